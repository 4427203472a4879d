"""Prompts in the contexts of sessions: fed once, and kept as snapshots for sessions that request the same.

Everything runs on the engine thread. Contains rows and snapshots. Does not contain the order of a session's calls.
"""

import hashlib
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from models.errors import ContextOverflowError, NumericsError
from models.inputs.tokens import Tokenizer
from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.session import Session

MAX_SNAPSHOT_ROWS = 1024  # longer prompts are rarely shared and take the memory of many snapshots
REF_AUDIO_CHUNK_S = 1.0  # a row of the reference voice looks ahead to the end of its second

Snapshot = list[Tensor]  # as `UnitSteps.save`


class Prompts:
    """Feeds prompts, and keeps snapshots of the latest `max_snapshots` of them."""

    def __init__(self, unit_steps: UnitSteps, tokenizer: Tokenizer, observer: Observer, max_snapshots: int):
        self._unit_steps, self._tokenizer, self._observer = unit_steps, tokenizer, observer
        self._max_snapshots = max_snapshots
        self.snapshots: OrderedDict[str, Snapshot] = OrderedDict()

    def restore(self, snapshots: OrderedDict[str, Snapshot]) -> None:
        """Replace all snapshots."""
        self.snapshots = snapshots

    def start(self, session: Session, prompt: SystemPrompt) -> int:
        """Start the empty context of a session. Returns: rows of the prompt.

        Raises: AudioError, ContextOverflowError, NumericsError.
        """
        unit_steps, slot, config = self._unit_steps, session.slot, session.config
        prefix, suffix = self._tokenizer.encode(prompt.prefix), self._tokenizer.encode(prompt.suffix)
        n_rows = self._load_or_feed(session, prefix, prompt.ref_audio, suffix)
        session.window.protect(n_rows - len(suffix), suffix)
        if not session.reference and config.window.mode != "off":
            n_held = n_rows - (len(suffix) if config.window.mode == "context" else 0)
            saved = self.snapshots.get(_digest(prefix, prompt.ref_audio, suffix))  # shared if there is one
            keys = unit_steps.save_keys(slot, n_held) if saved is None else saved
            unit_steps.context.hold(slot, keys, n_held)
        return n_rows

    def feed(self, session: Session, rows: Rows) -> int:
        """Feed the prompt of an empty session. Returns: its rows. Raises: ContextOverflowError, NumericsError."""
        unit_steps, what = self._unit_steps, f"prompt of session {session.id}"
        if len(rows) > unit_steps.max_context_len:
            expected = f"at most {unit_steps.max_context_len} rows"
            raise ContextOverflowError(what, expected=expected, got=len(rows))
        self._observer.rows_fed(session.id, "prompt", 0, rows)
        (chosen,) = unit_steps.feed([session.slot], [rows], [False])
        if chosen.bad:
            raise NumericsError(what, expected="finite numbers", got="NaN or infinity")
        return len(rows)

    def _load_or_feed(
        self, session: Session, prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]
    ) -> int:
        """Load the prompt's snapshot, or feed the prompt and save one. Returns: its rows."""
        unit_steps, slot = self._unit_steps, session.slot
        key = _digest(prefix, ref_audio, suffix)
        if (saved := self.snapshots.get(key)) is not None:
            self.snapshots.move_to_end(key)
            unit_steps.load(slot, saved)
            return unit_steps.context_len(slot)
        rows = self._rows(prefix, ref_audio, suffix)
        if rows is None:
            return 0
        n_rows = self.feed(session, rows)
        if n_rows <= MAX_SNAPSHOT_ROWS:
            self._keep(key, unit_steps.save(slot))
        return n_rows

    def _keep(self, key: str, saved: Snapshot) -> None:
        if self._max_snapshots:
            self.snapshots[key] = saved
            if len(self.snapshots) > self._max_snapshots:
                self.snapshots.popitem(last=False)

    def _rows(self, prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]) -> Rows | None:
        if not prefix and not suffix and ref_audio is None:
            return None
        if ref_audio is None:
            return Rows.mixed([*prefix, *suffix], [])
        (audio,) = self._unit_steps.encode_clips([torch.from_numpy(ref_audio)], chunk_length=REF_AUDIO_CHUNK_S)
        ids = [*prefix, *[0] * len(audio), *suffix]
        return Rows.mixed(ids, [(len(prefix), audio)])


def _digest(prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]) -> str:
    digest = hashlib.sha256(repr((prefix, suffix, ref_audio is not None)).encode())
    if ref_audio is not None:
        digest.update(np.ascontiguousarray(ref_audio, np.float32).tobytes())
    return digest.hexdigest()
