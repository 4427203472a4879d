"""All per-session tensors, preallocated in slots, and the free list of slots.

Contains sizes and the way to empty a slot. Does not compute: the regions read and write these tensors in place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from models.errors import SlotError
from models.inputs.mel_stream import MelStreamState
from models.layers.audio_overlap import RecentMel
from models.layers.kv_cache import KVCache
from models.layers.kv_pages import PageSizes
from models.layers.speech_state import SpeechState
from models.omni import OmniModel
from models.sampling.text import SamplerState

SPOKEN_TOKENS = 64  # maximum text tokens that condition one speech call of a unit or text chunk


@dataclass
class SlotState:
    """State tensors of `n_slots` sessions plus one scratch slot that receives the writes of padding."""

    n_slots: int
    llm: KVCache
    text: SamplerState
    apm: KVCache | None
    mel: MelStreamState | None
    recent_mel: RecentMel | None
    speech: SpeechState | None
    # [S + 1, 65, D] hidden states of the tokens to be spoken next, until the next unit overwrites them. The last row is
    # spare, as in `kv_cache`.
    hidden: Tensor
    # [S + 1, n, query_num, D] rows of image slices that are encoded before their unit; see `EarlyImages`.
    images: Tensor | None

    @classmethod
    def allocate(
        cls,
        model: OmniModel,
        *,
        n_slots: int,
        llm_len: int,
        tts_len: int | None = None,
        shared_scratch: bool = False,
        early_slices: int = 0,
        llm_pages: PageSizes | None = None,
        speech_pages: PageSizes | None = None,
    ) -> "SlotState":
        """Allocate every slot on the model's device.

        Args:
            llm_len: context rows per slot.
            tts_len: speech model rows per slot; default the checkpoint's maximum.
            shared_scratch: all layers share one scratch slot, which only the kernels allow; see `kv_cache`.
            early_slices: image slices of a slot that may be encoded before their unit.
            llm_pages: of a pool of context rows that the slots share; None: `llm_len` rows for each slot.
            speech_pages: of a pool of speech model rows that the slots share; None: `tts_len` rows for each slot.
        """
        config, device, dtype = model.config, model.device, model.dtype
        audio, tts = config.audio_config, config.tts_config

        def cache(
            n_layers: int,
            max_len: int,
            kv_heads: int,
            head_dim: int,
            page_sizes: PageSizes | None = None,
            has_windows: bool = False,
        ) -> KVCache:
            return KVCache(
                n_layers=n_layers,
                n_slots=n_slots,
                max_len=max_len,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
                spare=1,
                shared_scratch=shared_scratch,
                page_sizes=page_sizes,
                has_windows=has_windows,
            )

        heads = audio.encoder_attention_heads
        tts_len = tts_len or tts.max_position_embeddings
        width, n_images = config.hidden_size, early_slices if config.init_vision else 0
        return cls(
            n_slots=n_slots,
            llm=cache(config.num_hidden_layers, llm_len, config.num_key_value_heads, config.head_dim, llm_pages),
            text=SamplerState.allocate(n_slots, device=device),
            apm=cache(audio.encoder_layers, audio.max_source_positions, heads, audio.d_model // heads)
            if config.init_audio
            else None,
            mel=MelStreamState.allocate(n_slots, device=device, n_mels=audio.num_mel_bins)
            if config.init_audio
            else None,
            recent_mel=RecentMel.allocate(
                n_slots, max_positions=audio.max_source_positions, n_mels=audio.num_mel_bins, device=device
            )
            if config.init_audio
            else None,
            speech=SpeechState.allocate(
                cache(tts.num_hidden_layers, tts_len, tts.num_key_value_heads, tts.head_dim, speech_pages, True)
            )
            if config.init_tts
            else None,
            hidden=torch.zeros(n_slots + 1, SPOKEN_TOKENS + 1, width, dtype=dtype, device=device),
            images=torch.zeros(n_slots + 1, n_images, config.query_num, width, dtype=dtype, device=device)
            if n_images
            else None,
        )

    @property
    def scratch(self) -> int:
        """Index of the scratch slot."""
        return self.n_slots

    def tensors(self) -> list[Tensor]:
        """Every state tensor, slot axis first."""
        return list(_tensors(self))

    def reset(self, slots: Tensor) -> None:
        """Empty `slots` [B] completely, cache rows included."""
        for part in (self.llm, self.text, self.apm, self.mel, self.recent_mel, self.speech):
            if part is not None:
                part.reset(slots)
        self.hidden.index_fill_(0, slots, 0)
        if self.images is not None:
            self.images.index_fill_(0, slots, 0)

    def read_in_place(self) -> None:
        """Read rows without copies where possible. Only for regions on a CPU that are not compiled."""
        for cache in self.caches():
            cache.runs_eager = True

    def split_scratch(self) -> None:
        """Give each layer a scratch slot of its own, for compiled layers. Graphs captured before must not run again."""
        for cache in self.caches():
            cache.split_scratch()

    def caches(self) -> list[KVCache]:
        """The slot caches of the model's parts."""
        caches = (self.llm, self.apm, None if self.speech is None else self.speech.cache)
        return [cache for cache in caches if cache is not None]

    def slot_bytes(self) -> dict[str, int]:
        """Bytes of one slot by part, without scratch slots."""
        return {name: sum(tensor[0].nbytes for tensor in tensors) for name, tensors in self._parts().items()}

    def part_bytes(self) -> dict[str, int]:
        """Bytes of all slots by part."""
        return {name: held_bytes(tensors) for name, tensors in self._parts().items()}

    def _parts(self) -> dict[str, list[Tensor]]:
        parts = {field.name: list(_tensors(getattr(self, field.name))) for field in fields(self)}
        return {name: tensors for name, tensors in parts.items() if tensors}

    def nbytes(self) -> int:
        """Bytes of all slots."""
        return held_bytes(self.tensors())


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of `tensors`; a shared storage counts once."""
    memory = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in memory}.values())


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, KVCache):
        yield from part.tensors()
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))


class SlotPool:
    """Free list of slots."""

    def __init__(self, state: SlotState):
        self._state = state
        self._free = list(range(state.n_slots))

    @property
    def n_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def free_slots(self) -> list[int]:
        """Free slots, in the order in which they are leased."""
        return list(self._free)

    def acquire(self, n_rows: int | None = None) -> int:
        """Take a slot from the list that holds `n_rows` context rows; None: as many as a slot may hold.

        Raises: SlotError if no slot is free, or if slots share a pool of rows and too few of them are free.
        """
        if not self._free:
            raise SlotError("slot pool", expected="a free slot", got=f"all {self._state.n_slots} leased")
        self._state.llm.pages.reserve(self._free[0], self._state.llm.max_len if n_rows is None else n_rows)
        return self._free.pop(0)

    def release(self, slot: int) -> None:
        """Return a slot to the list, emptied. Raises: SlotError if it is not leased."""
        if slot in self._free or not 0 <= slot < self._state.n_slots:
            raise SlotError("slot release", expected="a leased slot", got=slot)
        self._state.reset(torch.tensor([slot], device=self._state.llm.lengths.device))
        for cache in self._state.caches():
            cache.pages.release(slot)
        self._free.append(slot)
