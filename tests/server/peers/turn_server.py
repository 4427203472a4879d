"""A TURN server that allocates addresses and relays nothing, on a free UDP port of the loopback address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from aioice.stun import Class, Message, Method, parse_message
from aioice.turn import make_integrity_key

REALM, NONCE = "example.org", b"nonce"
RELAYED = ("192.0.2.99", 40_000)


class TurnServer(asyncio.DatagramProtocol):
    """The server. credential: of the one user; None refuses all. port: its own. allocations: addresses it has given."""

    def __init__(self, username: str, credential: str | None):
        self._username, self._credential = username, credential
        self.port = self.n_requests = self.allocations = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        request = parse_message(data)
        self.n_requests += 1
        answer = Message(request.message_method, Class.ERROR, request.transaction_id)
        if "MESSAGE-INTEGRITY" not in request.attributes or self._credential is None:
            answer.attributes |= {"ERROR-CODE": (401, "Unauthorized"), "REALM": REALM, "NONCE": NONCE}
        else:
            key = make_integrity_key(self._username, REALM, self._credential)
            assert request.check_message_integrity(key), "expected the configured user and password"
            answer.message_class = Class.RESPONSE
            answer.attributes["LIFETIME"] = 600
            if request.message_method is Method.ALLOCATE:
                self.allocations += 1
                answer.attributes |= {"XOR-RELAYED-ADDRESS": RELAYED, "XOR-MAPPED-ADDRESS": addr}
            answer.add_message_integrity(key)
        self._transport.sendto(bytes(answer), addr)


@asynccontextmanager
async def turn_server(username: str, credential: str | None) -> AsyncIterator[TurnServer]:
    """A server that listens. Arguments as in `TurnServer`."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(
        lambda: TurnServer(username, credential), local_addr=("127.0.0.1", 0)
    )
    try:
        yield server
    finally:
        transport.close()
