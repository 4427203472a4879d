"""The life cycle of a compiled worker in real processes: start from the cache of `precompile.py`, unload and load,
drain, failed starts.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from models.checkpoint.embedded import TINY
from tests.worker.http.processes import WorkerProcess, running
from tests.worker.http.scripted_client import HandshakeRefused, ScriptedClient
from worker.config.compile import TARGETS
from worker.protocol.messages import Result
from worker.trace.records import read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = ("--max-sessions", "2", "--max-warmup-chunks", "2")
# The target that compiles fastest. The others take longer and add nothing to these tests;
# tests/test_compile_equivalence.py compiles all of them.
CHOSEN = ("vpm",)
FEW_STEPS = {"duplex": {"euler_steps": 1}}
COMPILING = {**FEW_STEPS, "service": {"compile": {"targets": list(CHOSEN)}}}
LIVELY = {"force_listen_count": 0, "seed": 5}
COMPILE_S = 600.0
MAX_ROUNDS, MAX_GROWTH = 6, 1.05  # of unloading and loading; of the memory that is kept from one round to the next


class Watched:
    """A worker from launch to IDLE, and the /health bodies on the way."""

    def __init__(self, worker: WorkerProcess):
        self.worker = worker
        self.states: list[str] = []
        self.phases: dict[str, list[str]] = {name: [] for name in TARGETS}
        self.progress: set[tuple[str, str]] = set()
        self.refused_while: set[str] = set()
        worker.wait_listening()
        start = time.monotonic()
        while (body := worker.health())["state"] not in ("IDLE", "FAILED"):
            self._note(body)
            assert time.monotonic() - start < COMPILE_S, f"expected IDLE by now, got {body['state']}\n{worker.log}"
            time.sleep(0.02)
        self._note(body)
        self.health = body

    def _note(self, body: dict[str, Any]) -> None:
        if self.states[-1:] != [body["state"]]:
            self.states.append(body["state"])
            if body["state"] != "IDLE":
                self._try_to_connect(body["state"])
        self.progress.add((body["state"], body["progress"]["what"]))
        for name, target in body["compile"]["targets"].items():
            if self.phases[name][-1:] != [target["phase"]]:
                self.phases[name].append(target["phase"])

    def _try_to_connect(self, state: str) -> None:
        try:
            ScriptedClient(self.worker).close()
        except HandshakeRefused as refused:
            assert refused.status == 403, f"while {state}: expected HTTP 403, got {refused.status}"
            self.refused_while.add(state)


@pytest.fixture(scope="module")
def cache(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `precompile.py` filled for these settings."""
    folder = tmp_path_factory.mktemp("cache")
    file = folder / "config.json"
    file.write_text(json.dumps(COMPILING), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "precompile.py", "--config", str(file), "--model-path", str(TINY), "--device", "cpu", *FLAGS],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
    )
    assert done.returncode == 0, f"expected precompile.py to end with 0, got:\n{done.stderr}"
    return folder


def launch(folder: Path, cache: Path, *flags: str, **options: Any) -> Any:
    # As users start it, the compiler has processes of its own.
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    return running(folder, "--compile", *FLAGS, *flags, until=None, config=COMPILING, environ=environ, **options)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Watched]:
    """A worker that found a full cache. The last test that uses it ends it."""
    with launch(tmp_path_factory.mktemp("compiled"), cache, "--drain-timeout", "20") as worker:
        yield Watched(worker)


@pytest.fixture(scope="module")
def results(compiled: Watched) -> list[Result]:
    """Of the first session."""
    with ScriptedClient(compiled.worker) as client:
        client.prepare(LIVELY)
        got = client.units(range(5), picture=True)
        client.stop()
    return got


def decisions_and_sound(results: list[Any]) -> list[tuple[Any, ...]]:
    """Decision, text and sound of each result."""
    return [
        (r.is_listen, r.text, r.end_of_turn, r.current_time, r.audio_data and r.audio_data.samples("").tobytes())
        for r in results
    ]


# --- starting -------------------------------------------------------------------------------------


