"""`draws.draw_codes` by one kernel. Requires Triton."""

from torch import Tensor

from models.kernels.samplers.code_sampler import CodeSamplerSettings, draw_code
from models.qwen3_tts.state import TalkerState


def draw_codes_by_kernel(
    scores: Tensor, slots: Tensor, state: TalkerState, draws: Tensor, which: int, candidates: int | None
) -> Tensor:
    """Shapes as `draws.draw_codes`; exact for any settings, whatever `candidates`."""
    settings = CodeSamplerSettings(
        seed=state.seed,
        greedy=state.greedy,
        temperature=state.temperature,
        top_k=state.top_k,
        top_p=state.top_p,
    )
    return draw_code(scores, slots, settings, draws, which)
