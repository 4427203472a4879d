"""Runs a traced session again, alone, and compares every unit with the trace."""

import argparse
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from models.atomic_file import write_atomically
from models.errors import ModelError
from worker.config.session import EngineConfig, SessionConfig
from worker.engine import Engine
from worker.loop.prompt.system_prompt import Adjustment
from worker.loop.results import DecidedUnit, Event, Failure, InsertedText, UnitResult
from worker.loop.session import Session, TextInput, UnitInput
from worker.trace.compare import differences, first_of_each_stage
from worker.trace.header import header_of
from worker.trace.recorder import TraceRecorder
from worker.trace.records import (
    OUTCOMES,
    Record,
    Trace,
    TraceError,
    read_records,
    stripped,
    to_line,
    unpack,
    unpack_frames,
    unpack_prompt,
    unpack_voice,
)

NAME = "replay"
POLL_S = 0.05


class Replay:
    """One traced session on an engine, which is built with `recorder`."""

    def __init__(self, engine: Engine, recorder: TraceRecorder, trace: Trace):
        self._engine, self._recorder = engine, recorder
        self._commands = deque(trace.commands)
        self._n_waiting = 0  # units and texts without an outcome
        self._error: Exception | None = None
        self._is_done = threading.Event()

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Execute all commands, each at the progress of the session that the trace has for it.

        is_over: polled; True ends the session before all commands have run.
        Raises: TraceError for a trace that cannot be executed; EngineError.
        """
        handle = self._engine.open(NAME, None, self._count).result()
        self._session: Session = self._engine.query_session(NAME, lambda session: session).result()
        self._recorder.changed = lambda _: self._schedule()
        try:
            while not self._is_done.wait(POLL_S) and not is_over():
                self._engine.submit(self._advance).result()
        finally:
            self._recorder.changed = None
        if self._error is not None:
            raise TraceError("trace", expected="commands that a session accepts", got=repr(self._error))
        handle.close().result()

    def _count(self, event: Event) -> None:
        if isinstance(event, UnitResult | Failure | InsertedText):
            self._n_waiting -= 1

    def _schedule(self) -> None:
        """Execute what is due before the next step of the loop. Called on the engine thread."""
        self._engine.submit(self._advance)

    def _advance(self) -> None:
        try:
            while self._commands and self._is_due(self._commands[0]):
                self._execute(self._commands.popleft())
        except Exception as error:
            self._error = error
            self._is_done.set()
        if not self._commands and not self._session.is_busy and not self._session.waiting:
            self._is_done.set()

    def _is_due(self, command: Record) -> bool:
        is_between_units = not self._session.is_busy and not self._session.waiting
        if command["kind"] in ("prepare", "adjust"):
            return is_between_units
        # After a difference the session may never make the progress of the trace.
        return self._recorder.progress(NAME) >= command["at"] or (self._n_waiting <= 0 and is_between_units)

    def _execute(self, command: Record) -> None:
        sessions, session, kind = self._recorder.sessions, self._session, command["kind"]
        assert sessions is not None, "expected an engine that is built with the recorder"
        if kind == "prepare":
            prompt = unpack_prompt(command["prompt"])
            if prompt is None:
                raise TraceError("prepare", expected="a prompt", got="none")
            sessions.prepare(session, prompt, SessionConfig(**command["config"]))
        elif kind == "unit":
            self._n_waiting += 1
            sessions.unit(session, _unit(command))
        elif kind == "text":
            self._n_waiting += 1
            sessions.insert_text(session, TextInput(tuple(command["ids"]), time.monotonic()))
        elif kind == "adjust":
            # Its seed is the one that `prepare` drew, if the client gave none.
            given = command["config"]
            config = None if given is None else SessionConfig(**{**given, "seed": session.config.seed})
            prompt, voice = unpack_prompt(command["prompt"]), unpack_voice(command["voice"])
            sessions.adjust(session, Adjustment(config, prompt, voice))
        elif kind == "interrupt":
            sessions.break_speech(session, command["on"])
        elif kind in ("pause", "resume", "stop", "clear_stop"):
            {
                "pause": sessions.pause,
                "resume": sessions.resume,
                "stop": sessions.stop,
                "clear_stop": sessions.clear_stop,
            }[kind](session)
        else:
            raise TraceError("trace", expected="a known command", got=kind)


def _unit(command: Record) -> UnitInput:
    sound = None if command["sound"] is None else unpack(command["sound"])
    flags: dict[str, Any] = {name: command[name] for name in ("force_speak", "close_early")}
    frames = unpack_frames(command["frames"])
    decided = None if (given := command.get("decided")) is None else DecidedUnit(**given)
    return UnitInput(sound, frames, command["force_listen"], time.monotonic(), **flags, decided=decided)


def run_again(trace: Trace, config: EngineConfig, *, only_first: bool = False) -> Trace:
    """The same session on a new engine.

    Args:
        trace: the session.
        config: of the engine.
        only_first: end after the first unit whose ids or sound differ. What runs until this is noticed is included.
    Raises: as `Engine.build` and `Replay.run`.
    """
    records: list[Record] = []
    n_equal = 0

    def differs() -> bool:
        nonlocal n_equal
        got = [record for record in tuple(records) if record.get("kind") in OUTCOMES][n_equal:]
        expected = trace.outcomes[n_equal : n_equal + len(got)]
        n_equal += len(got)
        return len(expected) < len(got) or any(not one.is_rounding for one in differences(expected, got))

    recorder = TraceRecorder(lambda _: lambda make: None if make is None else records.append(make()), is_on=True)
    with Engine.build(config, recorder=recorder) as engine:
        recorder.header = header_of(engine.parts, config)
        Replay(engine, recorder, trace).run(differs if only_first else lambda: False)
    return Trace.of(records)


def replay_config(trace: Trace, model: str, token2wav: str | None, device: str) -> EngineConfig:
    """The engine's settings of a trace for this model. Compilation is off on another kind of device."""
    recorded = trace.header["engine"]
    if device == "auto":
        device = recorded["device"] if recorded["device"] == "cpu" or torch.cuda.is_available() else "cpu"
    given = {**recorded, "model_path": model, "token2wav_path": token2wav, "device": device}
    if device.partition(":")[0] != recorded["device"]:
        given["compile"] = {**recorded["compile"], "enabled": False}
    return EngineConfig(**given)


