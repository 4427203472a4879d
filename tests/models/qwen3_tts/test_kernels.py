"""The language models by the project's kernels against PyTorch. On a CPU the kernels run in Triton's interpreter."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.qwen3_tts.code_predictor import PASS_ROWS
from models.qwen3_tts.draws import draw_codes
from models.qwen3_tts.frame_steps import BAD, ENDED, FRAME, LAST_FRAME, WAITED, Drawn, FrameSteps
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.settings import CodeSampling, FrameSampling
from models.qwen3_tts.state import FIRST, REST, TalkerState
from tests.models.compare import assert_close, assert_same
from tests.parity.golden import GoldenDir

pytest.importorskip("triton")

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
TOLERANCE = 5e-5
SETTINGS = (
    CodeSampling(),
    CodeSampling(greedy=True),
    CodeSampling(top_k=0, temperature=1.3),
    CodeSampling(top_k=0, top_p=0.6),
    CodeSampling(top_k=7, top_p=0.8, temperature=0.5),
    CodeSampling(top_k=3, top_p=0.01),
)


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, talker_golden: GoldenDir) -> Iterator[Qwen3TTS]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield load_qwen3_tts(talker_golden.model("tiny_b"), device=request.param)
    torch.backends.cuda.matmul.allow_tf32 = allowed


def with_and_without(model: Qwen3TTS, run) -> tuple[Tensor, Tensor]:
    """Results of `run` with the kernels and with PyTorch."""
    results = []
    for on in (True, False):
        model.use_kernels(on)
        with torch.no_grad():
            results.append(run())
    return results[0], results[1]


@pytest.mark.gpu
def test_residual_logits(model: Qwen3TTS) -> None:
    """All passes of two frames at once: norms of heads, rotation, attention over sixteen rows."""
    predictor, width = model.talker.code_predictor, model.config.talker_config.hidden_size
    config, generator = predictor.config, torch.Generator().manual_seed(1)
    hidden, first = (torch.randn(2, width, generator=generator).to(model.device) for _ in range(2))
    codes = torch.randint(0, config.vocab_size, (2, 15), generator=generator).to(model.device)

    def run() -> Tensor:
        cache = KVCache(
            n_layers=config.num_hidden_layers,
            n_slots=3,
            max_len=PASS_ROWS,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=model.device,
            spare=1,
        )
        slots = torch.tensor([2, 0], device=model.device)
        return predictor.parallel_logits(hidden, first, codes, cache, slots, model.backend)

    assert_close(*with_and_without(model, run), TOLERANCE, "residual logits")


def test_talker_step_after_a_prompt(model: Qwen3TTS) -> None:
    width, generator = model.config.talker_config.hidden_size, torch.Generator().manual_seed(2)
    rows = torch.randn(2, 2, width, generator=generator).to(model.device)
    n_new = torch.tensor([2, 1], device=model.device)

    def run() -> Tensor:
        state = TalkerState.allocate(model.talker, 3, 16)
        slots = torch.tensor([1, 0], device=model.device)
        model.talker(rows, state.cache, slots, n_new, 16, model.backend)
        step = model.talker(rows[:, :1], state.cache, slots, torch.ones_like(slots), 16, model.backend)
        return model.talker.logits(step[:, 0], model.backend)

    assert_close(*with_and_without(model, run), TOLERANCE, "logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_draws_the_same_codes(model: Qwen3TTS, dtype: torch.dtype) -> None:
    from models.qwen3_tts.kernel_frames import KernelFrameSteps

    table = torch.randn(61, 24, generator=torch.Generator().manual_seed(5)).to(model.device, dtype)

    def both(scores: Tensor, slots: Tensor, draws: Tensor, which: int) -> list[tuple[Drawn, Tensor | None]]:
        args = draw_codes, scores, slots, state, draws, which, None, table
        return [kind(model.talker, 0).draw(*args) for kind in (KernelFrameSteps, FrameSteps)]

    state = TalkerState.allocate(model.talker, len(SETTINGS), 16)
    for slot, codes in enumerate(SETTINGS):
        state.configure(slot, FrameSampling(first=codes, rest=codes), 2**63 + slot, 9)
    slots = torch.tensor([3, 0, 5, 1, 4, 2, len(SETTINGS)], device=model.device)
    drawn: list[list[int]] = []
    for frame, which in enumerate((FIRST, REST, REST)):
        draws = torch.arange(len(slots), device=model.device) + 100 * frame
        generator = torch.Generator().manual_seed(frame)
        scores = (3 * torch.randn(len(slots), 61, generator=generator)).to(model.device, dtype)
        scores[:, 20:26] = scores[:, 20:21]  # ties
        scores[:, 50:] = float("-inf")
        scores[3, 5:] = float("-inf")  # fewer than the top-k
        got, expected = both(scores, slots, draws, which)
        for one, other in zip((*got[0], got[1]), (*expected[0], expected[1]), strict=True):
            assert_same(one, other, f"codes, whether usable, rows of frame {frame}")
        drawn.append(expected[0].codes.tolist())
    assert len(set(map(tuple, drawn))) == 3
    scores[1, 3] = float("nan")
    by_kernel, by_pytorch = (drawn for drawn, _ in both(scores[1:2], slots[1:2], draws[:1], REST))
    assert by_kernel.codes[0] == 0 and not by_kernel.usable[0] and not by_pytorch.usable[0]


def test_steps_of_a_frame_by_kernels(model: Qwen3TTS) -> None:
    """Slots that wait, begin, go on, reach their limit, draw the end or unusable logits, and are over; and padding."""
    from models.qwen3_tts.kernel_frames import KernelFrameSteps

    talker, device, eos_id = model.talker, model.device, model.config.talker_config.codec_eos_token_id
    width, n_codes = model.config.talker_config.hidden_size, talker.code_predictor.config.vocab_size
    slots = torch.tensor([3, 0, 5, 1, 4, 2, 6, 7, 7], device=device)  # 7 is the scratch slot
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    start = TalkerState.allocate(talker, 7, 16)
    start.frames.copy_(torch.tensor([0, 3, 4, 1, 5, 0, 2, 0]))
    start.text_len.copy_(torch.tensor([2, 3, 9, 5, 2, 0, 1, 0]))
    start.text_open.copy_(torch.tensor([0, 1, 1, 0, 1, 1, 0, 0]) > 0)
    start.done.copy_(torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]) > 0)
    start.limit.copy_(torch.tensor([9, 9, 5, 9, 9, 9, 9, 9]))
    start.text.copy_(torch.arange(start.text.numel(), device=device).view(start.text.shape) % 50)
    start.repetition_penalty.fill_(1.3)
    start.row.copy_(noise(*start.row.shape))
    start.hidden.copy_(noise(*start.hidden.shape))
    start.seen.copy_(noise(*start.seen.shape) > 0.5)
    start.predictor_cache.lengths[:5] = 16
    start.predictor_cache.positions[:5] = 16
    fed_states, logits = noise(len(slots), width), 3 * noise(len(slots), start.seen.shape[1])
    rest = torch.randint(0, n_codes, (len(slots), 15), generator=generator).to(device)
    usable = slots != 4

    def run(steps: FrameSteps) -> list[Tensor]:
        state = copy.deepcopy(start)
        fed = steps.begin(state, slots)
        hidden = steps.keep_hidden(state, slots, fed_states, fed.n_new)
        scores, numbers = steps.first_scores(state, slots, logits)
        first = Drawn(torch.tensor([5, 9, 4, eos_id, 2, 1, 3, 8, 8], device=device), usable)
        residual = steps.begin_codes(state, slots, hidden, first, fed.active)
        codes = torch.cat((residual.codes[:, None], rest), dim=1)
        outcomes = steps.end(state, slots, codes, residual.n_new, fed.active, first, slots != 0)
        own = [state.frames, state.done, state.seen, state.row, state.hidden]
        lengths = [state.predictor_cache.lengths, state.predictor_cache.positions]
        kept = [tensor[:-1] for tensor in (*own, *lengths)]
        return [*fed, hidden, scores, numbers, *residual, outcomes, *kept]

    pad_id = model.config.tts_pad_token_id
    by_kernels, by_pytorch = run(KernelFrameSteps(talker, pad_id)), run(FrameSteps(talker, pad_id))
    assert set(by_pytorch[9].tolist()) == {WAITED, FRAME, LAST_FRAME, ENDED, BAD}
    for number, (got, expected) in enumerate(zip(by_kernels, by_pytorch, strict=True)):
        assert got.dtype == expected.dtype, f"result {number}: expected {expected.dtype}, got {got.dtype}"
        finite = [tensor.float().nan_to_num(neginf=-1e9) for tensor in (got, expected)]
        assert_close(*finite, 1e-6, f"result {number} of the steps")
