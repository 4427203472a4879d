"""Vision encoder: equal to its formula, independent of padding and batch.

Tolerances: 1e-5 between two batchings, 1e-4 against float64.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.backend import TORCH
from models.layers.vpm import Vpm
from tests.models.compare import assert_close
from tests.models.layers import transformer_reference as slow

few = settings(max_examples=20)


@pytest.fixture(scope="session")
def vpm(tiny_model):
    return tiny_model.vpm


def picture(seed: int, rows: int, cols: int) -> Tensor:
    """[3, 14 rows, 14 cols] normalised pixels."""
    return torch.rand(3, 14 * rows, 14 * cols, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def cut(image: Tensor) -> Tensor:
    """Patches row by row, each (channel, y, x): [rows * cols, 588]."""
    _, height, width = image.shape
    corners = [(y, x) for y in range(0, height, 14) for x in range(0, width, 14)]
    return torch.stack([image[:, y : y + 14, x : x + 14].flatten() for y, x in corners])


def table_rows(seed: int, n: int) -> Tensor:
    return torch.randint(0, 70 * 70, (n,), generator=torch.Generator().manual_seed(seed))


def batch(parts: list[tuple[Tensor, Tensor]], length: int, filler: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of (patches, table rows) padded to `length` with `filler`."""
    patches = torch.full((len(parts), length, 588), filler)
    ids, mask = torch.zeros(len(parts), length, dtype=torch.int64), torch.zeros(len(parts), length, dtype=torch.bool)
    for row, (pixels, position_ids) in enumerate(parts):
        n = len(pixels)
        patches[row, :n], ids[row, :n], mask[row, :n] = pixels, position_ids, True
    return patches, ids, mask


def plain(vpm: Vpm, image: Tensor, ids: Tensor, n_heads: int) -> Tensor:
    """The encoder's formula: a convolution, position rows, pre-norm layers, a norm."""
    w = slow.weights_of(vpm)
    projected = torch.nn.functional.conv2d(
        image.double()[None],
        w("embeddings.patch_embedding.weight"),
        w("embeddings.patch_embedding.bias"),
        stride=14,
    )
    x = projected[0].flatten(1).T + w("embeddings.position_embedding.weight")[ids]
    for i in range(len(vpm.encoder.layers)):
        name = f"encoder.layers.{i}"
        x = x + slow.self_attention(slow.layer_norm(x, w, f"{name}.layer_norm1", 1e-6), w, f"{name}.self_attn", n_heads)
        inner = slow.linear(slow.layer_norm(x, w, f"{name}.layer_norm2", 1e-6), w, f"{name}.mlp.fc1")
        x = x + slow.linear(slow.gelu_tanh(inner), w, f"{name}.mlp.fc2")
    return slow.layer_norm(x, w, "post_layernorm", 1e-6)


@few
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 5), cols=st.integers(1, 5), padding=st.integers(0, 9))
def test_image_equals_float64_reference(tiny_model, vpm, seed, rows, cols, padding):
    image, ids = picture(seed, rows, cols), table_rows(seed, rows * cols)
    got = vpm(*batch([(cut(image), ids)], rows * cols + padding), TORCH)[0, : rows * cols]
    assert_close(got, plain(vpm, image, ids, tiny_model.config.vision_config.num_attention_heads), 1e-4)


@few
@given(
    seed=st.integers(0, 2**20),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    padding=st.integers(0, 20),
    filler=st.sampled_from([0.0, 1.0, -1e3, 1e6]),
)
def test_result_does_not_depend_on_padding_or_batch(vpm, seed, sizes, padding, filler):
    parts = [(cut(picture(seed + i, 1, n)), table_rows(seed + i, n)) for i, n in enumerate(sizes)]
    together = vpm(*batch(parts, max(sizes) + padding, filler), TORCH)
    for row, n in enumerate(sizes):
        alone = vpm(*batch([parts[row]], n), TORCH)[0]
        assert_close(together[row, :n], alone, 1e-5, f"slice {row}")


def test_nan_does_not_reach_other_slices(vpm):
    parts = [(cut(picture(i, 2, 3)), table_rows(i, 6)) for i in range(2)]
    clean = vpm(*batch(parts, 8), TORCH)
    dirty = vpm(*batch([parts[0], (parts[1][0] * float("nan"), parts[1][1])], 8), TORCH)
    assert dirty[1, :6].isnan().all(), "expected NaN in the slice that was fed NaN"
    assert_close(dirty[0, :6], clean[0, :6], 0)


def test_row_without_patches_is_finite(vpm):
    parts = [(cut(picture(0, 2, 3)), table_rows(0, 6)), (torch.zeros(0, 588), table_rows(0, 0))]
    assert vpm(*batch(parts, 8), TORCH).isfinite().all()


def test_drop_last_layer_leaves_out_one_layer(tiny_model, vpm):
    config = tiny_model.config.vision_config
    short = Vpm(config, drop_last_layer=True).requires_grad_(False)
    short.load_state_dict(vpm.state_dict(), strict=False)
    assert len(short.encoder.layers) == config.num_hidden_layers - 1
    image, ids = picture(3, 3, 2), table_rows(3, 6)
    got = short(*batch([(cut(image), ids)], 6), TORCH)[0]
    assert_close(got, plain(short, image, ids, config.num_attention_heads), 1e-4)
