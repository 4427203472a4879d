"""Speech tokenizer against its formula, and its independence of padding and batch.

Tolerances: 1e-4 against float64, 1e-5 between two batches. A digit closer than that to a boundary between two levels
may be rounded either way, so tokens are compared where none of their digits is.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import CheckpointError
from models.layers.weights import on_meta
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer, config_of
from models.token2wav.settings import S3TokenizerConfig
from tests.models.compare import assert_close
from tests.models.layers import transformer_reference as slow

# An epsilon as large as the variance of the rows, so that a block with another epsilon fails the test.
CONFIG = S3TokenizerConfig(n_mels=9, width=128, n_layers=2, first_norm_eps=0.5)
few = settings(max_examples=8)


def build(config: S3TokenizerConfig, seed: int = 0) -> S3Tokenizer:
    torch.manual_seed(seed)
    model = S3Tokenizer(config).requires_grad_(False).eval()
    for name, tensor in model.state_dict().items():
        if name.endswith(("ln.weight", "ln.bias")):
            tensor += 0.3 * torch.randn_like(tensor)
        elif name.endswith("project_down.weight"):
            tensor *= 3  # digits of all three levels
    model.encoder.derive("cpu", torch.float32)
    return model


@pytest.fixture(scope="module")
def model() -> S3Tokenizer:
    return build(CONFIG)


def sound(n: int, seed: int = 0) -> Tensor:
    """[n_mels, n] log-mel."""
    return torch.randn(CONFIG.n_mels, n, generator=torch.Generator().manual_seed(seed))


def batch(sounds: list[Tensor], length: int, filler: float) -> tuple[Tensor, Tensor]:
    rows = torch.full((len(sounds), CONFIG.n_mels, length), filler)
    for row, mel in enumerate(sounds):
        rows[row, :, : mel.shape[1]] = mel
    return rows, torch.tensor([mel.shape[1] for mel in sounds])


def count(n_frames: int) -> int:
    return (n_frames + 3) // 4


def plain(model: S3Tokenizer, mel: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden rows [R, width] and digits before rounding [R, 8] by the formula, in float64."""
    w, x = slow.weights_of(model), mel.double()[None]
    for name in ("encoder.conv1", "encoder.conv2"):
        x = slow.gelu(F.conv1d(x, w(f"{name}.weight"), w(f"{name}.bias"), stride=2, padding=1))
    x = x[0].T
    positions = torch.arange(len(x))
    for i in range(CONFIG.n_layers):
        name = f"encoder.blocks.{i}"
        h = slow.layer_norm(x, w, f"{name}.attn_ln", CONFIG.first_norm_eps)
        q, k, v = (slow.linear(h, w, f"{name}.attn.{part}") for part in ("query", "key", "value"))
        heads = [
            slow.attention(slow.rope(a, positions, 10_000.0), slow.rope(b, positions, 10_000.0), c)
            for a, b, c in zip(*(slow.heads_of(part, 64) for part in (q, k, v)), strict=True)
        ]
        around, kernel = F.pad(v, (0, 0, 15, 15)), w(f"{name}.attn.fsmn_block.weight")[:, 0]
        memory = torch.stack([(around[t : t + 31] * kernel.T).sum(0) for t in range(len(v))]) + v
        x = x + slow.linear(torch.cat(heads, dim=1), w, f"{name}.attn.out") + memory
        inner = slow.gelu(slow.linear(slow.layer_norm(x, w, f"{name}.mlp_ln", 1e-5), w, f"{name}.mlp.0"))
        x = x + slow.linear(inner, w, f"{name}.mlp.2")
    return x, slow.linear(x, w, "quantizer._codebook.project_down").tanh() * 0.999


def assert_tokens(speech_tokens: Tensor, digits: Tensor) -> None:
    """Compare `speech_tokens` [R] with digits before rounding [R, 8], where those are not close to a boundary."""
    clear = ((digits.abs() - 0.5).abs() > 1e-3).all(1)
    assert clear.float().mean() > 0.7, f"expected most tokens far from a boundary, got {clear}"
    level = (digits > 0.5).long() - (digits < -0.5).long() + 1
    expected = (level * torch.tensor([1, 3, 9, 27, 81, 243, 729, 2187])).sum(1)
    assert speech_tokens[clear].tolist() == expected[clear].tolist()