def test_states_follow_in_order(compiled):
    expected = ["LOADING", "COMPILING", "WARMING_UP", "IDLE"]
    assert compiled.states == expected, f"expected {expected}, got {compiled.states}"
    assert set(compiled.health["start_seconds"]) == set(expected[:-1])
    assert compiled.refused_while == set(expected[:-1]), f"expected refusals until IDLE, got {compiled.refused_while}"


def test_idle_follows_warm_up(compiled):
    lines = compiled.worker.lines

    def at(text: str) -> int:
        found = [number for number, line in enumerate(lines) if text in line]
        assert found, f"expected a line with {text!r}, got:\n{compiled.worker.log}"
        return found[0]

    order = [at(f"[warmup] ({step}/6)") for step in range(1, 7)]
    assert order == sorted(order), f"expected the steps in order, got lines {order}"
    assert at("[warmup] unit=1/") < at("[warmup] unit=2/") < at("[warmup] ✓ omni duplex warmup complete") < at("IDLE")


def test_health_shows_each_target_compiling(compiled):
    targets = compiled.health["compile"]["targets"]
    phases = {name: target["phase"] for name, target in targets.items()}
    expected = {name: "compiled" if name in CHOSEN else "off" for name in TARGETS}
    assert phases == expected, f"expected {expected}, got {phases}\n{compiled.worker.log}"
    for name in CHOSEN:
        seen = compiled.phases[name]
        assert seen[0] == "waiting" and seen[-1] == "compiled", f"{name}: expected waiting to compiled, got {seen}"
        assert targets[name]["n_graphs"] > 0, f"{name}: expected graphs, got none"
    assert len({what for state, what in compiled.progress if state == "COMPILING"}) > 3


def test_start_uses_cache_of_precompile(compiled):
    cache = compiled.health["compile"]["cache"]
    assert cache["hits"] > 0 and cache["misses"] == 0, f"expected hits only, got {cache}"


def test_health_reports_weights_and_recompiles(compiled):
    weights, late = compiled.health["model"]["weights"], compiled.health["compile"]["after_warm_up"]
    assert weights["bytes"] > 1e6 and weights["gb_per_s"] == weights["bytes"] / 1e9 / weights["seconds"], weights
    assert late.keys() >= {"graph_breaks", "graphs", "recompiles", "graph_skips", "cudagraph_skips"}, late
    assert compiled.health["versions"].keys() >= {"torch", "triton", "cuda", "driver"}, compiled.health["versions"]
    assert any("weights: " in line and "GB/s" in line for line in compiled.worker.lines), compiled.worker.log


def test_nothing_compiles_after_warm_up(compiled, results):
    body = compiled.worker.wait_free(2)
    late, resident = body["compile"]["after_warm_up"], body["memory"]["resident"]
    assert late and not any(late.values()), f"expected nothing, got {late}"
    assert {r.is_listen for r in results} >= {False}, "expected some speech, got none"
    assert resident < 1.5e9, f"expected less than 1.5 GB, got {resident / 1e9:.2f}"


def test_serves_compile_report(compiled):
    status, body = compiled.worker.ask("/compile_report")
    assert status == 200, f"expected 200, got {status}: {body}"
    assert body["rows"], "expected rows, got none"


def test_health_answers_during_units(compiled):
    """In every state and for several concurrent requests; latency is measured by a benchmark."""
    worker, answers = compiled.worker, []
    worker.wait_free(2)

    def ask() -> None:
        for _ in range(20):
            answers.append(worker.health()["state"])

    with ScriptedClient(worker) as client:
        client.prepare(LIVELY)
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        client.units(range(4))
        for thread in threads:
            thread.join()
    assert len(answers) == 80 and "BUSY" in answers


# --- unloading ------------------------------------------------------------------------------------


