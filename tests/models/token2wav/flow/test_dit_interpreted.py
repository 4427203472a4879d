"""The fused solve in Triton's interpreter against the plain one, at small sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoint.precision import Kind, Precision
from models.layers.quantized import QuantizedLinear
from models.token2wav.flow.block_table import FIRST_ROW
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_backend import FlowBackend, PlainFlow
from models.token2wav.flow.flow_state import ChunkSlots, FlowSizes, FlowState, SolveInputs
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import DiTConfig, EncoderConfig, FlowConfig, HiftConfig
from models.token2wav.stream.noise import noise_table
from models.token2wav.stream.regions import FlowContext, prepare_voice
from tests.models.compare import assert_close, assert_same

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are built for the GPU", allow_module_level=True)

from models.token2wav.flow import dit_fused, dit_kernels
from models.token2wav.flow.flow_fused import FusedFlow

N_STEPS, N_MELS, T = 2, 6, 4
N_SESSIONS = 2
SIZES = FlowSizes(n_sessions=N_SESSIONS, n_voices=1, max_steps=N_STEPS, max_chunk=3, max_prompt=20, voice_frames=20)
TOLERANCE = 2e-5


def make_flow(kind: Kind | None = None) -> Flow:
    """Three heads, and a width that is neither a power of two nor theirs together. kind: of all layers of the block."""
    config = FlowConfig(
        n_mels=N_MELS,
        speaker_dim=5,
        encoder=EncoderConfig(width=8, heads=2, inner=12, n_layers=1, n_up_layers=1),
        estimator=DiTConfig(width=80 if kind else 20, heads=3, head_dim=16, depth=1, mlp_ratio=1.2 if kind else 2.0),
    )
    hift = HiftConfig(n_mels=N_MELS, base_channels=8, f0_channels=4)
    flow = random_parts(config, hift, precision=Precision(flow=kind)).flow
    quantized = [layer for layer in flow.modules() if isinstance(layer, QuantizedLinear)]
    assert len(quantized) == (6 if kind else 0)
    for layer in quantized:
        layer.replace_weight(layer.weight)  # PyTorch's int8 kernel of a CPU would round the inputs too
    return flow


def make_state(backend: FlowBackend) -> FlowState:
    """Both sessions start after one voice's prompt, which `backend` prepares: a solve with a prompt mel, in place."""
    flow = backend.flow
    state, generator = FlowState(flow, SIZES), torch.Generator().manual_seed(5)
    speech_tokens = torch.randint(6561, (1, 10 + 3), generator=generator)
    mel, speaker = torch.randn(1, 20, N_MELS, generator=generator), torch.randn(1, 5, generator=generator)
    schedules = {N_STEPS: flow.schedule(N_STEPS)}
    voice, start, n_speech_tokens = torch.tensor([[state.scratch + 1], [0], [10 + 3]])
    context = FlowContext(backend, state, schedules, noise_table(N_MELS, 0))
    prepare_voice(context, voice, start, speech_tokens, n_speech_tokens, mel, speaker, N_STEPS)
    state.begin(torch.arange(N_SESSIONS), voice.expand(N_SESSIONS))
    return state


