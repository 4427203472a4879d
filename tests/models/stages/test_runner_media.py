"""Images and clips to rows: results do not depend on groups, pieces or padding, except with batch padding."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from models.errors import ShapeError
from models.inputs.audio_sizes import CLIP_SAMPLES, SAMPLE_RATE
from models.inputs.image import ImagePatches, patchify
from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Runner
from tests.models.stages.slot_copies import assert_same, copy_state

TOLERANCE = 1e-5


def make_runner(model: OmniModel, **shapes: tuple[int, ...]) -> Runner:
    sets = TokenSets.build([TokenSet()], model.config.vocab_size)
    return Runner(model, sets, n_slots=1, llm_len=16, tts_len=16, shapes=Shapes(**shapes))


def picture(cols: int, rows: int, seed: int = 0) -> ImagePatches:
    pixels = np.random.default_rng(seed).integers(0, 256, (14 * rows, 14 * cols, 3), np.uint8)
    return patchify(Image.fromarray(pixels))


def sound(seconds: float, seed: int = 0) -> Tensor:
    n = round(seconds * SAMPLE_RATE)
    return 0.1 * torch.randn(n, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)


def difference(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape, f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    return float((got - expected).abs().max())


def test_more_slices_than_the_largest_batch(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model, slices=(1, 2), patches=(16, 64))
    pictures = [picture(*size, seed) for seed, size in enumerate([(4, 3), (8, 8), (1, 2), (5, 4), (3, 5)])]
    before = copy_state(runner.state)
    got = runner.encode_images(pictures)
    assert_same(runner.state, before)
    assert len(got) == 5
    alone = make_runner(tiny_model, slices=(1,), patches=(64,))
    for number, (rows, own) in enumerate(zip(got, pictures, strict=True)):
        (expected,) = alone.encode_images([own])
        assert expected.shape == (64, 128)
        assert difference(rows, expected) <= TOLERANCE, f"picture {number}: {difference(rows, expected)}"
    assert difference(got[0], got[1]) > 1e-3, "expected different rows for different images"


def test_no_input_gives_no_rows(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model)
    assert runner.encode_images([]) == []
    assert runner.encode_clips([], chunk_length=1.0) == []


def test_refuses_slice_larger_than_the_largest_bucket(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model, patches=(16, 64))
    with pytest.raises(ShapeError, match=r"vision: patches: expected .+, got 72"):
        runner.encode_images([picture(2, 2), picture(9, 8)])


def test_long_clips_are_encoded_in_pieces(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model, batch=(1, 2))
    long, short = sound(31.3), sound(0.7, seed=1)
    before = copy_state(runner.state)
    rows = runner.encode_clips([short, long], chunk_length=1.0)
    assert_same(runner.state, before)
    assert [len(part) for part in rows] == [7, 313]
    (first,) = runner.encode_clips([long[:CLIP_SAMPLES]], chunk_length=1.0)
    (second,) = runner.encode_clips([long[CLIP_SAMPLES:]], chunk_length=1.0)
    assert difference(rows[1], torch.cat((first, second))) <= TOLERANCE


def test_clips_do_not_depend_on_each_other(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model, batch=(1, 2, 4), clip_frames=(100, 150, 300))
    clips = [sound(seconds, seed) for seed, seconds in enumerate((0.5, 2.9, 1.09, 0.2, 0.081, 1.0))]
    together = runner.encode_clips(clips, chunk_length=1.0)
    assert [len(part) for part in together] == [5, 29, 11, 2, 1, 10]
    for number, clip in enumerate(clips):
        (alone,) = runner.encode_clips([clip], chunk_length=1.0)
        assert difference(together[number], alone) <= TOLERANCE, f"clip {number}: {difference(together[number], alone)}"


def test_batch_padding_changes_shorter_clips(tiny_model: OmniModel) -> None:
    clips = [sound(0.53), sound(2.9, seed=1), sound(1.6, seed=2)]
    runner = make_runner(tiny_model, batch=(1, 2, 4))
    padded = runner.encode_clips(clips, chunk_length=1.0, batch_padding=True)
    alone = runner.encode_clips(clips, chunk_length=1.0)
    assert [len(part) for part in padded] == [5, 29, 16]
    assert difference(padded[1], alone[1]) <= TOLERANCE, "expected the longest clip unchanged"
    for number in (0, 2):
        assert difference(padded[number], alone[number]) > 1e-4, f"expected clip {number} to attend to its padding"
    # Computing clips in groups of one changes nothing.
    grouped = make_runner(tiny_model, batch=(1,)).encode_clips(clips, chunk_length=1.0, batch_padding=True)
    for number, rows in enumerate(grouped):
        assert difference(rows, padded[number]) <= TOLERANCE, f"clip {number} in a group of its own"
    (single,) = runner.encode_clips(clips[:1], chunk_length=1.0, batch_padding=True)
    assert difference(single, alone[0]) <= TOLERANCE


def test_batch_padding_equals_a_padded_call(tiny_model: OmniModel) -> None:
    """Zeros up to the longest clip's frames; as many encoder rows are valid as there are mel frames."""
    runner = make_runner(tiny_model, batch=(2,))
    clips = [sound(0.3), sound(1.7, seed=1)]
    got = runner.encode_clips(clips, chunk_length=0, batch_padding=True)
    mel = torch.zeros(1, 80, 170)
    mel[:, :, :30] = runner.log_mel.log_mel(clips[0][None], torch.tensor([len(clips[0])]))
    expected = tiny_model.encode_clips(mel, torch.tensor([170]), torch.tensor([30]), 0)
    assert difference(got[0], expected[0, :3]) <= TOLERANCE


def test_rows_look_ahead_to_the_end_of_their_chunk(tiny_model: OmniModel) -> None:
    runner = make_runner(tiny_model)
    wave, other = sound(3.0), sound(3.0)
    # The loudest bin sets the scale of the log-mel; it is in the first second.
    wave[100:110] = other[100:110] = 1.0
    other[-2 * SAMPLE_RATE // 5 :] *= -0.5
    for chunk_length, n_same in ((1.0, 20), (2.0, 20), (0.5, 25), (0.0, 0), (-1.0, 0)):
        rows, changed = (runner.encode_clips([w], chunk_length=chunk_length)[0] for w in (wave, other))
        same = [n for n in range(30) if difference(rows[n], changed[n]) <= TOLERANCE]
        assert same == list(range(n_same)), f"chunks of {chunk_length} s: expected {n_same} equal rows, got {same}"