@few
@given(n=st.integers(1, 160), seed=st.integers(0, 2**20))
def test_tokens_equal_the_plain_reference(model, n, seed):
    mel = sound(n, seed)
    arguments = mel[None], torch.tensor([n])
    hidden, digits = plain(model, mel)
    assert_close(model.encoder(*arguments)[0][0], hidden, 1e-4)
    speech_tokens, n_speech_tokens = model(*arguments)
    assert (
        speech_tokens.shape == (1, count(n))
        and speech_tokens.dtype == torch.int64
        and n_speech_tokens.tolist() == [count(n)]
    )
    assert_tokens(speech_tokens[0], digits)


@few
@given(
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=3),
    padding=st.integers(0, 90),
    filler=st.sampled_from([0.0, 1e3, float("nan")]),
)
def test_tokens_do_not_depend_on_padding_and_batch(model, lengths, padding, filler):
    sounds = [sound(n, n) for n in lengths]
    arguments = batch(sounds, max(lengths) + padding, filler)
    hidden, _ = model.encoder(*arguments)
    speech_tokens, n_speech_tokens = model(*arguments)
    assert n_speech_tokens.tolist() == [count(n) for n in lengths]
    for row, (mel, n) in enumerate(zip(sounds, n_speech_tokens.tolist(), strict=True)):
        alone, _ = model.encoder(mel[None], torch.tensor([mel.shape[1]]))
        assert_close(hidden[row, :n], alone[0], 1e-5, f"sound {row}")
        assert_tokens(speech_tokens[row, :n], model.codebook.project_down(alone[0]).tanh() * 0.999)
        assert speech_tokens[row, n:].eq(0).all()


def test_a_row_without_frames_has_no_tokens(model):
    speech_tokens, n_speech_tokens = model(*batch([sound(40), sound(0)], 48, float("nan")))
    assert n_speech_tokens.tolist() == [10, 0] and speech_tokens[1].eq(0).all()


@pytest.mark.parametrize("push, token", [(-100.0, 0), (0.0, 3280), (100.0, 6560)])
def test_tokens_cover_the_whole_range(push, token):
    model = build(CONFIG)
    model.codebook.project_down.weight.zero_()
    model.codebook.project_down.bias.fill_(push)
    speech_tokens, _ = model(sound(8)[None], torch.tensor([8]))
    assert speech_tokens.tolist() == [[token, token]]


def test_reads_sizes_from_the_weights(model):
    config = config_of(model.state_dict())
    assert config == CONFIG.model_copy(update={"first_norm_eps": 1e-5})


@pytest.mark.parametrize(
    "tensors, got",
    [
        ({}, r"\[\] and 0 blocks"),
        ({"encoder.conv1.weight": torch.zeros(100, 9, 3)}, r"\[100, 9, 3\] and 0 blocks"),
        ({"encoder.conv1.weight": torch.zeros(64, 9, 3)}, r"\[64, 9, 3\] and 0 blocks"),
    ],
)
def test_refuses_weights_of_another_network(tensors, got):
    with pytest.raises(CheckpointError, match=f"speech tokenizer: expected encoder.conv1.weight .* got {got}"):
        config_of(tensors)


def test_released_names_and_shapes():
    with on_meta():
        tensors = S3Tokenizer(S3TokenizerConfig()).state_dict()
    assert len(tensors) == 102
    assert sum(tensor.numel() for tensor in tensors.values()) == 123_714_568
    assert tensors["encoder.blocks.5.attn.fsmn_block.weight"].shape == (1280, 1, 31)
    assert tensors["quantizer._codebook.project_down.weight"].shape == (8, 1280)
    assert "encoder.blocks.0.attn.key.bias" not in tensors


def test_traces_as_one_graph(model):
    traced = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    arguments = batch([sound(61), sound(90)], 100, float("nan"))
    for got, expected in zip(traced(*arguments), model(*arguments), strict=True):
        assert torch.equal(got, expected), f"expected {expected}, got {got}"
