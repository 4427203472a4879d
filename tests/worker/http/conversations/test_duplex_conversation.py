"""`DuplexConversation` without a socket and a model: engine failures, timeouts, limits."""

import asyncio
import json
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.errors import ContextOverflowError
from tests.worker.http.conversations.duplex_stage import CHUNK, MovableClock, Stage, staged
from worker.engine_thread import EngineError
from worker.http.duplex_conversation import MAX_UNSENT
from worker.loop.results import Failure, FedRows, InsertedText, PartialResult, UnitResult
from worker.loop.session import OrderError
from worker.protocol.codes import CloseCode, ErrorCode
from worker.protocol.messages import (
    MAX_UNIT_PICTURES,
    Error,
    Interrupt,
    Interrupted,
    Prepare,
    Prepared,
    Result,
    Spec,
    Stop,
    Timeout,
    VideoFrame,
    write,
)
from worker.protocol.text_messages import InsertText, TextInserted
from worker.protocol.unit_counters import Mark, UnitUsage
from worker.protocol.wire import WireError


@staged
async def test_idle_timeout_ends_session() -> None:
    """The timeout counts from the last unit: other messages and errors do not extend it."""
    clock = MovableClock()
    stage = Stage(idle_timeout=60.0)
    for _ in range(3):
        await clock.move(15)
        await stage.say(Interrupt(), WireError(ErrorCode.BAD_JSON, "message", expected="JSON", got="text"))
        assert isinstance(await stage.hear(), Interrupted)
        assert isinstance(await stage.hear(), Error)
    assert stage.conversation.outbox.empty(), "expected no timeout before 60 s"
    await clock.move(15)
    timeout = await stage.hear()
    assert isinstance(timeout, Timeout), f"expected a timeout, got {timeout!r}"
    assert timeout.reason == "Idle timeout (60.0s)", f"expected the reason, got {timeout!r}"
    end = await stage.end()
    assert end.code == CloseCode.NORMAL, f"expected close code {CloseCode.NORMAL}, got {end}"


@staged
async def test_engine_failure_ends_session() -> None:
    """One error, then close code 1011."""
    stage = Stage()
    await stage.say(Prepare())
    assert isinstance(await stage.hear(), Prepared)
    stage.conversation.emit(Failure("c", 0, EngineError("engine", expected="one that runs", got="none")))
    error = await stage.hear()
    assert isinstance(error, Error) and error.code == "engine", f"expected the engine's error, got {error!r}"
    end = await stage.end()
    assert end.code == CloseCode.INTERNAL_ERROR and stage.conversation.outbox.empty(), (
        f"expected {CloseCode.INTERNAL_ERROR} and no more, got {end}"
    )


