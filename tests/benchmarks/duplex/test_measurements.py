"""Measurements of the unit benchmark on a running engine: counts and detected differences. No times are checked."""

import json
import math
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.duplex import first_sound, latency, region_profile
from benchmarks.duplex import live_sessions as live_sessions
from benchmarks.duplex.bench_sessions import (
    LISTEN,
    SPEAK,
    SPOKEN_UNITS,
    TALK,
    BenchSession,
    DecisionScript,
    SentUnit,
    SyntheticMedia,
    run_units,
)
from benchmarks.duplex.correctness import (
    Choice,
    ChoiceRecorder,
    Transcript,
    compare_regions,
    compare_repeats,
    compare_runs,
    compare_with_reference,
    run_conversation,
)
from benchmarks.duplex.engine import EngineSpec, RunningEngine, Weights, start
from benchmarks.duplex.latency import measure_latency
from benchmarks.duplex.live_sessions import LoadPlan, max_served_sessions, measure_sessions
from benchmarks.duplex.region_errors import _ComparedRegions, compare_calls
from benchmarks.duplex.region_slots import SlotTensors, vocoder_slots
from benchmarks.duplex.tables import format_process, summary
from benchmarks.duplex.verdicts import verdicts
from models.graphs.region_graphs import RegionTable
from models.token2wav.flow.block_table import SPILL_ROW
from worker.loop.results import UnitResult

SPEC = EngineSpec(way="eager", slots=4, llm_len=768, steps=1, warms_up=False)


class CombinedScript(ChoiceRecorder):
    """The correctness script for its own sessions, the decision script for LISTEN, SPEAK and TALK sessions."""

    def __init__(self) -> None:
        super().__init__()
        self._script = DecisionScript(2)

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        scripted = session.startswith((LISTEN, SPEAK, TALK))
        return (
            self._script.token_sampled(session, job, token) if scripted else super().token_sampled(session, job, token)
        )


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights.create(SPEC)


@pytest.fixture(scope="module")
def choices() -> CombinedScript:
    return CombinedScript()


@pytest.fixture(scope="module")
def running(weights, choices, tmp_path_factory) -> Any:
    torch.set_num_threads(1)
    running = start(SPEC, 0.0, tmp_path_factory.mktemp("cache"), observer=choices, weights=weights)
    choices.record_logits(running)
    with running.engine:
        yield running


def test_times_listen_and_speak_units(running: RunningEngine) -> None:
    saved: list[int] = []
    found = measure_latency(
        running, n_units=2, context=40, n_frames=0, lead_s=0.5, save=lambda found: saved.append(len(found["rows"]))
    )
    listen, speak = found["rows"]
    assert (listen["mode"], speak["mode"], saved) == (LISTEN, SPEAK, [1, 2])
    assert (listen["n_codes"], speak["n_codes"], speak["n_tokens"]) == ([0], [25], [2])
    assert listen["first_sound_ms"] is None and 0 < speak["first_sound_ms"]["p50"] < speak["total_ms"]["p50"]
    assert speak["samples_mean"] == 24000 and speak["n"] == 2
    assert speak["stages_ms"]["total"]["p50"] <= speak["total_ms"]["p50"]
    assert 40 < listen["llm_rows"][0] < listen["llm_rows"][1]
    assert not any(listen["late"].values())
    assert any("SPEAK" in line for line in format_process("latency", {"latency": found}))


def test_times_pictures_before_and_with_their_units(running: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "WARM_UP_UNITS", 0)
    found = measure_latency(running, n_units=1, context=40, n_frames=1, lead_s=0.02, save=lambda found: None)
    rows = [(row["mode"], row["lead_s"]) for row in found["rows"]]
    assert rows == [(LISTEN, 0.02), (LISTEN, 0.0), (SPEAK, 0.02), (SPEAK, 0.0)]
    early = [row["n_early_slices"] for row in found["rows"]]
    assert max(early) <= 1 and early[1] == early[3] == 0, f"expected at most those sent ahead, got {early}"
    lines = format_process("latency", {"latency": found})
    assert [line.split()[1] for line in lines if line.startswith(LISTEN)] == ["-20", "at"]
    for row, total in zip(found["rows"], (10.0, 20.0, 30.0, 40.0), strict=True):
        row["total_ms"] = {"p95": total}
    result = {"processes": {"latency": {"latency": found}}, "environment": {"date": "", "torch": ""}, "command": []}
    figures = summary(result)
    keys = ("listen_p95_ms", "listen_edge_p95_ms", "speak_p95_ms", "speak_edge_p95_ms")
    assert [figures[key] for key in keys] == [10.0, 20.0, 30.0, 40.0], figures


