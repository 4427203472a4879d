"""`frame_steps.FrameSteps` by kernels. Requires Triton."""

from torch import Tensor

from models.kernels import frame_state
from models.kernels.samplers.code_sampler import CodeSamplerSettings, draw_code
from models.qwen3_tts.config import CONTROL_CODES
from models.qwen3_tts.frame_steps import Drawn, Fed, FrameSteps, Residual
from models.qwen3_tts.settings import MIN_FRAMES
from models.qwen3_tts.state import GROUPS, DrawCodes, TalkerState


class KernelFrameSteps(FrameSteps):
    """Draws are exact for any settings, whatever `candidates`."""

    def begin(self, state: TalkerState, slots: Tensor) -> Fed:
        return Fed(*frame_state.begin_frame(state, slots, self.talker.text_rows, self.pad_id))

    def keep_hidden(self, state: TalkerState, slots: Tensor, hidden: Tensor, n_new: Tensor) -> Tensor:
        return frame_state.keep_hidden(state, slots, hidden, n_new)

    def first_scores(self, state: TalkerState, slots: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return frame_state.first_scores(state, slots, logits, self.eos_id, CONTROL_CODES, MIN_FRAMES, GROUPS)

    def draw(
        self,
        eager: DrawCodes,
        scores: Tensor,
        slots: Tensor,
        state: TalkerState,
        numbers: Tensor,
        which: int,
        candidates: int | None,
        table: Tensor | None = None,
    ) -> tuple[Drawn, Tensor | None]:
        settings = CodeSamplerSettings(
            seed=state.seed,
            greedy=state.greedy,
            temperature=state.temperature,
            top_k=state.top_k,
            top_p=state.top_p,
        )
        codes, usable, rows = draw_code(scores, slots, settings, numbers, which, table)
        return Drawn(codes, usable), rows

    def begin_codes(self, state: TalkerState, slots: Tensor, hidden: Tensor, first: Drawn, active: Tensor) -> Residual:
        rows = self.talker.code_rows
        return Residual(
            *frame_state.begin_codes(state.predictor_cache, slots, hidden, rows, first, active, self.eos_id)
        )

    def end(
        self,
        state: TalkerState,
        slots: Tensor,
        codes: Tensor,
        n_new: Tensor,
        active: Tensor,
        first: Drawn,
        usable: Tensor,
    ) -> Tensor:
        tables = self.talker.code_rows, self.talker.code_predictor.tables
        return frame_state.end_frame(state, slots, codes, n_new, active, first, usable, tables, self.eos_id)
