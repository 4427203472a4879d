"""Compiled components: the waveform of the eager ones, and nothing that compiles after warm-up."""

import gc
from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from models.errors import SettingsError
from models.graphs.compiler import reset_compiler
from models.graphs.region_graphs import compile_counters
from models.layers.weights import assign_weights, on_meta
from models.token2wav.backends import Kernels
from models.token2wav.hift.hift import Hift, HiftBackend
from models.token2wav.s3gen import region_table
from models.token2wav.s3gen.components import S3Modes, compile_components
from models.token2wav.s3gen.model import S3Gen
from models.token2wav.s3gen.region_table import S3Regions, S3Shapes
from models.token2wav.s3gen.synthesizer import S3Synthesizer, Utterance
from tests.models.compare import assert_close
from tests.models.token2wav.prompt.prompt_sounds import prompt
from tests.models.token2wav.s3gen import tiny_s3gen
from tests.models.token2wav.s3gen.test_synthesizer import tokens

SHAPES = S3Shapes(batch=(2,), speech_tokens=(8,), prompt=(12,), sound=(60,))
TOLERANCE = 1e-4  # of samples, float32


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def spoken() -> list[Utterance]:
    return [Utterance(tokens(n, n), tiny_s3gen.voice(6, frames), seed=n) for n, frames in ((5, 12), (7, 13), (8, 12))]


def sounds() -> list[tuple[torch.Tensor, int]]:
    return [(torch.from_numpy(prompt(seconds, 16_000, seed=1)[0]), 16_000) for seconds in (0.5, 0.4, 0.3)]


@pytest.mark.slow
def test_compiled_components_equal_eager_ones_and_nothing_compiles_late() -> None:
    """Traced; HiFT and pitch with the compiler's decompositions. Requests of other lengths are the same graphs.

    `tests/models/token2wav/voice/test_voice_regions.py` has the tokenizer and the speaker encoder.
    """
    synthesizer = S3Synthesizer(tiny_s3gen.make(), SHAPES, steps=(2,))
    expected = synthesizer.speak(spoken())
    before = compile_counters()
    off = S3Modes.all("off")
    for names, backend in ((("encoder", "estimator"), "eager"), (("f0", "hift"), "aot_eager_decomp_partition")):
        modes = off.model_copy(update=dict.fromkeys(names, "default"))
        compile_components(synthesizer.regions, modes, captures=False, backend=backend)
    synthesizer.regions.warm_up(["s3_encode", "s3_solve", "s3_pitch", "s3_decode"])
    warm = compile_counters()
    for got, sound in zip(synthesizer.speak(spoken()), expected, strict=True):
        assert_close(got, sound, TOLERANCE)
    assert warm["graphs"] >= before["graphs"] + 4, "expected encoder, estimator, pitch and HiFT to compile"
    assert compile_counters() == warm, f"expected nothing compiled after warm-up, got {compile_counters()} after {warm}"
    assert warm["graph_breaks"] == before["graph_breaks"] and synthesizer.regions.n_skipped == 0


