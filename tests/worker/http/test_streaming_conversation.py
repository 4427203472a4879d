"""Turns of a client that does not read its answers."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from worker.http.metrics import WorkerMetrics
from worker.http.streaming_conversation import MAX_UNSENT, StreamingConversation
from worker.protocol.streaming_messages import TurnGenerate


def test_client_that_does_not_read_gets_few_answers() -> None:
    async def scenario() -> None:
        settings = SimpleNamespace(idle_timeout=None, max_backlog=2**20)
        service: Any = SimpleNamespace(settings=settings, is_ready=True)
        conversation = StreamingConversation(service, WorkerMetrics(), "s")
        for _ in range(3 * MAX_UNSENT):  # each is refused: there is nothing to answer
            await conversation.receive(TurnGenerate(), 100, 0.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                await conversation.run()
        assert conversation.outbox.qsize() == MAX_UNSENT + 1

    asyncio.run(scenario())