def test_measures_live_sessions_within_the_remaining_time(running: RunningEngine) -> None:
    plan = LoadPlan(counts=(2,), seconds=1.5, warm_s=1.0, contexts=(20, 100), n_frames=0, claim_units=1, trials=True)
    found = measure_sessions(running, plan, left_s=lambda: 60.0, save=lambda found: None)
    (row,) = found["rows"]
    assert (row["sessions"], row["n"], row["n_lost"], row["errors"]) == (2, 3, 0, [])
    assert 0 < row["n_speaking"] < 3 and row["samples_per_spoken_unit"] == 24000
    assert row["llm_rows"][0] > 20 and row["llm_rows"][1] > 100
    # A session that listens sends halves; whether there is time to try the first one depends on the machine.
    trials = row["trials"]
    assert trials["skipped"] + trials["taken_back"] in (1, 2) and trials["committed"] == 0, trials
    assert row["send_late_ms"]["max"] >= 0 and row["busy"]["process_core_percent"] > 0
    assert measure_sessions(running, plan, left_s=lambda: 1.0, save=lambda found: None)["left_out"]
    # On a slow machine units are late, and no number of sessions is served.
    claim = {"sessions": 2, "units": 3, "is_long": True} if row["miss_rate"] == 0 else None
    assert found["claim"] == claim and row["device_used_bytes"] is None
    assert any("sessions served" in line for line in format_process("sessions", {"sessions": found}))


def test_measures_first_sound_of_turns_with_and_without_the_order(running: RunningEngine) -> None:
    plan = LoadPlan(counts=(2,), seconds=1.0, warm_s=0.0, contexts=(20, 100), n_frames=0)
    found = first_sound.measure_first_sound(running, plan, left_s=lambda: 60.0, save=lambda found: None)
    kinds = [(row["units"], row["order"]) for row in found["rows"]]
    orders = ("first sound first", "none")
    assert kinds == [(units, order) for units in ("spread", "random") for order in orders], found
    for row in found["rows"]:
        assert (row["sessions"], row["n"], row["errors"]) == (2, 2, [])
        assert row["n_turns"] == 1 and row["first_sound_ms"]["p50"] > 0, "expected the first session's turn to begin"
    lines = format_process("first sound", {"first_sound": found})
    assert sum("first sound first" in line for line in lines) == 2, lines
    left_out = first_sound.measure_first_sound(running, plan, left_s=lambda: 1.0, save=lambda found: None)
    assert len(left_out["left_out"]) == 4


def test_profile_attributes_the_time_of_units_to_the_regions(running: RunningEngine) -> None:
    call, read = RegionTable.__call__, torch.Tensor.tolist
    session = BenchSession(running, f"{SPEAK} profiled", context=20)
    with region_profile.RegionProfile(running.device) as profile:
        run_units(running, [session], SyntheticMedia(0), 1)
    session.close()
    assert RegionTable.__call__ is call and torch.Tensor.tolist is read, "expected no patch to be left"
    row = region_profile.figures(profile.spans(), profile.thread, profile.seconds)
    parts, thread = row["parts"], row["thread_ms"]
    assert all(parts[name]["calls"] for name in ("LLM decode", "LLM prefill", "speech tokens", "flow", "HiFT")), row
    assert not parts["pictures"]["calls"] and parts["LLM decode"]["batch"] == 1, parts
    assert math.isclose(sum(part["share_ms"] for part in parts.values()) + row["idle_ms"], 1000.0), row
    assert thread["calls"] > max(part["span_ms"] for part in parts.values()) > 0, row
    assert thread["reads"] > 0, thread
    for part in parts.values():
        calls, spans = (sum(row[place] for row in part["batches"].values()) for place in (0, 1))
        assert math.isclose(calls, part["calls"]) and math.isclose(spans, part["span_ms"]), part


