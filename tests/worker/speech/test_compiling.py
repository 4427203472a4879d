"""What of the tiny speech model compiles, and with which flags it runs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from assets.build_tiny_speech import build
from models.graphs.region_graphs import compile_counters
from models.qwen3_tts.prompt import SpeechVoice
from tests.models.graphs.fake_captures import replay_on_cpu
from tests.worker.loop.engines import make_config
from worker.assembly import backend_flags
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig
from worker.protocol.speech_messages import SpeakRequest
from worker.speech import parts as speech_parts
from worker.speech.compiling import _capture, compile_speech, release_speech
from worker.speech.parts import SpeechParts, build_speech
from worker.speech.requests import PlannedSpeech, spoken_request
from worker.speech.voices import RequestVoice

CPU = torch.device("cpu")
TOLERANCE = 1e-5


def settings(**compile: Any) -> EngineConfig:
    return make_config(speech_sessions=1, speech_rows=128, compile=CompileConfig(**compile))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> SpeechParts:
    return build_speech(build(tmp_path_factory.mktemp("speech")), settings(enabled=False), CPU)


@pytest.fixture(autouse=True)
def eager_afterwards(parts: SpeechParts) -> Iterator[None]:
    yield
    release_speech(parts)
    torch._dynamo.reset()


def spoken(parts: SpeechParts) -> np.ndarray:
    """The sound of a few words."""
    planned = PlannedSpeech(SpeakRequest(text="Hi.", max_frames=7), RequestVoice(SpeechVoice(name="ryan")), 3)
    parts.streams.start(spoken_request(planned, parts, parts.tokenizer.encode_spoken("Hi.")))
    sounds: list[np.ndarray] = []
    while parts.streams.can_step:
        sounds += [part.samples for part in parts.streams.step()]
    return np.concatenate(sounds)


def compiled(parts: SpeechParts, config: EngineConfig, backend: Any = "eager") -> tuple[list[str], dict[str, Any]]:
    """The targets that were begun, and the regions that have a reason."""
    begun: list[str] = []
    with torch.no_grad():
        found = compile_speech(parts, config, lambda what, *_: begun.append(what.split()[-1]), backend=backend)
    return begun, found


def test_layers_of_the_chosen_targets_compile_and_speak_as_before(parts: SpeechParts) -> None:
    expected = spoken(parts)
    talker, codec = parts.runner.model.talker, parts.streams.codec.regions.root
    layers = [talker.model.layers[0], talker.code_predictor.model.layers[0]]
    for chosen in (("talker", "code_predictor", "codec"), ("codec",)):
        begun, found = compiled(parts, settings(enabled=True, speech_targets=chosen))
        assert begun == list(chosen) and not found
        has_compiled = ["forward" in vars(layer) for layer in layers]
        assert has_compiled == [len(chosen) == 3] * 2
        assert any("forward" in vars(module) for module in codec.modules())
        before = compile_counters()
        assert np.abs(spoken(parts) - expected).max() <= TOLERANCE
        assert compile_counters() == before, "expected that nothing compiles after the start"
        release_speech(parts)


def test_without_compiling_and_with_kernels_no_layer_compiles(
    parts: SpeechParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    for enabled in (False, "auto"):
        assert compiled(parts, settings(enabled=enabled)) == ([], {})
    monkeypatch.setattr(backend_flags, "supports_kernels", lambda device: True)
    assert compiled(parts, settings(enabled=True)) == ([], {})
    begun, _ = compiled(parts, settings(enabled=True, mode="max-autotune", speech_targets=("codec",)))
    assert begun == ["codec"], "another mode switches kernels off"
    assert parts.runner.table.marks_steps and parts.streams.codec.regions.marks_steps
    release_speech(parts)
    assert not parts.runner.table.marks_steps


def test_a_target_that_fails_runs_eagerly(parts: SpeechParts, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = spoken(parts)

    def broken(*_: Any) -> None:
        raise RuntimeError("no compiler")

    begun, found = compiled(parts, settings(enabled=True), broken)
    assert begun == ["talker", "code_predictor", "codec"]
    assert "code_predictor: " in found["speech.first_frame"].reason and "no compiler" in found["speech.frame"].reason
    assert found["speech.codec_decode"].stage == "speech.codec"
    replay_on_cpu(monkeypatch)
    with torch.no_grad():
        captured = _capture({"codec": parts.streams.codec.regions}, lambda *_: None, found)["speech.codec_decode"]
    assert captured.n_graphs > 0 and captured.reason is not None and "no compiler" in captured.reason, captured
    assert np.array_equal(spoken(parts), expected)


def test_flags_apply_with_compile_off(parts: SpeechParts, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[CompileConfig] = []
    monkeypatch.setattr(speech_parts, "apply_backend_flags", lambda config, device: applied.append(config))
    config = settings(enabled=False, attention="eager", cudnn_benchmark=True)
    build_speech(parts.folder, config, CPU)
    assert applied == [config.compile]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_layers_are_captured_on_a_gpu(parts: SpeechParts) -> None:
    config = settings(enabled=True, kernels="off")
    made = build_speech(parts.folder, config, torch.device("cuda", 0))
    try:
        with torch.no_grad():
            found = compile_speech(made, config, lambda *_: None)
        assert found and all(one.n_graphs and one.reason is None for one in found.values()), found
        before = compile_counters()
        assert np.isfinite(spoken(made)).all()
        assert compile_counters() == before, "expected that nothing compiles after the start"
    finally:
        release_speech(made)
        backend_flags.reset_backend_flags()
