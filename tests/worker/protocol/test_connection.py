"""The server of gateway and worker with clients that never end handshakes, requests and messages."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.server.certificates import make_certificate
from worker.protocol import connection
from worker.protocol.codes import CloseCode
from worker.protocol.connection import MAX_READ_BYTES, LiveProtocol, LiveServer, listen, live_server, send_in_time
from worker.protocol.live_http import LiveConfig, TransportLimit, TransportLimits

SECONDS = 20.0  # limit of each wait
HELD_S = 1.5  # in which the application of /held receives nothing
KEY = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
UPGRADE = f"GET /{{path}} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{KEY}\r\n"
VERSION = "Sec-WebSocket-Version: 13\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Accepts sockets, except those of /late, and sends back the length of each message; answers every request.

    It closes sockets of /ended after their first message, as a limit does.
    """
    assert scope["type"] in ("http", "websocket")
    if scope["type"] == "http":
        while scope["path"] == "/body" and (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        return
    await receive()
    if scope["path"] == "/held":
        await send({"type": "websocket.accept"})
        await asyncio.sleep(HELD_S)
        while (await receive())["type"] == "websocket.receive":
            pass
        return
    if scope["path"] == "/refused":
        await send({"type": "websocket.http.response.start", "status": 403, "headers": []})
        await send({"type": "websocket.http.response.body", "body": b"no"})
        return
    if scope["path"] != "/late":
        await send({"type": "websocket.accept"})
    if scope["path"] == "/ended":
        await receive()
        await send({"type": "websocket.close", "code": int(CloseCode.POLICY_VIOLATION)})
        return
    while (event := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": str(len(event.get("text") or event["bytes"]))})


@contextmanager
def serving(limits: TransportLimits | None = None, **options: Any) -> Iterator[LiveServer]:
    server, listening = live_server(echo, limits, **options), listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        listening.close()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving() as running:
        yield running


def connected(server: LiveServer) -> socket.socket:
    until = time.monotonic() + SECONDS
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    [listening] = [one for each in server.servers for one in each.sockets]
    client = socket.create_connection(listening.getsockname()[:2], SECONDS)
    client.settimeout(SECONDS)
    return client


def answer(client: socket.socket) -> bytes:
    """Everything up to the end of the connection, or of the headers of a 101."""
    data = b""
    while part := client.recv(65_536):
        data += part
        if data.startswith(b"HTTP/1.1 101") and b"\r\n\r\n" in data:
            break
    return data


def upgraded(server: LiveServer, path: str = "") -> socket.socket:
    client = connected(server)
    client.sendall((UPGRADE.format(path=path) + VERSION + "\r\n").encode())
    if path != "late":
        assert answer(client).startswith(b"HTTP/1.1 101")
    else:
        time.sleep(0.2)  # data that arrives together with the request is not read
    return client


def part_of(data: bytes, *, first: bool = True, last: bool = False) -> bytes:
    """A masked frame of a text message; the mask is zero."""
    head = bytes([(0x80 if last else 0) | (1 if first else 0), 0xFF]) + struct.pack("!Q", len(data)) + bytes(4)
    return head + data


def held(server: LiveServer) -> int:
    config = server.config
    assert isinstance(config, LiveConfig)
    return config.transport.held.total


def wait_held(server: LiveServer, expected: range) -> None:
    until = time.monotonic() + SECONDS
    while held(server) not in expected:
        assert time.monotonic() < until, f"expected {expected} bytes, got {held(server)}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Cookie: a=" + 9000 * "x" + "\r\n", 431),
        ("".join(f"X-Header-{number}: 1\r\n" for number in range(140)), 431),
        ("Transfer-Encoding: chunked\r\n", 400),
        ("", 101),
    ],
)
def test_every_handshake_is_answered(server: LiveServer, headers: str, status: int) -> None:
    with connected(server) as client:
        client.sendall((UPGRADE.format(path="") + VERSION + headers + "\r\n").encode())
        assert answer(client).startswith(f"HTTP/1.1 {status} ".encode())
    with connected(server) as client:  # the same headers without a handshake
        client.sendall(f"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n0\r\n\r\n".encode())
        assert answer(client).startswith(b"HTTP/1.1 200 ")


