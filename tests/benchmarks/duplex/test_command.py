"""The unit benchmark: what a run writes, what it counts, and that differences are found. No times are checked."""

import json
import math
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.compile_options import WAYS
from benchmarks.duplex import __main__ as duplex
from benchmarks.duplex import live_sessions as duplex_sessions
from benchmarks.duplex.correctness import Choice, Choices, Told, against, conversation, difference, identity, regions
from benchmarks.duplex.engine import EngineSpec, Running, Weights, start
from benchmarks.duplex.gpu_busy import Busy
from benchmarks.duplex.latency import latency
from benchmarks.duplex.live_sessions import LoadPlan, many_sessions, sessions_ok
from benchmarks.duplex.process import Processes
from benchmarks.duplex.region_errors import _Doubled, doubled
from benchmarks.duplex.region_slots import SlotTensors, vocoder_slots
from benchmarks.duplex.sessions_under_test import LISTEN, SPEAK, DecisionScript, Scenes, SentUnit, Talker, converse
from benchmarks.duplex.tables import SUMMARY, lines, summary, toggle_table
from benchmarks.duplex.verdicts import verdicts
from models.token2wav.flow.block_table import SPILL_ROW
from worker.config.compile import CompileConfig

SPEC = EngineSpec(way="eager", slots=4, llm_len=768, steps=1, warms_up=False)


class Both(Choices):
    """Words of correctness for its sessions, the script's for others."""

    def __init__(self) -> None:
        super().__init__()
        self._script = DecisionScript(2)

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        scripted = session.startswith((LISTEN, SPEAK))
        return self._script.token(session, job, token) if scripted else super().token_sampled(session, job, token)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights.of(SPEC)


@pytest.fixture(scope="module")
def choices() -> Both:
    return Both()


@pytest.fixture(scope="module")
def running(weights, choices, tmp_path_factory) -> Any:
    torch.set_num_threads(1)
    running = start(SPEC, 0.0, tmp_path_factory.mktemp("cache"), observer=choices, weights=weights)
    choices.watch(running)
    with running.engine:
        yield running


def test_units_of_both_kinds_are_timed(running: Running) -> None:
    saved: list[int] = []
    found = latency(running, n_units=2, context=40, n_frames=0, save=lambda found: saved.append(len(found["rows"])))
    listen, speak = found["rows"]
    assert (listen["mode"], speak["mode"], saved) == (LISTEN, SPEAK, [1, 2])
    assert (listen["n_codes"], speak["n_codes"], speak["n_tokens"]) == ([0], [25], [2])
    assert listen["first_sound_ms"] is None and 0 < speak["first_sound_ms"]["p50"] < speak["total_ms"]["p50"]
    assert speak["samples_mean"] == 24000 and speak["n"] == 2
    assert speak["stages_ms"]["total"]["p50"] <= speak["total_ms"]["p50"]
    assert 40 < listen["llm_rows"][0] < listen["llm_rows"][1]
    assert not any(listen["late"].values())
    assert any("SPEAK" in line for line in lines("latency", {"latency": found}))


def test_sessions_that_are_served_and_such_that_are_not(running: Running) -> None:
    plan = LoadPlan(counts=(2,), seconds=1.5, warm_s=1.0, contexts=(20, 100), n_frames=0, claim_units=1)
    found = many_sessions(running, plan, left_s=lambda: 60.0, save=lambda found: None)
    (row,) = found["rows"]
    assert (row["sessions"], row["n"], row["n_lost"], row["errors"]) == (2, 3, 0, [])
    assert 0 < row["n_speaking"] < 3 and row["samples_per_spoken_unit"] == 24000
    assert row["llm_rows"][0] > 20 and row["llm_rows"][1] > 100
    assert row["send_late_ms"]["max"] >= 0 and row["busy"]["process_core_percent"] > 0
    assert many_sessions(running, plan, left_s=lambda: 1.0, save=lambda found: None)["left_out"]
    assert found["claim"] == {"sessions": 2, "units": 3, "is_long": True} and row["device_used_bytes"] is None
    assert any("sessions served" in line for line in lines("sessions", {"sessions": found}))


