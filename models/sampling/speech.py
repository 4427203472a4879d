"""Samples the next speech token of every batch row: temperature, frequency penalty, top-p, top-k, draw.

Every slot has its own parameters, so one call serves duplex, half-duplex and chat rows together. All work stays on
the device and every shape is fixed. The caller ends a call at the end token (EOS) and selects the tokens to vocode.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from models.sampling.rng import STREAM_SPEECH, draw_index, fixed_point_weights, is_eager_on_cpu, running_sum, uniform
from models.sampling.settings import SpeechSampling, check_number, signed_seed
from models.sampling.text import NEVER, Sampled, best

PENALTY_WINDOW = 16  # recent speech tokens in the frequency penalty; fixed in the released model


@dataclass
class SpeechSamplerState:
    """Sampler state and parameters of every slot. Row n_slots is the scratch slot of padding rows.

    State:
        history            [S+1, 16] int64  ring of recent tokens; token number n is at n % 16
        count              [S+1]     int64  tokens since the history was emptied, EOS excluded
        step               [S+1]     int64  tokens drawn in this call, EOS included; `begin_call` sets it to 0
        min_speech_tokens  [S+1]     int64  EOS is masked while `step` is smaller
        seed               [S+1]     int64  all 64 bits
        draws              [S+1]     int64  draws since the slot was seeded
    Parameters, [S+1] each, written by `configure`: eos_id, and the fields of `SpeechSampling` under their names.
    """

    history: Tensor
    count: Tensor
    step: Tensor
    min_speech_tokens: Tensor
    seed: Tensor
    draws: Tensor
    eos_id: Tensor
    greedy: Tensor
    temperature: Tensor
    repetition_penalty: Tensor
    top_p: Tensor
    top_k: Tensor
    min_keep: Tensor
    history_per_call: Tensor

    @classmethod
    def allocate(cls, n_slots: int, device: torch.device | str | None = None) -> "SpeechSamplerState":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n_slots + 1, *shape, dtype=dtype, device=device)

        memory = {name: zeros() for name in ("count", "step", "min_speech_tokens", "seed", "draws", "eos_id")}
        parameters = {name: zeros(dtype=dtype) for name, dtype in _parameter_types().items()}
        state = cls(history=zeros(PENALTY_WINDOW), **memory, **parameters)
        state.reset(torch.arange(n_slots + 1, device=device))
        return state

    def reset(self, slots: Tensor) -> None:
        """Reset slots [N] to the state after allocation: empty history, seed 0, EOS 0, default parameters."""
        for tensor in (self.history, self.count, self.step, self.min_speech_tokens, self.seed, self.draws, self.eos_id):
            tensor.index_fill_(0, slots, 0)
        for name in _parameter_types():
            getattr(self, name).index_fill_(0, slots, getattr(_DEFAULT, name))

    def configure(self, slot: int, settings: SpeechSampling, eos_id: int, seed: int | None = None) -> None:
        """Write the parameters of one slot; its history stays. A `seed` restarts its random numbers.

        Raises: SettingsError if `eos_id` or `seed` is out of range; nothing is written then.
        """
        check_number("eos_id", eos_id, at_least=0, whole=True)
        number = None if seed is None else signed_seed(seed)
        for name in _parameter_types():
            getattr(self, name)[slot] = getattr(settings, name)
        self.eos_id[slot] = eos_id
        if number is not None:
            self.seed[slot] = number
            self.draws[slot] = 0

    def forget(self, slots: Tensor) -> None:
        """Empty the history of slots [N], as a new turn requires."""
        self.count.index_fill_(0, slots, 0)

    def begin_call(self, slots: Tensor, min_speech_tokens: Tensor, active: Tensor) -> None:
        """Start a call, a series of steps, in the active rows.

        Args:
            slots: [B] int64.
            min_speech_tokens: [B] int64, tokens before EOS is allowed.
            active: [B] bool.
        """
        self.step.index_copy_(0, slots, torch.where(active, 0, self.step[slots]))
        self.min_speech_tokens.index_copy_(
            0, slots, torch.where(active, min_speech_tokens, self.min_speech_tokens[slots])
        )
        emptied = active & self.history_per_call[slots]
        self.count.index_copy_(0, slots, torch.where(emptied, 0, self.count[slots]))

    def remember(self, slots: Tensor, speech_tokens: Tensor, where: Tensor) -> None:
        """Append speech_tokens [B] to the history of slots [B] in rows where the mask `where` [B] is true."""
        count = self.count[slots]
        place = count % PENALTY_WINDOW
        self.history[slots, place] = torch.where(where, speech_tokens, self.history[slots, place])
        self.count[slots] = count + where


_DEFAULT = SpeechSampling()


def _parameter_types() -> dict[str, torch.dtype]:
    types = {bool: torch.bool, int: torch.int64, float: torch.float32}
    return {field.name: types[type(getattr(_DEFAULT, field.name))] for field in fields(_DEFAULT)}


def sample_speech_tokens(
    logits: Tensor, slots: Tensor, active: Tensor, state: SpeechSamplerState, candidates: int | None = None
) -> Sampled:
    """The next speech token of each row, appended to the slot's history unless it is EOS.

    Inactive and bad rows return EOS and change no state.

    Args:
        logits: [B, V] float32, not modified.
        slots: [B] int64, distinct except for the scratch slot in inactive rows.
        active: [B] bool.
        state: updated in place.
        candidates: None sorts all tokens and is exact for any settings. A number C sorts only the C best tokens,
            which is exact for rows with top-p and top-k off, and for rows where max(top_k, min_keep) and the ties at
            that rank fit C.
    """
    eos_id, seed, draws = state.eos_id[slots], state.seed[slots], state.draws[slots]
    scores = final_speech_scores(logits, slots, state, candidates)
    peak = scores.amax(1)
    usable = logits.amax(1).isfinite() & peak.isfinite()

    drawn = draw_index(fixed_point_weights(scores, peak), uniform(seed, draws, STREAM_SPEECH))
    speech_tokens = torch.where(state.greedy[slots], scores.argmax(1), drawn)

    counts = active & usable
    remembered = counts & (speech_tokens != eos_id)
    state.remember(slots, speech_tokens, remembered)
    state.step[slots] = state.step[slots] + counts
    state.draws[slots] = draws + counts
    return Sampled(torch.where(counts, speech_tokens, eos_id), active & ~usable, remembered)


def final_speech_scores(
    logits: Tensor, slots: Tensor, state: SpeechSamplerState, candidates: int | None = None
) -> Tensor:
    """Processed logits [B, V]; the draw uses their softmax. Excluded tokens are -inf.

    EOS is masked after top-p and top-k, so a call below its minimum may keep fewer tokens than `min_keep`.
    """
    scores = penalise_speech_tokens(logits, slots, state)
    kept = keep_speech_tokens(scores, slots, state, candidates)
    is_eos = torch.arange(logits.shape[1], device=logits.device) == state.eos_id[slots, None]
    too_early = (state.step[slots] < state.min_speech_tokens[slots])[:, None]
    return torch.where(kept & ~(is_eos & too_early), scores, NEVER)


def penalise_speech_tokens(logits: Tensor, slots: Tensor, state: SpeechSamplerState) -> Tensor:
    """Logits [B, V] divided by temperature, with penalty**count applied to each token of the history."""
    scores = logits.float() / state.temperature[slots, None]
    in_use = torch.arange(PENALTY_WINDOW, device=logits.device) < state.count[slots, None]
    counts = torch.zeros_like(scores).scatter_add(1, state.history[slots], in_use.float())
    penalty = state.repetition_penalty[slots, None] ** counts
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def keep_speech_tokens(
    scores: Tensor, slots: Tensor, state: SpeechSamplerState, candidates: int | None = None
) -> Tensor:
    """[B, V] bool: tokens kept by top-p, then top-k; all tokens if the slot's history is empty.

    Top-p drops the largest set of worst tokens whose probabilities sum to 1 - p or less. Top-k drops tokens that score
    below the k-th best. Of equal scores at the limit of top-p, lower ids are kept.
    """
    min_keep, top_k, top_p = state.min_keep[slots], state.top_k[slots], state.top_p[slots]
    no_top_p, no_top_k = top_p >= 1, top_k == 0
    exempt = (state.count[slots] == 0) | (no_top_p & no_top_k)
    # The settings of duplex sessions keep all tokens; a sort without effect would take half the time of a step.
    if is_eager_on_cpu(scores) and exempt.numpy().all():
        return torch.ones_like(scores, dtype=torch.bool)
    values, ids = best(scores, candidates)
    n_values = values.shape[1]
    rank = torch.arange(n_values, device=scores.device)

    weights = fixed_point_weights(values, values[:, 0])
    total = fixed_point_weights(scores, values[:, 0]).sum(1)
    from_here_down = total[:, None] - (running_sum(weights) - weights)
    allowed_tail = (total.double() * (1 - top_p.double())).long()
    kept = (from_here_down > allowed_tail[:, None]) | (rank < min_keep[:, None]) | no_top_p[:, None]

    last_kept = values.gather(1, torch.maximum(top_k, min_keep).clamp(1, n_values)[:, None] - 1)
    kept &= (values >= last_kept) | no_top_k[:, None]

    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, kept) | exempt[:, None]
