"""Prompts in the contexts of sessions: fed once, and kept as snapshots for sessions that request the same.

Everything runs on the engine thread. Contains rows and snapshots. Does not contain the order of a session's calls.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from models.errors import ContextOverflowError, NumericsError, SettingsError
from models.inputs.tokens import Tokenizer
from models.layers.kv_cache import SavedRows
from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.session import Session
from worker.loop.window import UnitWindow

MAX_SNAPSHOT_ROWS = 1024  # longer prompts are rarely shared and take the memory of many snapshots
REF_AUDIO_CHUNK_S = 1.0  # a row of the reference voice looks ahead to the end of its second

Snapshot = SavedRows  # as `UnitSteps.save`


@dataclass(frozen=True)
class PromptChange:
    """What exchanges the prompt of a session.

    Args:
        window: the session's window after it.
        front: keys and values of the new rows: prompt and previous text.
        first_kept: oldest context row that stays.
        n_held: as in `ContextMover.replace_front`.
    """

    window: UnitWindow
    front: Snapshot
    first_kept: int
    n_held: int | None


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
            keys = unit_steps.save_keys(slot, n_held) if saved is None else saved.keys
            unit_steps.context.hold(slot, keys, n_held)
        return n_rows

    def plan(self, session: Session, prompt: SystemPrompt, window: UnitWindow, max_length: int) -> PromptChange:
        """Compute what exchanges the prompt of a session between two units. The session stays as it is.

        Args:
            window: the session's, as an own copy.
            max_length: most context rows of the result.
        Raises: SettingsError for an empty prompt; AudioError; ContextOverflowError; NumericsError.
        """
        prefix, suffix = self._tokenizer.encode(prompt.prefix), self._tokenizer.encode(prompt.suffix)
        audio = self._encode(prompt.ref_audio)
        if not prefix and not suffix and audio is None:
            raise SettingsError("prompt", expected="text or sound", got="neither")
        n_prefix = len(prefix) + (0 if audio is None else len(audio))
        window.replace_prompt(n_prefix, suffix, max_length)
        n_kept = window.length - window.preserve - len(session.pending)
        key = None if window.previous_ids else _digest(prefix, prompt.ref_audio, suffix)
        front = None if key is None else self.snapshots.get(key)
        if front is None:
            rows = _rows(prefix, audio, [*window.previous_ids, *suffix])
            front = self._unit_steps.context.compute_front(session.slot, rows)
            if key is not None:
                self._keep(key, front)
        n_held = None if session.reference else n_prefix if window.mode == "context" else window.preserve
        return PromptChange(window, front, self._unit_steps.context_len(session.slot) - n_kept, n_held)

    def apply(self, session: Session, change: PromptChange) -> None:
        """Exchange the prompt's rows; the rows of the remaining units follow them."""
        self._unit_steps.context.replace_front(session.slot, change.first_kept, change.front, change.n_held)
        session.replace_window(change.window)

    def feed(self, session: Session, rows: Rows) -> int:
        """Feed the prompt of an empty session. Returns: its rows. Raises: ContextOverflowError, NumericsError."""
        unit_steps, what = self._unit_steps, f"prompt of session {session.id}"
        if len(rows) > unit_steps.max_context_len:
            expected = f"at most {unit_steps.max_context_len} rows"
            raise ContextOverflowError(what, expected=expected, got=len(rows))
        self._reserve(session, len(rows))
        self._observer.rows_fed(session.id, "prompt", 0, rows)
        (chosen,) = unit_steps.feed([session.slot], [rows], [False])
        if chosen.bad:
            raise NumericsError(what, expected="finite numbers", got="NaN or infinity")
        return len(rows)

    def _reserve(self, session: Session, n_rows: int) -> None:
        """Rows for a prompt that is longer than the session's window, and for two units after it."""
        self._unit_steps.reserve(session.slot, n_rows + 2 * session.config.unit_rows)

    def _load_or_feed(
        self, session: Session, prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]
    ) -> int:
        """Load the prompt's snapshot, or feed the prompt and save one. Returns: its rows."""
        unit_steps, slot = self._unit_steps, session.slot
        key = _digest(prefix, ref_audio, suffix)
        if (saved := self.snapshots.get(key)) is not None:
            self.snapshots.move_to_end(key)
            self._reserve(session, saved.n_rows)
            unit_steps.load(slot, saved)
            return unit_steps.context_len(slot)
        if not prefix and not suffix and ref_audio is None:
            return 0
        n_rows = self.feed(session, _rows(prefix, self._encode(ref_audio), suffix))
        self._keep(key, unit_steps.save(slot))
        return n_rows

    def _keep(self, key: str, saved: Snapshot) -> None:
        if self._max_snapshots and saved.n_rows <= MAX_SNAPSHOT_ROWS:
            self.snapshots[key] = saved
            if len(self.snapshots) > self._max_snapshots:
                self.snapshots.popitem(last=False)

    def _encode(self, ref_audio: np.ndarray | None) -> Tensor | None:
        """Rows [n, D] of a reference voice."""
        if ref_audio is None:
            return None
        (audio,) = self._unit_steps.encode_clips([torch.from_numpy(ref_audio)], chunk_length=REF_AUDIO_CHUNK_S)
        return audio


def _rows(prefix: list[int], audio: Tensor | None, suffix: list[int]) -> Rows:
    if audio is None:
        return Rows.mixed([*prefix, *suffix], [])
    return Rows.mixed([*prefix, *[0] * len(audio), *suffix], [(len(prefix), audio)])


def _digest(prefix: list[int], ref_audio: np.ndarray | None, suffix: list[int]) -> str:
    digest = hashlib.sha256(repr((prefix, suffix, ref_audio is not None)).encode())
    if ref_audio is not None:
        digest.update(np.ascontiguousarray(ref_audio, np.float32).tobytes())
    return digest.hexdigest()