def test_unloads_and_loads_from_the_cache(compiled):
    """Results stay the same to the last bit."""
    worker = compiled.worker
    worker.wait_free(2)
    with ScriptedClient(worker) as client:
        client.prepare(LIVELY)
        before = decisions_and_sound(client.units(range(3), picture=True))
        page = urllib.request.Request(
            f"http://127.0.0.1:{worker.port}/model/unload", b"", {"Origin": "http://a.example"}
        )
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(page)
        status, body = worker.ask("/model/unload", post={})
        assert status == 409, f"with a session open: expected 409, got {status}: {body}"
        client.stop()
    worker.wait_free(2)
    kept = []
    for again in range(MAX_ROUNDS):
        if again:
            status, body = worker.ask("/model/load", post={})
            assert status == 202, f"expected 202, got {status}: {body}"
            assert worker.ask("/model/load", post={})[0] == 409, "expected one start at a time"
            worker.wait_state("IDLE", timeout=COMPILE_S)
            with ScriptedClient(worker) as client:
                client.prepare(LIVELY)
                assert decisions_and_sound(client.units(range(3), picture=True)) == before
                client.stop()
            compilation = worker.wait_free(2)["compile"]
            late = compilation["after_warm_up"]
            assert late and not any(late.values()), f"expected nothing, got {late}"
        status, body = worker.ask("/model/unload", post={}, timeout=120)
        assert (status, body["state"]) == (200, "UNLOADED"), f"got {status}: {body}"
        kept.append(body["memory"]["after"])
        assert worker.ask("/readyz")[0] == 503
        with pytest.raises(HandshakeRefused):
            ScriptedClient(worker)
        if again >= 2 and kept[-1] <= MAX_GROWTH * kept[-2]:
            break
    hits = {name: (target["hits"], target["misses"]) for name, target in compilation["targets"].items()}
    assert sum(h for h, _ in hits.values()) > 0 and not any(m for _, m in hits.values()), f"hits and misses: {hits}"
    lines = [line for line in worker.lines if "compile cache" in line]
    assert any(" hits" in line and "cold" in line for line in lines), (
        f"expected hits and seconds in the log, got {lines}"
    )
    # The first rounds also load the compiler, which stays in memory. Later ones go up and down: 643, 682, 666, 686,
    # 666, 688 and 669 MB on two cores. A leak makes every round larger.
    assert kept[-1] <= MAX_GROWTH * kept[-2], f"after letting go: expected at most 5 % over {kept[-2]}, got {kept}"


def test_reports_missing_model_and_accepts_another(compiled):
    """On a worker without a loaded model."""
    worker = compiled.worker
    if worker.health()["state"] != "UNLOADED":
        worker.wait_free(2)
        worker.ask("/model/unload", post={}, timeout=120)
    worker.ask("/model/load", post={"model_path": "/nowhere"})
    body = worker.wait_state("FAILED")
    assert "/nowhere" in body["error"], f"expected the folder's name, got {body['error']}"
    assert worker.ask("/livez")[0] == 503
    status, body = worker.ask("/model/load", post={"modle_path": "x"})
    assert status == 422, f"expected 422, got {status}: {body}"
    assert worker.ask("/model/unload", post={}, timeout=120)[0] == 200
    worker.ask("/model/load", post={"model_path": "assets/tiny", "compile": False})
    worker.wait_state("IDLE")
    phases = {target["phase"] for target in worker.health()["compile"]["targets"].values()}
    assert phases == {"off"}, f"expected nothing compiled, got {phases}"


# --- stopping -------------------------------------------------------------------------------------


def test_drain_lets_sessions_finish(compiled):
    worker = compiled.worker
    worker.wait_state("IDLE")
    with ScriptedClient(worker) as client:
        client.prepare(LIVELY)
        client.unit(0)
        worker.process.send_signal(signal.SIGTERM)
        body = worker.wait_health(lambda body: body["state"] == "DRAINING", "DRAINING")
        assert body["slots"]["free"] == 0 and worker.ask("/readyz")[0] == 503
        with pytest.raises(HandshakeRefused):
            ScriptedClient(worker)
        assert [r.current_time for r in client.units(range(1, 4))] == [2, 3, 4]
        client.stop()
        children = psutil.Process(worker.process.pid).children(recursive=True)
    status = worker.wait()
    assert status == 0, f"expected exit status 0, got {status}\n{worker.log}"
    _, left = psutil.wait_procs(children, timeout=30)
    assert children and not left, f"expected the compiler's processes to end, got {left} of {children}"


