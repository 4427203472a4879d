"""One voice conversion and its sound. Contains no sockets, JSON or tensors."""

import asyncio
from collections.abc import Callable

import numpy as np

from models.errors import AudioError
from worker.conversion.converter import ConversionJob, ConversionSource
from worker.http.answer_conversation import AnswerConversation
from worker.http.metrics import WorkerMetrics
from worker.loop.results import ReplyResult
from worker.protocol.chat_messages import PrefillDone, ReplyChunk
from worker.protocol.codes import ErrorCode
from worker.protocol.content import RATE_IN
from worker.protocol.speech_messages import MAX_SOURCE_S, ConversionRequest, read_conversion
from worker.protocol.wire import SOUND_RATE, Sound, WireError, read_object
from worker.service import Service

MIN_SOURCE_S = 0.5


class ConversionConversation(AnswerConversation[ConversionRequest]):
    """A sound, or given speech tokens, in another voice. It has a slot of the voice conversion."""

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        super().__init__(service, metrics, name)
        self._reports_usage = True
        self._job: ConversionJob | None = None
        self._release: Callable[[], None] | None = None
        self._n_samples = 0  # sent

    def _read(self, text: str) -> ConversionRequest:
        return read_conversion(read_object(text))

    async def _respond(self, request: ConversionRequest) -> ReplyResult:
        outcome = "failed"
        try:
            result = await self._convert(request)
            outcome = result.stopped
            return result
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._metrics.converted(outcome, self._n_samples / SOUND_RATE)

    async def _convert(self, request: ConversionRequest) -> ReplyResult:
        conversions, loop = self._service.conversions, asyncio.get_running_loop()
        source = _source_of(request)
        converter, self._release = await self._service.lease_conversion()
        async with self._service.preparing:
            samples = None if request.ref_audio_data is None else request.ref_audio_data.samples("ref_audio_data")
            rate = int(request.ref_audio_rate)
            voice = await asyncio.to_thread(conversions.voice, request.ref_audio_path, samples, rate)

        def emit(part: int | np.ndarray) -> None:
            loop.call_soon_threadsafe(self._send_part, part)

        self._job = converter.submit(source, voice, request.seed, emit)
        n_tokens = await asyncio.wrap_future(self._job.done)
        return ReplyResult(self.name, "", "stop", n_prompt=n_tokens, n_speech_tokens=n_tokens)

    def _send_part(self, part: int | np.ndarray) -> None:
        if isinstance(part, int):
            self.has_begun = True
            self._send(PrefillDone(input_tokens=part))
        else:
            self._n_samples += len(part)
            self._send(ReplyChunk(audio_data=Sound(part)))

    def leave(self) -> None:
        """End the conversion before its next piece."""
        super().leave()
        if self._job is not None:
            self._job.cancel()
        if self._release is not None:
            self._release()


def _source_of(request: ConversionRequest) -> ConversionSource:
    """What is spoken. Raises: WireError without a source or with two; AudioError for a sound of another duration."""
    if (request.source_data is None) == (request.speech_tokens is None):
        got = "neither" if request.source_data is None else "both"
        raise WireError(ErrorCode.BAD_MESSAGE, "source_data", expected="a sound or speech_tokens", got=got)
    if request.source_data is None:
        assert request.speech_tokens is not None
        return ConversionSource(speech_tokens=tuple(request.speech_tokens))
    samples = request.source_data.samples("source_data")
    if not MIN_SOURCE_S <= len(samples) / RATE_IN <= MAX_SOURCE_S:
        expected = f"{MIN_SOURCE_S} to {MAX_SOURCE_S} s of sound"
        raise AudioError("source_data", expected=expected, got=f"{len(samples) / RATE_IN:.2f} s")
    return ConversionSource(samples.clip(-1, 1), RATE_IN)
