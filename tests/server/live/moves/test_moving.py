"""Sessions whose worker is lost: what is kept, who goes on, and chunks that kill every worker."""

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest

from benchmarks.serve.fake_worker import FakeWorker
from server.dispatch.workers import Worker, WorkerAddress, WorkerLease
from server.live.moves.rebuild import ContextRebuild, RebuildError, messages_of
from tests.server.live.test_resumption import Talker, sample
from tests.server.live_gateway import CHUNK, PREPARE, STOP, run, running_gateway, wait_until
from worker.protocol.messages import write
from worker.protocol.takeover import session_journal
from worker.protocol.takeover.journal_steps import KEPT_JOURNAL
from worker.protocol.takeover.message_bytes import ByteBudget
from worker.protocol.takeover.session_journal import SessionJournal
from worker.protocol.wire import json_text

DECIDED = {"type": "decided", "unit": 1, "seed": 0, "sampled": [], "remembered": []}
FRAME = {"type": "video_frame", "frame": "AAAA"}


class JournalTalk:
    """A client and a worker at one journal."""

    def __init__(self, budget: ByteBudget | None = None) -> None:
        self.budget = budget or ByteBudget(10**9)
        self.journal = SessionJournal(self.budget)

    def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            assert self.journal.sent(json_text(message)), message

    def answer(self, kind: str, **fields: Any) -> bool:
        message = {"type": kind, **fields}
        return self.journal.answered(kind, json_text(message), message)

    def unit(self, number: int, **fields: Any) -> None:
        self.send({**CHUNK, "number": number})
        assert self.answer(**{**DECIDED, "kind": "decided", "unit": number, **fields}), (
            "expected the client not to have it"
        )
        assert not self.answer("result", is_listen=True)

    def prepared(self) -> "JournalTalk":
        self.send(PREPARE)
        self.answer("prepared")
        return self

    @property
    def kinds(self) -> list[str]:
        return [json.loads(data)["type"] for step in self.journal.steps for data in step.messages]


def test_the_journal_has_what_the_context_consists_of() -> None:
    talk = JournalTalk().prepared()
    talk.unit(1)
    talk.send(FRAME, CHUNK, {"type": "insert_text", "text": "a"}, {"type": "interrupt"}, CHUNK, FRAME)
    assert not talk.answer("partial") and talk.journal.n_chunks == 2
    talk.answer("result", incomplete=True)  # a piece
    talk.answer("text_inserted")
    talk.answer("interrupted")
    unit, piece = ["decided", "audio_chunk"], ["video_frame", "decided", "audio_chunk"]
    assert talk.kinds == ["prepare", *unit, *piece, "insert_text", "interrupt"]
    assert [json.loads(data)["type"] for data in talk.journal.unanswered] == ["audio_chunk", "video_frame"]
    talk.answer("error")  # in the place of a result: the chunk has no effect
    assert talk.journal.n_chunks == 0 and len(talk.kinds) == 8
    talk.send({"type": "pause"}, {"type": "resume"}, {"type": "pause"}, CHUNK)
    for kind in ("paused", "resumed", "paused", "error"):
        talk.answer(kind)
    assert talk.kinds[-2:] == ["interrupt", "pause"] and talk.journal.is_paused, talk.kinds
    talk.send({"type": "resume"}, FRAME, {"type": "interrupt"})
    for kind in ("resumed", "interrupted"):
        talk.answer(kind)
    talk.unit(2)
    unit_2 = ["video_frame", "decided", "audio_chunk"]
    assert talk.kinds == ["prepare", *unit, *piece, "insert_text", *unit_2], "expected the picture with its unit"
    assert not talk.journal.sent(json_text(DECIDED)), "expected decisions of clients to be refused"
    talk.send({**PREPARE, "system_prompt": "b"})
    talk.answer("prepared")
    assert talk.kinds == ["prepare"] and talk.journal.can_rebuild
    talk.unit(1)
    talk.send(CHUNK)
    talk.answer("result", is_listen=True)
    assert not talk.journal.can_rebuild, "expected a unit without its decisions to make the journal useless"
    talk.prepared().send(FRAME, CHUNK)
    talk.answer("error")
    talk.answer("result", is_listen=True)
    assert not talk.journal.can_rebuild, "expected an answer without a message to make the journal useless"
    talk.prepared().send(FRAME, CHUNK, CHUNK)
    talk.answer("error", code="backlog_full")  # of the picture or of the chunk
    assert not talk.journal.can_rebuild, "expected an error that may concern either to make the journal useless"
    talk.prepared()
    assert talk.journal.can_rebuild and talk.journal.unanswered == (), talk.journal.unanswered
    talk.journal.keep(False)
    talk.send(CHUNK)
    assert talk.budget.used == 0, f"expected no memory for a session that is not kept, got {talk.budget.used}"


