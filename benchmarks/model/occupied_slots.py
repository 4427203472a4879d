"""Slot state of the middle of a conversation, so that a timed region has a realistic amount of work.

The table's examples use the scratch slot in every row: one slot's cache, read B times, would come from the L2 cache.
Here row b uses slot b, its cache holds random rows, and its counters are set so that the timed call fills its bucket
to the last row. `restore` resets the counters for the next sample.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from benchmarks.model.floors import EVICTED_ROWS
from models.graphs.captured import Bucket
from models.inputs.audio import UNIT_COLUMNS
from models.layers.apm import UNIT_ROWS
from models.layers.kv_cache import KVCache
from models.sampling.settings import DUPLEX_SPEECH, DUPLEX_TEXT
from models.stages.region_table import Regions
from models.stages.state import SlotState

HEARD_ROWS = 1000  # encoder rows of 20 s of earlier sound
PUSHED_SAMPLES = 160_560  # 10 s and the lookahead of the longer first unit
EMITTED_FRAMES = 1000
TEXT_HISTORY = 300
LLM_REGIONS = ("unit_prefill", "unit_step")  # regions that feed the language model


class OccupiedSlots:
    """One region at one bucket on occupied slots: its inputs, and a reset of the slots."""

    def __init__(self, regions: Regions, name: str, bucket: Bucket):
        region, self._state = regions.table[name], regions.state
        tensors, self.static = region.example(bucket)
        names = list(inspect.signature(region.run).parameters)[len(region.bound) :]
        given = dict(zip(names, tensors, strict=False))
        if "slots" in given:
            n = given["slots"].shape[0]
            assert n <= self._state.n_slots, f"{name}: expected at most {self._state.n_slots} slots, got {n}"
            given["slots"] = torch.arange(n, device=given["slots"].device)
            _occupy(regions, name, bucket)
        if name == "llm_evict":
            given["drop"] = torch.full_like(given["drop"], EVICTED_ROWS)
        self.tensors: tuple[Tensor, ...] = tuple(given.values())
        rows = {id(t) for cache in _caches(self._state) for t in (*cache.k, *cache.v)}
        self._live = [tensor for tensor in self._state.tensors() if id(tensor) not in rows]
        self._saved = [tensor.clone() for tensor in self._live]

    def restore(self) -> None:
        """Reset everything but cache rows, which each call overwrites."""
        for live, saved in zip(self._live, self._saved, strict=True):
            live.copy_(saved)


def new_rows(name: str, bucket: Bucket) -> int:
    """Cache rows one call of a region appends to each slot."""
    if name == "unit_prefill":
        return bucket["rows"]
    return bucket["tokens"] + 2 if name == "speech_begin" else 1


def is_possible(name: str, bucket: Bucket) -> bool:
    """Whether the rows of a call fit into the rows that it attends to."""
    return "kv" not in bucket or new_rows(name, bucket) <= bucket["kv"]


def _caches(state: SlotState) -> list[KVCache]:
    speech = state.speech.cache if state.speech else None
    return [cache for cache in (state.llm, state.apm, speech) if cache is not None]


def _hold(cache: KVCache, n_rows: int) -> None:
    assert 0 <= n_rows <= cache.max_len, f"expected 0..{cache.max_len} rows, got {n_rows}"
    cache.lengths.fill_(n_rows)
    cache.positions.fill_(n_rows)


def _occupy(regions: Regions, name: str, bucket: Bucket) -> None:
    state, config = regions.state, regions.model.config
    device = state.llm.lengths.device
    state.reset(torch.arange(state.n_slots + 1, device=device))
    for cache in _caches(state):
        for tensor in (*cache.k, *cache.v):
            tensor.normal_()
    held = bucket["kv"] - new_rows(name, bucket) if "kv" in bucket else None
    _hold(state.llm, held if name in LLM_REGIONS else state.llm.max_len)
    for slot in range(state.n_slots):
        state.text.configure(slot, DUPLEX_TEXT, seed=slot)
    state.text.history.copy_(torch.randint(0, config.vocab_size, state.text.history.shape, device=device))
    state.text.count.fill_(TEXT_HISTORY)
    state.hidden.normal_()
    if state.apm is not None:
        _hold(state.apm, min(HEARD_ROWS, state.apm.max_len // 2))
    if state.mel is not None:
        for tensor in (state.mel.tail, state.mel.raw, state.mel.frame_max, state.mel.edge_max):
            tensor.normal_()
        state.mel.n_samples.fill_(PUSHED_SAMPLES)
        state.mel.n_emitted.fill_(EMITTED_FRAMES)
    if state.recent_mel is not None:
        state.recent_mel.mel.normal_()
        state.recent_mel.end.fill_(UNIT_COLUMNS)
        state.recent_mel.n_units.fill_(HEARD_ROWS // UNIT_ROWS)
    if state.speech is not None:
        _speak(regions, held if name.startswith("speech") and held is not None else 0)


def _speak(regions: Regions, held: int) -> None:
    """Put every slot into a speech call that does not end."""
    speech: Any = regions.state.speech
    tts = regions.model.config.tts_config
    _hold(speech.cache, held)
    for slot in range(regions.state.n_slots):
        speech.sampler.configure(slot, DUPLEX_SPEECH, tts.speech_eos_id, seed=slot)
    n_speech_tokens = speech.speech_tokens.shape[1]
    speech.sampler.min_speech_tokens.fill_(n_speech_tokens)
    speech.limit.fill_(n_speech_tokens)
    speech.newest.copy_(torch.randint(0, tts.speech_eos_id, speech.newest.shape, device=speech.newest.device))
    speech.done.fill_(False)