def test_a_refused_handshake_is_no_error(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with connected(server) as client:
        client.sendall((UPGRADE.format(path="refused") + VERSION + "\r\n").encode())
        found = answer(client)
    assert found.startswith(b"HTTP/1.1 403 ") and found.endswith(b"no")
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_closes_a_connection_without_a_whole_request() -> None:
    counted: list[str] = []
    limits = TransportLimits(header_s=1.5, body_s=0.5, count=counted.append)
    with ExitStack() as stack:
        server = stack.enter_context(serving(limits))
        silent, slow, second, body, drip = (stack.enter_context(connected(server)) for _ in range(5))
        slow.sendall(b"GET / HTTP/1.1\r\nHost:")
        second.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET")
        body.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\nunfinished")
        drip.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        socket_client = upgraded(server)
        dripping = threading.Thread(target=send_until_closed, args=(drip, b"1\r\nx\r\n"))
        dripping.start()
        for client in (silent, slow, body, drip):
            with suppress(ConnectionResetError):
                assert answer(client) == b""
        assert second.recv(100).startswith(b"HTTP/1.1 200")
        with socket_client:  # a WebSocket has no such limit
            socket_client.sendall(part_of(b"hello", last=True))
            assert socket_client.recv(10) == b"\x81\x015"
        dripping.join(SECONDS)
    assert sorted(counted) == ["body_timeout_s"] * 2 + ["header_timeout_s"] * 2, counted


def send_until_closed(client: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        while True:
            client.sendall(data)
            time.sleep(0.02)


def test_closes_an_unfinished_tls_handshake(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "server")
    files = {"ssl_certfile": cert, "ssl_keyfile": key}
    with serving(TransportLimits(header_s=0.3), **files) as server, connected(server) as silent:
        assert silent.recv(1) == b"", "expected the end of a connection without a handshake"
        with connected(server) as half:
            half.sendall(b"\x16\x03\x01\x02\x00")  # the head of a record
            with suppress(ConnectionResetError):
                assert half.recv(1) == b""


def test_an_address_has_a_limited_number_of_connections() -> None:
    limits, group = TransportLimits(max_connections=2), "192.0.2.1"
    assert [limits.open(group) for _ in range(3)] == [True, True, False]
    assert limits.open("192.0.2.2") and limits.open(None) and limits.open(None) and limits.open(None)
    for _ in range(3):
        limits.close(group)
    assert limits.open(group) and limits.n_open == {group: 1, "192.0.2.2": 1}


def test_counts_unfinished_messages_until_they_are_received(server: LiveServer) -> None:
    wait_held(server, range(1))
    data = 300_000 * b"x"
    with upgraded(server) as client, upgraded(server) as other:
        client.sendall(part_of(data))
        wait_held(server, range(300_000, 301_000))
        other.sendall(part_of(data)[:-10])  # within a frame
        wait_held(server, range(600_000, 601_000))
        for _ in range(100):  # empty parts take memory too
            client.sendall(part_of(b"", first=False))
        wait_held(server, range(610_000, 625_000))
        client.sendall(part_of(b"x", first=False, last=True))
        assert client.recv(10) == b"\x81\x06300001"
        wait_held(server, range(299_000, 301_000))
    wait_held(server, range(1))


def test_stops_reading_a_client_that_a_limit_closed_and_that_sends_on(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_read, received = 0, LiveProtocol.data_received

    def count(protocol: LiveProtocol, data: bytes) -> None:
        nonlocal n_read
        n_read += len(data)
        received(protocol, data)

    monkeypatch.setattr(LiveProtocol, "data_received", count)
    monkeypatch.setattr(connection, "CLOSING_S", 0.5)
    with upgraded(server, "ended") as client:
        client.settimeout(0.1)
        begun = time.monotonic()
        with suppress(TimeoutError):
            while time.monotonic() < begun + 1.0:
                client.sendall(part_of(1000 * b"x", last=True))
        while n_read <= connection.CLOSING_BYTES:
            assert time.monotonic() < begun + SECONDS, f"expected more bytes to be read, got {n_read}"
            time.sleep(0.01)
        most = 3 * MAX_READ_BYTES
        assert held(server) <= most, f"expected at most {most} bytes to be held after the close, got {held(server)}"
        client.settimeout(SECONDS)
        assert client.recv(4) == b"\x88\x02" + struct.pack("!H", 1008)
        with suppress(ConnectionResetError):
            assert client.recv(4) == b"", "expected the end of the connection"
        most = connection.CLOSING_BYTES + 3 * MAX_READ_BYTES  # with what came before the close
        assert n_read <= most, f"expected at most {most} bytes to be read, got {n_read}"
    wait_held(server, range(1))


def test_closes_after_an_invalid_frame_before_the_handshake(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with upgraded(server, "late") as client:
        client.sendall(b"\x0f\x00")
        with suppress(ConnectionResetError):
            assert client.recv(100) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("path", ["", "late"], ids=["accepted", "before the handshake"])
def test_closes_the_connection_that_holds_most(server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    assert isinstance(server.config, LiveConfig)
    monkeypatch.setattr(server.config.transport.held, "_max_total", 1_000_000)
    counted: list[TransportLimit] = []
    monkeypatch.setattr(server.config.transport, "count", counted.append)
    with upgraded(server) as small, upgraded(server, path) as large:
        large.sendall(part_of(700_000 * b"x"))
        wait_held(server, range(700_000, 701_000))
        small.sendall(part_of(400_000 * b"x"))
        wait_held(server, range(400_000, 401_000))
        closing = large.recv(100)
        assert closing == (b"\x88\x08" + struct.pack("!H", 1013) + b"memory" if path != "late" else b"")
        assert large.recv(100) == b""
        small.sendall(part_of(b"x", first=False, last=True))
        assert small.recv(10) == b"\x81\x06400001"
    wait_held(server, range(1))
    assert counted == [TransportLimit.HELD], f"expected one closed connection, got {counted}"


class SlowSocket:
    """A socket of an application whose messages are never taken."""

    def __init__(self, is_writable: bool):
        writable = asyncio.Event()
        if is_writable:
            writable.set()
        self.scope, self.sent = {"state": {connection.WRITABLE: writable}}, list[str | bytes]()
        self._is_writable = is_writable

    async def send_text(self, data: str) -> None:
        self.sent.append(data)
        if not self._is_writable:
            await asyncio.Event().wait()

    async def send_bytes(self, data: bytes) -> None:
        self.sent.append(data)


def test_sending_has_a_limit_of_time_only_if_it_has_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STUCK_S", 0.01)

    async def scenario() -> None:
        free, full = SlowSocket(is_writable=True), SlowSocket(is_writable=False)
        with mock.patch.object(asyncio, "timeout", side_effect=AssertionError("expected no timer")):
            await send_in_time(free, "a")
            await send_in_time(free, b"b")
        assert free.sent == ["a", b"b"]
        with pytest.raises(TimeoutError):
            await send_in_time(full, "a")

    asyncio.run(scenario())


def test_reads_on_while_little_waits(server: LiveServer) -> None:
    """While the application receives nothing, short messages are read, and more of them stop the reading."""
    wait_held(server, range(1))
    with upgraded(server, "held") as client:
        for _ in range(10):
            client.sendall(part_of(1000 * b"x", last=True))
        wait_held(server, range(10_000, 12_000))
        client.settimeout(0.1)
        begun = time.monotonic()
        with suppress(TimeoutError):
            while time.monotonic() < begun + HELD_S:
                client.sendall(part_of(1000 * b"x", last=True) * 16)
        most = connection.AHEAD_BYTES + 2 * MAX_READ_BYTES
        assert connection.AHEAD_BYTES < held(server) < most, f"expected reading to stop, got {held(server)} bytes"
    wait_held(server, range(1))