def test_profile_opens_the_sessions_once_and_lists_the_memory(running: RunningEngine) -> None:
    plan = LoadPlan(counts=(2, 1), seconds=0.2, warm_s=0.0, contexts=(20, 100), n_frames=0)
    found = region_profile.measure_profile(running, plan, left_s=lambda: 60.0, save=lambda found: None)
    assert [row["sessions"] for row in found["rows"]] == [1, 2], found
    assert not found["failed"] and not found["rows"][1]["errors"], found
    lines = format_process("profile", {"profile": found, "start": running.start})
    assert any("1 sessions" in line and "2 sessions" in line for line in lines), lines
    held, state = running.start["held_parts"], running.parts.unit_steps.state
    assert held["weights llm"] > 0 and held["slots llm"] == sum(one.nbytes for one in state.llm.tensors())
    assert any(line.split()[:2] == ["slots", "vocoder"] for line in lines), lines
    left_out = region_profile.measure_profile(running, plan, left_s=lambda: 0.0, save=lambda found: None)
    assert left_out["left_out"] == ["1 sessions", "2 sessions"]


def test_overlapping_spans_share_the_time() -> None:
    span = region_profile.Span
    spans = [span("a", 1.0, 5.0, 1), span("b", 3.0, 7.0, 1), span("b", 8.0, 9.0, 1)]
    assert region_profile.shares(spans) == ({"a": 3.0, "b": 4.0}, 2.0)


def test_figures_of_turns() -> None:
    """Times of first and later units, and the delay that a player needs."""

    def unit(session: str, index: int, sound_ms: float | None, *pieces: tuple[float, int]) -> SentUnit:
        due = float(index)
        sent = SentUnit(session, due, done=due + 0.5, result=UnitResult(session, index, sound_ms is None, "", False))
        sent.first_sound = None if sound_ms is None else due + sound_ms / 1000
        sent.pieces = [(due + at, round(24_000 * seconds)) for at, seconds in pieces]
        return sent

    turn = [unit("TALK 0", n + 1, 100 + n, (0.1 + n / 1000, 0.32), (0.15, 0.52 if n == 0 else 0.68)) for n in range(4)]
    late = [unit("TALK 4", 5, 50, (0.05, 0.84)), *(unit("TALK 4", n, 350, (0.35, 1.01)) for n in range(6, 9))]
    silent = [unit("TALK 1", n + 1, None) for n in range(4)]
    got = first_sound.figures([*turn, *late, *silent])
    assert (got["n"], got["n_turns"], got["n_turns_with_gaps"], got["n_missed"]) == (12, 2, 1, 0), got
    # The second unit of the late turn comes 1.3 s after the first sound, of which there are 0.84 s.
    assert got["playback_delay_ms"]["max"] == pytest.approx(460), got
    assert first_sound.turn_delay(turn) == pytest.approx(163), "expected 3.003 s less 2.84 s of sound"
    assert got["first_sound_ms"]["max"] == pytest.approx(100) and got["later_sound_ms"]["max"] == pytest.approx(350)
    assert len(first_sound.whole_turns([(0, turn[0]), (2, turn[2])])) == 0, "expected no turn with a unit missing"


@pytest.mark.parametrize(("place", "end"), [(0, "chunk_eos"), (SPOKEN_UNITS - 1, "turn_eos")])
def test_script_ends_a_turn_as_a_model_does(place: int, end: str) -> None:
    """A turn's last unit samples the end of the turn once, then the end of the unit."""
    ids = SimpleNamespace(speak=1, listen=2, chunk_eos=3, turn_eos=4)
    script, sampled = DecisionScript(2), list[int]()
    for _ in range(6):
        decoder = SimpleNamespace(all_ids=sampled)
        job: Any = SimpleNamespace(
            decoder=decoder, session=SimpleNamespace(n_decided=place), language=SimpleNamespace(control_tokens=ids)
        )
        sampled = [*sampled, script.token_sampled(f"{TALK} 0", job, 9)]
    ends = [getattr(ids, end), ids.chunk_eos, ids.chunk_eos]
    assert sampled == [ids.speak, ord("b"), ord("c"), *ends], sampled


def test_units_are_spread_as_by_a_worker_or_at_random() -> None:
    assert sorted(first_sound.offsets(8, is_spread=True)) == [number / 8 for number in range(8)]
    assert len(set(first_sound.offsets(8, is_spread=False))) == 8