def test_modes_of_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured regions leave graphs to the capture; the whole solve takes the place of the estimator."""
    regions = S3Regions(tiny_s3gen.make(), SHAPES)
    calls: dict[str, object] = {}
    for method in ("compile", "compile_parts"):
        monkeypatch.setattr(regions, method, lambda names, mode, **_: calls.update(dict.fromkeys(names, mode)))
    modes = S3Modes(f0="reduce-overhead", hift="max-autotune", estimator="off", tokenizer="off", encoder="off")
    compile_components(regions, modes, captures=True)
    expected = {"s3_pitch": "default", "mel2wav": "max-autotune-no-cudagraphs", "speaker_encoder": "default"}
    assert calls == expected and not regions.marks_steps
    calls.clear()
    compile_components(regions, S3Modes.all("reduce-overhead").model_copy(update={"solve": "default"}), captures=False)
    assert calls["s3_solve"] == "default" and "flow.decoder.estimator" not in calls
    assert calls["s3_pitch"] == "reduce-overhead" and regions.marks_steps
    with pytest.raises(ValidationError, match="'default', 'reduce-overhead' or 'max-autotune'"):
        S3Modes(f0="fast")  # type: ignore[arg-type]


class StubbedFused:
    """The plain HiFT as a fused backend, which counts its calls."""

    is_fused = True

    def __init__(self, hift: Hift):
        self.hift, self.m_source, self.n_calls = hift, hift.m_source, 0

    def f0(self, mel: Tensor, n_frames: Tensor) -> Tensor:
        return self.hift.f0(mel, n_frames)

    def decode(self, mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        self.n_calls += 1
        return self.hift.decode(mel, source, n_frames)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> list[StubbedFused]:
    """Simulates a device with kernels. The fused backends that are made."""
    made: list[StubbedFused] = []

    def choose(hift: Hift, kernels: Kernels) -> HiftBackend:
        if kernels == "plain":
            return hift
        made.append(StubbedFused(hift))
        return made[-1]

    monkeypatch.setattr(region_table, "hift_backend", choose)
    return made


def test_kernels_decode_until_the_release(stubbed: list[StubbedFused]) -> None:
    synthesizer = S3Synthesizer(tiny_s3gen.make(), SHAPES, steps=(2,))
    names, (expected, *_) = synthesizer.model.state_dict().keys(), synthesizer.speak(spoken())
    assert not stubbed, "expected the plain module in a new table"
    assert synthesizer.regions.use_kernels("auto")
    for n_calls in (2, 4):
        assert_close(synthesizer.speak(spoken())[0], expected, 0)
        assert stubbed[0].n_calls == n_calls, "expected a call for each of two batches"
    assert synthesizer.model.state_dict().keys() == names
    synthesizer.release()
    assert_close(synthesizer.speak(spoken())[0], expected, 0)
    assert stubbed[0].n_calls == 4, "expected the plain module after the release"


def test_hift_on_kernels_does_not_compile(stubbed: list[StubbedFused], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode other than the default compiles, without kernels."""
    regions, compiled = S3Regions(tiny_s3gen.make(), SHAPES), list[str]()
    for method in ("compile", "compile_parts"):
        monkeypatch.setattr(regions, method, lambda names, **_: compiled.extend(names))
    cases: tuple[tuple[S3Modes, Kernels, bool, bool], ...] = (
        (S3Modes(), "auto", True, False),
        (S3Modes(), "plain", False, True),
        (S3Modes(hift="max-autotune"), "fused", False, True),
        (S3Modes(hift="off"), "auto", False, False),
    )
    for modes, kernels, is_fused, compiles in cases:
        compiled.clear()
        stubbed.clear()
        compile_components(regions, modes, captures=True, kernels=kernels)
        assert (bool(stubbed), "mel2wav" in compiled) == (is_fused, compiles), (modes.hift, kernels)
        assert {"s3_pitch", "tokenizer", "flow.encoder"} <= {*compiled}


def test_kernels_are_refused_on_a_cpu() -> None:
    regions = S3Regions(tiny_s3gen.make(), SHAPES)
    assert not regions.use_kernels("auto")
    with pytest.raises(SettingsError, match="fused kernels: expected a CUDA device with Triton, got cpu"):
        regions.use_kernels("fused")


def on_gpu() -> S3Gen:
    model = tiny_s3gen.make()
    weights = {name: tensor.cuda() for name, tensor in model.state_dict().items()}
    with on_meta():
        model = S3Gen(model.config)
    return assign_weights(model, weights, "cuda", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_compiled_and_captured_components_on_a_gpu(kernels: Kernels) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        synthesizer = S3Synthesizer(on_gpu(), SHAPES, steps=(2,))
        expected = synthesizer.speak(spoken())
        compile_components(synthesizer.regions, S3Modes(), captures=True, kernels=kernels)
        synthesizer.regions.capture()
        warm = compile_counters()
        for got, sound in zip(synthesizer.speak(spoken()), expected, strict=True):
            assert_close(got, sound, TOLERANCE)
        synthesizer.prepare(sounds())
        assert compile_counters() == warm and synthesizer.regions.n_skipped == 0
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.gpu
def test_unloading_with_live_graphs_gives_the_memory_back() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    synthesizer = S3Synthesizer(on_gpu(), SHAPES, steps=(2,))
    compile_components(synthesizer.regions, S3Modes(), captures=True)
    synthesizer.regions.capture()
    synthesizer.speak(spoken())
    held = torch.cuda.memory_reserved()
    synthesizer.release()
    del synthesizer
    reset_compiler()
    gc.collect()
    torch.cuda.empty_cache()
    now = torch.cuda.memory_reserved()
    assert held > before, f"expected memory of graphs, got {held} after {before} bytes"
    # Library workspaces stay with the process.
    assert now - before <= 0.1 * (held - before) + 64 * 2**20, f"expected about {before} bytes, got {now} of {held}"
