"""`OmniModel`: scaling of pixels, encoders with their projections, parts that the config switches off."""

import pytest
import torch

from models.inputs.audio import UNIT_COLUMNS
from models.layers.backend import TORCH
from models.load import build_on_meta
from tests.models.compare import assert_close, assert_same
from tests.parity.build import slot_cache


def test_pixels_are_scaled_to_minus_one_to_one(tiny_model):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (2, 6, 588), dtype=torch.uint8, generator=generator)
    pixels[0, 0, :2] = torch.tensor([0, 255])
    ids = torch.randint(0, 4900, (2, 6), generator=generator)
    coords = torch.stack((torch.arange(6) // 3, torch.arange(6) % 3), dim=-1).expand(2, -1, -1)
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    patches = (pixels.double() / 127.5 - 1).float()
    expected = tiny_model.resampler(tiny_model.vpm(patches, ids, mask, TORCH), coords, mask)
    got = tiny_model.encode_images(pixels, ids, coords, mask)
    assert got.shape == (2, tiny_model.config.query_num, tiny_model.config.hidden_size)
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize("end, n_rows", [(104, 10), (102, 10), (62, 6), (60, 5), (9, 0), (0, 0)])
def test_unit_is_encoded_to_at_most_ten_rows(tiny_model, end, n_rows):
    mel = torch.randn(1, 80, UNIT_COLUMNS, generator=torch.Generator().manual_seed(0))
    slots, first = torch.tensor([1]), torch.tensor([min(2, end)])
    caches = [slot_cache(tiny_model, "apm", n_slots=2) for _ in range(2)]
    rows, n_valid = tiny_model.encode_unit(mel, first, torch.tensor([end]), caches[0], slots)
    hidden, _ = tiny_model.apm.stream(mel, first, torch.tensor([end]), caches[1], slots, TORCH)
    assert n_valid.tolist() == [n_rows]
    assert rows.shape == (1, 10, tiny_model.config.hidden_size)
    for i in range(n_rows):
        expected = tiny_model.audio_projection_layer(hidden[0, 5 * i : 5 * i + 5]).mean(0)
        assert_close(rows[0, i], expected, 1e-5, f"row {i}")


def test_clips_are_encoded_to_ten_rows_per_second(tiny_model):
    mel = torch.randn(2, 80, 200, generator=torch.Generator().manual_seed(0))
    n_frames, n_keys = torch.tensor([200, 130]), torch.tensor([100, 65])
    rows = tiny_model.encode_clips(mel, n_frames, n_keys, chunk=50)
    hidden = tiny_model.apm.encode(mel, n_frames, n_keys, chunk=50)
    assert rows.shape == (2, 20, tiny_model.config.hidden_size)
    expected = tiny_model.audio_projection_layer(hidden).unflatten(1, (20, 5)).mean(2)
    assert_close(rows, expected, 1e-5)


def test_float64_mel_is_converted_to_the_model_dtype(tiny_model):
    mel = torch.randn(1, 80, 100, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([100]), torch.tensor([50])
    assert_same(
        tiny_model.encode_clips(mel.double(), *counts, chunk=50), tiny_model.encode_clips(mel, *counts, chunk=50)
    )


@pytest.mark.parametrize(
    "switch, absent",
    [
        ("init_vision", {"vpm", "resampler"}),
        ("init_audio", {"apm", "audio_projection_layer"}),
        ("init_tts", {"tts"}),
    ],
)
def test_parts_switched_off_are_absent(tiny_model, switch, absent):
    parts = {name for name, _ in tiny_model.named_children()}
    got = {name for name, _ in build_on_meta(tiny_model.config.model_copy(update={switch: False})).named_children()}
    assert parts - got == absent
    assert got <= parts
