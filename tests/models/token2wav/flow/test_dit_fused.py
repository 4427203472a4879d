"""The fused solve against the plain one: mel, cached rows, tails and tables, for chunks of any length in one batch."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.checkpoint.precision import Kind, Precision
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_backend import FlowBackend, PlainFlow
from models.token2wav.flow.flow_state import REFERENCE_FLOW, ChunkSlots, FlowRules, FlowSizes, FlowState, SolveInputs
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import DiTConfig, EncoderConfig, FlowConfig, HiftConfig
from models.token2wav.stream.noise import noise_table
from models.token2wav.stream.regions import FlowContext, prepare_voice
from tests.models.compare import assert_same

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

N_STEPS = 3
N_SESSIONS = 5
SIZES = FlowSizes(n_sessions=N_SESSIONS, n_voices=2, max_steps=N_STEPS, max_prompt=120, voice_frames=180)
PROMPTS = (30, 60)  # tokens: less and more mel than the history
HIFT = HiftConfig(n_mels=20, base_channels=8, f0_channels=4)


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def make_flow(head_dim: int, dtype: torch.dtype, kind: Kind | None = None) -> Flow:
    """Three heads, and a width that is neither a power of two nor the heads' total."""
    estimator = DiTConfig(width=80, heads=3, head_dim=head_dim, depth=3, mlp_ratio=2.0)
    encoder = EncoderConfig(width=32, heads=2, inner=48, n_layers=1, n_up_layers=1)
    config = FlowConfig(n_mels=20, speaker_dim=12, encoder=encoder, estimator=estimator)
    return random_parts(config, HIFT, device="cuda", dtype=dtype, precision=Precision(flow=kind)).flow


def make_state(backend: FlowBackend, rules: FlowRules) -> FlowState:
    """Two prepared voices; sessions 0 and 2 with the first, sessions 1, 3 and 4 with the second."""
    flow = backend.flow
    state, generator = FlowState(flow, SIZES, rules), torch.Generator("cuda").manual_seed(5)
    state.grow_voices(SIZES.voice_frames)
    noise, schedules, start = noise_table(20, 0).cuda(), {N_STEPS: flow.schedule(N_STEPS)}, 0
    for number, n in enumerate(PROMPTS):
        slot = torch.tensor([state.scratch + 1 + number], device="cuda")
        speech_tokens = torch.randint(6561, (1, n + 3), device="cuda", generator=generator)
        mel = torch.randn(1, 2 * n, 20, device="cuda", generator=generator)
        speaker = torch.randn(1, 12, device="cuda", generator=generator)
        counts = torch.tensor([start], device="cuda"), speech_tokens, torch.tensor([n + 3], device="cuda")
        prepare_voice(FlowContext(backend, state, schedules, noise), slot, *counts, mel, speaker, N_STEPS)
        start += 2 * n
    voices = torch.tensor([0, 1, 0, 1, 1], device="cuda") + state.scratch + 1
    state.begin(torch.arange(N_SESSIONS, device="cuda"), voices)
    return state