def test_refused_unit_reports_an_error_and_later_units_keep_their_results(running: RunningEngine) -> None:
    done: queue.SimpleQueue[SentUnit] = queue.SimpleQueue()
    session, media = BenchSession(running, "LISTEN refused", context=10, done=done), SyntheticMedia(0)
    session.handle.pause().result()
    refused = session.send(media.audio(0), [])
    assert done.get(timeout=20) is refused and refused.error and refused.total_ms is None
    session.handle.resume().result()
    taken = session.send(media.audio(1), [])
    assert done.get(timeout=20) is taken and taken.result is not None and session.n_waiting == 0
    session.close()


def test_served_number_requires_all_smaller_numbers() -> None:
    rows = [{"sessions": n, "miss_rate": rate} for n, rate in ((1, 0.0), (16, 0.0), (4, 0.002), (8, 0.0))]
    assert max_served_sessions(rows) == 1
    rows[2]["miss_rate"] = 0.0009
    assert max_served_sessions(rows) == 16


def test_claimed_number_is_measured_with_claim_units(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, float]] = []

    def row(running: Any, plan: LoadPlan, n: int) -> dict[str, Any]:
        ran.append((n, plan.seconds))
        missed = n == 8 and plan.seconds > 10
        return {"sessions": n, "n": int(n * plan.seconds), "miss_rate": 0.01 if missed else 0.0}

    monkeypatch.setattr(live_sessions, "_measure_row", row)
    plan = LoadPlan((1, 4, 8), 10.0, 1.0, (20, 100), 0, claim_units=400, claim_s=60.0)
    found = measure_sessions(None, plan, left_s=lambda: 1e6, save=lambda found: None)
    assert ran[3:] == [(8, 50.0), (4, 60.0)], (
        "expected the next smaller number to be measured again, for at most claim_s"
    )
    assert found["claim"] == {"sessions": 4, "units": 240, "is_long": True} and max_served_sessions(found["rows"]) == 4
    short = measure_sessions(None, plan, left_s=lambda: 30.0, save=lambda found: None)
    assert short["claim"] == {"sessions": 8, "units": 80, "is_long": False}


def test_repeated_conversation_is_identical_alone_and_with_neighbours(
    running: RunningEngine, choices: CombinedScript
) -> None:
    alone = run_conversation(running, choices, 2, n_frames=0)
    again = compare_runs(alone, run_conversation(running, choices, 2, n_frames=0))
    beside = compare_runs(alone, run_conversation(running, choices, 2, neighbours=1, n_frames=0))
    assert again["same"] and again["n_units"] == 2 and again["n_codes"] == 50
    known = {"two_runs": again, "with_neighbours": beside}
    assert compare_repeats(running, choices, 2, lambda found: None, known) == known, (
        "expected known results to be reused"
    )
    assert beside["first"]["ids"] is None and beside["first"]["codes"] is None
    assert {one.unit for one in alone.choices} == {0, 1} and len(alone.choices) > 12
    assert len(set(alone.sounds)) == 2
    restored = Transcript.from_json(json.loads(json.dumps(alone.to_json())))
    assert restored == alone, f"expected an equal transcript from JSON, got {restored}"
    other = Transcript(alone.choices, [[1], *alone.speech_tokens[1:]], alone.sounds[:-1])
    assert compare_runs(alone, other)["first"] == {"ids": None, "codes": 0, "sound": 1}


def test_first_differing_choice_is_reported_with_its_gap(running: RunningEngine, choices: CombinedScript) -> None:
    mine = run_conversation(running, choices, 1, n_frames=0)
    at = mine.choices[3]
    likely = next(one for one in at.ids if one != at.token)
    reference = Transcript([*mine.choices[:3], Choice(at.unit, at.step, likely, at.ids, at.logits), *mine.choices[4:]])
    forced = run_conversation(running, choices, 1, forced=reference.choices, n_frames=0)
    found = compare_with_reference(reference, forced, choices.own_logits)
    first = found["first"]
    assert found["n_differ"] >= 1 and (first["unit"], first["step"], first["reference"]) == (at.unit, at.step, likely)
    assert math.isclose(first["gap"], -first["reference_gap"], rel_tol=1e-4), (
        "expected the same gap with opposite sign, from one engine"
    )
    assert compare_with_reference(mine, mine, {})["n_differ"] == 0


