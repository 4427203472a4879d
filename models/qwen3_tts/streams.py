"""Speech of many requests, frame by frame: codes from the language models, sound from the codec, limits of both.

One call is one frame of every request that can have one. Does not contain when calls are made, or where sound goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from models.errors import SettingsError, SlotError
from models.qwen3_tts import frame_steps
from models.qwen3_tts.codec.codec import CodeChunk, SpeechCodec
from models.qwen3_tts.codec.config import FRAME_SAMPLES
from models.qwen3_tts.prompt import Array, SpeechPrompt
from models.qwen3_tts.runaway import CodesEnd, RunawayLimits, SilenceWatch
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.settings import FrameSampling

RAMP = (1, 2, 4, 8)  # frames of a request's first chunks of sound; the last size repeats


@dataclass(frozen=True)
class SpokenRequest:
    """One request.

    Attributes:
        prompt: its rows, and the text after them.
        n_text: text tokens that are spoken, as far as known; decides the cap of its frames.
        reference_codes: int64 [frames, 16] that an in-context prompt continues; the codec continues them too.
        seed: 0..2**64-1, decides its draws whatever runs beside it.
        sampling, limits: how codes are drawn, and when an answer that does not end is ended.
        first_frames: frames of the first chunk of sound; None: as the ramp of the streams.
    """

    prompt: SpeechPrompt
    n_text: int
    reference_codes: Array | None = None
    seed: int = 0
    sampling: FrameSampling = field(default_factory=FrameSampling)
    limits: RunawayLimits = field(default_factory=RunawayLimits)
    first_frames: int | None = None


@dataclass(frozen=True)
class SpokenPart:
    """What one call gave one slot: samples float32 [n] at 24 kHz, possibly none, and why nothing follows."""

    slot: int
    samples: Array
    end: CodesEnd | None


@dataclass
class _Stream:
    """A request in its slot. pending: frames that are not sound yet. waits: its text has to go on first."""

    request: SpokenRequest
    silence: SilenceWatch
    n_text: int
    n_track: int  # tokens after the prompt
    is_open: bool
    frames: int = 0
    chunks: int = 0
    pending: list[Array] = field(default_factory=list)
    waits: bool = False
    end: CodesEnd | None = None


class SpeechStreams:
    """Requests in slots of a runner and of a codec with the same numbers."""

    def __init__(self, runner: TalkerRunner, codec: SpeechCodec, *, ramp: tuple[int, ...] = RAMP):
        """
        Args:
            codec: has a slot for each of the runner's, and decodes chunks of each size of the ramp.
            ramp: frames of the first chunks.
        Raises: SettingsError if the codec has too few slots or too small chunks.
        """
        if codec.state.n_slots < runner.n_slots:
            raise SettingsError("codec slots", expected=f"at least {runner.n_slots}", got=codec.state.n_slots)
        if not ramp or min(ramp) < 1 or max(ramp) > codec.shapes.frames[-1]:
            raise SettingsError("ramp", expected=f"chunks of 1 to {codec.shapes.frames[-1]} frames", got=ramp)
        self.runner, self.codec, self._ramp = runner, codec, ramp
        self._streams: dict[int, _Stream] = {}

    @property
    def can_step(self) -> bool:
        """Whether some request can have a frame now: one that does not wait for text."""
        return any(not stream.waits for stream in self._streams.values())

    def start(self, request: SpokenRequest) -> int:
        """Give a request a free slot and feed its prompt.

        Returns: the slot.
        Raises: SlotError without a free slot; SettingsError and ContextOverflowError for a request that does not fit.
        """
        most = self.codec.shapes.frames[-1]
        if request.first_frames is not None and not 1 <= request.first_frames <= most:
            raise SettingsError("frames of the first chunk", expected=f"1 to {most}", got=request.first_frames)
        free = self.runner.free_slots
        slot = free[0] if free else 0  # the runner refuses a slot that is not free
        self.runner.open(slot, request.sampling, seed=request.seed, max_frames=self._cap(request, request.n_text))
        try:
            self.codec.begin([slot])
            if request.reference_codes is not None:
                self.codec.decode_all(slot, request.reference_codes)
            self.runner.feed({slot: request.prompt})
        except BaseException:
            self.runner.close(slot)
            raise
        prompt = request.prompt
        self._streams[slot] = _Stream(
            request, SilenceWatch(request.limits), request.n_text, len(prompt.trailing), prompt.is_open
        )
        return slot

    def text_room(self, slot: int) -> int:
        """Text tokens that `append_text` takes for a running slot now."""
        stream = self._streams[slot]
        return self.runner.text_room(slot, n_read=max(stream.frames - 1, 0))

    def append_text(self, slot: int, ids: Sequence[int], *, is_open: bool) -> None:
        """Append the end of the text that is there now; a slot that waits goes on.

        Args:
            ids: text tokens; the last call's end with that of the text.
            is_open: more text follows.
        Raises: SlotError if the slot's request has ended; ContextOverflowError if too much text waits. Nothing is
            appended then.
        """
        stream = self._streams.get(slot)
        if stream is None:
            raise SlotError(f"slot {slot}", expected=f"one of the running ones {sorted(self._streams)}", got="another")
        self.runner.append_text(slot, ids, is_open=is_open, n_read=max(stream.frames - 1, 0))
        stream.n_text += len(ids)
        stream.n_track += len(ids)
        stream.is_open = is_open
        stream.waits = stream.waits and is_open and not ids
        self.runner.limit(slot, self._cap(stream.request, stream.n_text))

    def cancel(self, slot: int) -> None:
        """End a request; its slot is free. A request that has ended is left alone."""
        if self._streams.pop(slot, None) is not None:
            self.runner.close(slot)

    def step(self) -> list[SpokenPart]:
        """Draw the next frame of every request that does not wait for text, and decode the chunks that are due.

        Returns: the new sound and ends. Slots of requests that ended are free.
        """
        self._draw([slot for slot, stream in self._streams.items() if not stream.waits])
        sounds = self._decode()
        parts = []
        for slot, stream in list(self._streams.items()):
            if slot in sounds or stream.end is not None:
                samples = sounds.get(slot, np.zeros(0, np.float32))
                parts.append(SpokenPart(slot, samples, stream.end))
            if stream.end is not None:
                self.cancel(slot)
        return parts

    def _draw(self, slots: list[int]) -> None:
        if not slots:
            return
        codes, outcomes = self.runner.frame(slots)
        read = torch.cat((codes, outcomes[:, None]), dim=1).cpu().numpy()  # one copy
        for row, slot in zip(read, slots, strict=False):  # the rest is padding
            stream, outcome = self._streams[slot], int(row[-1])
            if outcome == frame_steps.WAITED:
                self.runner.take_back(slot)
                stream.waits = True
            if outcome in (frame_steps.FRAME, frame_steps.LAST_FRAME):
                stream.pending.append(row[:-1])
                stream.frames += 1
            stream.end = {
                frame_steps.LAST_FRAME: CodesEnd.LENGTH,
                frame_steps.ENDED: CodesEnd.STOP,
                frame_steps.BAD: CodesEnd.FAILED,
            }.get(outcome)

    def _decode(self) -> dict[int, Array]:
        """Sound of each slot whose chunk is due: full, or the last before an end or a wait."""
        due: list[CodeChunk] = []
        for slot, stream in self._streams.items():
            size = self._chunk_size(stream)
            if stream.pending and (len(stream.pending) >= size or stream.waits or stream.end is not None):
                due.append(CodeChunk(slot, np.stack(stream.pending)))
                stream.pending.clear()
                stream.chunks += 1
        sounds: dict[int, Array] = {}
        for chunk, wave in zip(due, self.codec.decode(due) if due else [], strict=True):
            samples = sounds[chunk.slot] = wave.cpu().numpy()
            self._watch(self._streams[chunk.slot], samples)
        return sounds

    def _chunk_size(self, stream: _Stream) -> int:
        """Frames of the next chunk."""
        first = stream.request.first_frames
        if first is not None and stream.chunks == 0:
            return first
        return max(first or 1, self._ramp[min(stream.chunks, len(self._ramp) - 1)])

    def _watch(self, stream: _Stream, samples: Array) -> None:
        """End a stream that has been silent for long after its text."""
        is_read = not stream.is_open and stream.frames > stream.n_track
        for frame in samples.reshape(-1, FRAME_SAMPLES):
            is_silent = stream.silence.push(float(np.abs(frame).max()), text_is_read=is_read)
            if is_silent and stream.end is None:
                stream.end = CodesEnd.SILENCE

    def _cap(self, request: SpokenRequest, n_text: int) -> int:
        return min(request.limits.frame_cap(n_text), self.runner.frames_that_fit(request.prompt))
