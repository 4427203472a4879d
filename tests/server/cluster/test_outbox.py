"""Messages between authority and gateway that the other side does not read."""

import asyncio
from pathlib import Path

import pytest

from server.access.usage import DayUsage
from server.cluster import link as link_module
from server.cluster.link import AuthorityLink
from server.cluster.messages import ClusterMessageError
from server.cluster.outbox import Outbox
from server.cluster.shared_dispatcher import SharedDispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue, QueueFullError
from server.dispatch.workers import Workers
from tests.server.cluster.clusters import running_authority
from tests.server.live_gateway import wait_until


@pytest.mark.parametrize("is_early", [True, False])
def test_full_outbox_ends_its_connection(is_early: bool) -> None:
    asyncio.run(_overfill(is_early))


async def _overfill(is_early: bool) -> None:
    outbox: Outbox[int] = Outbox("the reader", limit=2)
    for number in range(3 if is_early else 2):
        outbox.put(number)
    with pytest.raises(ClusterMessageError, match="the reader: expected one that reads: at most 2 messages wait"):
        async with outbox:
            outbox.put(2)
            await asyncio.Event().wait()
    outbox.put(3)  # of a session that does not know yet
    assert [await outbox.get() for _ in range(2)] == [0, 1], "expected the first messages, got others"


def test_messages_that_do_not_fit_reach_the_authority_with_the_next_connection(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(link_module, "Outbox", lambda reader: Outbox(reader, limit=10))
    asyncio.run(_send_too_many(tmp_path, 20))


async def _send_too_many(tmp_path: Path, n_tickets: int) -> None:
    dispatcher = SharedDispatcher(Workers(()), Queue(100), Eta(EtaConfig()))
    async with running_authority(tmp_path / "authority.sqlite") as authority:
        link = AuthorityLink(dispatcher, DayUsage(tmp_path / "usage.json"), authority.url, "g0", 1)
        link.start()
        try:
            await wait_until(lambda: dispatcher.tell is not None, "a connection")
            tickets = [dispatcher.submit("omni_duplex", f"s{n}").ticket for n in range(n_tickets)]
            queue = authority.service.authority.queue
            await wait_until(lambda: len(queue) == n_tickets, f"{n_tickets} tickets at the authority")
            assert {one.ticket_id for one in queue} == {one.ticket_id for one in tickets}
        finally:
            await link.stop()


def test_gateway_without_authority_refuses_sessions_above_the_queue() -> None:
    dispatcher = SharedDispatcher(Workers(()), Queue(2), Eta(EtaConfig()))
    for number in range(2):
        dispatcher.submit("omni_duplex", f"s{number}")
    with pytest.raises(QueueFullError, match="expected at most 2 tickets"):
        dispatcher.submit("omni_duplex", "s2")
    dispatcher.submit("speech", "s3")