def test_detects_a_changed_weight_in_the_twin(running: RunningEngine, weights: Weights) -> None:
    wide = weights.float32_copy()
    twin = wide.parts(SPEC, SPEC.engine_config())
    with compare_calls(running.parts, twin) as tables:
        session = BenchSession(running, "SPEAK same", context=10)
        run_units(running, [session], SyntheticMedia(0), 1)
    same = tables.errors()["omni"] | tables.errors()["vocoder"]
    assert {"audio_unit", "unit_prefill", "unit_step", "flow", "hift"} <= same.keys()
    # The product of one row and a matrix rounds by the address of the matrix, on a CPU.
    rounding = max(max(one.relative, one.state_relative, one.alike_relative) for one in same.values())
    assert rounding < 1e-5, f"expected rounding errors only, got {rounding:.1e}"
    assert not any(one.error or one.integers for one in same.values())
    assert all(one.n_alike == one.n for one in same.values())
    with torch.no_grad():
        wide.model.llm.lm_head.weight.mul_(1.01)
        wide.model.tts.model.layers[0].self_attn.v_proj.weight.mul_(1.01)
    with compare_calls(running.parts, twin) as tables:
        run_units(running, [session], SyntheticMedia(0), 1)
    session.close()
    errors = tables.errors()
    assert math.isclose(errors["omni"]["unit_step"].relative, 0.01 / 1.01, rel_tol=0.05)
    assert errors["omni"]["speech_step"].state_relative > 1e-4, "expected errors in cache rows that the call wrote"
    audio = errors["omni"]["audio_unit"]
    assert max(audio.relative, audio.state_relative) < 1e-5, f"expected no error where no weight changed, got {audio}"
    assert running.parts.unit_steps.regions is not None
    assert weights.model.llm.lm_head.weight.data_ptr() != wide.model.llm.lm_head.weight.data_ptr()


def test_calls_after_the_time_limit_are_served_and_reported(running: RunningEngine, weights: Weights) -> None:
    saved: list[dict[str, Any]] = []
    found = compare_regions(running, weights, 1, saved.append, limit_s=0.0)
    assert found["regions"] == {n: {"omni": {}, "vocoder": {}} for n in ("1", "4")}
    assert found["narrow"] is None, "expected no narrow twin for a float32 engine"
    assert "1 at once: 1 of 1 units" in found["regions_left_out"] and "4 at once" in found["regions_left_out"]
    assert "4 at once" in saved[0]["regions_left_out"], "expected the missing comparisons in the first saved result"
    assert "not finished: 1 at once" in format_process("correctness", found)[-1]
    result = {"processes": {"correctness": found}, "command": ["x"], "environment": {"date": "d", "torch": "t"}}
    assert [one["passes"] for one in verdicts(result) if one["what"] == "correctness: regions"] == [False]


def test_padding_is_not_compared(running: RunningEngine) -> None:
    """Covers returned rows of the scratch slot, the slot itself, and the row that padding writes to."""

    def table(add: float) -> Any:
        def call(name: str, slots: Any, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            offset = add * (torch.as_tensor(slots) == 4)
            return value + offset, torch.stack((value.long(), value.long())) + offset.long()

        call.uncaptured = call
        return call

    region = _ComparedRegions(table(9.0), table(0.0), SlotTensors([], scratch=4), SlotTensors([], scratch=4))
    region("step", np.array([0, 4, 2]), torch.tensor([1.0, 2.0, 3.0]))
    errors = region.errors["step"]
    assert (errors.relative, errors.integers, errors.n_integers) == (0, 0, 4) and not errors.error, errors
    region = _ComparedRegions(table(9.0), table(0.0), SlotTensors([], scratch=5), SlotTensors([], scratch=5))
    region("step", np.array([0, 4, 2]), torch.tensor([1.0, 2.0, 3.0]))
    assert region.errors["step"].relative > 1 and region.errors["step"].integers == 2

    state = running.parts.vocoder.state
    scratch_rows = (
        *(rows[..., SPILL_ROW, :, :] for rows in (state.token_rows, *state.dit_rows)),
        state.up_tail[state.scratch],
    )
    before = [tensor.clone() for tensor in scratch_rows]
    for tensor in scratch_rows:
        tensor.fill_(float("nan"))
    compared = vocoder_slots(running.parts).whole
    assert sum(tensor.numel() for tensor in compared) > 0.5 * sum(tensor.numel() for tensor in state.tensors())
    assert not any(tensor.isnan().any() for tensor in compared), "expected rows that padding writes to be excluded"
    for tensor, held in zip(scratch_rows, before, strict=True):
        tensor.copy_(held)