def lengths(T: int) -> list[list[int]]:
    """Frames of each row in each call; the sixth row is padding."""
    return [[T, T, 2, 1, 0, 0], [T, 17, T, 2, 1, 0], [1, 50, 0, T, 33, 0], [T, T, T, T, T, 0], [2, 1, T, 0, 50, 0]]


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def check(got: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    if not expected.numel():
        return
    if dtype == torch.float32:
        off = (got - expected).abs().max().item()
        assert off <= 1e-4, f"{what}: expected within 1e-4, got {off:.3g}"
    else:
        off = relative(got, expected)
        assert off <= 3e-2, f"{what}: expected within 3 % in norm, got {off:.3g}"


@pytest.mark.parametrize("rules", [FlowRules(), REFERENCE_FLOW], ids=["windowed", "reference"])
@pytest.mark.parametrize("T", [50, 56])
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_fused_solve_equals_plain_solve(dtype: torch.dtype, head_dim: int, T: int, rules: FlowRules):
    check_calls(make_flow(head_dim, dtype), rules, [3, 0, 4, 1, 2, 2 * N_SESSIONS], T, lengths(T))


@pytest.mark.parametrize("slots", [[3], [0, 4], [1, 2 * N_SESSIONS, 3]], ids=len)
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_few_rows_use_kernels_only(dtype: torch.dtype, head_dim: int, slots: list[int]):
    counts = [[20, 0, 20], [1, 0, 13], [2, 0, 20], [20, 0, 1]]
    check_calls(make_flow(head_dim, dtype), FlowRules(), slots, 20, [row[: len(slots)] for row in counts])


@pytest.mark.parametrize("slots", [[3], [0, 4, 1], [3, 0, 4, 1, 2, 2 * N_SESSIONS]], ids=len)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@torch.no_grad()
def test_quantised_layers(kind: Kind, slots: list[int]):
    """With the kernels for few rows, and with products of 300 and 600 rows."""
    counts = [row[: len(slots)] for row in lengths(50)]
    check_calls(make_flow(64, torch.bfloat16, kind), FlowRules(), slots, 50, counts)


def check_calls(flow: Flow, rules: FlowRules, slots: list[int], T: int, lengths: list[list[int]]) -> None:
    """Both backends in calls with these frames for each of `slots`, sessions or scratch."""
    from models.token2wav.flow.flow_fused import FusedFlow

    dtype, plain, fused, n = flow.dtype, PlainFlow(flow), FusedFlow(flow), len(slots)
    plain_state, fused_state = (make_state(plain, rules) for _ in range(2))
    schedule, noise = flow.schedule(N_STEPS), noise_table(20, 0).cuda()
    slots = torch.tensor(slots, device="cuda")
    others = torch.where(slots < N_SESSIONS, slots + N_SESSIONS, slots)
    generator = torch.Generator("cuda").manual_seed(7)
    for number, counts in enumerate(lengths):
        mu = torch.randn(n, T, 20, device="cuda", generator=generator).to(dtype)
        n_frames = torch.tensor(counts, device="cuda")
        width = SIZES.max_prompt + HISTORY_FRAMES + 4
        for state in (plain_state, fused_state):
            state.copy_voice_facts(slots, others)
        chunk, inputs = ChunkSlots(slots, width, others), SolveInputs(schedule, noise, mu, n_frames)
        expected, got = plain.solve(plain_state, chunk, inputs), fused.solve(fused_state, chunk, inputs)
        slots, others = others, slots
        assert got.dtype == torch.float32
        for row, count in enumerate(counts):
            check(got[row, :count], expected[row, :count], dtype, f"mel of row {row} in call {number}")
        same_state(fused_state, plain_state, dtype, f"after call {number}")


def same_state(got: FlowState, expected: FlowState, dtype: torch.dtype, what: str) -> None:
    """Compare the slots of sessions and voices; the scratch slot and the rows of padding are undefined."""
    keep = torch.arange(len(expected.prompt), device="cuda") != expected.scratch
    for name in ("rows", "length", "start"):
        assert_same(
            getattr(got.dit_table, name)[keep].cpu(), getattr(expected.dit_table, name)[keep].cpu(), f"{name} {what}"
        )
    for slot in expected.dit_table.length[: expected.scratch].nonzero().flatten().tolist():
        rows = expected.dit_table.rows[slot, : int(expected.dit_table.length[slot])]
        for k in range(N_STEPS):
            pools = [state.dit_rows[k][..., rows, :, :].float() for state in (got, expected)]
            check(*pools, dtype, f"rows of slot {slot}, step {k}, {what}")
            tails = [state.dit_tails[k][slot].float() for state in (got, expected)]
            check(*tails, dtype, f"tails of slot {slot}, step {k}, {what}")


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_voices_prepared_by_the_fused_solve_equal_the_plain_ones(dtype: torch.dtype, head_dim: int):
    """A prompt has a prompt mel and a ring of its own length."""
    from models.token2wav.flow.dit_fused import FusedSolver

    class FusedSolveOnly(PlainFlow):
        """The plain encoder, so that only the solve differs."""

        def solve(self, state: FlowState, slots: ChunkSlots, inputs: SolveInputs) -> Tensor:
            return FusedSolver(self.flow)(state, slots, inputs)

    flow = make_flow(head_dim, dtype)
    plain, fused = make_state(PlainFlow(flow), FlowRules()), make_state(FusedSolveOnly(flow), FlowRules())
    same_state(fused, plain, dtype, "of a voice")


@pytest.mark.parametrize("head_dim", [16, 64])
@torch.no_grad()
def test_nan_in_rows_of_other_slots_has_no_effect(head_dim: int):
    """Rows that a slot's table does not list, and the row that padding writes, are not read."""
    from models.token2wav.flow.dit_fused import FusedSolver

    flow = make_flow(head_dim, torch.float32)
    fused, schedule, noise = FusedSolver(flow), flow.schedule(N_STEPS), noise_table(20, 0).cuda()
    slots, n_frames = torch.tensor([0, 1], device="cuda"), torch.tensor([50, 3], device="cuda")
    mu = torch.randn(2, 50, 20, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    mels = []
    for poisoned in (False, True):
        state = make_state(PlainFlow(flow), FlowRules())
        if poisoned:
            seen = torch.cat([state.dit_table.rows[slot, : int(state.dit_table.length[slot])] for slot in (0, 1)])
            unseen = torch.ones(state.dit_table.n_rows, dtype=torch.bool, device="cuda")
            unseen[seen] = False
            unseen[0] = False  # the zero row, which is never written
            for rows in state.dit_rows:
                rows[..., unseen, :, :] = float("nan")
        mels.append(fused(state, ChunkSlots(slots, 224), SolveInputs(schedule, noise, mu, n_frames)))
    for row, n in enumerate((50, 3)):
        assert_same(mels[1][row, :n].cpu(), mels[0][row, :n].cpu(), f"mel of row {row}")