@staged
async def test_engine_failure_during_unit_ends_session() -> None:
    stage = Stage()
    await stage.say(Prepare(), CHUNK, CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.conversation.emit(Failure("c", 0, EngineError("engine", expected="one that runs", got="none")))
    error = await stage.hear()
    assert isinstance(error, Error) and error.code == "engine", f"expected the engine's error, got {error!r}"
    end = await stage.end()
    assert end.code == CloseCode.INTERNAL_ERROR, f"expected close code {CloseCode.INTERNAL_ERROR}, got {end}"
    assert stage.handle.calls == ["send"], f"expected no more units, got {stage.handle.calls}"


@staged
async def test_engine_failure_before_unit_is_accepted() -> None:
    """The engine emits a failure and refuses the unit; both errors have the code of the engine."""
    stage = Stage()
    stage.handle.sending = Future()
    await stage.say(Prepare(), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    error = EngineError("engine", expected="one that runs", got="none")
    stage.conversation.emit(Failure("c", 0, error))
    stage.handle.sending.set_exception(error)
    reported = [await stage.hear()]
    end = await stage.end()
    while not stage.conversation.outbox.empty():
        reported.append(await stage.hear())
    codes = {one.code for one in reported}
    assert end.code == CloseCode.INTERNAL_ERROR and codes == {"engine"}, (
        f"expected the engine's errors alone, got {reported}"
    )


@staged
async def test_failed_unit_gets_error_as_answer() -> None:
    stage = Stage()
    await stage.say(Prepare(), CHUNK, CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.conversation.emit(Failure("c", 0, OrderError("unit", expected="its turn", got="none")))
    assert isinstance(await stage.hear(), Error)
    await stage.sent(2)
    stage.answer()
    assert isinstance(await stage.hear(), Result)


@staged
async def test_sends_partial_results_only_on_request() -> None:
    for spec, n in ((Spec(), 0), (Spec(partial_results=True), 2)):
        stage = Stage()
        await stage.say(Prepare(spec=spec), CHUNK)
        assert isinstance(await stage.hear(), Prepared)
        await stage.sent(1)
        for text in "ab":
            stage.conversation.emit(PartialResult("c", 1, text))
        stage.answer()
        parts = [await stage.hear() for _ in range(n)]
        result = await stage.hear()
        got = [part.text for part in parts]
        assert got == ["a", "b"][:n] and result.n_parts == n, f"expected {n} parts, got {got}, {result!r}"


@staged
async def test_inserted_text_is_answered_once_it_is_in_the_context() -> None:
    """After the units before it; the units after it wait."""
    stage = Stage()
    await stage.say(Prepare(), CHUNK, InsertText(text="Hi.", role="system"), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.answer()
    assert isinstance(await stage.hear(), Result)
    await stage.called("system: Hi.")
    assert stage.conversation.outbox.empty() and stage.handle.calls == ["send", "system: Hi."]
    stage.conversation.emit(InsertedText("c", 7))
    assert await stage.hear() == TextInserted(n_rows=7)
    await stage.sent(2)
    stage.answer()
    assert isinstance(await stage.hear(), Result)


@staged
async def test_text_that_fails_gets_an_error() -> None:
    stage = Stage()
    await stage.say(InsertText(text="Hi."))
    early = await stage.hear()
    assert isinstance(early, Error) and (early.code, early.error) == ("not_prepared", "Not prepared yet"), early
    await stage.say(Prepare(), InsertText(text="Hi."), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.called("user: Hi.")
    stage.conversation.emit(Failure("c", 0, ContextOverflowError("text", expected="at most 3 rows", got=4)))
    error = await stage.hear()
    refusal = "context_full", "text: expected at most 3 rows, got 4"
    assert isinstance(error, Error) and (error.code, error.error) == refusal, error
    await stage.sent(1)
    stage.answer()
    assert isinstance(await stage.hear(), Result)


@staged
async def test_engine_failure_during_a_text_ends_session() -> None:
    stage = Stage()
    await stage.say(Prepare(), InsertText(text="Hi."), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.called("user: Hi.")
    stage.conversation.emit(Failure("c", 0, EngineError("engine", expected="one that runs", got="none")))
    error = await stage.hear()
    assert isinstance(error, Error) and error.code == "engine", f"expected the engine's error, got {error!r}"
    assert (await stage.end()).code == CloseCode.INTERNAL_ERROR


def unit(n: int, text: str = "", ms: int | None = None, **fields: Any) -> UnitResult:
    """A unit that has spoken. ms: length of its sound; None: without."""
    pcm = None if ms is None else np.ones(24 * ms, np.float32)
    return UnitResult("c", n, **{"is_listen": False, "end_of_turn": False, "text": text, "pcm": pcm, **fields})


@pytest.mark.parametrize("in_parts", [False, True])
def test_counters_follow_the_turn(in_parts: bool) -> None:
    """Marks count what was sent: a second without parts is padded. They go on over units without a decision."""
    units = [
        unit(1, is_listen=True, tokens=(1,), rows=FedRows(3, 10, 64)),
        unit(2, "Hello", 840, tokens=(2, 3), n_tokens=4, n_speech_tokens=25, rows=FedRows(3, 10)),
        unit(2, is_listen=True),  # sound too short for a unit
        unit(3, " there", 1000, tokens=(2,)),
        unit(4, "", 500, end_of_turn=True, tokens=(1,), turn_limit=True),
        unit(5, "Bye", None, end_of_turn=True, tokens=(2,)),
    ]
    sent_ms = [840, 1840, 2340, 0] if in_parts else [1000, 2000, 2500, 0]
    turn = [[Mark(text_chars=n, audio_ms=ms)] for n, ms in zip((5, 11, 11, 3), sent_ms, strict=True)]

    async def story() -> None:
        stage = Stage()
        # A session with a voice, whose seconds are padded.
        stage.conversation._service.reference = lambda **given: SimpleNamespace(voice=object(), audio_16k=None)
        await stage.say(Prepare(spec=Spec(counters=True, partial_results=in_parts)), *[CHUNK] * len(units))
        assert isinstance(await stage.hear(), Prepared)
        results = []
        for number, event in enumerate(units):
            await stage.sent(number + 1)
            if in_parts and event.pcm is not None:
                stage.conversation.emit(PartialResult("c", event.index, event.text, event.pcm))
                await stage.hear()
            stage.conversation.emit(event)
            results.append(await stage.hear())
        assert [one.marks for one in results] == [[], turn[0], [], *turn[1:]]
        assert [one.turn_limit for one in results] == [None] * 4 + [True, None]
        assert results[0].usage == UnitUsage(text_rows=3, audio_rows=10, image_rows=64)
        assert results[1].usage == UnitUsage(text_rows=3, audio_rows=10, text_tokens=4, speech_tokens=25)

    staged(story)()


@staged
async def test_counters_are_sent_only_on_request() -> None:
    stage = Stage()
    await stage.say(Prepare(), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.conversation.emit(unit(1, "Hello", 840))
    result = await stage.hear()
    assert (result.usage, result.marks, result.turn_limit) == (None, None, None)
    assert not {"usage", "marks", "turn_limit"} & json.loads(write(result)).keys()


@staged
async def test_late_interrupt_does_not_affect_next_turn() -> None:
    """The unit in flight had already decided to listen."""
    stage = Stage()
    await stage.say(Prepare(), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    await stage.say(Interrupt())
    stage.answer(is_listen=True)
    assert isinstance(await stage.hear(), Result) and isinstance(await stage.hear(), Interrupted)
    assert stage.handle.calls == ["send", "break", "clear"], f"expected it taken back, got {stage.handle.calls}"


@staged
async def test_interrupt_between_units_ends_the_turn() -> None:
    """It stays in force until the turn ends; an end without a turn is not reported."""
    stage = Stage()
    await stage.say(Prepare(), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.answer()
    assert not (await stage.hear()).is_listen
    await stage.say(Interrupt(), CHUNK)
    assert isinstance(await stage.hear(), Interrupted)
    await stage.sent(2)
    assert stage.handle.calls == ["send", "break", "send"], f"expected the break to stand, got {stage.handle.calls}"
    stage.answer(is_listen=True, end_of_turn=True)
    assert (await stage.hear()).end_of_turn, "expected the open turn to end"
    await stage.say(CHUNK)
    await stage.sent(3)
    stage.answer(is_listen=True, end_of_turn=True)
    assert not (await stage.hear()).end_of_turn, "expected no end of a turn that never was"


@staged
async def test_incomplete_unit_changes_nothing_about_the_open_turn() -> None:
    """An interrupt stays in force, and the turn ends for the client with the unit that ends it."""
    stage = Stage()
    await stage.say(Prepare(), CHUNK, CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.answer()
    assert (await stage.hear()).incomplete is None
    await stage.sent(2)
    await stage.say(Interrupt(), CHUNK)
    stage.answer(is_listen=True, is_incomplete=True)
    piece = await stage.hear()
    assert (piece.incomplete, piece.end_of_turn, piece.current_time) == (True, False, 1)
    assert isinstance(await stage.hear(), Interrupted)
    await stage.sent(3)
    assert "clear" not in stage.handle.calls, "expected the interrupt to stay in force"
    stage.answer(is_listen=True, end_of_turn=True)
    assert (await stage.hear()).end_of_turn
    assert stage.conversation.n_units == 2, f"expected two units, got {stage.conversation.n_units}"


@staged
async def test_notes_that_deferred_finalize_has_no_effect() -> None:
    stage = Stage()
    await stage.say(Prepare(), Prepare(deferred_finalize=False))
    assert (await stage.hear()).notes == []
    [note] = (await stage.hear()).notes
    assert note.startswith("setting deferred_finalize has no effect: "), note


@staged
async def test_refuses_too_many_frames() -> None:
    stage = Stage()
    await stage.say(*[VideoFrame(frame="AAAA")] * (MAX_UNIT_PICTURES + 2))
    for _ in range(2):
        error = await stage.hear()
        assert isinstance(error, Error) and error.code == "backlog_full", f"expected a limit, got {error!r}"


@staged
async def test_pauses_for_client_that_does_not_read() -> None:
    stage = Stage()
    await stage.say(*[Interrupt()] * 100)
    await asyncio.sleep(0.05)
    waiting = stage.conversation.outbox.qsize()
    assert waiting == MAX_UNSENT + 1, f"expected {MAX_UNSENT + 1} unsent messages, got {waiting}"
    for _ in range(100):
        assert isinstance(await stage.hear(), Interrupted)
    await stage.say(Stop())
    await stage.hear()
    assert (await stage.end()).code == CloseCode.NORMAL


@pytest.mark.parametrize("n_bytes", [1, 100_000])
def test_inbox_is_bounded(n_bytes: int) -> None:
    """By bytes, or by count for tiny messages."""

    async def fill() -> int:
        stage = Stage(max_backlog=2_000_000)
        stage.running.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                for _ in range(10_000):
                    await stage.conversation.receive(Interrupt(), n_bytes, 0.0)
        return len(stage.conversation._inbox)

    n = asyncio.run(fill())
    expected = 21 if n_bytes > 1024 else 2_000_000 // 1024 + 1
    assert n == expected, f"expected {expected} messages to be taken, got {n}"
