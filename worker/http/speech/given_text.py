"""One text to speak, and its sound. Contains no sockets, JSON or tensors."""

from models.errors import SettingsError
from models.inputs.messages import ChatMessage
from worker.chat.requests import language_of, speech_config
from worker.http.answer_conversation import AnswerConversation
from worker.http.metrics import WorkerMetrics
from worker.loop.results import ReplyResult
from worker.protocol.speech_messages import SpeechRequest, read_speech
from worker.protocol.wire import read_object
from worker.service import Service


class SpeechConversation(AnswerConversation[SpeechRequest]):
    """A text that takes the place of a generated answer: its speech is that of an answer with this text."""

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        super().__init__(service, metrics, name)
        self._is_streaming = self._reports_usage = True

    def _read(self, text: str) -> SpeechRequest:
        return read_speech(read_object(text))

    async def _respond(self, request: SpeechRequest) -> ReplyResult:
        text, config = request.text, speech_config(request)
        await self._answer.lease()
        if request.messages:
            messages = await self._answer.decode(request.messages)
        else:
            messages = [ChatMessage("user", (self._service.omni.plain_text(text),))]
        speech = request.tts.model_copy(update={"enabled": True, "language": language_of(text)})
        messages, voice = await self._answer.with_voice(messages, speech, "voice_cloning")
        if voice is None:
            raise SettingsError("speech", expected="a worker with a voice", got="one without")
        result = await self._answer.answer(messages, config, voice)
        if result.voice_error is not None:
            raise result.voice_error
        return result
