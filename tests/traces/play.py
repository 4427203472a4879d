"""Replays recorded sessions on the real engine parts, alone or many at once, with the recording's fake vocoder."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.traces.account import SessionRecord
from tests.traces.folder import Trace, TraceError
from tests.traces.settings import session_config, slice_limits
from tests.traces.stage import VOICE, RecordedEngine, RecordedModel
from tests.traces.watch import UnitLog
from worker.config.session import SessionConfig
from worker.loop.prompt.system_prompt import Adjustment, SystemPrompt
from worker.loop.results import Failure
from worker.loop.session import SessionPhase, UnitInput

SPARE_ROWS = 64  # context beyond the recording's, so that a diverging session is compared and not refused


def play(cast: RecordedModel, traces: Sequence[Trace], *, snapshots: int = 0) -> list[SessionRecord]:
    """Run every trace as a session of one engine. Returns: their records.

    A unit is sent once its session has closed the one before, so that units of several sessions share batches.
    Raises: TraceError; the error of a session that fails.
    """
    configs = [session_config(trace.given) for trace in traces]
    pairs = list(zip(traces, configs, strict=True))
    llm_len = max(max(_rows_held(trace) + SPARE_ROWS, config.rows_needed) for trace, config in pairs)
    with torch.no_grad():
        stage = RecordedEngine(cast, n_slots=len(traces), llm_len=llm_len, snapshots=snapshots)
        players = [_Player(stage, trace, config) for trace, config in pairs]
        for player in players:
            player.prepare()
        while busy := [player for player in players if not player.is_over]:
            for player in busy:
                player.advance()
            stage.sessions.dispatch()
            stage.loop.run()
    return [player.account for player in players]


class _Player:
    """The session of one trace."""

    def __init__(self, stage: RecordedEngine, trace: Trace, config: SessionConfig):
        self._stage, self._trace = stage, trace
        self._session = stage.sessions.open(trace.name, config, lambda event: None)
        stage.watcher.join(trace.name, self._session.slot)
        wanted = frozenset(int(name[1:].split(".")[0]) for name in trace.tensors if ".after_evict." in name)
        self.account = SessionRecord(stage.unit_steps, self._session, stage.cast.tokenizer, wanted)
        self._log: UnitLog | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.account.final)

    def prepare(self) -> None:
        given, stage = self._trace.given["prepare"], self._stage
        log = stage.watcher.fresh(self._trace.name)
        prefix, suffix = given.get("prefix") or "", given.get("suffix") or ""
        sound = stage.cast.folder.reference_sound if given.get("ref_audio") else None
        stage.sessions.prepare(self._session, SystemPrompt(prefix, suffix, sound, VOICE))
        self.account.take_prepare(log, prefix, suffix)

    def advance(self) -> None:
        """Record the unit that has ended and send the next one."""
        if self._log is not None and isinstance(self._log.event, Failure):
            raise self._log.event.error
        if self._session.phase is not SessionPhase.READY:
            return
        if self._log is not None:
            self.account.take_unit(self._log, self._stage.loop.job_of[self._trace.name])
        units = self._trace.given["units"]
        if len(self.account.units) < len(units):
            self._send(units[len(self.account.units)])
        else:
            self.account.take_final()

    def _send(self, unit: dict[str, Any]) -> None:
        cast, sessions = self._stage.cast, self._stage.sessions
        for call in unit.get("before") or []:
            self._before(call)
        sessions.adjust(self._session, Adjustment(session_config(self._trace.given, unit)))
        sound, frames = cast.folder.sound(unit.get("audio")), unit.get("frames") or []
        slices = [cast.slices(number, limit) for number, limit in zip(frames, slice_limits(unit), strict=True)]
        self._log = self._stage.watcher.fresh(self._trace.name)
        sessions.unit(self._session, UnitInput(sound, slices, bool(unit.get("force_listen")), 0.0))

    def _before(self, call: str) -> None:
        sessions, session = self._stage.sessions, self._session
        calls = {
            "set_break_event": lambda: sessions.break_speech(session),
            "clear_break_event": lambda: sessions.break_speech(session, False),
            "set_session_stop": lambda: sessions.stop(session),
            "clear_session_stop": lambda: sessions.clear_stop(session),
        }
        if call not in calls:
            raise TraceError(f"{self._trace.name}: before", expected=f"one of {', '.join(calls)}", got=call)
        calls[call]()


def _rows_held(trace: Trace) -> int:
    """The longest context in the recording, in rows."""
    phases = [trace.expected["prepare"], *(phase for unit in trace.expected["units"] for phase in unit.values())]
    return max(phase["kv_len"] for phase in phases if isinstance(phase, dict) and "kv_len" in phase)
