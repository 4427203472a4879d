"""A session's commands for its owner, which may run on any thread.

Checks images and sound on the caller's thread, so that invalid input never reaches the model. Does not contain sockets.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from PIL import Image

from models.checkpoint.config import PreprocessorConfig
from models.errors import AudioError, SettingsError
from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.image import EncodedImage, ImagePatches, image_patches, open_image, plan
from worker.config.session import SessionConfig
from worker.early.trial import EarlyTrial
from worker.loop.audio_buffer import checked
from worker.loop.command_queue import CommandQueue
from worker.loop.prompt.system_prompt import Adjustment, AdjustOutcome, SystemPrompt
from worker.loop.results import DecidedUnit
from worker.loop.session import Session, TextInput, UnitInput
from worker.loop.sessions import Sessions

MAX_SLICES = 9
CutImage = list[ImagePatches]


class ImageCutter:
    """Cuts images into patches for one checkpoint."""

    def __init__(self, settings: PreprocessorConfig, table_side: int):
        """table_side: side length of the vision encoder's position table."""
        self._settings, self._table_side = settings, table_side

    def cut(self, image: bytes | Image.Image | EncodedImage, max_slices: int) -> list[ImagePatches]:
        """The image's slices, the whole image first. Raises: ImageError."""
        settings, opened = self._settings, image if isinstance(image, EncodedImage) else open_image(image)
        slices = plan(*opened.size, max_slices, scale=settings.scale_resolution, patch=settings.patch_size)
        return image_patches(opened, slices, table_side=self._table_side)


