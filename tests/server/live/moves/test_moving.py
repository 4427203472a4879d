"""Sessions whose worker is lost: who goes on, and units that kill every worker."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from benchmarks.serve.fake_worker import FakeWorker
from server.dispatch.workers import Worker, WorkerAddress, WorkerLease
from server.live.client_end import ClientEnd
from server.live.moves.rebuild import ContextRebuild, RebuildError
from tests.server.live.moves.test_session_journal import DECIDED, FRAME, JournalTalk
from tests.server.live.test_resumption import Talker, sample
from tests.server.live_gateway import CHUNK, STOP, run, running_gateway, wait_until
from worker.protocol.wire import json_text


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_worker_that_rebuilds_nothing_is_noticed(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection stays open, and no message comes. Time that runs out is no death, so no unit is blamed for it."""
    monkeypatch.setattr("server.live.moves.rebuild.REBUILD_S", 30.0 if is_lost else 0.05)

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
        if is_lost:
            worker.lost.set()
        with pytest.raises(RebuildError, match="it is lost" if is_lost else "0 in 0.05 s") as caught:
            await feeding
        assert caught.value.suspect is (steps[0] if is_lost else None)

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


def test_a_chunk_that_kills_two_workers_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker is told of the first one's death, for the gateway that may take the session over."""
    told = []
    monkeypatch.setattr("server.live.relay.KEPT_FIELD", "status")  # of each worker
    monkeypatch.setattr(ClientEnd, "keep_slot", lambda *arguments: told.append(arguments[2:]))

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
                assert ((0,) in told) == (n_kept == 1), told
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


@pytest.mark.parametrize("is_served", [True, False])
def test_a_session_that_moves_waits_for_a_slot_while_the_gateway_drains(is_served: bool) -> None:
    """As long as a worker may give it one. A session that waits for its first slot ends."""

    async def scenario() -> None:
        async with FakeWorker(slots=1) as one, FakeWorker(slots=1) as other, running_gateway(one, other) as gateway:
            talker = await Talker.prepared(gateway)
            await talker.client.send(CHUNK)
            await talker.take("result")
            first, second = (one, other) if one.sessions else (other, one)
            neighbour = await (await gateway.connect("omni_neighbour")).prepared()
            waiting = await gateway.connect("omni_waiting")
            await waiting.receive("queued")
            first.crash()
            await talker.take("session_moving")
            await wait_until(lambda: len(gateway.gateway.dispatcher.queue) == 2, "both to wait")
            gateway.gateway.live.drain()
            assert (await waiting.receive_until("error"))["code"] == "draining"
            if not is_served:
                second.crash()
                assert (await talker.take("error"))["code"] == "draining"
                assert await talker.client.wait_closed() == (1012, "Shutting down")
                return
            await neighbour.send(STOP)
            await neighbour.receive("stopped")
            await talker.take("session_moved")
            await talker.client.send(CHUNK)
            await talker.take("result")
            assert talker.units == [1, 2], talker.units

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
