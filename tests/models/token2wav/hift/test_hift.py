"""HiFT against a slow float64 vocoder, for rows of different length, bfloat16 weights and Inductor."""

import pytest
import torch
from torch import Tensor, nn

from models.layers.weights import assign_weights, on_meta
from models.token2wav.hift.hift import LIMIT, MIN_CHANNELS_LAST, Hift, Snake, weight_dtype
from models.token2wav.hift.source import phase_lines
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.hift.hift_reference import slow_decode
from tests.models.token2wav.hift.hifts import CONFIG, make_hift, random_mel

LENGTHS = torch.tensor([11, 1, 6, 0, 3])


def inputs() -> tuple[Tensor, Tensor]:
    mel = random_mel(len(LENGTHS), 11)
    source = 0.3 * torch.randn(len(LENGTHS), 480 * 11, generator=torch.Generator().manual_seed(9))
    for row, n in enumerate(LENGTHS):
        mel[row, :, n:] = float("nan")
        source[row, 480 * n :] = float("nan")
    return mel, source


def test_rows_of_one_bucket_equal_each_row_alone():
    hift, (mel, source) = make_hift(), inputs()
    wave = hift.decode(mel, source, LENGTHS)
    for row, n in enumerate(LENGTHS.tolist()):
        assert not wave[row, 480 * n :].any()
        if n == 0:
            continue
        short_mel, short_source = mel[row : row + 1, :, :n], source[row : row + 1, : 480 * n]
        alone = hift.decode(short_mel, short_source, LENGTHS[row : row + 1])
        assert_close(wave[row : row + 1, : 480 * n], alone, 3e-6, f"row {row} alone")
        assert_close(alone[0], slow_decode(hift, short_mel[0], short_source[0]), 1e-5, f"row {row}, slow")
    assert wave[0].std() > 0.01
    assert wave.abs().max() <= LIMIT


@pytest.mark.parametrize(("base", "is_last"), [(MIN_CHANNELS_LAST, True), (MIN_CHANNELS_LAST // 2, False)])
def test_order_of_the_channels_changes_no_sound_on_a_cpu(base: int, is_last: bool):
    hift, (mel, source) = make_hift(config=CONFIG.model_copy(update={"base_channels": base})), inputs()
    convolutions = [module for module in hift.modules() if isinstance(module, nn.Conv1d | nn.ConvTranspose1d)]
    assert all((one.weight.stride(1) == 1) == is_last for one in convolutions if one.kernel_size[0] > 1)
    wave = hift.decode(mel, source, LENGTHS)
    for one in convolutions:
        one.weight.data = one.weight.data.contiguous()
    assert_close(wave, hift.decode(mel, source, LENGTHS), 1e-5)


def test_loud_sound_is_limited():
    hift = make_hift()
    hift.conv_post.bias.data[:9] += 20.0  # also exceeds the largest magnitude
    mel, source = inputs()
    wave = hift.decode(mel[:1], source[:1], LENGTHS[:1])
    assert_close(wave[0], slow_decode(hift, mel[0], source[0]), 2e-4)
    assert wave.max() == LIMIT and wave.min() == -LIMIT


def test_bfloat16_weights_keep_pitch_excitation_and_spectra_in_float32():
    wide, narrow = make_hift(), make_hift(torch.bfloat16)
    types = {name: value.dtype for name, value in narrow.named_parameters()}
    assert types["resblocks.0.convs1.0.weight"] == types["ups.1.bias"] == torch.bfloat16
    kept = [name for name, dtype in types.items() if dtype == torch.float32]
    assert kept == [name for name in types if weight_dtype(name, torch.bfloat16) == torch.float32]
    mel, _ = inputs()
    f0 = wide.f0(mel, LENGTHS)
    noise = wide.m_source.mixed_noise(torch.zeros_like(LENGTHS), 480 * 11)
    lines = phase_lines("interp", f0, LENGTHS)
    source, _ = wide.m_source(f0, lines, noise, LENGTHS)
    assert_same(narrow.m_source(f0, lines, noise, LENGTHS)[0], source)
    expected, got = wide.decode(mel, source, LENGTHS), narrow.decode(mel, source, LENGTHS)
    assert got.dtype == torch.float32
    error = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0 < error < 0.1, f"expected bfloat16's rounding, got a relative error of {error:.3g}"


def test_state_dict_has_no_derived_tensors():
    hift = make_hift()
    assert {name.split(".")[-1] for name in hift.state_dict()} == {"weight", "bias", "alpha"}
    assert len(hift.state_dict()) == 246  # the 328 tensors of the file, two of each weight-normed layer folded
    with on_meta():
        again = Hift(CONFIG)
    assign_weights(again, hift.state_dict(), "cpu", torch.float32)
    mel, source = inputs()
    assert_same(again.decode(mel, source, LENGTHS), hift.decode(mel, source, LENGTHS))


def test_snake_divides_by_alpha():
    snake = Snake(2)
    snake.alpha.data = torch.tensor([0.5, 2.0])
    snake.derive("cpu", torch.float32)
    x = torch.tensor([[[1.0], [1.0]]])
    expected = 1 + torch.tensor([0.5, 2.0]).sin().square() / torch.tensor([0.5, 2.0])
    assert_close(snake(x)[0, :, 0], expected, 1e-6)


def test_compiled_source_and_spectra_equal_eager():
    """The parts for which Inductor generates code; most others are library calls."""
    hift, n = make_hift(), torch.tensor([4, 2])

    def parts(f0: Tensor, n_frames: Tensor) -> Tensor:
        noise = hift.m_source.mixed_noise(n_frames, 480 * f0.shape[1])
        source, _ = hift.m_source(f0, phase_lines("interp", f0, n_frames), noise, n_frames)
        spectra = hift.spectral.stft(source, 480 * n_frames)
        return hift.spectral.istft(spectra[:, :9].exp(), spectra[:, 9:], 480 * n_frames)

    f0 = hift.f0(random_mel(2, 4), n)
    compiled = torch.compile(parts, fullgraph=True, dynamic=False)
    with torch.no_grad():
        assert_close(compiled(f0, n), parts(f0, n), 1e-5)
