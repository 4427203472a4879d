"""Speaker encoder against its formula with unfolded batch norms, and its independence of padding and batch.

Tolerance: 2e-6, against float64 and between two batches. Values are about 1, and a segment shifted by a few frames
changes them by 1e-5.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import CheckpointError
from models.layers.weights import on_meta
from models.token2wav.prompt.campplus import CampPlus, config_of, conv_order, fold_batch_norms
from models.token2wav.settings import CampPlusConfig
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.prompt import campplus_reference as slow

CONFIG = CampPlusConfig(n_mels=16, embedding=6, growth=4, bottleneck=3, channels=10, front_channels=3)
TOLERANCE = 2e-6
few = settings(max_examples=8)


def build(folded: dict[str, Tensor]) -> CampPlus:
    with on_meta():
        model = CampPlus(config_of(folded))
    model.load_state_dict(folded, assign=True)
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="module")
def trained() -> dict[str, Tensor]:
    return slow.random_tensors(CONFIG, seed=1)


@pytest.fixture(scope="module")
def model(trained) -> CampPlus:
    return build(fold_batch_norms(trained))


def sound(n: int, seed: int = 0) -> Tensor:
    """[n, n_mels] energies of changing level, so that segments differ."""
    generator = torch.Generator().manual_seed(seed)
    wander = torch.sin(torch.arange(n) / 40.0)[:, None]
    return torch.randn(n, CONFIG.n_mels, generator=generator) + 2 * wander


def batch(sounds: list[Tensor], length: int, filler: float) -> tuple[Tensor, Tensor]:
    rows = torch.full((len(sounds), length, CONFIG.n_mels), filler)
    for row, energies in enumerate(sounds):
        rows[row, : len(energies)] = energies
    return rows, torch.tensor([len(energies) for energies in sounds])


# 200 frames fill one segment exactly, 199 test the rounding up, 202 start another segment, 620 fill three.
@pytest.mark.parametrize("n", [3, 50, 199, 200, 202, 455, 620])
def test_vector_equals_the_plain_reference(trained, model, n):
    energies = sound(n, n)
    assert_close(model(energies[None])[0], slow.vector(trained, energies), TOLERANCE)


@few
@given(
    lengths=st.lists(st.integers(3, 300), min_size=1, max_size=3),
    padding=st.integers(0, 250),
    filler=st.sampled_from([0.0, 1e4, float("nan")]),
)
def test_vector_does_not_depend_on_padding_and_batch(model, lengths, padding, filler):
    sounds = [sound(n, n) for n in lengths]
    together = model(*batch(sounds, max(lengths) + padding, filler))
    for row, energies in enumerate(sounds):
        assert_close(together[row], model(energies[None])[0], TOLERANCE, f"sound {row}")


def test_rows_too_short_for_a_deviation_are_finite(model):
    got = model(*batch([sound(0), sound(1), sound(2), sound(30)], 40, float("nan")))
    assert got.isfinite().all(), f"expected finite vectors, got {got}"


def test_front_end_is_zero_after_the_end_of_a_row(model):
    energies, n_frames = batch([sound(20)], 30, 5.0)
    got = model.head(energies, torch.arange(30) < n_frames[:, None, None])
    assert got.shape == (1, CONFIG.front_channels * CONFIG.n_mels // 8, 30)
    assert got[..., 20:].eq(0).all() and got[..., :20].ne(0).any()


def test_folding_twice_changes_nothing(trained):
    once = fold_batch_norms(trained)
    twice = fold_batch_norms(once)
    assert list(once) == list(twice)
    for name, tensor in once.items():
        assert_same(twice[name], tensor, name)


def test_a_partly_folded_file_gives_the_same_tensors(trained):
    """An exporter folds the norms directly after a convolution, except the last one."""
    folded = fold_batch_norms(trained)
    kept = ("nonlinear1.batchnorm", "transit1", "transit2", "transit3.nonlinear", "dense", "cam_layer")
    half = {name: tensor for name, tensor in trained.items() if any(part in name for part in kept)}
    half |= {name: tensor for name, tensor in folded.items() if not any(part in name for part in kept)}
    assert len(half) < len(trained) and any("running_mean" in name for name in half)
    got = fold_batch_norms(half)
    assert got.keys() == folded.keys()
    for name, tensor in folded.items():
        assert_same(got[name], tensor, name)


def test_a_bias_before_a_norm_is_scaled_with_it():
    tensors = {
        "xvector.dense.linear.weight": torch.tensor([[[3.0]]]),
        "xvector.dense.linear.bias": torch.tensor([1.0]),
        "xvector.dense.nonlinear.batchnorm.running_mean": torch.tensor([0.5]),
        "xvector.dense.nonlinear.batchnorm.running_var": torch.tensor([0.25 - 1e-5]),
    }
    got = fold_batch_norms(tensors)
    assert got.keys() == {"xvector.dense.linear.weight", "xvector.dense.linear.bias"}
    assert_close(got["xvector.dense.linear.weight"], torch.tensor([[[6.0]]]), 1e-6)
    assert_close(got["xvector.dense.linear.bias"], torch.tensor([1.0]), 1e-6)


def test_refuses_a_norm_without_variance(trained):
    broken = {name: tensor for name, tensor in trained.items() if name != "head.bn2.running_var"}
    with pytest.raises(CheckpointError, match=r"head\.bn2: expected running_mean and running_var, got no running_var"):
        fold_batch_norms(broken)


def test_released_size_has_the_released_tensors():
    released = slow.random_tensors(CampPlusConfig(), seed=0)
    folded = fold_batch_norms(released)
    assert len(released) == 937, f"expected 937 tensors, got {len(released)}"
    assert config_of(folded) == CampPlusConfig()
    build(folded)


def test_reads_sizes_from_the_weights(trained):
    assert config_of(fold_batch_norms(trained)) == CONFIG


@pytest.mark.parametrize(
    "change",
    [
        {"xvector.dense.linear.weight": None},
        {"head.conv1.weight": torch.zeros(())},
        {"head.conv1.weight": torch.zeros(0, 1, 3, 3)},
        {"xvector.tdnn.linear.weight": torch.zeros(10, 7, 5)},
    ],
)
def test_refuses_weights_of_another_network(trained, change):
    tensors = {name: t for name, t in (fold_batch_norms(trained) | change).items() if t is not None}
    with pytest.raises(CheckpointError, match=r"speaker encoder: expected weights of head\.conv1"):
        config_of(tensors)


def test_convolutions_run_in_the_order_of_their_names(model):
    ran: list[str] = []
    names = {module: name for name, module in model.named_modules()}
    hooks = [
        module.register_forward_hook(lambda module, *_: ran.append(names[module]))
        for module in names
        if isinstance(module, torch.nn.modules.conv._ConvNd)
    ]
    model(sound(10)[None])
    for hook in hooks:
        hook.remove()
    assert len(ran) == 225 and ran == conv_order()
