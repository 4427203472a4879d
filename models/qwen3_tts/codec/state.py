"""State of the speech decoder for all slots: convolution columns, a ring of keys and values, and positions.

The ring holds the newest positions of a slot; position p is in row p mod R. With R at least the window less one plus
the largest chunk, no chunk overwrites a row that it still has to read. A chunk writes ring rows while it runs, and
columns and positions at its end, so a call that raises leaves every slot as it was.
"""

import torch
from torch import Tensor

from models.errors import SlotError
from models.layers.kv_cache import CacheView
from models.qwen3_tts.codec.config import SpeechDecoderConfig

ALIGNED_ROWS = 8  # attention kernels need key counts and mask strides in multiples of it


class CodecState:
    """All slots of one speech decoder, and the scratch slot, which receives the writes of padding."""

    def __init__(
        self,
        config: SpeechDecoderConfig,
        n_columns: int,
        *,
        n_slots: int,
        max_frames: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """
        Args:
            config: of the decoder.
            n_columns: values that the decoder's convolutions keep for a slot.
            n_slots: slots of sessions.
            max_frames: frames of the largest chunk.
            device, dtype: of the decoder.
        """
        self.n_slots = self.scratch = n_slots
        self.window, self.max_frames = config.sliding_window, max_frames
        self.n_rows = -(-(self.window - 1 + max_frames) // ALIGNED_ROWS) * ALIGNED_ROWS
        shape = n_slots + 1, config.num_key_value_heads, self.n_rows, config.head_dim

        def rings() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

        self.k, self.v = rings(), rings()
        self.columns = torch.zeros(n_slots + 1, n_columns, dtype=dtype, device=device)
        self.positions = torch.zeros(n_slots + 1, dtype=torch.int64, device=device)  # frames decoded

    def tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, self.columns, self.positions]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def view(self, slots: Tensor, n_frames: Tensor, n_rows: int) -> CacheView:
        """Addresses of a chunk in the rings.

        Args:
            slots: [B] int64, distinct except for the scratch slot.
            n_frames: [B] int64 valid frames, 0 to `n_rows`.
            n_rows: frames of the bucket.
        """
        assert n_rows <= self.max_frames, f"frames of a chunk: expected at most {self.max_frames}, got {n_rows}"
        offset = torch.arange(n_rows, device=slots.device)
        positions = self.positions[slots][:, None] + offset
        row_slots = torch.where(offset < n_frames[:, None], slots[:, None], self.scratch)
        # Frames since a row was written. Rows that this chunk writes after the query's own count as the oldest.
        age = (positions[:, :, None] - torch.arange(self.n_rows, device=slots.device)) % self.n_rows
        mask = (age < self.window) & (age <= positions[:, :, None])
        return CacheView(slots, row_slots, positions % self.n_rows, positions, mask, self.n_rows)

    def advance(self, slots: Tensor, n_frames: Tensor, columns: Tensor) -> None:
        """Store the columns [B, n_columns] after a chunk and add its n_frames [B] to the positions of `slots` [B]."""
        self.columns.index_copy_(0, slots, columns)
        self.positions.index_add_(0, slots, n_frames)

    def reset(self, slots: Tensor) -> None:
        """Set `slots` [B] to the start of a stream. Rows are zeroed: 0 * NaN in a masked row is NaN."""
        for tensor in self.tensors():
            tensor.index_fill_(0, slots, 0)

    def save(self, slot: int) -> list[Tensor]:
        """Copies of a slot's state, for `load`. Raises: SlotError."""
        self._check(slot)
        return [tensor[slot].clone() for tensor in self.tensors()]

    def load(self, slot: int, saved: list[Tensor]) -> None:
        """Replace a slot's state by that of `save`, of any slot of this decoder. Raises: SlotError."""
        self._check(slot)
        for tensor, value in zip(self.tensors(), saved, strict=True):
            tensor[slot].copy_(value)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.n_slots:
            raise SlotError("codec slot", expected=f"0 to {self.n_slots - 1}", got=slot)
