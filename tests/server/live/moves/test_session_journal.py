"""The journal of a session: what it keeps and drops, and what goes to another worker."""

import json
from typing import Any

import pytest

from server.live.moves.rebuild import messages_of
from tests.server.live_gateway import CHUNK, PREPARE
from worker.http.slot_keeper import SlotKeeper
from worker.protocol.messages import write
from worker.protocol.takeover import session_journal
from worker.protocol.takeover.journal_steps import KEPT_JOURNAL
from worker.protocol.takeover.message_bytes import ByteBudget
from worker.protocol.takeover.session_journal import SessionJournal
from worker.protocol.takeover.slot_messages import KeepSlot
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


@pytest.mark.parametrize("is_answered", [False, True])
def test_deaths_are_counted_on_by_another_gateway(is_answered: bool) -> None:
    """Through a worker, which may have answered the message before it hears of the death."""
    talk, worker, taken = JournalTalk().prepared(), JournalTalk().prepared(), JournalTalk()
    for one in (talk, worker):
        one.send(FRAME, CHUNK)
    assert not talk.journal.lose_worker()
    for one in (talk, worker):
        one.send(CHUNK)
    if is_answered:
        worker.answer("decided")
        worker.answer("result", is_listen=True)
    keeper = SlotKeeper(journal=worker.journal)
    n_after = talk.journal.n_after_suspect
    keeper.keep(
        keeper.newest,
        KeepSlot(grace_s=1, tokens=[], received=0, n_frames=0, number=0, acknowledged=0, n_after_suspect=n_after),
    )
    state, messages = worker.journal.copied() or pytest.fail("expected a journal that can be handed over")
    taken.journal.restore(KEPT_JOURNAL.read_text(str(write(state))), messages)
    assert taken.journal.lose_worker() == (not is_answered), f"expected the second death to count, {n_after} after it"
    assert taken.journal.n_chunks == 1


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
