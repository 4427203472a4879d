"""GPT-Live sessions whose units take sound in pieces, and the time of their first unit."""

from pathlib import Path

import numpy as np

from benchmarks.serve.fake_replies import tone
from tests.server.doors.gpt_live.staged_session import PREPARED, Stage, spoken, staged
from worker.protocol.messages import AudioChunk, Interrupt, Partial, Result


def test_unit_runs_early_where_the_worker_does_so(tmp_path: Path) -> None:
    """Sound goes out in pieces while the model listens; the unit that a piece completes is one as any other."""

    async def scenario(stage: Stage) -> None:
        lane, worker = stage.session.lane, stage.worker
        worker.runs_early = True
        lane.on_answer(await stage.start(), PREPARED)
        for _ in range(3):
            lane.append(np.zeros(1_600, np.float32))
        first, second, third = (message for message in worker.sent if isinstance(message, AudioChunk))
        times = {"cost_all_ms": 1.0, "server_send_ts": 0.0, "wall_clock_ms": 1.0, "current_time": 0}
        waits = Result(is_listen=True, incomplete=True, kv_cache_length=1, **times)
        lane.on_answer(first, waits)
        early = spoken(end_of_turn=False).model_copy(update={"early": True, "shift_ms": 800.0})
        lane.on_partial(Partial(current_time=1, part=1, text="So", audio_data=tone("pcm16", 24_000)))
        lane.on_answer(second, early.model_copy(update={"audio_data": None, "n_parts": 1}))
        assert lane.is_answering and stage.session.timeline.waiting_ms > 900
        lane.on_answer(third, waits)
        lane.append(np.zeros(8_000, np.float32))
        assert worker.sent[-1] is third, "expected no pieces while the model speaks"
        stage.session.timeline.clear()
        lane.append(np.zeros(6_400, np.float32))
        unit = worker.sent[-1]
        assert isinstance(unit, AudioChunk) and len(unit.samples()) == 14_400, "expected the rest of a whole second"

    deltas = [one["delta"] for one in staged(tmp_path, scenario).events if "transcript.delta" in one["type"]]
    assert deltas == ["So"], f"expected the text once, got {deltas}"


def test_interrupt_ends_a_unit_that_a_piece_has_completed(tmp_path: Path) -> None:
    """From its first partial on it is in flight: its rest is dropped, and the next unit listens."""

    async def scenario(stage: Stage) -> None:
        lane, worker, timeline = stage.session.lane, stage.worker, stage.session.timeline
        worker.runs_early = True
        lane.on_answer(await stage.start(), PREPARED)
        lane.append(np.zeros(1_600, np.float32))
        piece = worker.sent[-1]
        lane.on_partial(Partial(current_time=1, part=1, text="So", audio_data=tone("pcm16", 24_000)))
        timeline.clear()
        lane.interrupt()
        assert isinstance(worker.sent[-1], Interrupt), f"expected an interrupt, got {worker.sent[-1]}"
        lane.on_partial(Partial(current_time=1, part=2, audio_data=tone("pcm16", 24_000)))
        lane.on_answer(piece, spoken(end_of_turn=True).model_copy(update={"early": True}))
        assert timeline.waiting_ms == 0, "expected the rest of the unit to be dropped"
        lane.append(np.zeros(16_000, np.float32))
        unit = worker.sent[-1]
        assert isinstance(unit, AudioChunk) and len(unit.samples()) == 16_000 and unit.force_listen
        times = {"cost_all_ms": 1.0, "server_send_ts": 0.0, "wall_clock_ms": 1.0, "current_time": 2}
        lane.on_answer(unit, Result(is_listen=True, kv_cache_length=1, **times))
        lane.append(np.zeros(1_600, np.float32))
        assert isinstance(worker.sent[-1], AudioChunk) and len(worker.sent[-1].samples()) == 1_600

    staged(tmp_path, scenario)


def test_units_are_full_where_the_worker_has_a_place(tmp_path: Path) -> None:
    async def scenario(stage: Stage) -> None:
        lane, worker = stage.session.lane, stage.worker
        lane.append(np.ones(3_200, np.float32))
        lane.on_answer(await stage.start(), PREPARED.model_copy(update={"start_after_ms": 400.0}))
        lane.append(np.ones(3_200, np.float32))
        assert not [message for message in worker.sent if isinstance(message, AudioChunk)]
        lane.append(np.ones(3_200, np.float32))
        unit = worker.sent[-1]
        assert isinstance(unit, AudioChunk), f"expected a unit 400 ms after the context, got {unit}"
        silence = unit.samples()[: 16_000 - 9_600]
        assert not silence.any() and unit.samples()[len(silence) :].all()

    staged(tmp_path, scenario)


def test_interrupt_drops_what_the_pieces_before_it_complete(tmp_path: Path) -> None:
    """Before the first partial of an early unit; a unit of later sound is as any other."""

    async def scenario(stage: Stage) -> None:
        lane, worker, timeline = stage.session.lane, stage.worker, stage.session.timeline
        times = {"cost_all_ms": 1.0, "server_send_ts": 0.0, "wall_clock_ms": 1.0, "current_time": 1}
        waits = Result(is_listen=True, incomplete=True, kv_cache_length=1, **times)
        worker.runs_early = True
        lane.on_answer(await stage.start(), PREPARED)
        for completes in (False, True):
            lane.append(np.zeros(1_600, np.float32))
            before = worker.sent[-1]
            lane.interrupt()
            assert isinstance(worker.sent[-1], Interrupt), f"expected an interrupt, got {worker.sent[-1]}"
            lane.append(np.zeros(1_600, np.float32))
            after = worker.sent[-1]
            if completes:
                lane.on_partial(Partial(current_time=1, part=1, text="So", audio_data=tone("pcm16", 24_000)))
                lane.on_answer(before, spoken(end_of_turn=False).model_copy(update={"early": True}))
                assert timeline.waiting_ms == 0, "expected what came before the interrupt to be dropped"
                lane.on_answer(after, waits)
                lane.append(np.zeros(14_400, np.float32))
                assert worker.sent[-1].force_listen, "expected the turn to end"
            else:
                lane.on_answer(before, waits)
                lane.on_partial(Partial(current_time=1, part=1, text="So", audio_data=tone("pcm16", 24_000)))
                lane.on_answer(after, spoken(end_of_turn=True).model_copy(update={"early": True}))
                assert timeline.waiting_ms > 900, "expected a unit of later sound to be heard"
                timeline.clear()

    staged(tmp_path, scenario)
