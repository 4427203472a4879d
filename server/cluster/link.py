"""A gateway's connection to the authority of its cluster: reconnects after a loss, and renews the leases."""

import asyncio
import logging
from collections.abc import Mapping
from itertools import count

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from server.access.usage import DayUsage, KeyUsage
from server.background import end_task
from server.cluster.messages import (
    TLS_SCHEME,
    ClusterMessageError,
    CountedUse,
    FromGateway,
    ReportUsage,
    UsageOfOthers,
    read_from_authority,
)
from server.cluster.outbox import Outbox
from server.cluster.shared_dispatcher import SharedDispatcher

LOG = logging.getLogger(__name__)
BEAT_S = 2.0  # interval of renewals, and of reports of keys' usage
RETRY_S = 0.5
OPEN_TIMEOUT_S = 5.0
MAX_MESSAGE = 16 * 2**20


class AuthorityLink:
    """The connection of one gateway, as a task.

    Args:
        dispatcher: its tickets.
        usage: of keys, which all gateways of the cluster share.
        url: of the authority, such as ws://host:port.
        name: of this gateway, which no other gateway of the cluster has.
        port: at which other gateways reach this one.
        host: it listens on; "": all addresses, of which the others use that of the connection to the authority.
        headers: with the secret of the cluster.
        has_tls: this gateway serves https.
    """

    def __init__(
        self,
        dispatcher: SharedDispatcher,
        usage: DayUsage,
        url: str,
        name: str,
        port: int,
        host: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        has_tls: bool = False,
    ):
        self._dispatcher, self._usage = dispatcher, usage
        self._url, self._name, self._headers = f"{url}/gateway", name, headers or {}
        self._host, self._port, self._scheme = host, port, TLS_SCHEME if has_tls else ""
        self._task: asyncio.Task[None] | None = None
        self._numbers = count(1)

    def start(self) -> None:
        """Start connecting."""
        self._task = asyncio.create_task(self._run(), name="authority")

    async def stop(self) -> None:
        """End the connection."""
        await end_task(self._task)

    async def _run(self) -> None:
        is_new_loss = True
        while True:
            try:
                async with connect(
                    self._url,
                    additional_headers=self._headers,
                    compression=None,
                    proxy=None,
                    max_size=MAX_MESSAGE,
                    open_timeout=OPEN_TIMEOUT_S,
                    close_timeout=1,
                    user_agent_header=None,
                ) as socket:
                    LOG.info("connected to the authority at %s", self._url)
                    is_new_loss = True
                    await self._talk(socket)
            except (OSError, WebSocketException, ClusterMessageError) as error:
                if is_new_loss:
                    LOG.warning("no authority at %s: %s", self._url, error or type(error).__name__)
                is_new_loss = False
            except Exception:  # one faulty message must not end the reconnects
                LOG.exception("error in the connection to the authority")
            await asyncio.sleep(RETRY_S)

    async def _talk(self, socket: ClientConnection) -> None:
        """Pass messages until the connection is lost. Raises: ConnectionClosed; ClusterMessageError."""
        unsent: Outbox[FromGateway] = Outbox(f"the authority at {self._url}")
        address = f"{self._scheme}{self._host or socket.local_address[0]}:{self._port}"
        unsent.put(self._dispatcher.hello(self._name, address))
        self._dispatcher.tell = unsent.put
        tasks = [
            asyncio.create_task(self._send(socket, unsent), name="to-authority"),
            asyncio.create_task(self._beat(unsent), name="beats"),
            asyncio.create_task(self._receive(socket), name="from-authority"),
        ]
        try:
            async with unsent:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._dispatcher.disconnected()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _send(self, socket: ClientConnection, unsent: Outbox[FromGateway]) -> None:
        while True:
            await socket.send((await unsent.get()).model_dump_json())

    async def _receive(self, socket: ClientConnection) -> None:
        async for data in socket:
            message = read_from_authority(data if isinstance(data, str) else "")
            if isinstance(message, UsageOfOthers):
                keys = {
                    name: KeyUsage(requests=one.requests, session_s=one.session_s) for name, one in message.keys.items()
                }
                self._usage.add_others(message.day, keys)
            else:
                self._dispatcher.receive(message)
        raise ConnectionClosed(None, None)

    async def _beat(self, unsent: Outbox[FromGateway]) -> None:
        while True:
            unsent.put(self._dispatcher.next_beat(next(self._numbers)))
            day, keys = self._usage.own
            used = {name: CountedUse(requests=one.requests, session_s=one.session_s) for name, one in keys.items()}
            unsent.put(ReportUsage(day=day, keys=used))
            await asyncio.sleep(BEAT_S)
