"""The language models by the project's kernels against PyTorch. On a CPU the kernels run in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.qwen3_tts.code_predictor import PASS_ROWS
from models.qwen3_tts.draws import draw_codes
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
    from models.qwen3_tts.kernel_draws import draw_codes_by_kernel

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
        expected = draw_codes(scores, slots, state, draws, which, None)
        assert_same(draw_codes_by_kernel(scores, slots, state, draws, which, None), expected, f"codes of frame {frame}")
        drawn.append(expected.tolist())
    assert len(set(map(tuple, drawn))) == 3
    scores[1, 3] = float("nan")
    assert draw_codes_by_kernel(scores[1:2], slots[1:2], state, draws, REST, None)[0] == 0