def test_a_worker_hands_the_journal_over() -> None:
    """Also a worker that has rebuilt the session itself; both journals then go on in the same way."""
    talk = JournalTalk().prepared()
    talk.unit(1)
    talk.send(FRAME, CHUNK, {"type": "insert_text", "text": "a"})
    talk.answer("result", incomplete=True)
    talk.answer("text_inserted")
    talk.unit(2, goes_on=True)
    rebuilt = JournalTalk()
    for step in talk.journal.steps:
        for data in step.messages:
            is_decided = json.loads(data)["type"] == "decided"
            rebuilt.journal.given(data) if is_decided else rebuilt.journal.sent(data)
        is_piece = step.kind == "result" and not step.is_decided
        rebuilt.answer(step.kind, is_listen=True, **({"incomplete": True} if is_piece else {}))
    for one in (talk, rebuilt):
        one.send(CHUNK, CHUNK, FRAME)
        one.answer("partial")
        one.answer("decided", unit=3)
        state, messages = one.journal.copied() or pytest.fail("expected a journal that can be handed over")
        taken = JournalTalk()
        taken.journal.restore(KEPT_JOURNAL.read_text(str(write(state))), messages)
        for both in (one, taken):
            both.answer("result", is_listen=True)
        of_taken, of_one, expected = (
            [step._replace(n_bytes=0) for step in journal.steps]
            for journal in (taken.journal, one.journal, talk.journal)
        )
        assert of_taken == of_one == expected
        assert taken.journal.unanswered == one.journal.unanswered and len(taken.journal.unanswered) == 2
        assert (taken.journal.n_units, taken.journal.can_rebuild) == (3, True)
        taken.journal.clear()
        assert taken.budget.used == 0
    talk.journal.keep(False)
    assert talk.journal.copied() is None


def test_only_the_newest_turn_is_spoken_on() -> None:
    """Its speech needs the units that only spoke the rest of it, and the one with its text."""
    talk = JournalTalk().prepared()
    for number, drains in enumerate((False, False, True, True), 1):
        talk.unit(number, spoken=[number], unvoiced=[7], drains=drains)
    talk.send({"type": "insert_text", "text": "a"})
    talk.answer("text_inserted")
    for n_steps, expected in ((6, [None, [2], [3], [4]]), (3, [None, [2]]), (2, [[1]])):
        steps = talk.journal.steps[:n_steps]
        sent = messages_of(steps)
        decided = [json.loads(data) for messages in sent for data in messages if '"decided"' in data]
        assert [one.get("spoken") for one in decided] == expected, decided
        assert all(("unvoiced" in one) is ("spoken" in one) for one in decided), decided
        assert [len(messages) for messages in sent] == [len(step.messages) for step in steps]


