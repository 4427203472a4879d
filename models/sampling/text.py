"""Chooses the next text token of every row: stop probe, masks, penalties, listen rule, top-k, top-p, draw.

One call serves duplex, half-duplex and chat rows side by side, because each slot carries its own
parameters; a neutral parameter makes its step an identity. All work stays on the device and every
shape is fixed. Knows ids only by the sets it is given; knows nothing about units, turns or tokenizers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import TokenError
from models.sampling.rng import STREAM_STOP_PROBE, STREAM_TEXT, draw_index, fixed_point_weights, running_sum, uniform
from models.sampling.settings import TextSampling, check_number, signed_seed

NEVER = float("-inf")
# Not the running sums' block: maxima over as many columns would go into one kernel with those, and of a batch of open
# size Inductor cannot generate it (torch 2.11, CUDA).
MAX_BLOCK = 2048


class Sampled(NamedTuple):
    """ids [B] int64; bad [B] bool: an active row that had NaN, +inf or nothing left to choose from; remembered [B]
    bool: the id went into the slot's history.
    """

    ids: Tensor
    bad: Tensor
    remembered: Tensor


@dataclass(frozen=True)
class TokenSet:
    """Ids with a special part in sampling; one set per way of talking (duplex, half duplex, chat).

    `forbidden` never wins; `length_ids` are what the length penalty acts on; `unremembered` ids leave no
    trace in the history, so that the repetition penalty never acts on them; `listen_id` is what the listen
    scale and rank act on; `stop_id` is what the stop probe asks for; `pad_id` is what idle and bad rows return.
    """

    forbidden: Collection[int] = ()
    length_ids: Collection[int] = ()
    unremembered: Collection[int] = ()
    listen_id: int | None = None
    stop_id: int | None = None
    pad_id: int = 0


@dataclass
class TokenSets:
    """Token sets as tensors, shared by all slots; a slot's `set_index` picks its row.

    forbidden, length_ids, unremembered: [n_sets, V] bool. listen_id, stop_id (-1: none), pad_id: [n_sets] int64.
    """

    forbidden: Tensor
    length_ids: Tensor
    unremembered: Tensor
    listen_id: Tensor
    stop_id: Tensor
    pad_id: Tensor

    @classmethod
    def build(cls, sets: Sequence[TokenSet], vocab_size: int, device: torch.device | str | None = None) -> "TokenSets":
        """Raises: TokenError if an id is outside the vocabulary."""

        def checked(name: str, token: int) -> int:
            if not 0 <= token < vocab_size:
                raise TokenError(f"token set: {name}", expected=f"an id in 0..{vocab_size - 1}", got=token)
            return token

        def mask(name: str) -> Tensor:
            rows = torch.zeros(len(sets), vocab_size, dtype=torch.bool)
            for row, one in zip(rows, sets, strict=True):
                row[[checked(name, token) for token in getattr(one, name)]] = True
            return rows.to(device)

        def single(name: str) -> Tensor:
            ids = [getattr(one, name) for one in sets]
            return torch.tensor([-1 if i is None else checked(name, i) for i in ids], device=device)

        masks = {name: mask(name) for name in ("forbidden", "length_ids", "unremembered")}
        return cls(**masks, **{name: single(name) for name in ("listen_id", "stop_id", "pad_id")})


@dataclass
class SamplerState:
    """What each slot remembers between calls, and its parameters. Row n_slots is for padded batch rows.

    Memory:
        history      [S+1, H] int64  ring of chosen ids; id number n lies at place n % H; `sample_text` appends
        count        [S+1]    int64  ids chosen since the last `forget`
        chunk_start  [S+1]    int64  `count` when the current chunk began; set by `begin_chunk`
        seed         [S+1]    int64  all 64 bits
        draws        [S+1]    int64  calls of `sample_text` this slot took part in since it was seeded
    Parameters [S+1] each, written by `configure`: the fields of `TextSampling`, same names.
    """

    history: Tensor
    count: Tensor
    chunk_start: Tensor
    seed: Tensor
    draws: Tensor
    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    repetition_penalty: Tensor
    repetition_window: Tensor
    chunked_window: Tensor
    sign_blind: Tensor
    length_penalty: Tensor
    listen_scale: Tensor
    listen_scale_on_probability: Tensor
    listen_top_k: Tensor
    stop_probe: Tensor
    set_index: Tensor

    @classmethod
    def allocate(
        cls, n_slots: int, history_length: int = 4096, device: torch.device | str | None = None
    ) -> "SamplerState":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n_slots + 1, *shape, dtype=dtype, device=device)

        memory = {name: zeros() for name in ("count", "chunk_start", "seed", "draws")}
        parameters = {name: zeros(dtype=dtype) for name, dtype in _parameter_types().items()}
        state = cls(history=zeros(history_length), **memory, **parameters)
        state.reset(torch.arange(n_slots + 1, device=device))
        return state

    def reset(self, slots: Tensor) -> None:
        """Slots [N] as freshly allocated: nothing remembered, seed 0, neutral parameters."""
        for tensor in (self.history, self.count, self.chunk_start, self.seed, self.draws):
            tensor.index_fill_(0, slots, 0)
        for name in _parameter_types():
            getattr(self, name).index_fill_(0, slots, getattr(_NEUTRAL, name))

    def configure(self, slot: int, settings: TextSampling, seed: int | None = None) -> None:
        """Write one slot's parameters; its memory stays. A `seed` restarts the slot's random numbers.

        Raises: as `check`, before anything is written.
        """
        self.check(settings, seed)
        for name in _parameter_types():
            getattr(self, name)[slot] = getattr(settings, name)
        if seed is not None:
            self.seed[slot] = signed_seed(seed)
            self.draws[slot] = 0

    def check(self, settings: TextSampling, seed: int | None) -> None:
        """Raises: SettingsError for a repetition window longer than the history kept, or a seed out of range."""
        limit = self.history.shape[1]
        check_number("repetition_window", settings.repetition_window, at_least=0, at_most=limit, whole=True)
        if seed is not None:
            signed_seed(seed)

    def forget(self, slots: Tensor) -> None:
        """Empty the history of slots [N]; seeds, draws and parameters stay."""
        self.count.index_fill_(0, slots, 0)
        self.chunk_start.index_fill_(0, slots, 0)

    def begin_chunk(self, slots: Tensor) -> None:
        """A chunk starts in slots [N]: a chunked window reaches back from here, plus all of the chunk."""
        self.chunk_start[slots] = self.count[slots]

    def remember(self, slots: Tensor, ids: Tensor, where: Tensor) -> None:
        """Append ids [B] to the history of slots [B] in the rows that `where` [B] names."""
        count = self.count[slots]
        place = count % self.history.shape[1]
        self.history[slots, place] = torch.where(where, ids, self.history[slots, place])
        self.count[slots] = count + where


_NEUTRAL = TextSampling()


def _parameter_types() -> dict[str, torch.dtype]:
    types = {bool: torch.bool, int: torch.int64, float: torch.float32}
    return {field.name: types[type(getattr(_NEUTRAL, field.name))] for field in fields(_NEUTRAL)}


def sample_text(
    logits: Tensor,
    slots: Tensor,
    active: Tensor,
    state: SamplerState,
    sets: TokenSets,
    candidates: int | None = None,
) -> Sampled:
    """The next token of each row; appends it to the slot's history.

    A token that the stop probe or the listen rank rule decides is returned without being remembered.
    Rows that are idle or bad return their set's `pad_id` and change nothing.

    Args:
        logits: [B, V] float32, not changed.
        slots: [B] int64, no slot twice except the scratch slot in idle rows.
        active: [B] bool.
        state: updated in place.
        candidates: None sorts the whole vocabulary and is exact for any settings. A number C looks at
            the C best only: exact if 0 < top_k <= C and all ties at the k-th place fit, otherwise the
            choice is cut to the C best.
    """
    token_set = state.set_index[slots]
    stop_id, listen_id = sets.stop_id[token_set], sets.listen_id[token_set]
    greedy, seed, draws = state.greedy[slots], state.seed[slots], state.draws[slots]

    scores = penalise(logits, slots, state, sets)
    usable = highest(logits).isfinite() & highest(scores).isfinite()

    stopped_by_draw = uniform(seed, draws, STREAM_STOP_PROBE) < stop_probability(logits, stop_id)
    stop = (
        torch.where(greedy, _first_best(logits) == stop_id, stopped_by_draw) & state.stop_probe[slots] & (stop_id >= 0)
    )
    listen = (listen_rank(scores, listen_id) < state.listen_top_k[slots]) & (listen_id >= 0)

    best_ids, weights = _keep(scores, slots, state, candidates)
    index = draw_index(weights, uniform(seed, draws, STREAM_TEXT))
    ids = torch.where(greedy, _first_best(scores), best_ids.gather(1, index[:, None])[:, 0])
    ids = torch.where(stop, stop_id, torch.where(listen, listen_id, ids))

    counts = active & usable
    remembered = counts & ~stop & ~listen & ~sets.unremembered[token_set, ids]
    state.remember(slots, ids, remembered)
    state.draws[slots] = draws + counts
    return Sampled(torch.where(counts, ids, sets.pad_id[token_set]), active & ~usable, remembered)


def stop_probability(logits: Tensor, stop_id: Tensor) -> Tensor:
    """Chance of `stop_id` [B] under the raw logits [B, V]: no temperature, mask or penalty. [B] float32.

    Drawing a token from the whole vocabulary to see whether it is this one needs no more than this.
    """
    return torch.exp(_at(logits, stop_id) - logits.logsumexp(1))


def penalise(logits: Tensor, slots: Tensor, state: SamplerState, sets: TokenSets) -> Tensor:
    """Logits [B, V] after forbidden ids, repetition, length penalty and listen scale, in this order."""
    token_set = state.set_index[slots]
    scores = logits.float().masked_fill(sets.forbidden[token_set], NEVER)

    penalty = state.repetition_penalty[slots, None]
    seen = _seen(slots, state, logits.shape[1])
    lowered = torch.where(state.sign_blind[slots, None] | (scores > 0), scores / penalty, scores * penalty)
    scores = torch.where(seen, lowered, scores)

    penalty = state.length_penalty[slots, None]
    lowered = torch.where(scores > 0, scores / penalty, scores * penalty)
    scores = torch.where(sets.length_ids[token_set], lowered, scores)

    listen_id, scale = sets.listen_id[token_set], state.listen_scale[slots]
    listen = _at(scores, listen_id)
    scaled = torch.where(state.listen_scale_on_probability[slots], listen + scale.log(), listen * scale)
    is_listen = torch.arange(logits.shape[1], device=logits.device) == listen_id[:, None]
    return torch.where(is_listen, scaled[:, None], scores)


def listen_rank(scores: Tensor, listen_id: Tensor) -> Tensor:
    """How many ids score strictly above `listen_id` [B]; [B] int64."""
    return (_blocks(scores) > _at(scores, listen_id)[:, None, None]).sum(2).sum(1)


def highest(scores: Tensor) -> Tensor:
    """The best score of each row [B, V]; [B]."""
    return _blocks(scores).amax(2).amax(1)


def _first_best(scores: Tensor) -> Tensor:
    """The id of each row's best score, of equal ones the lowest; [B] int64."""
    values, ids = _blocks(scores).max(2)
    block = values.argmax(1)
    return block * MAX_BLOCK + ids.gather(1, block[:, None])[:, 0]


