"""The pause of a session whose client sends no units, and the bound of those that wait."""

import asyncio
from typing import cast

from benchmarks.serve.fake_replies import tone
from server.doors.core.unit_session import UnitSession
from server.doors.dialects.minicpm_o.client_messages import BufferAppend, ModeUpdate
from server.doors.dialects.minicpm_o.units import MAX_WAITING, REST_AFTER_S, ModeUnits
from tests.server.doors.recorded_units import RecordedUnits
from worker.protocol.messages import AudioChunk, Error, Pause, Prepare, Prepared


def test_a_session_pauses_when_no_unit_comes() -> None:
    now, worker, events = [0.0], RecordedUnits(), []
    units = ModeUnits(events.append, "me", "audio", lambda: now[0])
    units.attach(cast(UnitSession, worker))

    async def begin() -> None:
        await units.handle(ModeUpdate())
        await units.handle(BufferAppend(audio=tone("float32", 16_000).base64()))

    asyncio.run(begin())
    prepare, chunk = worker.sent
    assert isinstance(prepare, Prepare) and isinstance(chunk, AudioChunk)
    units.on_answer(prepare, Prepared(prompt_length=3))
    units.on_answer(chunk, Error(error="broken", code="engine"))
    assert [event["type"] for event in events] == ["session.created", "error"]
    assert events[1]["error"] == {"code": "engine", "message": "broken", "type": "server_error"}
    units.rest_if_quiet()
    now[0] = REST_AFTER_S + 1
    worker.n_unanswered = 1
    units.rest_if_quiet()
    assert len(worker.sent) == 2, "expected no pause while a unit is not answered"
    worker.n_unanswered = 0
    units.rest_if_quiet()
    assert isinstance(worker.sent[2], Pause)
    worker.is_paused = True
    units.rest_if_quiet()
    assert len(worker.sent) == 3


def test_units_wait_for_answers() -> None:
    worker, units = RecordedUnits(), ModeUnits(lambda _: None, "me", "audio", lambda: 0.0)
    units.attach(cast(UnitSession, worker))
    unit = BufferAppend(audio=tone("float32", 16_000).base64())

    async def fill() -> None:
        await units.handle(ModeUpdate())
        for _ in range(MAX_WAITING):
            await units.handle(unit)
        waiting = asyncio.create_task(units.handle(unit))
        await asyncio.sleep(0.01)
        assert not waiting.done() and len(worker.sent) == 1 + MAX_WAITING
        units.on_answer(worker.sent[1], Error(error="broken"))
        await asyncio.wait_for(waiting, 1.0)
        assert len(worker.sent) == 2 + MAX_WAITING

    asyncio.run(fill())