class SessionHandle:
    """One session for its owner. Every call returns at once; its future has the errors of the engine thread."""

    def __init__(self, commands: CommandQueue, sessions: Sessions, session: Session, cutter: ImageCutter):
        self._commands, self._sessions, self._session, self._cutter = commands, sessions, session, cutter
        self._config = session.config  # as requested last; the session's own settings change on the engine thread
        self.name = session.id

    @property
    def is_live(self) -> bool:
        """Whether the session has a context for the next unit."""
        return self._session.is_live

    @property
    def context_len(self) -> int:
        """Context rows held."""
        return self._sessions.context_len(self._session)

    @property
    def n_to_unit(self) -> int:
        """Samples that are missing from a whole unit, while none is in flight; 0: each piece of one is to be sent."""
        return 0 if self._session.reference else self._session.audio_buffer.n_to_unit

    @property
    def n_units(self) -> int:
        """Units counted so far, while none is in flight."""
        return self._session.n_units

    @property
    def max_waiting_units(self) -> int:
        """Units that may wait beside the one that runs."""
        return self._sessions.max_waiting_units

    def prepare(self, prompt: SystemPrompt, config: SessionConfig | None = None) -> Future[int]:
        """Start the context from a prompt. config: settings from now on; None keeps the current ones.

        Returns: the prompt's context rows. Future errors: as `Sessions.prepare`.
        Raises: AudioError.
        """
        self._check_sound(prompt)
        self._config = config or self._config
        return self._commands.submit_long(self._sessions.prepare, self._session, prompt, config)

    def _check_sound(self, prompt: SystemPrompt) -> None:
        if prompt.ref_audio is not None:
            max_s, n_samples = self._sessions.max_prompt_s, len(checked(prompt.ref_audio))
            if n_samples > max_s * SAMPLE_RATE:
                got = f"{n_samples / SAMPLE_RATE:.1f} s"
                raise AudioError("sound of a prompt", expected=f"at most {max_s:g} s", got=got)

    def send(
        self,
        sound: np.ndarray | None = None,
        frames: Sequence[bytes | Image.Image | CutImage] = (),
        *,
        force_listen: bool = False,
        force_speak: bool = False,
        close_early: bool = False,
        early: EarlyTrial | None = None,
        decided: DecidedUnit | None = None,
        max_slice_nums: int | Sequence[int] | None = None,
        earlier: Sequence[np.ndarray] = (),
    ) -> Future[None]:
        """Send one unit; its outcome is emitted as an event.

        Args:
            sound: [n] float32 at 16 kHz.
            frames: images: encoded, decoded, or from `cut`.
            force_listen: listen whatever the model decides.
            force_speak: speak whatever the model decides, also in the first units; not with `force_listen`.
            close_early: complete sound that is too short for a unit with silence.
            early: the same, if the unit then speaks and there is time for it.
            decided: the unit's decisions, which are replayed; None: the model decides.
            max_slice_nums: slices per image, one number or one each; None: as the session's settings. Images from
                `cut` keep theirs.
            earlier: pieces of sound before `sound`, each as `sound`. They stay if the unit fails.
        Returns: a future that is done when the unit is queued. Future errors: as `Sessions.unit`.
        Raises: AudioError, ImageError, SettingsError; nothing is queued then.
        """
        arrived = time.monotonic()
        if sound is not None:
            sound = checked(sound)
        if sound is None and not frames and not self._session.reference:
            raise SettingsError("unit", expected="sound or images", got="neither")
        if force_listen and force_speak:
            raise SettingsError("force_speak", expected="false with force_listen", got="true")
        limits = self.slice_limits(len(frames), max_slice_nums)
        slices = [
            frame if isinstance(frame, list) else self.cut(frame, limit)
            for frame, limit in zip(frames, limits, strict=True)
        ]
        unit = UnitInput(sound, slices, force_listen, arrived, force_speak, close_early, early, decided, earlier)
        return self._commands.submit(self._sessions.unit, self._session, unit)

    def send_ahead(self, image: bytes | Image.Image | EncodedImage, max_slices: int) -> CutImage:
        """An image for a later `send`, which the engine encodes before that if it has time. Raises: ImageError."""
        slices = self.cut(image, max_slices)
        if self.max_early_slices:
            self._commands.submit(self._sessions.expect_picture, self._session, slices)
        return slices

    def forget_ahead(self) -> Future[None]:
        """Drop what `send_ahead` has sent since the last `send`: its unit was refused."""
        return self._commands.submit(self._sessions.forget_pictures_ahead, self._session)

    @property
    def max_early_slices(self) -> int:
        """Slices that `send_ahead` may encode before their unit; 0: it saves no time."""
        return 0 if self._config.compat == "reference" else self._sessions.max_early_slices

    def insert_text(self, role: str, text: str) -> Future[None]:
        """Insert a text between the units sent before and after it; its outcome is emitted as an event.

        Slow for long texts: call on a thread.
        Returns: a future that is done when the text is queued. Future errors: as `Sessions.insert_text`.
        Raises: ContextOverflowError, TokenError; nothing is queued then.
        """
        text_input = TextInput(self._sessions.text_ids(role, text), time.monotonic())
        return self._commands.submit(self._sessions.insert_text, self._session, text_input)

    def cut(self, image: bytes | Image.Image | EncodedImage, max_slices: int) -> CutImage:
        """An image for `send`. Raises: ImageError."""
        return self._cutter.cut(image, max_slices)

    def slice_limits(self, n_frames: int, given: int | Sequence[int] | None) -> list[int]:
        """Most slices of each image. Arguments as in `send`. Raises: SettingsError."""
        if given is None:
            given = self._config.max_slice_nums
        limits = [given] * n_frames if isinstance(given, int) else list(given)
        if len(limits) != n_frames:
            raise SettingsError("max_slice_nums", expected=f"one number, or {n_frames}", got=f"{len(limits)}")
        for limit in limits:
            if type(limit) is not int or not 1 <= limit <= MAX_SLICES:
                expected = f"whole numbers from 1 to {MAX_SLICES}"
                raise SettingsError("max_slice_nums", expected=expected, got=limit)
        return limits

    @property
    def config(self) -> SessionConfig:
        """The settings as requested last."""
        return self._config

    def adjust(self, change: Adjustment) -> Future[AdjustOutcome]:
        """Change the session from the next unit on. Future errors: as `Sessions.adjust`; nothing has changed then.

        Raises: AudioError.
        """
        if change.prompt is not None:
            self._check_sound(change.prompt)
        before = self._config
        self._config = change.config or before
        adjusting = self._commands.submit_long(self._sessions.adjust, self._session, change)

        def undo(future: Future[AdjustOutcome]) -> None:
            has_failed = future.cancelled() or future.exception() is not None  # cancelled: the client has gone
            if has_failed and self._config is change.config:
                self._config = before

        adjusting.add_done_callback(undo)
        return adjusting

    def break_speech(self) -> Future[None]:
        """Stop speaking at the next token; if no unit runs, the next one listens instead of continuing the turn."""
        return self._commands.submit(self._sessions.break_speech, self._session)

    def clear_break(self) -> Future[None]:
        """Cancel a `break_speech` that has not taken effect yet."""
        return self._commands.submit(self._sessions.break_speech, self._session, False)

    def pause(self) -> Future[None]:
        """Refuse units until `resume`. Future errors: OrderError."""
        return self._commands.submit(self._sessions.pause, self._session)

    def resume(self) -> Future[None]:
        """Accept units again. Future errors: OrderError."""
        return self._commands.submit(self._sessions.resume, self._session)

    def stop(self) -> Future[None]:
        """Refuse units until `clear_stop` and drop the waiting ones. Future errors: OrderError."""
        return self._commands.submit(self._sessions.stop, self._session)

    def clear_stop(self) -> Future[None]:
        """Accept units again. Future errors: OrderError."""
        return self._commands.submit(self._sessions.clear_stop, self._session)

    def close(self) -> Future[None]:
        """End the session and release its slot. Future errors: OrderError if it is closed."""
        return self._commands.submit(self._sessions.close, self._session)
