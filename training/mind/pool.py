"""Records on the training device, which batches are drawn from again and again. One thread may add while one draws.

Sound, pictures and phonemes lie in rings on the device, where the newest replace the oldest; rows stay on the host.
"""

import random
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from training.mind.batches import Batch, collate, to_device
from training.mind.records import Record
from training.timelines.speech import RATE

BUCKET_ROWS = 64  # records of a batch differ in length by less than this
SPARE = 0.02  # of a ring: its oldest rows are not drawn any more
# Uses of a record of each task on average; with more, the model memorizes replies instead of learning from sound.
MAX_USES = {"text": 10, "echo": 10, "captions": 10, "talk": 4, "written": 4, "chat": 4}
MIN_BATCH, MAX_BATCH = 2, 512  # sequences; the compiler makes a program of its own for one


class Ring:
    """Rows in a tensor [capacity, ...]; numbers of rows grow without end, the newest replace the oldest."""

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.rows = torch.zeros(capacity, *shape, dtype=dtype, device=device)
        self.end = 0

    def add(self, rows: Tensor) -> int:
        """Store rows next to each other. Returns: the number of the first. Raises: ValueError for too many."""
        capacity, n = len(self.rows), len(rows)
        if n > capacity:
            raise ValueError(f"rows of one record: expected at most {capacity}, got {n}")
        if self.end % capacity + n > capacity:
            self.end += -self.end % capacity  # what does not fit before the end is left unused
        start, self.end = self.end, self.end + n
        if n:
            # Copied from pinned memory the device reads it later, while the host goes on.
            source = rows.pin_memory() if self.rows.is_cuda else rows
            self.rows[start % capacity : start % capacity + n].copy_(source, non_blocking=True)
        return start

    def holds(self, start: int) -> bool:
        """Whether the row is there, and is not among the next that are replaced: another thread may do so meanwhile."""
        return start >= self.end - int((1 - SPARE) * len(self.rows))


@dataclass(frozen=True)
class Stored:
    """A record and the numbers of its first rows in the rings."""

    record: Record
    wave: int
    phones: int
    pictures: int
    clip: int


@dataclass(frozen=True)
class PoolSizes:
    """Rows of the rings."""

    samples: int
    pictures: int
    clip_samples: int

    @classmethod
    def of_bytes(cls, n: float) -> "PoolSizes":
        """Sizes for memory of n bytes: two fifths for sound, as much for pictures."""
        return cls(int(0.4 * n / 2), max(8, int(0.5 * n / (448 * 448 * 3))), int(0.1 * n / 2))