def test_a_unit_that_is_refused_is_told_and_the_others_are_not_mixed_up(running: Running) -> None:
    done: queue.SimpleQueue[SentUnit] = queue.SimpleQueue()
    talker, scenes = Talker(running, "LISTEN refused", context=10, done=done), Scenes(0)
    talker.handle.pause().result()
    refused = talker.send(scenes.sound(0), [])
    assert done.get(timeout=20) is refused and refused.error and refused.total_ms is None
    talker.handle.resume().result()
    taken = talker.send(scenes.sound(1), [])
    assert done.get(timeout=20) is taken and taken.result is not None and talker.n_waiting == 0
    talker.close()


def test_sessions_are_served_only_if_all_smaller_numbers_are() -> None:
    rows = [{"sessions": n, "miss_rate": rate} for n, rate in ((1, 0.0), (16, 0.0), (4, 0.002), (8, 0.0))]
    assert sessions_ok(rows) == 1
    rows[2]["miss_rate"] = 0.0009
    assert sessions_ok(rows) == 16


def test_what_is_claimed_has_been_measured_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, float]] = []

    def row(running: Any, plan: LoadPlan, n: int) -> dict[str, Any]:
        ran.append((n, plan.seconds))
        missed = n == 8 and plan.seconds > 10
        return {"sessions": n, "n": int(n * plan.seconds), "miss_rate": 0.01 if missed else 0.0}

    monkeypatch.setattr(duplex_sessions, "_row", row)
    plan = LoadPlan((1, 4, 8), 10.0, 1.0, (20, 100), 0, claim_units=400, claim_s=60.0)
    found = many_sessions(None, plan, left_s=lambda: 1e6, save=lambda found: None)
    assert ran[3:] == [(8, 50.0), (4, 60.0)], "the next smaller number is measured again, for no longer than allowed"
    assert found["claim"] == {"sessions": 4, "units": 240, "is_long": True} and sessions_ok(found["rows"]) == 4
    short = many_sessions(None, plan, left_s=lambda: 30.0, save=lambda found: None)
    assert short["claim"] == {"sessions": 8, "units": 80, "is_long": False}


def test_the_same_conversation_twice_and_with_neighbours(running: Running, choices: Both) -> None:
    alone = conversation(running, choices, 2, n_frames=0)
    again = difference(alone, conversation(running, choices, 2, n_frames=0))
    beside = difference(alone, conversation(running, choices, 2, neighbours=1, n_frames=0))
    assert again["same"] and again["n_units"] == 2 and again["n_codes"] == 50
    known = {"two_runs": again, "with_neighbours": beside}
    assert identity(running, choices, 2, lambda found: None, known) == known, "nothing is run again"
    assert beside["first"]["ids"] is None and beside["first"]["codes"] is None
    assert {one.unit for one in alone.choices} == {0, 1} and len(alone.choices) > 12
    assert len(set(alone.sounds)) == 2
    other = Told(alone.choices, [[1], *alone.speech_tokens[1:]], alone.sounds[:-1])
    assert difference(alone, other)["first"] == {"ids": None, "codes": 0, "sound": 1}


def test_the_first_other_choice_is_told_with_its_gap(running: Running, choices: Both) -> None:
    mine = conversation(running, choices, 1, n_frames=0)
    at = mine.choices[3]
    likely = next(one for one in at.ids if one != at.token)
    reference = Told([*mine.choices[:3], Choice(at.unit, at.step, likely, at.ids, at.logits), *mine.choices[4:]])
    told = conversation(running, choices, 1, feeds=reference.choices, n_frames=0)
    found = against(reference, told, choices.own)
    first = found["first"]
    assert found["n_differ"] >= 1 and (first["unit"], first["step"], first["reference"]) == (at.unit, at.step, likely)
    assert math.isclose(first["gap"], -first["reference_gap"], rel_tol=1e-4), "one engine: one gap, seen from both ends"
    assert against(mine, mine, {})["n_differ"] == 0


