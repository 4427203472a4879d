"""The codec on a GPU: captured regions, no device synchronization in a call, the same sound as on the CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.qwen3_tts.codec import regions
from models.qwen3_tts.codec.codec import CodeChunk, SpeechCodec
from models.qwen3_tts.codec.load import load_speech_tokenizer
from models.qwen3_tts.codec.region_table import CodecShapes
from tests.models.compare import assert_close
from tests.models.qwen3_tts.codec.test_codec import codes_of
from tests.parity.golden import WEIGHTS, GoldenDir, read_tensors
from tests.parity.qwen3_tts.codec import checkpoint, ramp

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SHAPES = CodecShapes(batch=(1, 4), frames=(1, 2, 4, 8), sounds=(1,), sound_frames=(26,))
FRAMES = 30


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def codec_on(golden: GoldenDir, device: str, dtype: torch.dtype = torch.float32) -> SpeechCodec:
    folder = golden.path / "speech_tokenizer"
    tensors, config = read_tensors(folder, WEIGHTS)[0], golden.json("speech_tokenizer/config.json")
    with checkpoint(tensors, config) as full:
        tokenizer = load_speech_tokenizer(full, device=device, dtype=dtype)
    return SpeechCodec(tokenizer, n_slots=3, shapes=SHAPES)


def streamed(codec: SpeechCodec) -> list[Tensor]:
    """The sounds of three streams: by single frames, in a ramp, and in the largest chunks, which share batches."""
    plans = [[1] * FRAMES, ramp(FRAMES), [8, 8, 8, 6]]
    codec.begin([0, 1, 2])
    waves: list[list[Tensor]] = [[], [], []]
    for call in range(FRAMES):
        chunks = []
        for slot, plan in enumerate(plans):
            if call < len(plan):
                start = sum(plan[:call])
                chunks.append(CodeChunk(slot, codes_of(FRAMES, slot)[start : start + plan[call]]))
        for chunk, wave in zip(chunks, codec.decode(chunks), strict=True):
            waves[chunk.slot].append(wave.cpu())
    return [torch.cat(parts) for parts in waves]


def test_captured_sound_equals_the_cpu(codec_golden: GoldenDir) -> None:
    codec = codec_on(codec_golden, "cuda")
    eager = streamed(codec)
    assert codec.regions.capture() == 2 + 2 * 4 + 1 == codec.regions.n_captured
    captured, expected = streamed(codec), streamed(codec_on(codec_golden, "cpu"))
    for got, same, wanted in zip(captured, eager, expected, strict=True):
        assert_close(got, same, 1e-6, "captured against eager")
        assert_close(got, wanted, 2e-5, "against the CPU")
    assert codec.regions.n_skipped == 0


def test_calls_do_not_synchronize(codec_golden: GoldenDir) -> None:
    codec = codec_on(codec_golden, "cuda")
    codec.regions.capture()
    slots, codes = torch.tensor([0], device="cuda"), torch.zeros(1, 1, 16, dtype=torch.int64, device="cuda")
    counts = torch.tensor([1], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            codec.regions.run(regions.decode_frames, slots, codes, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bfloat16_differs_by_its_rounding_only(codec_golden: GoldenDir) -> None:
    """Chunks run in kernels of other shapes, whose sums may round differently: no further off than bfloat16 itself."""
    exact = streamed(codec_on(codec_golden, "cuda"))
    codec = codec_on(codec_golden, "cuda", torch.bfloat16)
    for slot, (wave, right) in enumerate(zip(streamed(codec), exact, strict=True)):
        parts = [torch.from_numpy(codes_of(FRAMES, slot))[start : start + 8].numpy() for start in range(0, FRAMES, 8)]
        codec.begin([slot])
        whole = torch.cat([codec.decode([CodeChunk(slot, part)])[0].cpu() for part in parts])
        assert decibels(right, wave) >= 30
        assert decibels(whole, wave) >= decibels(right, whole) - 1, f"stream {slot}"


def decibels(expected: Tensor, got: Tensor) -> float:
    """Power of a sound above that of the difference."""
    error = (got - expected).square().mean().clamp_min(1e-12)
    return 10 * torch.log10(expected.square().mean() / error).item()


def test_reference_codes_equal_the_cpu(codec_golden: GoldenDir) -> None:
    tensors = codec_golden.tensors("speech_encoder")
    codec = codec_on(codec_golden, "cuda")
    codec.regions.capture(["codec_encode"])
    got = codec.encode(tensors["w0.wave_q"].float().numpy() / 20_000, silence=0)
    assert (got == tensors["w0.codes"].numpy()).all()
