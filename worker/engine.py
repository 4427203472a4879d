"""The engine of the omni model: its work on the engine thread, and the calls that the rest of the worker makes to it.

The order of events is the order of the command queue: a session's commands run in the order of submission, a unit is
closed before its next one begins, and a slot is released after the step in flight. Does not contain the thread
(`engine_thread`) or sockets.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from models.inputs.chat_template import template_of
from models.inputs.prompts import Prompt
from models.stages.message_reader import Content, MessageReader
from models.token2wav.voice.voice import Voice
from worker.assembly.backend_flags import resolve_compile
from worker.assembly.hub import with_local_checkpoint
from worker.assembly.parts import EngineParts, build, device_type
from worker.assembly.solver_steps import with_solver_steps
from worker.chat.answers import Answers
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.half_duplex import HalfDuplex
from worker.compile.compile_engine import compile_engine
from worker.config.session import EngineConfig, SessionConfig
from worker.engine_thread import EngineThread
from worker.loop.command_queue import CommandQueue
from worker.loop.duplex_job import DuplexJob
from worker.loop.early.early_pictures import EarlyPictureCounts
from worker.loop.observer import Observer
from worker.loop.order.unit_deadlines import UnitDeadlines
from worker.loop.results import Event
from worker.loop.session import Session
from worker.loop.session_handle import ImageCutter, SessionHandle
from worker.loop.sessions import Sessions, SessionsMark
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager
from worker.trace.recorder import TracedSessions, TraceObserver, TraceRecorder

Result = TypeVar("Result")
Params = ParamSpec("Params")


class HalfDuplexHandle(SessionHandle):
    """The session of a half-duplex conversation."""

    def __init__(
        self, commands: CommandQueue, sessions: Sessions, session: Session, cutter: ImageCutter, answers: Answers
    ):
        super().__init__(commands, sessions, session, cutter)
        self._answers = answers

    def answer(self, content: Content, config: ReplyConfig, arrived: float) -> Future[None]:
        """Answer the user's turn. Returns: a future that is done when the reply has begun.

        Future errors: as `Answers.answer`.
        """
        return self._commands.submit(self._answers.answer, self._session, content, config, arrived)

    def take_back(self) -> Future[bool]:
        """Remove the round in flight. Returns: whether there was one."""
        return self._commands.submit(self._answers.take_back, self._session)


class Engine:
    """Model, slots and loop. Use as a context manager, or call `start` and `close`.

    thread: runs the work.
    """

    def __init__(
        self,
        parts: EngineParts,
        config: EngineConfig,
        *,
        observer: Observer | None = None,
        thread: EngineThread | None = None,
        recorder: TraceRecorder | None = None,
    ):
        """
        Args:
            thread: one that runs and that other models use too; None: one of its own, which `start` starts.
            recorder: of traces of sessions; None: nothing is traced.
        """
        self.parts, self.config = parts, config.model_copy(update={"kv_layout": parts.kv_layout})
        self._recorder = recorder
        if recorder is not None:
            observer = TraceObserver(recorder, observer)
        self._has_own_thread = thread is None
        self.thread = EngineThread(parts.model.device) if thread is None else thread
        self._deadlines = UnitDeadlines()
        unit_steps, language = parts.unit_steps, parts.language
        voices = VoiceManager(unit_steps, parts.vocoder)
        self._unit_steps = unit_steps
        self._loop = UnitLoop(
            unit_steps,
            parts.vocoder,
            voices,
            observer=observer,
            first_sound_first=config.first_sound_first,
            # Units end 7 ms later for a first sound 1.4 ms sooner (two H200s): about as much as the copy saves them.
            first_sound_alone=parts.model.has_decode_copy,
        )
        given = unit_steps, language, voices, self._loop, config
        self._sessions = Sessions(*given) if recorder is None else TracedSessions(*given, recorder=recorder)
        self._answers = Answers(self._sessions, unit_steps, language, voices, self._loop, config.session)
        template = partial(template_of, config.model_path)
        self._reader = MessageReader(parts.model.config, language.tokenizer, parts.pictures, template)
        self._cutter = ImageCutter(parts.pictures, parts.model.config.vision_config.table_side)
        self._commands = self.thread.commands

    @classmethod
    def build(
        cls, config: EngineConfig, *, observer: Observer | None = None, recorder: TraceRecorder | None = None
    ) -> "Engine":
        """Load, compile and capture as `config` requires; errors as `worker.assembly.parts.build`.

        Returns: an engine whose thread runs: compiled code belongs to that thread.
        """
        config = with_solver_steps(with_local_checkpoint(resolve_compile(config, device_type(config.device))))
        parts = build(config)
        engine = cls(parts, config, observer=observer, recorder=recorder)
        engine.start()
        try:
            engine.submit(compile_engine, parts, config).result()
        except BaseException:
            engine.close()
            raise
        return engine

    def trace(self, session: str, is_requested: bool) -> bool:
        """Whether a trace of the session is recorded from its next preparation on. is_requested: by its client."""
        return self._recorder is not None and self._recorder.ask(session, is_requested)

    def __enter__(self) -> "Engine":
        if self.thread.thread is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to work, once."""
        self.thread.add(self, first=True)
        if self._has_own_thread:
            self.thread.start()

    def close(self) -> None:
        """End all sessions after the step in flight; a thread of its own ends too."""
        if self._has_own_thread:
            self.thread.close()
        else:
            self.thread.remove(self)

    # --- sessions ------------------------------------------------------------------------------

    def open(self, name: str, config: SessionConfig | None, emit: Callable[[Event], None]) -> Future[SessionHandle]:
        """Lease a slot for a new session.

        Args:
            config: None for the engine's defaults.
            emit: receives the session's events on the engine thread; must return at once.
        Future errors: as `Sessions.open`; EngineError.
        """

        def open_session() -> SessionHandle:
            return self._handle(self._sessions.open(name, config or self.config.session, emit))

        return self.submit(open_session)

    def chat(
        self,
        name: str,
        messages: object,
        config: ReplyConfig | None,
        emit: Callable[[Event], None],
        *,
        voice: Voice | None = None,
    ) -> Future[SessionHandle]:
        """Answer a conversation in a session that closes after its result.

        Args:
            messages: the whole conversation, as `MessageReader.read` takes it.
            emit: as in `open`.
            voice: None for a reply without sound.
        Future errors: as `Answers.chat`; EngineError.
        Raises: MessageError, ImageError, AudioError, TokenError.
        """
        arrived, reply = time.monotonic(), config or ReplyConfig()
        content = self._reader.cut(self._reader.read(messages, reply.prompt_options()))
        if reply.text is not None:
            content = replace(content, answer=tuple(self.parts.language.tokenizer.encode_plain(reply.text)))

        def open_chat() -> SessionHandle:
            return self._handle(self._answers.chat(name, content, reply, emit, voice=voice, arrived=arrived))

        return self.submit(open_chat)

    def prompt(self, messages: object, config: ReplyConfig) -> Prompt:
        """The prompt of a conversation, without a session. Raises: as `chat`."""
        return self._reader.read(messages, config.prompt_options())

    def converse(
        self,
        name: str,
        system: Sequence[str | np.ndarray],
        config: HalfDuplexConfig | None,
        emit: Callable[[Event], None],
        *,
        voice: Voice | None = None,
    ) -> Future[HalfDuplex]:
        """Open a half-duplex conversation.

        Args:
            system: text and sound of the system message.
            emit: receives events on the engine thread or on the thread that pushes sound.
            voice: as in `chat`.
        Future errors: as `Answers.converse`; EngineError.
        Raises: as `chat`; SettingsError.
        """
        settings = config or HalfDuplexConfig()
        conversation = HalfDuplex(self._reader, settings, emit, self.max_context_len)
        options = replace(settings.reply.prompt_options(), add_generation_prompt=False)
        content = self._reader.cut(self._reader.read([{"role": "system", "content": list(system)}], options))

        def open_conversation() -> HalfDuplex:
            answers = self._answers
            session = answers.converse(name, content, settings, conversation.forward, voice=voice)
            conversation.begin(HalfDuplexHandle(self._commands, self._sessions, session, self._cutter, answers))
            return conversation

        return self.submit(open_conversation)

    def _handle(self, session: Session) -> SessionHandle:
        return SessionHandle(self._commands, self._sessions, session, self._cutter)

    def order_first_sound(self, on: bool) -> Future[None]:
        """Whether work of turns without sound goes first from now on, instead of `EngineConfig.first_sound_first`."""
        return self.submit(self._loop.order_first_sound, on)

    # --- state ---------------------------------------------------------------------------------

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread; None if there is none."""
        return self.thread.failure

    @property
    def device(self) -> torch.device:
        return self.parts.model.device

    @property
    def n_slots(self) -> int:
        """Slots in all."""
        return self.parts.n_slots

    @property
    def has_vocoder(self) -> bool:
        """Whether the engine makes sound."""
        return self.parts.vocoder is not None

    @property
    def max_context_len(self) -> int:
        """Context rows of one slot."""
        return self._unit_steps.max_context_len

    @property
    def n_context_rows(self) -> int:
        """Context rows of all slots together."""
        return self._unit_steps.n_context_rows

    def n_free(self) -> int:
        """Slots that no session leases."""
        return self._unit_steps.n_free

    def n_fitting(self) -> int:
        """Further sessions with default settings for which a shared pool of context rows has room."""
        return self._unit_steps.n_fitting(self.config.rows_of(self.config.session))

    @property
    def early_pictures(self) -> EarlyPictureCounts:
        """Counts of pictures that were encoded before their unit."""
        return self._loop.pictures.counts

    def n_snapshots(self) -> int:
        """Number of saved prompts."""
        return self._sessions.n_snapshots

    def forget_snapshots(self) -> Future[None]:
        """Drop all saved prompts."""
        return self.submit(self._sessions.forget_snapshots)

    def mark_sessions(self) -> Future[SessionsMark]:
        """State that closed sessions leave behind, for `forget_sessions_since`."""
        return self.submit(self._sessions.mark)

    def forget_sessions_since(self, mark: SessionsMark) -> Future[None]:
        """Restore the state of `mark`; see `Sessions.forget_since`."""
        return self.submit(self._sessions.forget_since, mark)

    def expect_unit_times(self, seconds: Callable[[int], float]) -> Future[None]:
        """Tell what units take before one is measured: s until `n` units that start together are answered, by `n`."""
        return self.submit(self._loop.expect_unit_times, seconds)

    def query_session(self, name: str, query: Callable[[Session], Result]) -> Future[Result]:
        """Call `query` with an open session on the engine thread. Future errors: OrderError; those of `query`."""
        return self.submit(lambda: query(self._sessions.get(name)))

    def submit(self, call: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]:
        """Call a function on the engine thread. Future errors: those of the call; EngineError."""
        return self._commands.submit(call, *args, **kwargs)

    # --- called by the thread ------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no job and no early picture is left."""
        return self._loop.is_idle

    def run(self, slack_s: float) -> None:
        """One iteration of the unit loop."""
        self._sessions.dispatch()
        self._loop.run()
        self._sessions.dispatch()  # start waiting units before the queue blocks

    def slack_s(self) -> float:
        """Seconds that other models may take before a unit is late."""
        now = time.monotonic()
        self._deadlines.watch({job: job.arrived for job in self._loop.jobs if isinstance(job, DuplexJob)}, now)
        return self._deadlines.slack_s(now)

    def after_others(self, seconds: float) -> None:
        """Count the time of other models."""
        self._deadlines.count_other(seconds)

    def fail(self, error: Exception) -> None:
        """Send the failure to all sessions."""
        self._sessions.fail_all(error)

    def end(self) -> None:
        """Close all sessions."""
        self._sessions.close_all()
