"""The speech model of a worker: its slots, voices and utterances, for conversations on the event loop."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from models.qwen3_tts.streams import SpokenRequest
from worker.admission.lease_count import LeaseCount
from worker.compile.state import RegionState
from worker.engine_thread import EngineThread
from worker.protocol.speech_messages import SpeakRequest
from worker.speech.compiling import release_speech
from worker.speech.parts import SpeechParts
from worker.speech.requests import TASKS, PlannedSpeech, check_request, spoken_request, text_parts
from worker.speech.speech_loop import Emit, SpeechLoop, SpokenUtterance, submit_call
from worker.speech.voices import SpeechVoices, VoiceFolders

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class SpeechModel:
    """A speech model on the engine thread.

    regions: state of each captured region, by name. slots: of requests that are served at the same time.
    """

    def __init__(
        self,
        name: str,
        parts: SpeechParts,
        thread: EngineThread,
        folders: VoiceFolders,
        regions: Mapping[str, RegionState],
    ):
        """name: as configured. thread: runs it from `start` on."""
        self.parts, self.regions = parts, dict(regions)
        self.slots = LeaseCount("speech model", parts.n_slots)
        self._name, self._thread, self.device = name, thread, thread.device
        self._loop = SpeechLoop(parts.streams, thread.device)
        self._voices = SpeechVoices(
            parts.config, parts.streams.codec, folders, parts.folder, partial(submit_call, thread.submit, self._loop)
        )
        # Threads of its own: a new voice waits for units to leave time, and asyncio's threads prepare live sessions.
        self._threads = ThreadPoolExecutor(parts.n_slots, "speech")

    def start(self) -> None:
        """Begin to serve."""
        self._thread.add(self._loop)

    def close(self) -> None:
        """End all utterances, and free what the device holds beside the weights."""
        self._thread.remove(self._loop)
        self._threads.shutdown(wait=False, cancel_futures=True)
        release_speech(self.parts)

    # --- speech --------------------------------------------------------------------------------

    def plan(self, request: SpeakRequest) -> PlannedSpeech:
        """The request with its voice. Takes as long as reading and encoding its sound: call it with `on_thread`.

        Raises: SettingsError, AudioError, TokenError; EngineError.
        """
        check_request(request, self.parts)
        voice = self._voices.of(request, in_context=not request.is_open)
        return PlannedSpeech(request, voice, secrets.randbits(63) if request.seed is None else request.seed)

    async def on_thread(self, call: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        """The result of something slow, such as `plan`. Raises: as it does."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    def parts_of(self, planned: PlannedSpeech) -> list[tuple[int, ...]]:
        """The tokens of each utterance of a whole text. Raises: as `spoken_request`."""
        return list(text_parts(planned, self.parts))

    def request(self, planned: PlannedSpeech, ids: tuple[int, ...], number: int, *, is_open: bool) -> SpokenRequest:
        """One utterance as the loop takes it; arguments and errors of `spoken_request`."""
        return spoken_request(planned, self.parts, ids, number=number, is_open=is_open)

    def begin(self, request: SpokenRequest, emit: Emit, *, is_open: bool) -> SpokenUtterance:
        """Start an utterance of a client that has a slot. emit: called on the engine thread."""
        utterance = SpokenUtterance(request, emit, is_open)
        self._thread.submit(self._loop.begin, utterance).add_done_callback(
            lambda done: None if (error := done.exception()) is None else emit(_as_error(error))
        )
        return utterance

    def append_text(self, utterance: SpokenUtterance, ids: Sequence[int], *, is_open: bool) -> None:
        """Append text tokens to an open utterance; the last call has `is_open` false."""
        self._thread.submit(partial(self._loop.append_text, utterance, ids, is_open=is_open))

    def cancel(self, utterance: SpokenUtterance, then: Callable[[], None]) -> None:
        """End an utterance after the step in flight, and call `then`, also if the thread has ended."""
        self._thread.submit(self._loop.cancel, utterance).add_done_callback(lambda _: then())

    def body(self) -> dict[str, Any]:
        """Checkpoint, slots and counters for /health."""
        config = self.parts.config
        return {
            "path": self._name,
            "kind": TASKS[config.tts_model_type],
            "speakers": list(config.speakers),
            "languages": sorted(config.languages),
            "slots": self.slots.body(),
            "texts": self.slots.n_leases,
            "bytes": self.parts.n_bytes,
            "frames": self._loop.n_frames,
            "late_sounds": self._loop.n_sounds_late,
            "graphs": sum(one.n_graphs for one in self.regions.values()),
        }


def _as_error(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(str(error))
