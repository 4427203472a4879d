"""A start runs its stages in order, reports each, and frees everything if it fails."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors import safe_open

from models.checkpoint.files import list_tensors
from models.checkpoint.index import converted_to
from models.errors import AudioError
from models.layers.quantized import QuantizedLinear
from models.quantize import quantize_folder
from tests.worker.loop.engines import TINY
from worker.compile.state import TargetPhase, TargetState
from worker.config.compile import TARGETS, CompileConfig
from worker.config.session import EngineConfig
from worker.engine import Engine
from worker.media import MediaError
from worker.start import starting
from worker.start.starting import Started, start_engine
from worker.start.voices import ReferenceSound
from worker.start.warmup import WarmUpError
from worker.status import State, StateError, Status

ASSETS = Path(__file__).parents[3] / "assets"
CONFIG = EngineConfig(model_path=TINY, device="cpu", max_sessions=1, euler_steps=1)
COMPILED = CONFIG.model_copy(update={"compile": CompileConfig(enabled=True, targets=("llm.model", "apm"))})


class RecordingStatus(Status):
    """Records every state, and every progress report with the state at its time."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.words = [self.state], []

    def move(self, state: State, error: str | None = None) -> None:
        super().move(state, error)
        self.states.append(state)

    def progress(self, what: str, done: int = 0, total: int = 0) -> None:
        super().progress(what, done, total)
        self.words.append((self.state, what, done, total))


def start(tmp_path: Path, config: EngineConfig = CONFIG, status: Status | None = None, **given: Any) -> Started:
    files = {"video": ASSETS / "warmup.mp4", "ref_audio": ASSETS / "ref_audio" / "default.wav"}
    known = {"max_units": 1, "cache_dir": tmp_path, "targets": {}, "status": status or RecordingStatus()}
    return start_engine(config, **{**files, **known, **given})


@contextmanager
def no_engine_left() -> Iterator[None]:
    before = engine_threads()
    yield
    assert engine_threads() == before, "expected no engine left running"


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "engine"}


def test_stages_in_order(tmp_path: Path) -> None:
    status, targets = RecordingStatus(), {"left over": TargetState("left over")}
    with no_engine_left():
        started = start(tmp_path, status=status, targets=targets)
        assert isinstance(started.engine, Engine) and started.engine.n_free() == 1
        started.engine.close()
    assert status.states == [State.LOADING, State.WARMING_UP], status.states
    assert started.seconds.keys() == {"load", "warm_up"} and min(started.seconds.values()) > 0
    assert started.warm_up.n_units == 1 and started.cache is None
    assert started.targets is targets and list(targets) == list(TARGETS)
    assert {one.phase for one in targets.values()} == {TargetPhase.OFF}, targets
    assert (State.WARMING_UP, "units", 1, 1) in status.words
    assert any("weights of tiny" in what for state, what, *_ in status.words if state is State.LOADING), status.words
    loading = started.engine.parts.loading
    stored, _ = list_tensors(TINY)
    assert loading.n_bytes == sum(tensor.n_bytes for tensor in stored) and 0 < loading.seconds < started.seconds["load"]
    assert started.report.header.loading == loading and str(loading) in started.report.table()
    kept = list((tmp_path / "voices").iterdir())
    assert started.voices is not None and kept, "expected the voice to be kept in the cache's folder"


