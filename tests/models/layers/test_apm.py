"""Audio encoder on whole clips and its projection: formula, masks, padding, batch mates.

Tolerances: 1e-5 between two ways through the same float32 code, 1e-4 against float64.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.apm import project
from tests.models.compare import assert_close, assert_same
from tests.models.layers import transformer_reference as slow
from tests.models.layers import whisper_reference as slow_whisper

BINS, NAN = 80, float("nan")
few = settings(max_examples=15)


@pytest.fixture(scope="session")
def apm(tiny_model):
    return tiny_model.apm


def mel(seed: int, n: int) -> Tensor:
    return torch.randn(BINS, n, generator=torch.Generator().manual_seed(seed)) * 0.5


def encode(apm, clips: list[Tensor], bucket: int, chunk: int, n_keys: list[int] | None = None) -> Tensor:
    """Encode clips [80, n] in one batch, padded with NaN."""
    batch = torch.full((len(clips), BINS, bucket), NAN)
    for row, clip in enumerate(clips):
        batch[row, :, : clip.shape[1]] = clip
    n_frames = torch.tensor([clip.shape[1] for clip in clips])
    keys = (n_frames + 1) // 2 if n_keys is None else torch.tensor(n_keys)
    return apm.encode(batch, n_frames, keys, chunk)


def plain(tiny_model, clip: Tensor, chunk: int, n_keys: int) -> Tensor:
    rows = slow_whisper.convolve(tiny_model.apm, clip)
    i = torch.arange(len(rows))
    visible = (i < n_keys).expand(len(rows), -1)
    if chunk:
        visible = visible & (i // chunk <= (i // chunk)[:, None])
    return slow_whisper.encode(tiny_model.apm, rows, visible, tiny_model.config.audio_config.encoder_attention_heads)


@few
@given(
    seed=st.integers(0, 2**20),
    n_frames=st.integers(1, 160),
    padding=st.integers(0, 40),
    chunk=st.sampled_from([0, 20, 50]),
    data=st.data(),
)
def test_clip_equals_float64_reference(tiny_model, apm, seed, n_frames, padding, chunk, data):
    """Also if some of the clip's own rows are not visible."""
    n_rows = (n_frames + 1) // 2
    n_keys = data.draw(st.just(n_rows) | st.integers(1, n_rows))
    clip = mel(seed, n_frames)
    got = encode(apm, [clip], n_frames + padding, chunk, [n_keys])
    assert got.shape[1] == (n_frames + padding + 1) // 2
    assert_close(got[0, :n_keys], plain(tiny_model, clip, chunk, n_keys)[:n_keys], 1e-4)


@few
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 160), min_size=1, max_size=3),
    padding=st.integers(0, 60),
    chunk=st.sampled_from([0, 50]),
)
def test_result_does_not_depend_on_bucket_or_batch(apm, seed, lengths, padding, chunk):
    clips = [mel(seed + i, n) for i, n in enumerate(lengths)]
    together = encode(apm, clips, max(lengths) + padding, chunk)
    for row, clip in enumerate(clips):
        alone = encode(apm, [clip], clip.shape[1], chunk)[0]
        assert_close(together[row, : len(alone)], alone, 1e-5, f"clip {row}")


def test_counted_zero_frames_change_the_result(tiny_model, apm):
    """30 zero frames are part of the clip: the convolutions read them and, with keys for them, attention too."""
    clip = torch.cat((mel(0, 70), torch.zeros(BINS, 30)), dim=1)
    for n_keys in (35, 50):
        got = encode(apm, [clip], 120, 50, [n_keys])[0, :35]
        assert_close(got, plain(tiny_model, clip, 50, n_keys)[:35], 1e-4, f"{n_keys} keys")
    short = encode(apm, [clip[:, :70]], 120, 50)[0, :35]
    assert (short - got).abs().max() > 1e-3, "expected counted silence to change the rows"


def test_chunk_does_not_attend_to_the_next_chunk(apm):
    clip, other = mel(0, 200), mel(0, 200)
    other[:, 104:] = mel(1, 96)
    got, expected = (encode(apm, [frames], 200, 50)[0] for frames in (other, clip))
    assert_close(got[:50], expected[:50], 0)
    assert (got[50:] - expected[50:]).abs().max() > 1e-3, "expected the second chunk to differ"


def test_longest_clip_fills_the_position_table(tiny_model, apm):
    n = tiny_model.config.audio_config.max_source_positions
    got = encode(apm, [mel(0, 2 * n)], 2 * n, 50)
    assert got.shape[:2] == (1, n)
    assert_close(got[0], plain(tiny_model, mel(0, 2 * n), 50, n), 1e-4)


def test_nan_does_not_reach_other_clips(apm):
    clips = [mel(0, 60), mel(1, 60)]
    clean = encode(apm, clips, 64, 50)
    dirty = encode(apm, [clips[0], clips[1] * NAN], 64, 50)
    assert dirty[1].isnan().any(), "expected NaN in the clip that was fed NaN"
    assert_same(dirty[0], clean[0])


def test_clip_without_frames_is_finite(apm):
    assert encode(apm, [mel(0, 0), mel(0, 9)], 10, 50).isfinite().all()


@pytest.mark.parametrize("n_rows, pool", [(50, 5), (13, 5), (4, 5), (7, 1)])
def test_projection_precedes_pooling_and_drops_a_short_tail(tiny_model, n_rows, pool):
    projection = tiny_model.audio_projection_layer
    hidden = torch.randn(2, n_rows, 64, generator=torch.Generator().manual_seed(0))
    w = slow.weights_of(projection)
    got = project(projection, hidden, pool)
    assert got.shape[:2] == (2, n_rows // pool)
    for b in range(2):
        rows = slow.linear(slow.linear(hidden[b].double(), w, "linear1").clamp(min=0), w, "linear2")
        for i in range(n_rows // pool):
            assert_close(got[b, i], sum(rows[i * pool : (i + 1) * pool]) / pool, 1e-4, f"row {i}")
