"""Regions, sizes and encoders of a runner that need no slot, for callers of `UnitSteps`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from models.stages.early_images import EarlyImages
from models.stages.message_reader import Content, MediaPiece
from models.stages.region_table import Regions, Shapes
from models.stages.runner import Rows, Runner


class RunnerFacts:
    """Base of `UnitSteps`: device, table of regions, sizes and encoders of its runner.

    `early_images` encodes images, some of them before their unit.
    """

    def __init__(self, runner: Runner):
        self.runner, self.early_images = runner, EarlyImages(runner)

    @property
    def device(self) -> torch.device:
        return self.runner.model.device

    @property
    def regions(self) -> Regions:
        """The table of regions; `use_shapes` replaces it. Assigning another one changes what later calls run."""
        return self.runner.regions

    @regions.setter
    def regions(self, table: Regions) -> None:
        self.runner.regions = table

    @property
    def shapes(self) -> Shapes:
        """Bucket sizes of the regions."""
        return self.runner.shapes

    def use_shapes(self, shapes: Shapes) -> None:
        """Change the bucket sizes of later calls, see `Runner.use_shapes`."""
        self.runner.use_shapes(shapes)

    @property
    def n_slots(self) -> int:
        """Slots, leased or not."""
        return self.runner.state.n_slots

    @property
    def n_free(self) -> int:
        """Number of slots that are not leased."""
        return self.runner.pool.n_free

    @property
    def free_slots(self) -> list[int]:
        """Slots that are not leased, in the order of their next leases."""
        return self.runner.pool.free_slots

    @property
    def max_context_len(self) -> int:
        """Context rows of one slot at most."""
        return self.runner.llm_len

    @property
    def n_context_rows(self) -> int:
        """Context rows of all slots together."""
        return self.runner.state.llm.pages.n_rows

    def capacity(self, slot: int) -> int:
        """Context rows that a leased slot holds at most."""
        return self.runner.capacity(slot)

    def n_fitting(self, n_rows: int) -> int:
        """Slots of `n_rows` rows for which a shared pool has room; without one all slots."""
        return self.runner.state.llm.pages.n_fitting(n_rows)

    def reserve(self, slot: int, n_rows: int) -> None:
        """Let a leased slot hold at least `n_rows` context rows. Raises: SlotError if a shared pool has too few."""
        self.runner.state.llm.pages.reserve(slot, n_rows)

    @property
    def max_prefill_rows(self) -> int:
        """Rows that one prefill call feeds to a slot at most."""
        return self.runner.shapes.rows[-1]

    def prefill_bucket(self, n_rows: int) -> int:
        """Size that a prefill of `n_rows` is padded to. Raises: ShapeError for more rows than any bucket has."""
        return self.runner.shapes.fit("unit_prefill", "rows", n_rows)

    def joint_prefill_bucket(self, n_rows: int) -> int:
        """The first size of at least four times that of a prefill of `n_rows`; without one, the largest size."""
        sizes = self.runner.shapes.rows
        return next((size for size in sizes if size >= 4 * self.prefill_bucket(min(n_rows, sizes[-1]))), sizes[-1])

    def encode_clips(self, waves: Sequence[Tensor], *, chunk_length: float) -> list[Tensor]:
        """LLM rows [n, D] of each clip, see `Runner.encode_clips`."""
        return self.runner.encode_clips(waves, chunk_length=chunk_length)

    def media_pieces(self, content: Content, *, batch_padding: bool) -> Iterator[MediaPiece]:
        """Encode the media of `content`, see `Content.media_pieces`."""
        return content.media_pieces(self.runner, batch_padding=batch_padding)

    def encode_content(self, content: Content) -> Rows:
        """The rows of `content`, ready to be fed."""
        return content.encode(self.runner)