def test_an_int8_folder_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "int8"
    quantize_folder(TINY, folder)
    started = start(tmp_path, CONFIG.model_copy(update={"model_path": folder, "weights": "int8"}))
    parts = started.engine.parts
    started.engine.close()
    assert started.warm_up.n_units == 1 and started.voices is not None
    assert started.report.header.settings["weights"] == "int8"
    assert (converted_to(folder), converted_to(TINY), converted_to(tmp_path)) == ("int8", None, None)
    layers = [module for module in parts.model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 2 * (7 + 7 + 6 + 6) + 1, f"expected all layers and the head, got {len(layers)}"
    head = safe_open(folder / "model-00001-of-00001.safetensors", "pt").get_tensor("llm.lm_head.weight")
    assert torch.equal(parts.model.llm.lm_head.weight.values, head), "expected the stored values, not rounded again"
    n_bytes = sum(tensor.n_bytes for tensor in list_tensors(TINY)[0])
    assert parts.loading.n_bytes < 0.3 * n_bytes, f"expected int8 bytes of {n_bytes}, got {parts.loading.n_bytes}"


def test_auto_starts_eagerly_on_a_cpu(tmp_path: Path) -> None:
    status = RecordingStatus()
    started = start(tmp_path, CONFIG.model_copy(update={"compile": CompileConfig(), "max_sessions": 2}), status)
    started.engine.close()
    batch = started.engine.parts.unit_steps.shapes.batch
    assert batch == (1, 2), f"expected a size for one session alone, got {batch}"
    assert State.COMPILING not in status.states and started.engine.config.compile.enabled is False
    assert started.report.header.settings["enabled"] is False


def test_says_that_a_copy_for_decoding_is_not_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for asked in ("auto", True):
        caplog.clear()
        start(tmp_path, CONFIG.model_copy(update={"decode_copy": asked})).engine.close()
        said = [text for text in caplog.messages if "model.decode_copy" in text]
        expected = ["setting model.decode_copy has no effect: the model runs on a CPU"] if asked is True else []
        assert said == expected, f"{asked}: expected {expected}, got {said}"


def test_compiles_on_the_engines_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, State, list[str]]] = []
    warm: list[bool] = []
    status, targets = RecordingStatus(), {}

    def compile_engine(parts: Any, config: EngineConfig, **given: Any) -> starting.CompileResult:
        assert given["targets"] is targets
        given["progress"]("a bucket", 1, 2)
        waiting = [name for name, one in targets.items() if one.phase is TargetPhase.WAITING]
        seen.append((threading.current_thread().name, status.state, waiting))
        warm.append(given["is_warm"])
        targets["apm"].hits, targets["llm.model"].misses = 3, 1
        return starting.CompileResult({name: targets[name] for name in waiting})

    monkeypatch.setattr(starting, "compile_engine", compile_engine)
    started = start(tmp_path, COMPILED, status, targets=targets)
    started.engine.close()
    assert seen == [("engine", State.COMPILING, ["llm.model", "apm"])], seen
    assert status.states == [State.LOADING, State.COMPILING, State.WARMING_UP], status.states
    assert (State.COMPILING, "a bucket", 1, 2) in status.words
    assert (started.cache.hits, started.cache.misses, started.cache.folder) == (3, 1, str(tmp_path))
    assert started.cache.this_s <= started.seconds["compile"] and "3 hits, 1 misses" in started.report.header.cache
    assert str(tmp_path) in started.report.header.cache
    assert any((tmp_path / "manifests").glob("*.json")), "expected the cache to be written down"
    assert list(started.seconds) == ["load", "compile", "warm_up"]
    assert [row.name for row in started.report.rows] == ["llm.model", "apm"], started.report
    status, targets = RecordingStatus(), {}
    start(tmp_path, COMPILED, status, targets=targets).engine.close()
    assert warm == [False, True], "expected the second start to find everything"


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("stage", "expected", "last"),
    [
        ("build", RuntimeError, State.LOADING),
        ("compile_engine", RuntimeError, State.COMPILING),
        ("Voices", RuntimeError, State.WARMING_UP),
        ("warm_up", WarmUpError, State.WARMING_UP),
    ],
)
def test_failed_stage_closes_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, expected: type[Exception], last: State
) -> None:
    status = RecordingStatus()
    monkeypatch.setattr(starting, "compile_engine", lambda *_, **__: starting.CompileResult())
    if stage == "warm_up":  # in the middle of it
        monkeypatch.setattr("worker.loop.sessions.Sessions.prepare", fail)
    else:
        monkeypatch.setattr(starting, stage, fail)
    with no_engine_left(), pytest.raises(expected, match="no luck"):
        start(tmp_path, COMPILED, status)
    assert status.state is last, f"expected the caller to move on from {last}, got {status.state}"


def test_stopped_worker_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, build = RecordingStatus(), starting.build

    def build_and_drain(config: EngineConfig) -> Any:
        status.move(State.DRAINING)
        return build(config)

    monkeypatch.setattr(starting, "build", build_and_drain)
    with no_engine_left(), pytest.raises(StateError):
        start(tmp_path, status=status)
    assert status.state is State.DRAINING


def test_refuses_a_default_voice_for_which_there_is_no_room(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    soundfile.write(path, np.full(7 * 16_000, 0.1, np.float32), 16_000)
    sound = ReferenceSound.read(path)
    starting._check_length(sound, EngineConfig(voices_s=7))
    with pytest.raises(AudioError, match=r"at most 6 s.*voices_s.*7\.0 s"):
        starting._check_length(sound, EngineConfig(voices_s=6))


@pytest.mark.parametrize(
    ("files", "error", "word"),
    [
        ({"video": Path("none.mp4")}, MediaError, "build_warmup"),
        ({"ref_audio": Path("none.wav")}, AudioError, "none.wav"),
    ],
    ids=["video", "reference sound"],
)
def test_checks_files_before_loading(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, Path],
    error: type[Exception],
    word: str,
) -> None:
    loads: list[Any] = []
    build: Callable[[EngineConfig], Any] = starting.build
    monkeypatch.setattr(starting, "build", lambda config: loads.append(config) or build(config))
    with no_engine_left(), pytest.raises(error, match=word):
        start(tmp_path, **files)
    assert not loads, "expected nothing loaded"


def test_without_a_reference_sound_it_warms_up_silently(tmp_path: Path) -> None:
    started = start(tmp_path, ref_audio=None)
    started.engine.close()
    assert started.warm_up.fallback_used and not started.warm_up.tts_triggered