def test_a_twin_with_one_other_weight_is_found_out(running: Running, weights: Weights) -> None:
    wide = weights.wide()
    twin = wide.parts(SPEC, SPEC.engine_config())
    with doubled(running.parts, twin) as tables:
        talker = Talker(running, "SPEAK same", context=10)
        converse(running, [talker], Scenes(0), 1)
    same = tables.errors()["omni"] | tables.errors()["vocoder"]
    assert {"audio_unit", "unit_prefill", "unit_step", "flow", "hift"} <= same.keys()
    assert not any(one.error or one.relative or one.state_relative or one.integers for one in same.values())
    assert all(one.n_alike == one.n and one.alike_relative == one.alike_largest == 0 for one in same.values())
    with torch.no_grad():
        wide.model.llm.lm_head.weight.mul_(1.01)
        wide.model.tts.model.layers[0].self_attn.v_proj.weight.mul_(1.01)
    with doubled(running.parts, twin) as tables:
        converse(running, [talker], Scenes(0), 1)
    talker.close()
    errors = tables.errors()
    assert math.isclose(errors["omni"]["unit_step"].relative, 0.01 / 1.01, rel_tol=0.05)
    assert errors["omni"]["speech_step"].state_relative > 1e-4, "rows of a cache that the call has written"
    assert errors["omni"]["audio_unit"].relative == errors["omni"]["audio_unit"].state_relative == 0
    assert running.parts.duplex.runner.regions is not None
    assert weights.model.llm.lm_head.weight.data_ptr() != wide.model.llm.lm_head.weight.data_ptr()


def test_regions_that_come_too_late_are_served_and_told(running: Running, weights: Weights) -> None:
    saved: list[dict[str, Any]] = []
    found = regions(running, weights, 1, saved.append, limit_s=0.0)
    assert found["regions"] == {n: {"omni": {}, "vocoder": {}} for n in ("1", "4")}
    assert found["narrow"] is None, "where float32 is served, no narrower type has anything to tell"
    assert "1 at once: 1 of 1 units" in found["regions_left_out"] and "4 at once" in found["regions_left_out"]
    assert "4 at once" in saved[0]["regions_left_out"], (
        "a process that is killed in the first unit says what is missing"
    )
    assert "not finished: 1 at once" in lines("correctness", found)[-1]
    result = {"processes": {"correctness": found}, "command": ["x"], "environment": {"date": "d", "torch": "t"}}
    assert [one["passes"] for one in verdicts(result) if one["what"] == "correctness: regions"] == [False]


