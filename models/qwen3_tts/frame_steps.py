"""The steps of a frame between the passes of the language models, in PyTorch operations.

`kernel_frames` has the same steps by the project's kernels. Rows of padding name the scratch slot.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.qwen3_tts.draws import allowed_scores
from models.qwen3_tts.state import GROUPS, DrawCodes, TalkerState
from models.qwen3_tts.talker import Talker

# Outcomes of a slot in one frame.
WAITED = 0  # no frame: no request, over, or waiting for text
FRAME = 1
LAST_FRAME = 2  # a frame, and the slot is at its limit
ENDED = 3  # no frame: the end of speech was drawn
BAD = 4  # no frame: the logits are NaN or infinite; the slot is over


class Fed(NamedTuple):
    """What a frame feeds to the talker.

    rows: [B, 1, D]. active: [B] bool, whether the slot draws a frame. n_new: [B] int64, 1 if it feeds its newest one.
    """

    rows: Tensor
    active: Tensor
    n_new: Tensor


class Drawn(NamedTuple):
    """One code of each slot. codes: [B] int64. usable: [B] bool, whether the highest score is finite."""

    codes: Tensor
    usable: Tensor


class Residual(NamedTuple):
    """Where a frame's residual codes begin.

    rows: [B, 2, D] that the code predictor is fed first. codes: [B] int64 first codes; 0 where the frame does not go
    on. n_new: [B] int64, 1 where it does.
    """

    rows: Tensor
    codes: Tensor
    n_new: Tensor


class FrameSteps:
    """The steps in the order of their calls. `keep_hidden`, `begin_codes` and `end` change the state in place."""

    def __init__(self, talker: Talker, pad_id: int):
        """pad_id: text token that is fed after the text."""
        self.talker, self.pad_id, self.eos_id = talker, pad_id, talker.config.codec_eos_token_id

    def begin(self, state: TalkerState, slots: Tensor) -> Fed:
        """The row of each slot's newest frame, with its text."""
        number = state.frames[slots] - 1  # of the newest frame
        has_text = number < state.text_len[slots]
        waits = (number >= 0) & ~has_text & state.text_open[slots]
        active = ~state.done[slots] & ~waits
        text = state.text[slots, number.clamp(min=0) % state.text.shape[1]]
        rows = self.talker.text_rows[torch.where(has_text, text, self.pad_id)] + state.row[slots]
        return Fed(rows[:, None], active, (active & (number >= 0)).long())

    def keep_hidden(self, state: TalkerState, slots: Tensor, hidden: Tensor, n_new: Tensor) -> Tensor:
        """Store the states [B, D] after rows that were fed. Returns: the newest states [B, D] of all."""
        newest = torch.where(n_new[:, None] > 0, hidden, state.hidden[slots])
        state.hidden.index_copy_(0, slots, newest)
        return newest

    def first_scores(self, state: TalkerState, slots: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, V] float32 of the first codes, from logits [B, V]; and numbers [16, B] of the frame's draws."""
        group = torch.arange(GROUPS, device=slots.device)[:, None]
        return allowed_scores(logits.float(), slots, state, self.eos_id), state.frames[slots] * GROUPS + group

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
        """One code of each slot.

        Args:
            eager: `draws.draw_codes`, plain or compiled; the arguments up to `candidates` are its own.
            table: [K, D].
        Returns: the codes, and with a table their rows [B, 1, D].
        """
        codes = eager(scores, slots, state, numbers, which, candidates)
        rows = None if table is None else F.embedding(codes[:, None], table)
        return Drawn(codes, scores.amax(1).isfinite()), rows

    def begin_codes(self, state: TalkerState, slots: Tensor, hidden: Tensor, first: Drawn, active: Tensor) -> Residual:
        """Empty the code predictor's cache. hidden: [B, D] newest states."""
        begun = active & first.usable & (first.codes != self.eos_id)
        # Padding and idle rows run too, on an acoustic code.
        codes = torch.where(begun, first.codes, 0)
        state.predictor_cache.set_length(slots, torch.zeros_like(slots))
        return Residual(torch.stack((hidden, self.talker.code_rows[codes]), dim=1), codes, begun.long())

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
        """Store the frame of codes [B, 16]. usable: [B] of the last draw. Returns: outcomes [B] int64."""
        drawn, frames = (n_new > 0) & usable, state.frames[slots]
        rows = self.talker.frame_rows(codes)
        state.row.index_copy_(0, slots, torch.where(drawn[:, None], rows, state.row[slots]))
        state.seen[slots, codes[:, 0]] = state.seen[slots, codes[:, 0]] | drawn
        state.frames.index_copy_(0, slots, frames + drawn)
        is_last = drawn & (frames + 1 >= state.limit[slots])
        ended = first.usable & (first.codes == self.eos_id)
        outcome = torch.where(drawn, torch.where(is_last, LAST_FRAME, FRAME), torch.where(ended, ENDED, BAD))
        outcome = torch.where(active, outcome, WAITED)
        state.done.index_copy_(0, slots, state.done[slots] | (outcome >= LAST_FRAME))
        return outcome
