"""Samples the next text token of every batch row: stop probe, masks, penalties, listen rule, top-k, top-p, draw.

Every slot has its own parameters, so one call serves duplex, half-duplex and chat rows together; a step with a neutral
parameter changes nothing. All work stays on the device and every shape is fixed. Special ids come from the token sets;
this module contains no rules of units and turns.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.errors import TokenError
from models.sampling.rng import (
    STREAM_STOP_PROBE,
    STREAM_TEXT,
    draw_index,
    fixed_point_weights,
    is_eager_on_cpu,
    running_sum,
    uniform,
)
from models.sampling.settings import TextSampling, check_number, signed_seed

NEVER = float("-inf")
# Differs from SCAN_BLOCK on purpose: with equal blocks Inductor fuses the maxima with the running sums, and it cannot
# generate that kernel for a dynamic batch size (torch 2.11, CUDA).
MAX_BLOCK = 2048


class Sampled(NamedTuple):
    """One sampled step.

    Attributes:
        ids: [B] int64.
        bad: [B] bool, active rows whose scores contain NaN or +inf, or are all -inf.
        remembered: [B] bool, rows whose id was appended to the slot's history.
    """

    ids: Tensor
    bad: Tensor
    remembered: Tensor


@dataclass(frozen=True)
class TokenSet:
    """Ids with a special role in sampling; one set per mode (duplex, half duplex, chat).

    Attributes:
        forbidden: ids that are never sampled.
        allowed: ids outside of which nothing is sampled; None: all ids.
        length_ids: ids that the length penalty applies to.
        unremembered: ids that are not appended to the history, so the repetition penalty never applies to them.
        listen_id: id of the listen scale and the listen rank rule.
        stop_id: id of the stop probe.
        pad_id: id that inactive and bad rows return.
    """

    forbidden: Collection[int] = ()
    allowed: Collection[int] | None = None
    length_ids: Collection[int] = ()
    unremembered: Collection[int] = ()
    listen_id: int | None = None
    stop_id: int | None = None
    pad_id: int = 0


@dataclass
class TokenSets:
    """Token sets as tensors, shared by all slots; the parameter `set_index` of a slot selects its row.

    Attributes:
        forbidden, length_ids, unremembered: [n_sets, V] bool.
        listen_id, stop_id: [n_sets] int64, -1 for none.
        pad_id: [n_sets] int64.
    """

    forbidden: Tensor
    length_ids: Tensor
    unremembered: Tensor
    listen_id: Tensor
    stop_id: Tensor
    pad_id: Tensor

    @classmethod
    def build(cls, sets: Sequence[TokenSet], vocab_size: int, device: torch.device | str | None = None) -> "TokenSets":
        """The tensors of `sets`, in their order. Raises: TokenError if an id is outside the vocabulary."""

        def checked(name: str, ids: Collection[int]) -> list[int]:
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                got = next(token for token in ids if not 0 <= token < vocab_size)
                raise TokenError(f"token set: {name}", expected=f"an id in 0..{vocab_size - 1}", got=got)
            return list(ids)

        def mask(name: str) -> Tensor:
            rows = torch.zeros(len(sets), vocab_size, dtype=torch.bool)
            for row, one in zip(rows, sets, strict=True):
                if name == "forbidden" and one.allowed is not None:
                    row.fill_(True)
                    row[checked("allowed", one.allowed)] = False
                row[checked(name, getattr(one, name))] = True
            return rows.to(device)

        def single(name: str) -> Tensor:
            ids = [getattr(one, name) for one in sets]
            checked(name, [i for i in ids if i is not None])
            return torch.tensor([-1 if i is None else i for i in ids], device=device)

        masks = {name: mask(name) for name in ("forbidden", "length_ids", "unremembered")}
        return cls(**masks, **{name: single(name) for name in ("listen_id", "stop_id", "pad_id")})


@dataclass
class SamplerState:
    """Sampler state and parameters of every slot. Row n_slots is the scratch slot of padding rows.

    State:
        history      [S+1, H] int64  ring of sampled ids; id number n is at n % H; `sample_text` appends
        count        [S+1]    int64  ids appended since the last `forget`
        chunk_start  [S+1]    int64  `count` at the start of the current chunk; set by `begin_chunk`
        seed         [S+1]    int64  all 64 bits
        draws        [S+1]    int64  calls of `sample_text` with this slot active since it was seeded
    Parameters, [S+1] each, written by `configure`: the fields of `TextSampling` under their names.
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
        """Reset slots [N] to the state after allocation: empty history, seed 0, neutral parameters."""
        for tensor in (self.history, self.count, self.chunk_start, self.seed, self.draws):
            tensor.index_fill_(0, slots, 0)
        for name in _parameter_types():
            getattr(self, name).index_fill_(0, slots, getattr(_NEUTRAL, name))

    def configure(self, slot: int, settings: TextSampling, seed: int | None = None) -> None:
        """Write the parameters of one slot; its history stays. A `seed` restarts its random numbers.

        Raises: SettingsError as `check`; nothing is written then.
        """
        self.check(settings, seed)
        for name in _parameter_types():
            getattr(self, name)[slot] = getattr(settings, name)
        if seed is not None:
            self.seed[slot] = signed_seed(seed)
            self.draws[slot] = 0

    @contextmanager
    def choosing_from(self, sets: Mapping[int, int]) -> Iterator[None]:
        """Inside, slots choose from other token sets. sets: slot -> its `set_index`."""
        # Copies on the device, in the order of its work: nothing waits for them.
        kept = [(slot, self.set_index[slot].clone()) for slot in sets]
        for slot, index in sets.items():
            self.set_index[slot] = index
        try:
            yield
        finally:
            for slot, before in kept:
                self.set_index[slot] = before

    def check(self, settings: TextSampling, seed: int | None) -> None:
        """Raises: SettingsError for a repetition window longer than the history, or a seed out of range."""
        limit = self.history.shape[1]
        check_number("repetition_window", settings.repetition_window, at_least=0, at_most=limit, whole=True)
        if seed is not None:
            signed_seed(seed)

    def forget(self, slots: Tensor) -> None:
        """Empty the history of slots [N]; seeds, draws and parameters stay."""
        self.count.index_fill_(0, slots, 0)
        self.chunk_start.index_fill_(0, slots, 0)

    def begin_chunk(self, slots: Tensor) -> None:
        """Start a chunk in slots [N]. A chunked window is counted back from here and includes the whole chunk."""
        self.chunk_start[slots] = self.count[slots]

    def remember(self, slots: Tensor, ids: Tensor, where: Tensor) -> None:
        """Append ids [B] to the history of slots [B] in rows where the mask `where` [B] is true."""
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
    """The next token of each row, appended to the slot's history.

    Tokens chosen by the stop probe or the listen rank rule are not appended. Inactive and bad rows return `pad_id` of
    their token set and change no state.

    Args:
        logits: [B, V] float32, not modified.
        slots: [B] int64, distinct except for the scratch slot in inactive rows.
        active: [B] bool.
        state: updated in place.
        candidates: None sorts the whole vocabulary and is exact for any settings. A number C considers only the C best
            tokens, which is exact if 0 < top_k <= C and the ties at the k-th rank fit.
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
    """[B] float32 probability of `stop_id` [B] under the raw logits [B, V], without temperature, mask or penalty.

    Comparing one uniform number with it is equivalent to sampling from the whole vocabulary and testing for `stop_id`.
    """
    return torch.exp(_at(logits, stop_id) - logits.logsumexp(1))


def penalise(logits: Tensor, slots: Tensor, state: SamplerState, sets: TokenSets) -> Tensor:
    """Logits [B, V] after, in this order, forbidden ids, repetition penalty, length penalty and listen scale."""
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
    """[B] int64 number of ids that score strictly above `listen_id` [B]."""
    return (_blocks(scores) > _at(scores, listen_id)[:, None, None]).sum(2).sum(1)


def highest(scores: Tensor) -> Tensor:
    """[B] best score of each row of [B, V]."""
    return _blocks(scores).amax(2).amax(1)


def _first_best(scores: Tensor) -> Tensor:
    """[B] int64 id of the best score of each row; the lowest id of equal scores."""
    values, ids = _blocks(scores).max(2)
    block = values.argmax(1)
    return block * MAX_BLOCK + ids.gather(1, block[:, None])[:, 0]


def _blocks(scores: Tensor) -> Tensor:
    """[B, V] as [B, n, MAX_BLOCK]: otherwise one GPU program reduces the whole vocabulary of a row."""
    B, V = scores.shape
    return F.pad(scores, (0, -V % MAX_BLOCK), value=NEVER).view(B, -1, MAX_BLOCK)


def keep_top(
    scores: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Temperature, then top-k (keeps ties at the k-th rank), then top-p (keeps the entry that crosses p).

    Top-p keeps an entry if the probabilities above it sum to p or less. The warper of `transformers` drops the
    ascending tail that sums to 1 - p or less. The two differ only where a partial sum equals p to the last bit: the
    warper drops the next entry, this function keeps it.

    Args:
        scores: [B, V] float32.
        temperature: [B].
        top_k: [B], 0 is off.
        top_p: [B], <= 0 or >= 1 is off.
    Returns: ids and fixed-point weights (0 for dropped entries), [B, C or V] int64, best first, ties by id.
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


def best(scores: Tensor, candidates: int | None) -> tuple[Tensor, Tensor]:
    """Values and ids of the `candidates` best scores (None: all), best first, equal scores by ascending id."""
    if candidates is None:
        if is_eager_on_cpu(scores) and scores.dtype == torch.float32:
            return _sort_with_numpy(scores)
        return scores.sort(dim=1, descending=True, stable=True)
    values, ids = scores.topk(min(candidates, scores.shape[1]), dim=1, sorted=False)
    # The order of equal scores from topk is undefined; the sampled id must not depend on it.
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _sort_with_numpy(scores: Tensor) -> tuple[Tensor, Tensor]:
    """`best` of all scores [B, V] float32; NumPy sorts with vector instructions, in a fourth of torch's time."""
    bits = (scores + 0.0).numpy().view(np.int32)  # the sum turns -0.0 into 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the scores
    keys = (~rising).astype(np.int64) << 32 | np.arange(scores.shape[1])
    keys.sort(axis=1)
    ids = torch.from_numpy(keys & 0xFFFFFFFF)
    return scores.gather(1, ids), ids


def _keep(scores: Tensor, slots: Tensor, state: SamplerState, candidates: int | None) -> tuple[Tensor, Tensor]:
    return keep_top(scores, state.temperature[slots], state.top_k[slots], state.top_p[slots], candidates)


def _at(scores: Tensor, ids: Tensor) -> Tensor:
    return scores.gather(1, ids.clamp_min(0)[:, None])[:, 0]


def _seen(slots: Tensor, state: SamplerState, vocab_size: int) -> Tensor:
    """[B, V] bool: ids in the slot's repetition window."""
    history, count = state.history[slots], state.count[slots, None]
    length = history.shape[1]
    place = torch.arange(length, device=history.device)
    number = count - 1 - (count - 1 - place) % length
    reaches_from = torch.where(state.chunked_window[slots, None], state.chunk_start[slots, None], count)
    inside = (number >= 0) & (number >= reaches_from - state.repetition_window[slots, None])
    # Entries outside the window are scattered into an extra column, which is cut off.
    seen = torch.zeros(slots.shape[0], vocab_size + 1, dtype=torch.bool, device=history.device)
    return seen.scatter(1, torch.where(inside, history, vocab_size), True)[:, :vocab_size]
