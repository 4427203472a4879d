"""A WebSocket client that sends any octets, also frames that no library would send."""

import asyncio
import base64
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
ANSWER_S = 30.0
MASK = b"\x37\xfa\x21\x3d"


def frame(opcode: int, data: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True) -> bytes:
    """A client's frame. rsv: the three reserved bits, 0 to 7."""
    head = bytes([fin << 7 | rsv << 4 | opcode])
    bit, n = 0x80 * masked, len(data)
    if n < 126:
        head += bytes([bit | n])
    elif n < 65_536:
        head += struct.pack(">BH", bit | 126, n)
    else:
        head += struct.pack(">BQ", bit | 127, n)
    if not masked:
        return head + data
    whole = int.from_bytes(data, "big") ^ int.from_bytes((MASK * (n // 4 + 1))[:n], "big")
    return head + MASK + whole.to_bytes(n, "big")


def close_frame(code: int | None = None, reason: bytes = b"") -> bytes:
    return frame(CLOSE, b"" if code is None else struct.pack(">H", code) + reason)


@dataclass
class Received:
    """What a server sent until it closed the connection, in order.

    Attributes:
        messages: opcode and content of whole messages.
        pongs: their contents.
        close_code: of its close frame; None: there was none, 1005: without a code.
    """

    messages: list[tuple[int, bytes]] = field(default_factory=list)
    pongs: list[bytes] = field(default_factory=list)
    close_code: int | None = None


class RawSocket:
    """An open connection, without a buffer between the test and the kernel: what a server sends before it resets the
    connection can be read.

    extensions: those that the server has accepted.
    """

    def __init__(self, connected: socket.socket):
        self._socket, self._buffer, self.extensions = connected, bytearray(), ""

    @classmethod
    async def open(cls, port: int, path: str, offer: str = "") -> Self:
        """offer: value of Sec-WebSocket-Extensions."""
        connected = socket.socket()
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", port))
        one, key = cls(connected), base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
        lines += [f"Sec-WebSocket-Extensions: {offer}"] if offer else []
        await one.send("\r\n".join([*lines, "", ""]).encode())
        head, end = b"", b"\r\n\r\n"
        while not head.endswith(end):
            head += await one._read(1)
        first, *rest = head.decode().split("\r\n")
        assert " 101 " in first, f"expected a WebSocket, got {head.decode()}"
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        one.extensions = headers.get("sec-websocket-extensions", "")
        return one

    async def send(self, data: bytes, chop: int | None = None) -> None:
        """Send octets until the server closes the connection. chop: in pieces of so many."""
        with suppress(ConnectionError):
            for start in range(0, len(data), chop or len(data) or 1):
                piece = data[start : start + chop] if chop else data
                await asyncio.get_running_loop().sock_sendall(self._socket, piece)
                await asyncio.sleep(0)  # the server may read the piece alone

    async def _read(self, n: int) -> bytes:
        """The next octets. Raises: EOFError at the end; TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            while len(self._buffer) < n:
                data = await asyncio.get_running_loop().sock_recv(self._socket, 2**16)
                if not data:
                    raise EOFError("expected more octets, got the end of the connection")
                self._buffer += data
        found = bytes(self._buffer[:n])
        del self._buffer[:n]
        return found

    async def frame(self) -> tuple[int, bool, bytes]:
        """Opcode, whether it is final, and content of the next frame. Raises: EOFError at the end; TimeoutError."""
        first, second = await self._read(2)
        assert not (first & 0x70 or second & 0x80), f"expected no reserved bit and no mask, got {first:x} {second:x}"
        n = second
        if n > 125:
            n = int.from_bytes(await self._read(2 if n == 126 else 8), "big")
        return first & 0x0F, bool(first & 0x80), await self._read(n)

    async def message(self) -> tuple[int, bytes]:
        """The next message; pings are answered."""
        kind, is_final, data = await self.frame()
        while kind == PING:
            await self.send(frame(PONG, data))
            kind, is_final, data = await self.frame()
        while not is_final:
            opcode, is_final, more = await self.frame()
            assert opcode == CONT, f"expected a continuation, got opcode {opcode}"
            data += more
        return kind, data

    async def until_closed(self) -> Received:
        """Everything up to the end of the connection. The client does not answer the server's close frame."""
        received = Received()
        try:
            while True:
                kind, data = await self.message()
                assert received.close_code is None, f"expected nothing after a close frame, got opcode {kind}"
                if kind == CLOSE:
                    received.close_code = int.from_bytes(data[:2], "big") if data else 1005
                    with suppress(OSError):
                        self._socket.shutdown(socket.SHUT_WR)
                elif kind == PONG:
                    received.pongs.append(data)
                elif kind in (TEXT, BINARY):
                    received.messages.append((kind, data))
        except (EOFError, ConnectionError):
            return received

    def close(self) -> None:
        self._socket.close()