@pytest.mark.parametrize(
    ("most_rows", "is_ahead", "kind"),
    [(128, True, None), (0, False, None), (128, True, "int8"), (128, True, "fp8"), (0, False, "int8")],
    ids=["few", "many", "few-int8", "few-fp8", "many-int8"],
)
@torch.no_grad()
def test_fused_solve_equals_plain_solve(
    most_rows: int, is_ahead: bool, kind: Kind | None, monkeypatch: pytest.MonkeyPatch
):
    """Rows with all frames, with one frame and with none; cached keys of two tiles, of which the first is read ahead or
    not.
    """
    monkeypatch.setattr(dit_fused, "FEW_ROWS", most_rows)
    monkeypatch.setattr(dit_kernels, "attend_tiles", lambda *_, **__: dit_kernels.AttendTiles(16, 16, 4, 2, is_ahead))
    if not is_ahead:  # the voice's new rows are two tiles
        monkeypatch.setattr(dit_kernels, "NEW_ROWS", 16)
    monkeypatch.setattr(torch, "_addmm_activation", _product_with_gelu)
    flow = make_flow(kind)
    backends = PlainFlow(flow), FusedFlow(flow)
    states = [make_state(backend) for backend in backends]
    _same(*states, "of the voice")
    slots = torch.tensor([1, 0, states[0].scratch])
    others = torch.where(slots < N_SESSIONS, slots + N_SESSIONS, slots)
    schedule, noise, generator = flow.schedule(N_STEPS), noise_table(N_MELS, 0), torch.Generator().manual_seed(7)
    for number, counts in enumerate([[T, 1, 0], [2, T, 0]][: 2 if most_rows and kind is None else 1]):
        mu, n_frames = torch.randn(3, T, N_MELS, generator=generator), torch.tensor(counts)
        mels = []
        for state, backend in zip(states, backends, strict=True):
            state.copy_voice_facts(slots, others)
            inputs = SolveInputs(schedule, noise, mu, n_frames)
            mels.append(backend.solve(state, ChunkSlots(slots, 112, others), inputs))
        slots, others = others, slots
        for row, n in enumerate(counts):
            assert_close(mels[1][row, :n], mels[0][row, :n], TOLERANCE, f"mel of row {row} in call {number}")
        _same(*states, f"after call {number}")


@torch.no_grad()
def test_kernels_read_and_write_contiguous_pools_too():
    """The same bits as with the rows outermost in memory."""
    backend = FusedFlow(flow := make_flow())
    states = [make_state(backend) for _ in range(2)]
    states[1].dit_rows = [rows.contiguous() for rows in states[1].dit_rows]
    assert states[0].dit_rows[0].stride() != states[1].dit_rows[0].stride()
    slots = torch.arange(N_SESSIONS)
    mu = torch.randn(N_SESSIONS, T, N_MELS, generator=torch.Generator().manual_seed(7))
    inputs = SolveInputs(flow.schedule(N_STEPS), noise_table(N_MELS, 0), mu, torch.tensor([T, 2]))
    mels = [backend.solve(state, ChunkSlots(slots, 112, slots + N_SESSIONS), inputs) for state in states]
    for row, n in enumerate((T, 2)):
        assert_same(mels[1][row, :n], mels[0][row, :n], f"mel of row {row}")
    for k, (got, expected) in enumerate(zip(states[1].dit_rows, states[0].dit_rows, strict=True)):
        assert_same(got[..., FIRST_ROW:, :, :], expected[..., FIRST_ROW:, :, :], f"rows of step {k}")


def _same(expected: FlowState, got: FlowState, what: str) -> None:
    """Compare the slots of sessions and voices; the scratch slot is undefined."""
    keep = torch.arange(len(expected.prompt)) != expected.scratch
    for name in ("rows", "length", "start"):
        assert_same(getattr(got.dit_table, name)[keep], getattr(expected.dit_table, name)[keep], f"{name} {what}")
    seen = torch.cat(
        [view[:n] for view, n in zip(expected.dit_table.rows[keep], expected.dit_table.length[keep], strict=True)]
    )
    for k in range(N_STEPS):
        rows = [state.dit_rows[k][..., seen, :, :] for state in (got, expected)]
        assert_close(*rows, TOLERANCE, f"rows {what}")
        assert_close(got.dit_tails[k][keep], expected.dit_tails[k][keep], TOLERANCE, f"tails {what}")


def _product_with_gelu(bias: Tensor, rows: Tensor, weight: Tensor, *, use_gelu: bool) -> Tensor:
    """The operation of a GPU; on a CPU torch computes the exact GELU."""
    assert use_gelu
    return F.gelu(torch.addmm(bias, rows, weight), approximate="tanh")
