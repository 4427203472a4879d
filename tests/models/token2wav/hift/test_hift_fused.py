"""Fused HiFT against the plain one; in Triton's interpreter on a CPU, and part by part where that is slow."""

import pytest
import torch
import torch.nn.functional as F

from models.token2wav.hift.hift import KERNELS, Hift, Snake
from models.token2wav.load.random_weights import random_parts
from tests.models.compare import assert_close
from tests.models.token2wav.hift.hifts import make_hift, random_mel

pytest.importorskip("triton")

from models.token2wav.hift import hift_kernels
from models.token2wav.hift.hift_fused import FusedHift
from models.token2wav.hift.hift_kernels import ConvTiles, activate, average

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")
DEVICES = (pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu))
LENGTHS = (9, 4, 0)


def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return x + (x * alpha).sin().square() / (alpha + 1e-9)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tiles, because the interpreter's time is proportional to the programs."""
    monkeypatch.setattr(hift_kernels, "conv_tiles", lambda *_, **__: ConvTiles(512, 16, 16, 4, 2))
    monkeypatch.setattr(hift_kernels, "BLOCK_ROWS", 512)


@interpreted
@torch.no_grad()
def test_fused_sound_equals_plain_sound(few_programs: None):
    hift, lengths = make_hift(), torch.tensor([1])
    mel, source = random_mel(1, 2), 0.3 * torch.randn(1, 480 * 2, generator=torch.Generator().manual_seed(9))
    mel[0, :, 1:], source[0, 480:] = float("nan"), float("nan")
    got, expected = FusedHift(hift).decode(mel, source, lengths), hift.decode(mel, source, lengths)
    assert expected.std() > 0.01
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_blocks_of_one_stage_equal_plain_blocks(device: str, monkeypatch: pytest.MonkeyPatch):
    """Rows of different length with NaN beyond their ends, and more channels than a tile."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    from models.token2wav.hift.hift_fused import _blocks, _run

    hift: Hift = make_hift()
    blocks = list(hift.resblocks[: len(KERNELS)].to(device))
    C, generator = len(blocks[0].convs1[0].bias), torch.Generator().manual_seed(3)
    x = torch.randn(3, 9, C, generator=generator).to(device)
    lengths = torch.tensor(LENGTHS, device=device)
    inside = (torch.arange(9, device=device) < lengths[:, None])[:, None].float()
    joined = _blocks(blocks)
    stream, active = activate(x, torch.zeros(C, device=device), joined.alphas[0][0], 9, torch.float32)
    active.masked_fill_(inside.transpose(1, 2)[None] == 0, float("nan"))
    got = _run(joined, stream, active, lengths)
    for block, one in zip(blocks, got, strict=True):
        expected = block(x.transpose(1, 2), inside).transpose(1, 2)
        for row, n in enumerate(LENGTHS):
            assert_close(one[row, :n], expected[row, :n], 1e-5, f"row {row}")


@pytest.mark.parametrize("device", DEVICES)
def test_activate_adds_and_reflects_the_first_frame(device: str):
    generator = torch.Generator().manual_seed(4)
    x, bias, added, alpha = (torch.randn(s, generator=generator).to(device) for s in ((2, 7, 6), 6, (2, 8, 6), (3, 6)))
    alpha = alpha.abs() + 0.1
    stream, active = activate(x, bias, alpha, 8, torch.float32, added)
    expected = F.pad((x + bias).transpose(1, 2), (1, 0), mode="reflect").transpose(1, 2) + added
    assert_close(stream[0], expected, 1e-6)
    assert_close(active, torch.stack([snake(expected, a) for a in alpha]), 1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_activation_of_large_values(device: str):
    """The series requires a reduction by whole half turns."""
    x = torch.linspace(-40, 40, 801, device=device).view(1, -1, 1)
    alpha = torch.tensor([[1.7]], device=device)
    _, active = activate(x, torch.zeros(1, device=device), alpha, 801, torch.float32)
    exact = x.double() + (x.double() * alpha.double()).sin().square() / alpha.double()
    assert_close(active[0], exact.float(), 2e-5)
    activation = Snake(1)
    activation.alpha.data = alpha[0].cpu()
    activation.derive("cpu", torch.float32)
    assert_close(active[0].cpu()[0].T[None], activation(x.cpu().transpose(1, 2)).detach(), 2e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_average_of_a_stage(device: str):
    blocks = torch.randn(3, 2, 9, 6, generator=torch.Generator().manual_seed(5)).to(device)
    lengths = torch.tensor([9, 4], device=device)
    got = average(blocks, None, lengths, 0.1, torch.float32)
    expected = F.leaky_relu(blocks.sum(0) / 3, 0.1)
    expected[1, 4:] = 0
    assert_close(got, expected, 1e-6)
    bias = torch.randn(6, generator=torch.Generator().manual_seed(6)).to(device)
    expected = F.leaky_relu(blocks[0] + bias, 0.1)
    expected[1, 4:] = 0
    assert_close(average(blocks[:1], bias, lengths, 0.1, torch.float32), expected, 1e-6)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B", [1, 9])
def test_fused_sound_at_the_released_size(B: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Small and large tiles, rows of different length."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    hift = random_parts(device="cuda", hift_dtype=dtype).hift
    lengths = torch.arange(58, 58 - B, -1, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    mel = torch.randn(B, 80, 58, device="cuda", generator=generator)
    stft = hift.spectral.stft(0.3 * torch.randn(B, 480 * 58, device="cuda", generator=generator), 480 * lengths)
    inside = torch.arange(stft.shape[2], device="cuda") <= 120 * lengths[:, None, None]
    for got, expected in zip(
        FusedHift(hift).spectrum(mel, stft, lengths), hift.spectrum(mel, stft, lengths), strict=True
    ):
        off = ((got - expected) * inside).norm() / (expected * inside).norm()
        assert off <= (1e-4 if dtype == torch.float32 else 2e-2), f"{off:.3g}"
