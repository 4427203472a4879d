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

from benchmarks import duplex
from benchmarks.compile_options import WAYS
from benchmarks.duplex_correctness import Choice, Choices, Told, against, conversation, difference
from benchmarks.duplex_engine import Running, Spec, Weights, start
from benchmarks.duplex_latency import latency
from benchmarks.duplex_process import Processes
from benchmarks.duplex_sessions import Plan, many_sessions, sessions_ok
from benchmarks.duplex_tables import SUMMARY, lines, summary, toggle_table
from benchmarks.duplex_talk import LISTEN, SPEAK, Scenes, Script, Sent, Talker, converse
from benchmarks.gpu_busy import Busy
from benchmarks.region_errors import doubled
from worker.compile_config import CompileConfig

SPEC = Spec(way="eager", slots=4, llm_len=768, steps=1, warms_up=False)


class Both(Choices):
    """Words of correctness for its sessions, the script's for others."""

    def __init__(self) -> None:
        super().__init__()
        self._script = Script(2)

    def token(self, session: str, job: Any, token: int) -> int:
        scripted = session.startswith((LISTEN, SPEAK))
        return self._script.token(session, job, token) if scripted else super().token(session, job, token)


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
    plan = Plan(counts=(2,), seconds=1.5, warm_s=1.0, contexts=(20, 100), n_frames=0, claim_units=1)
    found = many_sessions(running, plan, left_s=lambda: 60.0, save=lambda found: None)
    (row,) = found["rows"]
    assert (row["sessions"], row["n"], row["n_lost"], row["errors"]) == (2, 3, 0, [])
    assert 0 < row["n_speaking"] < 3 and row["samples_per_spoken_unit"] == 24000
    assert row["llm_rows"][0] > 20 and row["llm_rows"][1] > 100
    assert row["send_late_ms"]["max"] >= 0 and row["busy"]["process_core_percent"] > 0
    assert many_sessions(running, plan, left_s=lambda: 1.0, save=lambda found: None)["left_out"]
    assert any("sessions served" in line for line in lines("sessions", {"sessions": found}))


def test_a_unit_that_is_refused_is_told_and_the_others_are_not_mixed_up(running: Running) -> None:
    done: queue.SimpleQueue[Sent] = queue.SimpleQueue()
    talker, scenes = Talker(running, "LISTEN refused", context=10, done=done), Scenes(0)
    running.engine.ask(type(running.engine._sessions).pause, talker.handle._session).result()
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


def test_the_same_conversation_twice_and_with_neighbours(running: Running, choices: Both) -> None:
    alone = conversation(running, choices, 2, n_frames=0)
    again = difference(alone, conversation(running, choices, 2, n_frames=0))
    beside = difference(alone, conversation(running, choices, 2, neighbours=1, n_frames=0))
    assert again["same"] and again["n_units"] == 2 and again["n_codes"] == 50
    assert beside["first"]["ids"] is None and beside["first"]["codes"] is None
    assert {one.unit for one in alone.choices} == {0, 1} and len(alone.choices) > 12
    assert len(set(alone.sounds)) == 2
    other = Told(alone.choices, [[1], *alone.codes[1:]], alone.sounds[:-1])
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
    with doubled(running.parts, twin) as errors:
        talker = Talker(running, "SPEAK same", context=10)
        converse(running, [talker], Scenes(0), 1)
    same = errors["omni"] | errors["vocoder"]
    assert {"audio_unit", "unit_prefill", "unit_step", "flow", "hift"} <= same.keys()
    assert not any(one.error or one.relative or one.state_relative or one.integers for one in same.values())
    with torch.no_grad():
        wide.model.llm.lm_head.weight.mul_(1.01)
    with doubled(running.parts, twin) as errors:
        converse(running, [talker], Scenes(0), 1)
    talker.close()
    assert math.isclose(errors["omni"]["unit_step"].relative, 0.01 / 1.01, rel_tol=0.05)
    assert errors["omni"]["audio_unit"].relative == 0 and running.parts.duplex.runner.regions is not None
    assert weights.model.llm.lm_head.weight.data_ptr() != wide.model.llm.lm_head.weight.data_ptr()


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
    assert "listen_p95_ms" in capsys.readouterr().out


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
