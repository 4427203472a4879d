"""What the engine thread executes and emits for each session, as records of a trace."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from worker.config.session import SessionConfig
from worker.loop.job import Job
from worker.loop.observer import FedKind, FedRows, Observer
from worker.loop.prompt.system_prompt import Adjustment, AdjustOutcome, SystemPrompt
from worker.loop.results import NO_STAGES, Event, Failure, InsertedText, UnitResult
from worker.loop.session import Session, TextInput, UnitInput
from worker.loop.sessions import Sessions
from worker.trace.records import (
    Record,
    Sink,
    digest,
    levels,
    pack,
    pack_frames,
    pack_prompt,
    pack_voice,
    top_logits,
)


@dataclass
class _Computed:
    """Of the unit in flight, copied from the device."""

    sound_rows: list[np.ndarray] = field(default_factory=list)
    image_rows: list[np.ndarray] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    speech_tokens: list[int] = field(default_factory=list)


@dataclass
class _SessionTrace:
    sink: Sink
    began: float
    progress: int = 0
    answered: int = 0  # progress at the last outcome
    unit: _Computed = field(default_factory=_Computed)


class TraceRecorder:
    """Traces of all sessions that are prepared while it is on.

    A session's progress is the number of text tokens and speech calls since its preparation. Each command is recorded
    with the progress at its execution, which places an interrupt inside a unit.

    Attributes:
        is_on: sessions that are prepared from now on are traced.
        header: first line of each trace.
        changed: called on the engine thread with a session's name after each progress and event; None: nothing is.
        sessions: of the engine, once it is built.
    """

    def __init__(self, open_sink: Callable[[str], Sink], *, is_on: bool = False, asked_only: bool = False):
        """open_sink: makes the receiver of a session's records, from its name. asked_only: only after `ask`."""
        self._open_sink = open_sink
        self._traces: dict[str, _SessionTrace] = {}
        self._asked_only, self._asked = asked_only, set[str]()
        self.is_on, self.header = is_on, dict[str, Any]()
        self.changed: Callable[[str], None] | None = None
        self.sessions: Sessions | None = None

    def progress(self, session: str) -> int:
        """Progress of a session; 0 if it is not traced."""
        return self._traces[session].progress if session in self._traces else 0

    # --- commands ------------------------------------------------------------------------------

    def ask(self, session: str, is_requested: bool) -> bool:
        """Whether a session is traced from its next preparation on. On any thread. is_requested: by its client."""
        if is_requested:
            self._asked.add(session)
        else:
            self._asked.discard(session)
        return self.is_on and (is_requested or not self._asked_only)

    def prepared(self, session: str, prompt: SystemPrompt, config: SessionConfig, seed: int) -> None:
        """A session has a new context."""
        if self._asked_only and session not in self._asked:
            self.closed(session)
            return
        if session not in self._traces:
            if not self.is_on:
                return
            self._traces[session] = _SessionTrace(self._open_sink(session), time.monotonic())
            header = self.header
            self._traces[session].sink(lambda: header)
        settings = config.model_dump(mode="json") | {"seed": seed}
        self.command(session, "prepare", lambda: {"config": settings, "prompt": pack_prompt(prompt)})

    def command(self, session: str, kind: str, fields: Callable[[], Record] = dict) -> None:
        """A command was executed. fields: of its record; called on the writer's thread."""
        if (trace := self._traces.get(session)) is None:
            return
        at, ms = trace.progress, round(1000 * (time.monotonic() - trace.began), 1)
        trace.sink(lambda: {"kind": kind, "at": at, "ms": ms, **fields()})

    def closed(self, session: str) -> None:
        """A session has ended, or is not traced any more."""
        self._asked.discard(session)
        if (trace := self._traces.pop(session, None)) is not None:
            trace.sink(None)

    # --- what is computed ----------------------------------------------------------------------

    def computed(self, session: str) -> _Computed | None:
        """What is known of the unit in flight; None for a session that is not traced."""
        return self._traces[session].unit if session in self._traces else None

    def advance(self, session: str) -> None:
        """Count a token or a speech call."""
        if session in self._traces:
            self._traces[session].progress += 1
            self._tell(session)

    def take_back(self, session: str) -> None:
        """Forget what the unit in flight has computed."""
        if (trace := self._traces.get(session)) is not None:
            trace.unit, trace.progress = _Computed(), trace.answered

    def event(self, session: str, event: Event) -> None:
        """An event was emitted."""
        if (trace := self._traces.get(session)) is None:
            return
        if isinstance(event, InsertedText):
            n_rows = event.n_rows
            self.command(session, "inserted", lambda: {"n_rows": n_rows})
        elif isinstance(event, UnitResult | Failure):
            unit, trace.unit, trace.answered = trace.unit, _Computed(), trace.progress
            if isinstance(event, Failure):
                failed = f"{type(event.error).__name__}: {event.error}"
                self.command(session, "failure", lambda: {"error": failed})
            else:
                self.command(session, "result", partial(_outcome, event, unit))
        self._tell(session)

    def _tell(self, session: str) -> None:
        if self.changed is not None:
            self.changed(session)