def test_the_journal_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_journal, "MAX_UNITS", 3)
    talk = JournalTalk().prepared()
    talk.send({"type": "insert_text", "text": "a"})
    talk.answer("text_inserted")
    for number in range(1, 6):
        talk.unit(number)
    assert (talk.journal.n_units, talk.journal.n_omitted) == (3, 2)
    assert talk.kinds == ["prepare", "insert_text", *["decided", "audio_chunk"] * 3]
    for number in range(6, 9):
        talk.unit(number, goes_on=True)
    assert (talk.journal.n_units, talk.journal.n_omitted) == (3, 5)
    talk.unit(9)
    assert (talk.journal.n_units, talk.journal.n_omitted) == (0, 9), "expected no turn without its begin"
    talk.unit(10)
    assert (talk.journal.n_units, talk.journal.n_omitted) == (1, 9)
    talk.budget.max_bytes = talk.budget.used
    talk.unit(11)
    assert talk.journal.n_units < 3, "expected the bound of all journals to hold for each"
    talk.budget.max_bytes = 10**9
    for number in range(100):
        talk.send({"type": "adjust", "number": number, "ref_audio_base64": "A" * 2**18})
        talk.answer("adjusted")
    assert talk.budget.used <= session_journal.MAX_BYTES, f"expected a bound for settings too, got {talk.budget.used}"
    assert not talk.journal.can_rebuild and talk.prepared().journal.can_rebuild
    talk.journal.clear()
    assert talk.budget.used == 0


def test_input_without_answers_costs_no_other_session_its_units() -> None:
    budget = ByteBudget(10**6)
    good, *others = (JournalTalk(budget).prepared() for _ in range(4))
    for number in range(1, 21):
        good.unit(number)
    for talk in others:
        talk.unit(1)
        talk.send({**CHUNK, "sound": "A" * 10**6})
    assert budget.is_exhausted
    good.unit(21)
    assert (good.journal.n_units, good.journal.n_omitted) == (21, 0)
    others[0].unit(2)
    assert others[0].journal.n_units == 0, "expected the units of a session above its share to be dropped"
    for talk in (good, *others):
        talk.journal.clear()
    assert (budget.used, budget.n_journals) == (0, 0)


def test_a_chunk_is_dropped_after_the_second_loss() -> None:
    talk = JournalTalk().prepared()
    talk.send(CHUNK, {**CHUNK, "second": True})
    talk.answer("partial")
    assert not talk.journal.lose_worker()
    assert talk.answer("partial") and not talk.answer("partial"), "expected what the client has not to come again"
    assert talk.journal.lose_worker() and talk.journal.n_chunks == 1
    assert not talk.journal.lose_worker(), "expected another chunk to have a chance"
    talk.answer("result", incomplete=True)
    assert not talk.journal.lose_worker()
    insert = {"type": "insert_text", "text": "a"}
    talk.send(FRAME, insert, CHUNK)
    assert not talk.journal.lose_worker() and talk.journal.lose_worker(), "expected the text to be dropped"
    assert [json.loads(data)["type"] for data in talk.journal.unanswered] == ["video_frame", "audio_chunk"]
    assert not talk.journal.lose_worker() and talk.journal.lose_worker(), "expected the chunk with its picture"
    assert talk.journal.unanswered == ()


def test_a_turn_is_dropped_as_a_whole() -> None:
    talk = JournalTalk().prepared()
    for number in range(1, 6):
        talk.unit(number, goes_on=number in (2, 3))
    part = talk.journal.steps[3]
    assert not talk.journal.lose_worker_at(part) and talk.journal.n_units == 5
    assert talk.journal.lose_worker_at(talk.journal.steps[3])
    assert [json.loads(step.messages[-1])["number"] for step in talk.journal.steps[1:]] == [1, 5]
    assert (talk.journal.n_units, talk.journal.take_dropped().n_units, talk.journal.take_dropped().n_units) == (2, 3, 0)
    talk.unit(6)
    talk.unit(7)
    assert talk.journal.lose_worker_at(talk.journal.steps[4], 2), "expected two deaths at once to count"
    assert [json.loads(step.messages[-1])["number"] for step in talk.journal.steps[1:]] == [1, 5, 6]
    talk.journal.clear()
    assert talk.budget.used == 0