class Pool:
    """Records by task and length."""

    def __init__(self, sizes: PoolSizes, device: torch.device):
        self.device = device
        self.waves = Ring(sizes.samples, (), torch.int16, device)
        self.phones = Ring(sizes.samples // RATE * 50, (), torch.int8, device)
        self.pictures = Ring(sizes.pictures, (448, 448, 3), torch.uint8, device)
        self.clips = Ring(sizes.clip_samples, (), torch.int16, device)
        self._buckets: dict[str, dict[int, list[Stored]]] = defaultdict(dict)
        self.n_added: dict[str, int] = defaultdict(int)
        self.n_drawn: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()  # of the lists in `_buckets`

    def add(self, records: Iterable[Record]) -> list[Stored]:
        """Store records. Returns: them as they are stored."""
        added = []
        for one in records:
            stored = Stored(
                record=one,
                wave=self.waves.add(torch.from_numpy(one.wave)),
                phones=self.phones.add(torch.from_numpy(one.phones)),
                pictures=self.pictures.add(torch.from_numpy(one.pictures)),
                clip=self.clips.add(torch.from_numpy(one.clip)),
            )
            added.append(stored)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        with self._lock:
            for stored in added:
                task = stored.record.task
                self._buckets[task].setdefault(len(stored.record.ids) // BUCKET_ROWS, []).append(stored)
                self.n_added[task] += 1
        return added

    def has(self, task: str) -> bool:
        return self.n_added.get(task, 0) > 0

    @property
    def uses(self) -> dict[str, float]:
        """How often a record of each task has been drawn on average."""
        added = dict(self.n_added)  # at once: another thread may add a task
        return {task: round(self.n_drawn[task] / n, 1) for task, n in added.items() if n}

    def is_fresh(self, task: str) -> bool:
        """Whether the records of a task have been used less than MAX_USES says, on average."""
        return self.n_drawn[task] < MAX_USES[task] * self.n_added[task]

    def draw(self, task: str, n_rows: int, rng: random.Random) -> list[Stored]:
        """Records of one task and of similar length with about `n_rows` rows in all, at least one."""
        buckets = self._buckets[task]
        lengths = [one for one in list(buckets) if buckets[one]]
        # A row is drawn as often as any other: a bucket counts by its rows.
        (length,) = rng.choices(lengths, [len(buckets[one]) * (one + 0.5) for one in lengths])
        bucket = buckets[length]
        n = max(MIN_BATCH, min(MAX_BATCH, n_rows // (BUCKET_ROWS * (length + 1))))
        drawn: list[Stored] = []
        while len(drawn) < n and bucket:
            at = rng.randrange(len(bucket))
            if self._is_alive(bucket[at]):
                drawn.append(bucket[at])
            else:
                with self._lock:
                    bucket[at] = bucket[-1]
                    bucket.pop()
        if not drawn:
            return self.draw(task, n_rows, rng)
        self.n_drawn[task] += len(drawn)
        return drawn

    def batch(self, drawn: Sequence[Stored]) -> Batch:
        """The index tensors of records."""
        return collate([one.record for one in drawn])

    def waves_of(self, drawn: Sequence[Stored]) -> Tensor:
        """Sound [B, 16 000 U] float32 of U units, the longest record's; later samples are zero."""
        return _gathered(self.waves, [(one.wave, len(one.record.wave)) for one in drawn]).float() / 32_768

    def phones_of(self, drawn: Sequence[Stored], unknown: int) -> Tensor:
        """Phonemes [B, 50 U] int64."""
        return _gathered(self.phones, [(one.phones, len(one.record.phones)) for one in drawn], unknown).long()

    def pictures_of(self, drawn: Sequence[Stored]) -> Tensor:
        """Pictures [P, 448, 448, 3] uint8 of all records, in order."""
        numbers = [one.pictures + i for one in drawn for i in range(len(one.record.pictures))]
        at = torch.tensor(numbers, dtype=torch.int64) % len(self.pictures.rows)
        return self.pictures.rows[to_device(at, self.device)]

    def classes_of(self, drawn: Sequence[Stored]) -> Tensor:
        """What the pictures of `pictures_of` show [P, 4] int64."""
        classes = torch.from_numpy(np.concatenate([one.record.picture_classes for one in drawn]).astype(np.int64))
        return to_device(classes, self.device)

    def clips_of(self, drawn: Sequence[Stored]) -> tuple[Tensor, Tensor]:
        """Clips [R, N] float32 of the records that have one, in order, and their samples [R] on the host."""
        spans = [(one.clip, len(one.record.clip)) for one in drawn if len(one.record.clip)]
        lengths = torch.tensor([n for _, n in spans], dtype=torch.int64)
        return _gathered(self.clips, spans).float() / 32_768, lengths

    def _is_alive(self, stored: Stored) -> bool:
        rings = (self.waves, stored.wave), (self.phones, stored.phones), (self.pictures, stored.pictures)
        return all(ring.holds(start) for ring, start in (*rings, (self.clips, stored.clip)))


def _gathered(ring: Ring, spans: Sequence[tuple[int, int]], fill: int = 0) -> Tensor:
    """Spans (first, length) of a ring as rows [B, longest]."""
    longest = max((n for _, n in spans), default=0)
    capacity, device = len(ring.rows), ring.rows.device
    first, lengths = (
        (torch.tensor(part, dtype=torch.int64) for part in zip(*spans, strict=True))
        if spans
        else (
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, dtype=torch.int64),
        )
    )
    first, lengths = to_device(first, device) % capacity, to_device(lengths, device)
    column = torch.arange(longest, device=device)
    inside = column < lengths[:, None]
    return torch.where(inside, ring.rows[torch.where(inside, first[:, None] + column, 0)], fill)