def _blocks(scores: Tensor) -> Tensor:
    """[B, V] as [B, n, MAX_BLOCK]: on a GPU the whole vocabulary of a single row would be one program's work."""
    B, V = scores.shape
    return F.pad(scores, (0, -V % MAX_BLOCK), value=NEVER).view(B, -1, MAX_BLOCK)


def keep_top(
    scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Temperature, then top-k (ties at the k-th place stay), then top-p (up to the entry that crosses p).

    Top-p keeps an entry if what lies above it sums to p or less. The usual library warper, which cuts
    the ascending tail that sums to 1 - p or less, differs only where a partial sum equals p to the
    last bit: there it drops the next entry and this one keeps it.

    Args:
        scores: [B, V] float32; temperature, top_k (0: off), top_p (<= 0 or >= 1: off): [B].
    Returns: ids and fixed-point weights (0: dropped), [B, C or V] int64, best first, ties by id.
    """
    scores = scores / temperature[:, None]
    values, ids = best(scores, candidates)
    peak = values[:, 0]
    last_kept = values.gather(1, top_k.clamp(1, values.shape[1])[:, None] - 1)
    no_top_k = top_k == 0
    values = torch.where((values >= last_kept) | no_top_k[:, None], values, NEVER)
    weights = fixed_point_weights(values, peak)
    total = weights.sum(1)
    if candidates is not None:
        total = torch.where(no_top_k, fixed_point_weights(scores, peak).sum(1), total)
    above = running_sum(weights) - weights
    crossed = above > (total.double() * top_p.double()).long()[:, None]
    no_top_p = (top_p <= 0) | (top_p >= 1)
    return ids, torch.where(crossed & ~no_top_p[:, None], 0, weights)


def final_probs(
    logits: Tensor, slots: Tensor, state: SamplerState, sets: TokenSets, candidates: int | None = None
) -> Tensor:
    """The distribution that `sample_text` draws from when neither probe nor listen rank decides. [B, V] float32."""
    ids, weights = _keep(penalise(logits, slots, state, sets), slots, state, candidates)
    shares = (weights.double() / weights.sum(1, keepdim=True)).float()
    return torch.zeros_like(logits, dtype=torch.float32).scatter(1, ids, shares)


def best(scores: Tensor, candidates: int | None) -> tuple[Tensor, Tensor]:
    """Values and ids of the `candidates` best scores (None: all), best first, equal scores by rising id."""
    if candidates is None:
        return scores.sort(dim=1, descending=True, stable=True)
    values, ids = scores.topk(min(candidates, scores.shape[1]), dim=1, sorted=False)
    # topk leaves equal scores in no defined order; a drawn id must not hang on that.
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _keep(scores: Tensor, slots: Tensor, state: SamplerState, candidates: int | None) -> tuple[Tensor, Tensor]:
    return keep_top(scores, state.temperature[slots], state.top_k[slots], state.top_p[slots], candidates)


def _at(scores: Tensor, ids: Tensor) -> Tensor:
    return scores.gather(1, ids.clamp_min(0)[:, None])[:, 0]


def _seen(slots: Tensor, state: SamplerState, vocab_size: int) -> Tensor:
    """[B, V] bool: ids that the slot chose inside its repetition window."""
    history, count = state.history[slots], state.count[slots, None]
    length = history.shape[1]
    place = torch.arange(length, device=history.device)
    number = count - 1 - (count - 1 - place) % length
    reaches_from = torch.where(state.chunked_window[slots, None], state.chunk_start[slots, None], count)
    inside = (number >= 0) & (number >= reaches_from - state.repetition_window[slots, None])
    # One column more takes the places outside the window, so that no real id is overwritten.
    seen = torch.zeros(slots.shape[0], vocab_size + 1, dtype=torch.bool, device=history.device)
    return seen.scatter(1, torch.where(inside, history, vocab_size), True)[:, :vocab_size]