def test_a_worker_that_is_lost_while_it_rebuilds_is_noticed() -> None:
    """Its connection stays open, and no message comes."""

    class SilentLink:
        async def send(self, _: object) -> None:
            pass

        async def recv(self) -> str:
            await asyncio.Event().wait()
            raise AssertionError

    async def scenario() -> None:
        worker = Worker(0, WorkerAddress("127.0.0.1", 1))
        lease = WorkerLease(worker, "omni_duplex", "me", 0.0, 0.0)
        rebuild = ContextRebuild(SilentLink(), lease, one_by_one=False)  # type: ignore[arg-type]
        steps = JournalTalk().prepared().journal.steps
        feeding = asyncio.create_task(rebuild.feed(steps))
        await asyncio.sleep(0)
        worker.lost.set()
        with pytest.raises(RebuildError, match="lost") as caught:
            await feeding
        assert caught.value.suspect is steps[0]

    asyncio.run(scenario())


def test_a_session_goes_on_with_another_worker() -> None:
    """Units count on, the cycle of listening and speaking goes on, and unanswered chunks run there."""

    async def scenario() -> None:
        async with (
            FakeWorker(slots=1, n_listen=2, n_speak=3) as one,
            FakeWorker(slots=1, n_listen=2, n_speak=3) as other,
            running_gateway(one, other) as gateway,
        ):
            talker = await Talker.prepared(gateway)
            texts = []
            for _ in range(3):
                await talker.client.send(CHUNK)
                texts.append((await talker.take("result"))["text"])
            first, second = (one, other) if one.sessions else (other, one)
            first.freeze()
            await talker.client.send(CHUNK, CHUNK)
            await wait_until(lambda: sample(gateway, "session_journal_bytes") > 5 * 4000, "the chunks to be sent")
            first.crash()
            assert (await talker.take("session_moving"))["reason"] == "worker_lost"
            moved = await talker.take("session_moved")
            assert (moved["reason"], moved["restored"], moved["omitted"]) == ("worker_lost", 3, 0), moved
            for _ in range(2):
                texts.append((await talker.take("result"))["text"])
            assert talker.units == [1, 2, 3, 4, 5], f"expected each result once, got {talker.units}"
            assert texts == ["", "", "second 3. ", "second 4. ", "second 5. "], texts
            assert (second.n_rebuilt, second.total_requests) == (3, 2)
            assert sample(gateway, "move_seconds_count", outcome="moved") == 1
            await talker.lose()
            resumed = await talker.resume()
            assert resumed["next"] == talker.n + 1, resumed
            await talker.client.send(DECIDED)
            assert (await talker.take("error"))["code"] == "unknown_type"
            await talker.client.send(STOP)
            await talker.take("stopped")
            await gateway.wait_idle()
            assert sample(gateway, "session_journal_bytes") == 0

    run(scenario)


def test_a_chunk_that_kills_two_workers_is_dropped() -> None:
    async def scenario() -> None:
        workers = [FakeWorker(slots=1) for _ in range(3)]
        async with workers[0], workers[1], workers[2], running_gateway(*workers) as gateway:
            talker = await Talker.prepared(gateway)
            await talker.client.send(CHUNK)
            await talker.take("result")
            for worker in workers:
                worker.think_s = 1000.0
            await talker.client.send(CHUNK)
            for n_kept in (2, 1):
                await wait_until(lambda: any(worker.is_thinking for worker in workers), "the unit to run")
                [holder] = [worker for worker in workers if worker.sessions]
                holder.crash()
                workers.remove(holder)
                await talker.take("session_moving")
                if n_kept == 1:
                    assert (await talker.take("error"))["code"] == "quarantined"
                moved = await talker.take("session_moved")
                assert (moved["repeated"], moved["dropped"]) == (n_kept - 1, 2 - n_kept), moved
            assert (moved["dropped_sound_s"], moved["dropped_pictures"]) == (0.1, 0), moved
            workers[0].think_s = 0.0
            await talker.client.send(CHUNK)
            await talker.take("result")
            assert talker.units == [1, 2], f"expected the dropped chunk not to count, got {talker.units}"
            assert sample(gateway, "quarantined_units_total") == 1

    run(scenario)


