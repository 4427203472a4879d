"""The encoder's fused layers against the plain ones, over slots; in Triton's interpreter on a CPU."""

import pytest
import torch

from models.checkpoint.precision import Kind, Precision
from models.layers.quantized import QuantizedLinear
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.flow_state import REFERENCE_FLOW, ChunkSlots, ChunkTokens, FlowSizes, FlowState, encode
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import DiTConfig, EncoderConfig, FlowConfig, HiftConfig
from tests.models.compare import assert_close, assert_same

pytest.importorskip("triton")

from models.token2wav.flow import conformer_fused
from models.token2wav.flow.conformer_fused import FusedLayers

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
SIZES = FlowSizes(n_sessions=2, n_voices=1, max_steps=1, max_chunk=10, max_prompt=60, voice_frames=60)
CONFIG = FlowConfig(
    n_mels=6,
    speaker_dim=5,
    encoder=EncoderConfig(width=32, heads=2, inner=48, n_layers=2, n_up_layers=1),
    estimator=DiTConfig(width=8, heads=1, head_dim=8, depth=1, mlp_ratio=2.0),
)


@pytest.mark.parametrize(("kind", "most_rows"), [(None, 128), ("int8", 128), ("fp8", 0)], ids=["", "int8", "fp8-many"])
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_fused_layers_equal_plain_layers(
    device: str, kind: Kind | None, most_rows: int, monkeypatch: pytest.MonkeyPatch
):
    """Chunks of different length after a prompt that fills more than one tile of keys."""
    monkeypatch.setattr(conformer_fused, "MAX_ROWS", most_rows)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    hift = HiftConfig(n_mels=6, base_channels=8, f0_channels=4)
    flow = random_parts(CONFIG, hift, device=device, precision=Precision(flow=kind)).flow
    quantized = [layer for layer in flow.modules() if isinstance(layer, QuantizedLinear)]
    assert len(quantized) == (18 if kind else 0), "expected six for each layer of the encoder"
    for layer in quantized:
        layer.replace_weight(layer.weight)  # PyTorch's int8 kernel of a CPU would round the inputs too
    generator = torch.Generator().manual_seed(3)
    states = [FlowState(flow, SIZES, REFERENCE_FLOW) for _ in range(2)]
    voice = torch.tensor([states[0].scratch + 1], device=device)
    prompt = torch.randint(6561, (1, 33), generator=generator).to(device)
    for state in states:
        n = torch.tensor([60], device=device)
        state.place_voices(voice, torch.zeros_like(voice), n, torch.zeros(1, 6, device=device))
        none = torch.zeros(1, dtype=torch.bool, device=device)
        encode(flow, state, ChunkSlots(voice, 0, ring=60), ChunkTokens(prompt, torch.tensor([33], device=device), none))
        state.begin(torch.arange(2, device=device), voice.expand(2))
    slots, others = torch.tensor([1, 0], device=device), torch.tensor([3, 2], device=device)
    width = SIZES.max_prompt + HISTORY_FRAMES
    for number, (counts, last) in enumerate((([13, 5], [0, 0]), ([0, 10], [0, 1]))):
        speech_tokens = torch.randint(6561, (2, 13), generator=generator).to(device)
        n_speech_tokens, ends = torch.tensor(counts, device=device), torch.tensor(last, device=device).bool()
        chunk, tokens = ChunkSlots(slots, width, others), ChunkTokens(speech_tokens, n_speech_tokens, ends)
        expected, got = (
            encode(flow, state, chunk, tokens, run)
            for state, run in zip(states, (None, FusedLayers(flow.encoder)), strict=True)
        )
        slots, others = others, slots
        for row, (n, end) in enumerate(zip(counts, last, strict=True)):
            n_frames = 2 * (n if end else max(n - 3, 0))
            assert_close(got[row, :n_frames], expected[row, :n_frames], 2e-5, f"row {row} of call {number}")
        for name, pool in (("token_table", "token_rows"), ("mel_table", "mel_rows")):
            tables = [getattr(state, name) for state in states]
            assert_same(tables[1].rows[:4].cpu(), tables[0].rows[:4].cpu(), f"{name} after call {number}")
            seen = torch.cat([tables[0].rows[s, : int(tables[0].length[s])] for s in range(4)])
            rows = [getattr(state, pool)[..., seen, :, :] for state in states]
            assert_close(rows[1], rows[0], 2e-5, f"{pool} after call {number}")
    torch.backends.cuda.matmul.allow_tf32 = before