def replay(args: argparse.Namespace, note: Callable[[str], None]) -> int:
    """`--replay`. Returns: the exit status. Raises: ModelError."""
    try:
        records = read_records(Path(args.replay))
        if args.strip:
            write_atomically(Path(args.strip), "".join(map(to_line, stripped(records))).encode())
            return 0
    except OSError as error:
        raise ModelError(args.replay, expected="a trace file", got=str(error.strerror)) from None
    trace = Trace.of(records)
    config = replay_config(trace, args.model, args.token2wav, args.device)
    again = run_again(trace, config, only_first=args.first)
    for name in ("model", "weights", "device"):
        if (expected := trace.header[name]) != (got := again.header[name]):
            note(f"note: {name}: the trace has {expected}, this run {got}")
    found = differences(trace.outcomes, again.outcomes)
    first = next((one.unit for one in found if not one.is_rounding), None)
    if args.first and first is not None:
        found = [one for one in found if one.unit <= first]  # a session that ended early lacks the units after it
    for one in first_of_each_stage(found):
        print(f"first difference of {one.stage}: {one}")
    changed = [one for one in found if not one.is_rounding]
    n_units, n_changed = len(trace.outcomes), len({one.unit for one in changed})
    if not changed:
        print(f"{n_units} units: ids and sound are the same")
    elif args.first:
        print(f"{n_units} units: unit {first} differs, later ones are not compared")
    else:
        print(f"{n_units} units: {n_changed} differ")
    sys.stdout.flush()
    return 1 if changed else 0