def _outcome(event: UnitResult, unit: _Computed) -> Record:
    pcm = np.zeros(0, np.float32) if event.pcm is None else event.pcm
    rows = {"sound": unit.sound_rows, "pictures": unit.image_rows, "hidden": unit.logits}
    times = {name: ms for name, ms in vars(event.times).items() if name not in NO_STAGES}
    return {
        "unit": event.index,
        "decision": "incomplete" if event.is_incomplete else "listen" if event.is_listen else "speak",
        "end_of_turn": event.end_of_turn,
        "early": None if event.early is None else str(event.early.end),
        "text": event.text,
        "ids": list(event.tokens),
        "speech_tokens": digest(np.array(unit.speech_tokens, np.int64)),
        "n_speech_tokens": event.n_speech_tokens,
        "n_samples": len(pcm),
        "samples": digest(pcm),
        "levels": levels(pcm),
        "rows": {name: digest(*arrays) for name, arrays in rows.items()},
        "top": [top_logits(logits) for logits in unit.logits[-1:]],
        "context_len": event.context_len,
        "times": {name: round(ms, 2) for name, ms in times.items()},
    }


class TraceObserver(Observer):
    """Passes everything on to another observer and to the recorder."""

    def __init__(self, recorder: TraceRecorder, inner: Observer | None):
        self._recorder, self._inner = recorder, inner or Observer()

    def rows_fed(self, session: str, kind: FedKind, past: int, rows: FedRows) -> None:
        self._inner.rows_fed(session, kind, past, rows)

    def audio_encoded(self, session: str, rows: Tensor) -> None:
        self._inner.audio_encoded(session, rows)
        if (unit := self._recorder.computed(session)) is not None:
            unit.sound_rows.append(_copy(rows))

    def images_encoded(self, session: str, rows: list[Tensor]) -> None:
        self._inner.images_encoded(session, rows)
        if (unit := self._recorder.computed(session)) is not None:
            unit.image_rows.extend(map(_copy, rows))

    def prefilled(self, session: str, logits: Tensor) -> None:
        self._inner.prefilled(session, logits)
        if (unit := self._recorder.computed(session)) is not None:
            unit.logits.append(_copy(logits))

    def token_sampled(self, session: str, job: Job, token: int) -> int:
        token = self._inner.token_sampled(session, job, token)
        self._recorder.advance(session)
        return token

    def speech_call_ended(
        self, session: str, start: int, rows: Tensor, min_tokens: int, speech_tokens: list[int]
    ) -> None:
        self._inner.speech_call_ended(session, start, rows, min_tokens, speech_tokens)
        if (unit := self._recorder.computed(session)) is not None:
            unit.speech_tokens.extend(speech_tokens)
        self._recorder.advance(session)

    def window_voiced(self, session: str, speech_tokens: tuple[int, ...], last: bool) -> None:
        self._inner.window_voiced(session, speech_tokens, last)

    def result_sent(self, session: str, event: Event) -> None:
        self._inner.result_sent(session, event)

    def unit_taken_back(self, session: str) -> None:
        self._inner.unit_taken_back(session)
        self._recorder.take_back(session)

    def closed(self, session: str) -> None:
        self._inner.closed(session)


def _copy(rows: Tensor) -> np.ndarray:
    return np.array(rows.detach().float().cpu().numpy())


class TracedSessions(Sessions):
    """Sessions whose commands are recorded once they are executed."""

    def __init__(self, *given: Any, recorder: TraceRecorder):
        """given: as for `Sessions`."""
        super().__init__(*given)
        self._recorder, self._drawn = recorder, 0
        recorder.sessions = self

    def open(
        self, name: str, config: SessionConfig, emit: Callable[[Event], None], n_rows: int | None = None
    ) -> Session:
        def traced(event: Event) -> None:
            self._recorder.event(name, event)
            emit(event)

        return super().open(name, config, traced, n_rows)

    def seed(self, config: SessionConfig) -> int:
        self._drawn = super().seed(config)
        return self._drawn

    def prepare(self, session: Session, prompt: SystemPrompt, config: SessionConfig | None = None) -> int:
        n_rows = super().prepare(session, prompt, config)
        self._recorder.prepared(session.id, prompt, session.config, self._drawn)
        return n_rows

    def unit(self, session: Session, unit: UnitInput) -> None:
        super().unit(session, unit)
        self._recorder.command(session.id, "unit", lambda: _unit(unit))

    def insert_text(self, session: Session, text: TextInput) -> None:
        super().insert_text(session, text)
        self._recorder.command(session.id, "text", lambda: {"ids": list(text.ids)})

    def adjust(self, session: Session, change: Adjustment) -> AdjustOutcome:
        outcome = super().adjust(session, change)
        config = None if change.config is None else change.config.model_dump(mode="json")
        self._recorder.command(
            session.id,
            "adjust",
            lambda: {"config": config, "prompt": pack_prompt(change.prompt), "voice": pack_voice(change.voice)},
        )
        return outcome

    def break_speech(self, session: Session, on: bool = True) -> None:
        super().break_speech(session, on)
        self._recorder.command(session.id, "interrupt", lambda: {"on": on})

    def pause(self, session: Session) -> None:
        super().pause(session)
        self._recorder.command(session.id, "pause")

    def resume(self, session: Session) -> None:
        super().resume(session)
        self._recorder.command(session.id, "resume")

    def stop(self, session: Session) -> None:
        super().stop(session)
        self._recorder.command(session.id, "stop")

    def clear_stop(self, session: Session) -> None:
        super().clear_stop(session)
        self._recorder.command(session.id, "clear_stop")

    def close(self, session: Session) -> None:
        super().close(session)
        self._recorder.closed(session.id)


def _unit(unit: UnitInput) -> Record:
    sound = None if unit.sound is None else np.concatenate((*unit.earlier, unit.sound))
    flags = ("force_listen", "force_speak", "close_early")
    return {
        "n_samples": 0 if sound is None else len(sound),
        "sound": None if sound is None else pack(sound),
        "frames": pack_frames(unit.frames),
        **{name: getattr(unit, name) for name in flags},
        "decided": None if unit.decided is None else unit.decided._asdict(),
    }
