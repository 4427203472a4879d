"""One chat request and its answer, for a socket or an HTTP request. Contains no sockets, JSON or tensors."""

from typing import get_args

from worker.chat.requests import reply_config
from worker.describe import shown
from worker.http.answer_conversation import AnswerConversation
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.loop.results import ReplyResult
from worker.protocol.chat_messages import (
    SOCKET_NEW_TOKENS,
    ChatRequest,
    ReplyDone,
    SpokenReplyDone,
    VoiceMode,
    read_chat,
)
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import Sound, WireError, read_object
from worker.service import Service

MODES: tuple[VoiceMode, ...] = get_args(VoiceMode)


class ChatConversation(AnswerConversation[ChatRequest]):
    """A conversation to answer.

    Attributes:
        prompt: the prompt's text, if the request asks for it.
    """

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        super().__init__(service, metrics, name)
        self.prompt: str | None = None

    async def answer(self, request: ChatRequest, *, mode: VoiceMode, default_new_tokens: int) -> ConversationEnd:
        """Answer a request.

        Args:
            request: the request.
            mode: system message that is inserted where the conversation has none.
            default_new_tokens: limit of the answer's tokens, where the request has none.
        """
        return await self._end_after(self._reply(request, mode, default_new_tokens))

    def _read(self, text: str) -> ChatRequest:
        return read_chat(read_object(text))

    async def _respond(self, request: ChatRequest) -> ReplyResult:
        mode = mode_of(request) if request.introduces_voice else "default"
        return await self._reply(request, mode, SOCKET_NEW_TOKENS)

    async def _reply(self, request: ChatRequest, mode: VoiceMode, default_new_tokens: int) -> ReplyResult:
        self._is_streaming, self._reports_usage = request.streaming, request.report_usage
        config = reply_config(request, default_new_tokens)
        await self._answer.lease()
        messages = await self._answer.decode(request.messages)
        messages, voice = await self._answer.with_voice(messages, request.tts, mode)
        if request.return_prompt:
            self.prompt = (await self._answer.prompt(messages, config)).text
        return await self._answer.answer(messages, config, voice)

    def _done(self, result: ReplyResult) -> ReplyDone:
        done = super()._done(result)
        if self._is_streaming:
            return done
        sound = None if result.pcm is None else Sound(result.pcm)
        return SpokenReplyDone(**dict(done), audio_data=sound)


def mode_of(request: ChatRequest) -> VoiceMode:
    """The kind of system message that introduces the voice. Raises: WireError."""
    for mode in MODES:
        if request.tts.mode == mode:
            return mode
    raise WireError(ErrorCode.BAD_CONFIG, "tts.mode", expected=" or ".join(MODES), got=shown(request.tts.mode))
