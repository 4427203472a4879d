"""Chats and streamed turns without a socket and a model: ends by the worker, slots that idle turns give back."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Self

import pytest

from models.inputs.messages import ChatMessage
from worker.http import streaming_conversation
from worker.http.chat_conversation import ChatConversation
from worker.http.metrics import WorkerMetrics
from worker.http.socket import WorkerSockets
from worker.http.streaming_conversation import MAX_UNSENT, StreamingConversation
from worker.loop.results import Event, PartialResult, Prefilled, ReplyResult
from worker.protocol.chat_messages import ChatRequest, PrefillDone
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.content import ChatTurn
from worker.protocol.messages import Error, Timeout
from worker.protocol.streaming_messages import TurnGenerate, TurnPrefill, TurnPrefilled

HI = ChatTurn(role="user", content="Hi")
PATIENCE_S = 10.0


class FakeAnswer:
    """A fake `ChatAnswer`. answers: all of them. result: what `answer` returns; None: it never returns."""

    answers: list["FakeAnswer"]
    result: ReplyResult | None = None
    context_len = 0

    def __init__(self, service: Any, name: str, use: Any, on_event: Any):
        self.has_slot, self._on_event = False, on_event
        self.answers.append(self)

    @classmethod
    def among(cls, answers: list[Self], result: ReplyResult | None) -> type[Self]:
        return type("Fake", (cls,), {"answers": answers, "result": result})

    async def lease(self) -> None:
        self.has_slot = True

    async def decode(self, turns: list[ChatTurn]) -> list[ChatMessage]:
        return [ChatMessage(turn.role, (turn.text,)) for turn in turns]

    async def with_voice(self, messages: list[ChatMessage], *_: Any) -> tuple[list[ChatMessage], None]:
        return messages, None

    async def prompt(self, messages: list[ChatMessage], config: Any) -> Any:
        return SimpleNamespace(text="Hi", ids=(1, 2))

    async def answer(self, messages: list[ChatMessage], config: Any, voice: None) -> ReplyResult:
        events: list[Event] = [Prefilled("a", 2), PartialResult("a", 1, "Hello")]
        for event in events:
            self._on_event(event)
        if self.result is None:
            await asyncio.Event().wait()
        assert self.result is not None
        return self.result

    def leave(self) -> None:
        self.has_slot = False


def fake_service(idle_timeout: float | None) -> Any:
    settings = SimpleNamespace(idle_timeout=idle_timeout, max_backlog=2**20)
    return SimpleNamespace(settings=settings, is_ready=True)


def test_worker_that_ends_its_conversations_ends_http_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[FakeAnswer] = []
    monkeypatch.setattr("worker.http.answer_conversation.ChatAnswer", FakeAnswer.among(answers, None))

    async def end() -> ChatConversation:
        service, metrics = fake_service(None), WorkerMetrics()
        sockets, conversation = WorkerSockets(service, metrics), ChatConversation(service, metrics, "chat")
        request = ChatRequest(messages=[HI], streaming=False)
        answering = conversation.answer(request, mode="default", default_new_tokens=8)
        running = asyncio.create_task(sockets.run_without_socket(conversation, answering))
        while not conversation.has_begun:
            await asyncio.sleep(0)
        assert list(sockets.conversations) == [conversation] and answers[0].has_slot
        sockets.end_all(ErrorCode.DRAINING, "the worker is shutting down")
        await asyncio.wait_for(running, PATIENCE_S)
        assert not sockets.conversations
        return conversation

    conversation = asyncio.run(end())
    assert (conversation.result, conversation.error) == (None, None)
    assert [type(message) for message, _ in conversation.outbox._queue] == [PrefillDone, Error]  # type: ignore[attr-defined]
    assert conversation.end_if_cancelled == (CloseCode.SERVICE_RESTART, CloseReason.DRAINING)
    assert not answers[0].has_slot


def test_turn_without_generate_gives_its_slot_back_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[FakeAnswer] = []
    result = ReplyResult("a", "Hello", "stop", n_prompt=2, tokens=(5,))
    monkeypatch.setattr(streaming_conversation, "ChatAnswer", FakeAnswer.among(answers, result))
    monkeypatch.setattr(streaming_conversation, "HOLD_S", 0.01)

    async def talk() -> list[Any]:
        conversation = StreamingConversation(fake_service(0.3), WorkerMetrics(), "turns")
        running = asyncio.create_task(conversation.run())
        await conversation.receive(TurnPrefill(messages=[HI]), 10, 0.0)
        sent = [(await asyncio.wait_for(conversation.outbox.get(), PATIENCE_S))[0]]
        while answers[0].has_slot:
            await asyncio.sleep(0.005)
        await conversation.receive(TurnGenerate(), 10, 0.0)
        end = await asyncio.wait_for(running, PATIENCE_S)
        assert end == (CloseCode.NORMAL, CloseReason.IDLE)
        while not conversation.outbox.empty():
            sent.append(conversation.outbox.get_nowait()[0])
        return sent

    prefilled, chunk, last, done, timeout = asyncio.run(talk())
    assert isinstance(prefilled, TurnPrefilled) and prefilled.input_tokens == 2
    assert (chunk.text_delta, last.is_final, done.text) == ("Hello", True, "Hello")
    assert isinstance(timeout, Timeout) and timeout.reason == "Idle timeout (0.3s)"
    assert len(answers) == 2 and not any(answer.has_slot for answer in answers)


def test_client_that_does_not_read_its_turns_gets_few_answers() -> None:
    async def scenario() -> None:
        conversation = StreamingConversation(fake_service(None), WorkerMetrics(), "s")
        for _ in range(3 * MAX_UNSENT):  # each is refused: there is nothing to answer
            await conversation.receive(TurnGenerate(), 100, 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await conversation.run()
        assert conversation.outbox.qsize() == MAX_UNSENT + 1

    asyncio.run(scenario())
