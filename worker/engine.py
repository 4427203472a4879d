"""The engine: one thread that owns the model, fed by one inbox; what the rest of the worker calls.

Order is a property of the inbox: what a session asks for happens in the order it asked, a unit is closed before its
next one begins, and a slot is given back after the step in flight. Pictures and sound are checked on the caller's
thread, so that bad input never reaches the model. Knows threads. Does not know sockets.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from models.errors import AudioError, ModelError, SettingsError
from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.image import image_patches, open_image, plan
from models.stages.message_reader import Content, MessageReader
from worker.assembly.backend_flags import resolve_compile
from worker.assembly.hub import with_local_checkpoint
from worker.assembly.parts import EngineParts, build, device_type
from worker.chat.answers import Answers
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.half_duplex import HalfDuplex
from worker.compile.compile_engine import compile_engine
from worker.config.session import EngineConfig, SessionConfig
from worker.loop.audio_buffer import checked
from worker.loop.observer import Observer
from worker.loop.results import Event
from worker.loop.session import Session, UnitInput
from worker.loop.sessions import Sessions, SystemPrompt
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager

LOG = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 30.0


class EngineError(ModelError, RuntimeError):
    """The engine is not running, or has broken down."""


class Handle:
    """One session as its owner sees it. Every call returns at once; what can be refused late is in the future."""

    def __init__(self, engine: "Engine", session: Session):
        self._engine, self._session = engine, session
        self._config = session.config  # as asked for last: the session's own changes on the engine's thread
        self.name = session.id

    @property
    def is_live(self) -> bool:
        """Whether there is a context that units go on from."""
        return self._session.is_live

    @property
    def n_rows(self) -> int:
        """Context rows held."""
        return self._engine.parts.duplex.runner.context_len(self._session.slot)

    @property
    def most_waiting(self) -> int:
        """Units that may wait, beside the one that runs."""
        return self._engine.config.max_waiting_units

    def prepare(self, prompt: SystemPrompt, config: SessionConfig | None = None) -> Future[int]:
        """Start the context anew. Gives: its rows. Errors: as `Sessions.prepare`. Raises: AudioError."""
        if prompt.ref_audio is not None:
            longest, n_samples = self._engine.config.max_prompt_s, len(checked(prompt.ref_audio))
            if n_samples > longest * SAMPLE_RATE:
                got = f"{n_samples / SAMPLE_RATE:.1f} s"
                raise AudioError("sound of a prompt", expected=f"at most {longest:g} s", got=got)
        self._config = config or self._config
        return self._ask(Sessions.prepare, prompt, config)

    def send(
        self,
        sound: np.ndarray | None = None,
        frames: Sequence[bytes | Image.Image] = (),
        *,
        force_listen: bool = False,
        max_slice_nums: int | Sequence[int] | None = None,
    ) -> Future[None]:
        """One unit.

        Args:
            sound: [n] float32 at 16 kHz. frames: encoded or decoded pictures.
            max_slice_nums: slices per picture, one number or one each; None: as the session's config says.
        Gives: nothing, once it is taken; the outcome comes as an event. Errors: as `Sessions.unit`.
        Raises: AudioError, ImageError, SettingsError at once; nothing has been taken then.
        """
        arrived = time.monotonic()
        if sound is not None:
            sound = checked(sound)
        if sound is None and not frames and not self._session.reference:
            raise SettingsError("unit", expected="sound or pictures", got="neither")
        slices = self._engine.patches(frames, self._slice_limits(frames, max_slice_nums))
        return self._ask(Sessions.unit, UnitInput(sound, slices, force_listen, arrived))

    def _slice_limits(self, frames: Sequence[Any], given: int | Sequence[int] | None) -> list[int]:
        if given is None:
            given = self._config.max_slice_nums
        limits = [given] * len(frames) if isinstance(given, int) else list(given)
        if len(limits) != len(frames):
            raise SettingsError("max_slice_nums", expected=f"one number, or {len(frames)}", got=f"{len(limits)}")
        for limit in limits:
            if type(limit) is not int or not 1 <= limit <= 9:
                raise SettingsError("max_slice_nums", expected="whole numbers from 1 to 9", got=limit)
        return limits

    def adjust(self, config: SessionConfig) -> Future[None]:
        """Other settings from the next unit on. Errors: as `Sessions.adjust`."""
        self._config = config
        return self._ask(Sessions.adjust, config)

    def break_speech(self) -> Future[None]:
        """Stop speaking at the next token; if no unit runs, the next one listens instead of speaking on."""
        return self._ask(Sessions.break_speech)

    def clear_break(self) -> Future[None]:
        """Take back a break that has not happened yet."""
        return self._ask(Sessions.break_speech, False)

    def pause(self) -> Future[None]:
        return self._ask(Sessions.pause)

    def resume(self) -> Future[None]:
        return self._ask(Sessions.resume)

    def stop(self) -> Future[None]:
        return self._ask(Sessions.stop)

    def clear_stop(self) -> Future[None]:
        return self._ask(Sessions.clear_stop)

    def close(self) -> Future[None]:
        return self._ask(Sessions.close)

    def _ask(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._engine.ask(method, self._session, *arguments)


class AnswerLine(Handle):
    """The same for a half-duplex conversation."""

    def __init__(self, engine: "Engine", answers: Answers, session: Session):
        super().__init__(engine, session)
        self._answers = answers

    def answer(self, content: Content, config: ReplyConfig, arrived: float) -> Future[None]:
        """Answer what the user said. Gives: nothing, once it is begun. Errors: as `Answers.answer`."""
        return self._engine.submit(self._answers.answer, self._session, content, config, arrived)

    def take_back(self) -> Future[bool]:
        """Forget the round that runs. Gives: whether there was one."""
        return self._engine.submit(self._answers.take_back, self._session)


class Engine:
    """Model, slots, loop and thread. Use as a context manager, or call `start` and `close`."""

    def __init__(self, parts: EngineParts, config: EngineConfig, *, observer: Observer | None = None):
        self.parts, self.config = parts, config
        voices = VoiceManager(parts.duplex, parts.vocoder)
        self.loop = UnitLoop(parts.duplex, parts.vocoder, voices, observer=observer)
        self._sessions = Sessions(parts.duplex, parts.language, voices, self.loop, config)
        self._answers = Answers(self._sessions, parts.duplex, parts.language, voices, self.loop)
        self._reader = MessageReader(parts.model.config, parts.language.tokenizer, parts.pictures)
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._inbox = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_over = False

    @classmethod
    def build(cls, config: EngineConfig, *, observer: Observer | None = None) -> "Engine":
        """Load everything, compile and capture what the config says; errors as `worker.assembly.parts.build`.

        Returns: an engine whose thread runs, since what is compiled belongs to it.
        """
        config = with_local_checkpoint(resolve_compile(config, device_type(config.device)))
        parts = build(config)
        engine = cls(parts, config, observer=observer)
        engine.start()
        try:
            engine.submit(compile_engine, parts, config).result()
        except BaseException:
            engine.close()
            raise
        return engine

    def __enter__(self) -> "Engine":
        if self._thread is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        assert self._thread is None, "the engine runs already"
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all sessions and the thread; the step in flight is finished."""
        if self._thread is not None and self._thread.is_alive():
            self._inbox.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                LOG.error("the engine's step in flight did not end within %.0f s", CLOSE_TIMEOUT_S)

    def open(self, name: str, config: SessionConfig | None, emit: Callable[[Event], None]) -> Future[Handle]:
        """Lease a slot for a new session.

        Args:
            config: None = the engine's defaults.
            emit: gets the session's events, on the engine's thread; it must return at once.
        Errors: as `Sessions.open`; EngineError.
        """

        def opened() -> Handle:
            return Handle(self, self._sessions.open(name, config or self.config.session, emit))

        return self.submit(opened)

    def chat(
        self,
        name: str,
        messages: object,
        config: ReplyConfig | None,
        emit: Callable[[Event], None],
        *,
        voice: Any = None,
    ) -> Future[Handle]:
        """Answer a conversation in a session that closes by itself behind the outcome.

        Args:
            messages: the whole conversation, as `MessageReader.read` takes it. emit: as in `open`.
            voice: `models.token2wav.voice.voice.Voice`; None: the answer is not voiced.
        Errors: as `Answers.chat`; EngineError.
        Raises: MessageError, ImageError, AudioError, TokenError at once.
        """
        arrived, config = time.monotonic(), config or ReplyConfig()
        content = self._reader.cut(self._reader.read(messages, config.prompt_options()))

        def opened() -> Handle:
            return Handle(self, self._answers.chat(name, content, config, emit, voice=voice, arrived=arrived))

        return self.submit(opened)

    def converse(
        self,
        name: str,
        system: Sequence[str | np.ndarray],
        config: HalfDuplexConfig | None,
        emit: Callable[[Event], None],
        *,
        voice: Any = None,
    ) -> Future[HalfDuplex]:
        """Open a half-duplex conversation.

        Args:
            system: text and sound of the system message. voice: as in `chat`.
            emit: gets the events, on the engine's thread or on that of whoever pushes sound.
        Errors: as `Answers.converse`; EngineError.
        Raises: as `chat`; SettingsError.
        """
        config = config or HalfDuplexConfig()
        talk = HalfDuplex(self._reader, config, emit)
        options = replace(config.reply.prompt_options(), add_generation_prompt=False)
        content = self._reader.cut(self._reader.read([{"role": "system", "content": list(system)}], options))

        def opened() -> HalfDuplex:
            session = self._answers.converse(name, content, config, talk.forward, voice=voice)
            talk.begin(AnswerLine(self, self._answers, session))
            return talk

        return self.submit(opened)

    def ask(self, method: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a method of `Sessions` called on the engine's thread."""
        return self.submit(method, self._sessions, *arguments)

    @property
    def failure(self) -> BaseException | None:
        """What the engine broke down from, if it did."""
        return self._failure

    def n_snapshots(self) -> int:
        """Prepared prompts that are kept."""
        return self._sessions.n_snapshots

    def n_free(self) -> int:
        """Slots that no session has."""
        return self.parts.duplex.runner.pool.n_free

    def patches(self, frames: Sequence[bytes | Image.Image], limits: Sequence[int]) -> list[list[Any]]:
        """Each picture's slices, the whole picture first. Raises: ImageError."""
        settings, vision = self.parts.pictures, self.parts.model.config.vision_config
        slices = []
        for frame, limit in zip(frames, limits, strict=True):
            image = open_image(frame)
            cut = plan(*image.size, limit, scale=settings.scale_resolution, patch=settings.patch_size)
            slices.append(image_patches(image, cut, table_side=vision.table_side))
        return slices

    # --- the thread ----------------------------------------------------------------------------

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have something called on the engine's thread. Errors: what it raises; EngineError."""
        future: Future[Any] = Future()
        if self._thread is None or not self._thread.is_alive():
            future.set_exception(self._error())
            return future
        self._inbox.put((future, call, arguments))
        if self._is_over:  # what the thread no longer sees is refused here
            self._refuse_rest()
        return future

    def _error(self) -> EngineError:
        got = "none" if self._failure is None else f"one that broke down: {self._failure}"
        return EngineError("engine", expected="a running thread", got=got)

    def _serve(self) -> None:
        if self.parts.model.device.type == "cuda":
            torch.cuda.set_device(self.parts.model.device)
        try:
            while self._take_orders(block=self.loop.is_idle):
                self._sessions.dispatch()
                self.loop.run()
                self._sessions.dispatch()  # whoever is done and has more waiting, so that the inbox does not block
        except BaseException as error:
            LOG.exception("the engine broke down")
            self._failure = error
            self._sessions.tell_all(self._error())
        finally:
            self._is_over = True
            self._sessions.close_all()
            self._refuse_rest()

    def _take_orders(self, block: bool) -> bool:
        """Everything in the inbox, waiting for the first if there is nothing else to do. Returns: False at the end."""
        try:
            while True:
                order = self._inbox.get(block=block)
                if order is None:
                    return False
                future, call, arguments = order
                block = False
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(call(*arguments))
                    except BaseException as error:
                        future.set_exception(error)
                        if not isinstance(error, Exception):
                            raise
                if call is Sessions.prepare:
                    return True  # it takes as long as a unit: whoever speaks has a turn before the next one
        except queue.Empty:
            return True

    def _refuse_rest(self) -> None:
        while True:
            try:
                order = self._inbox.get_nowait()
            except queue.Empty:
                return
            if order is not None and order[0].set_running_or_notify_cancel():
                order[0].set_exception(self._error())