@pytest.mark.parametrize(("deaths", "n_pictures", "newest"), [([2, 2], 1, 4), ([1, 3, 2], 0, 3)])
def test_a_unit_that_kills_two_rebuilding_workers_is_dropped(
    deaths: list[int], n_pictures: int, newest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has an answer already, so its client gets the number of dropped units. A joint loss counts for one unit."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            workers = [await stack.enter_async_context(FakeWorker(slots=1)) for _ in range(5)]
            gateway = await stack.enter_async_context(running_gateway(*workers))
            talker = await Talker.prepared(gateway)
            for frames in ([FRAME], [FRAME], []):
                await talker.client.send(*frames, CHUNK)
                await talker.take("result")
            left, crash = iter(deaths), FakeWorker.crash

            def crash_at_next(worker: FakeWorker) -> None:
                crash(worker)
                monkeypatch.setattr(FakeWorker, "dies_rebuilding", next(left, None), raising=False)

            for worker in workers:
                del worker.dies_rebuilding
            monkeypatch.setattr(FakeWorker, "crash", crash_at_next)
            next(worker for worker in workers if worker.sessions).crash()
            await talker.take("session_moving")
            moved = await talker.take("session_moved")
            assert (moved["restored"], moved["dropped"], moved["dropped_pictures"]) == (2, 1, n_pictures), moved
            await talker.client.send(CHUNK)
            assert (await talker.take("result"))["current_time"] == newest
            assert sample(gateway, "quarantined_units_total") == 1

    run(scenario)


def test_a_session_without_another_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.live.moves.moving.WAIT_S", 0.2)

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_gateway(worker) as gateway:
            talker = await Talker.prepared(gateway)
            worker.crash()
            await talker.take("session_moving")
            assert (await talker.take("error"))["code"] == "worker_lost"
            assert await talker.client.wait_closed() == (1011, "Worker lost")
            await gateway.wait_idle()
            assert sample(gateway, "move_seconds_count", outcome="failed") == 1

    run(scenario)


def test_a_paused_session_leaves_a_worker_that_drains() -> None:
    """It is paused on the other one too, and over another connection. It counts as one session."""

    async def scenario() -> None:
        async with FakeWorker(slots=1) as one, FakeWorker(slots=1) as other, running_gateway(one, other) as gateway:
            talker = await Talker.prepared(gateway)
            await talker.client.send(CHUNK, {"type": "pause"})
            await talker.take("result")
            await talker.take("paused")
            await talker.lose()
            await talker.resume()
            holder = one if one.sessions else other
            [connection] = [one for one in holder.connections if one.conversation is not None]
            await connection.send(json_text({"type": "error", "error": "draining", "code": "draining"}))
            assert (await talker.take("session_moving"))["reason"] == "draining"
            assert (await talker.take("session_moved"))["restored"] == 1
            await talker.lose()
            await talker.resume()
            await talker.client.send(CHUNK)
            assert (await talker.take("error"))["code"] == "paused"
            [lease] = gateway.gateway.dispatcher.workers.leases
            assert lease.paused, "expected the other worker's slot to be shown as paused"
            await talker.client.send({"type": "resume"}, CHUNK)
            await talker.take("resumed")
            await talker.take("result")
            assert talker.units == [1, 2], talker.units
            await talker.client.send(STOP)
            await talker.take("stopped")
            await gateway.wait_idle()
            kind = {"request_type": "omni_duplex"}
            counts = [sample(gateway, name, **kind) for name in ("sessions_total", "session_seconds_count")]
            assert counts == [1, 1], f"expected one session, got {counts}"

    run(scenario)