def test_what_padding_comes_to_does_not_count(running: Running) -> None:
    """Rows of the scratch slot in what is returned, the slot itself, and the row that padding writes to."""

    def table(add: float) -> Any:
        def call(name: str, slots: Any, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            strange = add * (torch.as_tensor(slots) == 4)
            return value + strange, torch.stack((value.long(), value.long())) + strange.long()

        call.uncaptured = call
        return call

    region = _Doubled(table(9.0), table(0.0), SlotTensors([], scratch=4), SlotTensors([], scratch=4))
    region("step", np.array([0, 4, 2]), torch.tensor([1.0, 2.0, 3.0]))
    errors = region.errors["step"]
    assert (errors.relative, errors.integers, errors.n_integers) == (0, 0, 4) and not errors.error, errors
    region = _Doubled(table(9.0), table(0.0), SlotTensors([], scratch=5), SlotTensors([], scratch=5))
    region("step", np.array([0, 4, 2]), torch.tensor([1.0, 2.0, 3.0]))
    assert region.errors["step"].relative > 1 and region.errors["step"].integers == 2

    state = running.parts.vocoder.state
    nobodys = (
        *(rows[..., SPILL_ROW, :, :] for rows in (state.token_rows, *state.dit_rows)),
        state.up_tail[state.scratch],
    )
    before = [tensor.clone() for tensor in nobodys]
    for tensor in nobodys:
        tensor.fill_(float("nan"))
    looked_at = vocoder_slots(running.parts).whole
    assert sum(tensor.numel() for tensor in looked_at) > 0.5 * sum(tensor.numel() for tensor in state.tensors())
    assert not any(tensor.isnan().any() for tensor in looked_at), "expected what padding writes to be left out"
    for tensor, held in zip(nobodys, before, strict=True):
        tensor.copy_(held)


def test_a_run_writes_what_it_has_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, figures = tmp_path / "out.json", tmp_path / "figures.json"
    options = [
        "--device",
        "cpu",
        "--units",
        "1",
        "--context",
        "10",
        "--frames",
        "0",
        "--llm-len",
        "512",
        "--no-warm-up",
    ]
    duplex.main([*options, "--parts", "latency", "--json", str(file), "--summary", str(figures)])
    told, result = json.loads(figures.read_text()), json.loads(file.read_text())
    assert tuple(told) == SUMMARY
    assert told["listen_p95_ms"] > 0 and told["speak_p95_ms"] > told["first_sound_p95_ms"] > 0
    missing = {"sessions_ok", "cold_start_s", "cached_start_s", "peak_gb"}
    assert {name for name, value in told.items() if value is None} == missing
    assert (told["recompiles"], told["cudagraph_skips"]) == (0, 0) and "--units 1" in told["command"]
    found = result["processes"]["latency"]
    assert found["is_complete"] and found["process"]["status"] == 0 and found["latency"]["rows"][1]["floor_ms"] > 0
    assert found["start"]["total_s"] > found["start"]["seconds"]["process"] and result["environment"]["torch"]
    assert found["start"]["bytes_of_1000_rows"] > 0 and found["start"]["bytes_of_a_voice_second"] > 0
    assert result["verdicts"][0]["figure"] == told["listen_p95_ms"]
    assert "listen_p95_ms" in capsys.readouterr().out


def test_a_plan_is_finished_by_a_second_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    options: list[dict[str, Any]] = []

    def run(processes: Any, job: Any, cache: Path, limit_s: float, tell: Any) -> dict[str, Any]:
        ran.append(job["part"])
        options.append(job["options"])
        is_cut = job["part"] == "correctness" and limit_s < 100
        found = {"process": {"seconds": 1.0, "status": 0, "killed": "killed" if is_cut else ""}, "told": {}}
        found |= {"against_eager": told} if is_cut else {}
        tell(dict(found))
        return found

    told = {"n_differ": 0, "n_choices": 1, "n_units": 1, "first": None, "median_gap_of_best_two": None}
    monkeypatch.setattr(Processes, "run", run)
    file = tmp_path / "out.json"
    shared = ["--device", "cpu", "--json", str(file), "--folder", str(tmp_path / "folder")]
    duplex.main([*shared, "--parts", "latency,correctness", "--budget-s", "50"])
    assert ran == ["latency", "reference", "correctness", "regions"]
    resumed = [*shared, "--resume", str(file)]
    result = duplex.main([*resumed, "--parts", "latency,correctness"])
    assert ran[4:] == ["correctness"], "what was cut short is run again, and nothing else"
    assert options[4]["done"] == {"against_eager": told}, "but for the steps that it had finished"
    assert result["processes"]["correctness"]["against_eager"] == told
    assert len(result["resumed"]) == 1 and " && " in summary(result)["command"] and result["left_out"] == []
    with pytest.raises(SystemExit):
        duplex.main([*resumed, "--units", "3"])
    duplex.main([*resumed, "--parts", "latency,start"])
    behind = "a part that starts from the cache has to come behind the cold start"
    assert ran[5:] == ["start", "latency", "start", "start"], behind
    result = duplex.main([*resumed, "--parts", "sessions"])
    assert ran[9:] == ["sessions"] and result["settings"]["parts"] == ["latency", "sessions", "correctness", "start"]


def test_a_process_is_killed_at_its_limit(tmp_path: Path) -> None:
    job = {"part": "start", "options": {}, "spec": {"way": "eager"}}
    found = Processes(tmp_path).run(job, tmp_path / "cache", 0.2, lambda found: None)
    assert "limit" in found["process"]["killed"] and found["process"]["status"] == -9
    assert "killed" in lines("x", found)[-1]


def test_starts_are_told_of_the_number_of_sessions_that_is_served() -> None:
    def started(seconds: float) -> dict[str, Any]:
        return {"start": {"total_s": seconds}}

    processes = {"cold latency": started(1.0), "latency": started(2.0)}
    result = {"processes": processes, "command": ["x"], "environment": {"date": "d", "torch": "t"}}
    assert (summary(result)["cold_start_s"], summary(result)["cached_start_s"]) == (1.0, 2.0)
    processes |= {"cold sessions": started(3.0), "sessions": started(4.0)}
    assert (summary(result)["cold_start_s"], summary(result)["cached_start_s"]) == (3.0, 4.0)
    del processes["cold sessions"], processes["cold latency"]
    assert (summary(result)["cold_start_s"], summary(result)["cached_start_s"]) == (None, None)


def test_every_way_is_one_that_the_worker_knows() -> None:
    for name, way in WAYS.items():
        assert way.config().enabled is (name != "eager")
        unknown = way.compile.keys() - CompileConfig.model_fields.keys()
        assert not unknown, f"{name}: expected settings of CompileConfig, got {unknown}"
    killed = {"toggle ours": {"process": {"killed": "killed at its limit of 1 s"}}}
    assert "killed" in toggle_table(killed)[1]
    ready = {"counts": dict.fromkeys(("graph_breaks", "graphs", "graph_skips", "cudagraph_skips"), 3), "total_s": 87.5}
    killed["toggle ours"]["start"] = {**ready, "fell_back": [], "peak_memory": {"allocated_bytes": 21e9}}
    line = toggle_table(killed)[1]
    assert "killed" in line and "21.0" in line and "87.5" in line and "6 / -" in line, "what was known before"
    counts = {"graph_breaks": 1, "graphs": 30, "graph_skips": 2, "cudagraph_skips": 5}
    started = {"start": {"counts": counts, "total_s": 1.0, "fell_back": []}, "is_complete": True}
    started["latency"] = {"rows": [{"mode": LISTEN, "late": dict.fromkeys(counts, 1)}], "memory": {}}
    line = toggle_table({"toggle ours": started})[1]
    assert "1 / 1" in line and "30 / 1" in line and "7 / 2" in line
    places = [toggle_table({"toggle ours": started | kept})[1].index(" 1.0 ") for kept in ({}, {"is_kept": True})]
    assert places[0] < places[1], "a start from kernels that were there is none from an empty folder"


def test_toggles_may_go_on_with_kernels_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def run(self: Processes, job: dict[str, Any], cache: Path, limit_s: float, tell: Any) -> dict[str, Any]:
        jobs.append(job)
        assert (cache / "kernel").exists() == (cache.parent == tmp_path)
        return {"process": {"seconds": 1.0, "status": 0, "killed": ""}, "is_complete": True}

    monkeypatch.setattr(Processes, "run", run)
    (tmp_path / "toggle-inductor").mkdir()
    (tmp_path / "toggle-inductor/kernel").touch()
    asked = ["--device", "cpu", "--parts", "toggles", "--toggles", "inductor", "--targets", "apm,vpm"]
    found = duplex.main([*asked, "--cache-dir", str(tmp_path)])
    assert [name for name, one in found["processes"].items() if one.get("is_kept")] == ["toggle inductor"]
    assert EngineSpec(**jobs[0]["spec"]).engine_config().compile.targets == ("apm", "vpm")
    assert len(jobs) == 1 and (tmp_path / "toggle-inductor/kernel").exists()
    (tmp_path / "folder/toggle-inductor").mkdir(parents=True)
    (tmp_path / "folder/toggle-inductor/kernel").touch()
    found = duplex.main([*asked[:-2], "--folder", str(tmp_path / "folder"), "--no-cached"])
    assert not found["processes"]["toggle inductor"].get("is_kept") and jobs[1]["spec"]["targets"] is None


def test_busy_counts_what_this_process_burns() -> None:
    with Busy(torch.device("cpu")) as busy:
        until = np.arange(2_000_000, dtype=np.float64)
        for _ in range(20):
            until = np.sqrt(until)
    told = busy.report()
    assert told["process_core_percent"] > 20 and told["gpu_percent"] is None and told["gpu_source"] == "no GPU"


def test_options_that_make_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--parts", "latency,speed"], ["--toggles", "fastest"]):
        with pytest.raises(SystemExit):
            duplex.parse(wrong)
        assert "expected some of" in capsys.readouterr().err
    assert duplex.parse(["--parts", "all", "--device", "cpu"]).parts == duplex.PARTS
    assert SimpleNamespace(way=duplex.parse(["--device", "cpu"]).way).way == "eager"