def test_stop_during_start_exits(tmp_path, cache):
    with launch(tmp_path, cache) as worker:
        worker.wait_state("LOADING", "COMPILING")
        status = worker.stop()
        assert status == 0, f"expected exit status 0, got {status}\n{worker.log}"


# --- failed starts --------------------------------------------------------------------------------


def test_failed_start_names_its_cause(tmp_path):
    """tests/worker/start/test_starting.py has the other causes."""
    with running(tmp_path, "--warmup-video", "/nowhere/talk.mp4", until=None) as worker:
        status = worker.wait(120)
    errors, named = [line for line in worker.lines if " ERROR " in line], ("/nowhere/talk.mp4", "build_warmup.py")
    assert status == 1, f"expected exit status 1, got {status}\n{worker.log}"
    assert errors and all(name in errors[0] for name in named), f"expected {named} in an error, got:\n{worker.log}"


@pytest.mark.parametrize(
    ("flags", "config", "named"),
    [
        ((), {"service": {"compil": True}}, "service.compile"),
        (("--max-sessions", "0"), {}, "max_sessions"),
    ],
    ids=["unknown key", "out of range"],
)
def test_invalid_settings_give_one_line(tmp_path, flags, config, named):
    with running(tmp_path, *flags, until=None, config=config) as worker:
        status = worker.wait(60)
    assert status == 2, f"expected exit status 2, got {status}\n{worker.log}"
    assert len(worker.lines) == 1 and named in worker.lines[0], f"expected one line with {named}, got:\n{worker.log}"


def test_used_port_gives_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = str(first.getsockname()[1])
        with running(tmp_path, "--port", port, until=None) as second:
            status = second.wait(60)
    assert status == 2 and len(second.lines) == 1 and port in second.log, f"got {status}:\n{second.log}"


def test_without_a_compiler_sessions_are_served_eagerly_traced_and_drained(tmp_path):
    """One worker with the target that is traced fastest."""
    config = {**FEW_STEPS, "service": {"compile": {"targets": ["token2wav.hift"]}}}
    environ = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none")}
    traces = tmp_path / "traces"
    traces.mkdir()
    flags = (*FLAGS, "--drain-timeout", "1", "--record-trace", str(traces))
    with running(tmp_path, *flags, config=config, environ=environ) as worker:
        targets = worker.health()["compile"]["targets"]
        phases = {name: target["phase"] for name, target in targets.items() if target["phase"] != "off"}
        assert phases == {"token2wav.hift": "eager"}, f"expected it eager, got {phases}\n{worker.log}"
        assert targets["token2wav.hift"]["error"]
        assert any("WARNING" in line and "token2wav.hift" in line for line in worker.lines), worker.log
        metrics = worker.ask("/metrics")[1]
        assert 'compile_target{phase="eager",target="token2wav.hift"} 1.0' in metrics
        with ScriptedClient(worker) as client:
            client.prepare(LIVELY)
            assert [r.current_time for r in client.units(range(3), picture=True)] == [1, 2, 3]
            client.stop()
        worker.wait_free(2)
        with ScriptedClient(worker) as client:
            assert client.prepare(LIVELY).spec.trace, "expected all sessions to be traced"
            client.unit(0)
            assert worker.ask("/drain", post={}) == (202, {"state": "DRAINING"})
            client.expect_error("draining", timeout=30)
            code = client.close_code()
            assert code == 1012, f"expected close code 1012, got {code}"
            status = worker.wait()
            assert status == 0, f"expected exit status 0, got {status}\n{worker.log}"
    records = [read_records(path) for path in sorted(traces.glob("*-[12].trace.jsonl"), key=lambda path: path.stem[-7])]
    kinds = [[record["kind"] for record in one[1:] if record["kind"] != "unit"] for one in records]
    assert kinds == [["prepare", *["result"] * 3], ["prepare", "result"]], f"expected two traced sessions, got {kinds}"
