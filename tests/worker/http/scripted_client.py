"""A real client that a test controls step by step.

It drives the websockets protocol on a blocking socket without a thread. A test therefore controls the order of all
events, including the loss of the connection.
"""

import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.protocol import CLOSED, OPEN
from websockets.uri import parse_uri

from tests.worker.http.client_scripts import chunk
from tests.worker.http.processes import ANSWER_S, WorkerProcess
from worker.protocol.messages import PLAIN_SPEC, Error, Prepared, Result, ServerMessage, Spec, Stopped, read_server


class HandshakeRefused(Exception):
    """The server refused the handshake. status: the HTTP status."""

    def __init__(self, status: int):
        super().__init__(f"HTTP {status}")
        self.status = status


class ScriptedClient:
    """One client. spec: options of the last `prepare`, which decide how frames are decoded."""

    def __init__(
        self,
        worker: WorkerProcess | int,
        session_id: str | None = None,
        *,
        wait: bool = True,
        timeout: float = ANSWER_S,
        path: str = "/ws/duplex",
    ):
        """Connect. wait: finish the handshake. timeout: limit of each wait, in s. Raises: HandshakeRefused."""
        port = worker if isinstance(worker, int) else worker.port
        query = "" if session_id is None else f"?session_id={session_id}"
        self.spec, self._timeout = PLAIN_SPEC, timeout
        self._wire = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{path}{query}"), max_size=None)
        self._frames: deque[tuple[Opcode, bytes]] = deque()
        self._parts: list[Frame] = []
        self._socket = socket.create_connection(("127.0.0.1", port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wire.send_request(self._wire.connect())
        self._flush()
        if wait:
            self.finish_handshake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def finish_handshake(self) -> Self:
        """Wait for the answer to the handshake. Raises: HandshakeRefused."""
        until = time.monotonic() + self._timeout
        while self._wire.state is not OPEN:
            if self._wire.handshake_exc is not None:
                self._socket.close()
                error = self._wire.handshake_exc
                assert isinstance(error, InvalidHandshake), f"expected an answer over HTTP, got {error!r}"
                raise HandshakeRefused(error.response.status_code)
            self._pump(until)
        return self

    # --- sending -------------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any] | str | bytes) -> None:
        """Send an object as JSON, text, or bytes as a binary frame; messages that arrive are queued."""
        if isinstance(message, bytes):
            self._wire.send_binary(message)
        else:
            text = message if isinstance(message, str) else json.dumps(message)
            self._wire.send_text(text.encode())
        self._flush()

    def send_raw_text(self, data: bytes) -> None:
        """Send a text frame with arbitrary bytes."""
        self._wire.send_text(data)
        self._flush()

    def send_parts(self, *parts: bytes) -> None:
        """Send a text message in several frames."""
        for number, part in enumerate(parts):
            send = self._wire.send_continuation if number else self._wire.send_text
            send(part, fin=number == len(parts) - 1)
        self._flush()

    def flood(self, message: str, most: int, patience: float = 1.0) -> int:
        """Repeat a message without reading, up to `most` bytes or until the server accepts nothing for `patience` s.

        Afterwards only `drop` is valid. Returns: the number of accepted bytes.
        """
        self._wire.send_text(message.encode())
        data = b"".join(self._wire.data_to_send())
        data, sent = data * (2**18 // len(data) + 1), 0
        while sent < most and select.select([], [self._socket], [], patience)[1]:
            with suppress(BlockingIOError):
                sent += self._socket.send(data[sent % len(data) :], socket.MSG_DONTWAIT)
        return sent

    def ping(self, data: bytes) -> None:
        self._wire.send_ping(data)
        self._flush()

    def prepare(self, config: Mapping[str, Any] | None = None, **fields: Any) -> Prepared:
        """Send `prepare` and receive its answer. fields: further fields; `spec` is an object."""
        self.ask_prepare(config, **fields)
        return self.expect(Prepared)

    def ask_prepare(self, config: Mapping[str, Any] | None = None, **fields: Any) -> None:
        given = {} if config is None else {"config": config}
        if "spec" in fields:
            self.spec = Spec(**fields["spec"])
        self.send({"type": "prepare", **given, **fields})

    def unit(self, number: int = 0, **given: Any) -> Result:
        """Send one `chunk` and receive its result."""
        self.send(chunk(number, **given))
        return self.expect(Result)

    def units(self, numbers: Sequence[int] | range, **given: Any) -> list[Result]:
        """Send chunks one by one, each after the previous result. Returns: the results."""
        return [self.unit(number, **given) for number in numbers]

    def burst(self, numbers: Sequence[int] | range, **given: Any) -> list[Result]:
        """Send all chunks at once. Returns: the results."""
        for number in numbers:
            self.send(chunk(number, **given))
        return [self.expect(Result) for _ in numbers]

    def stop(self) -> None:
        """Send `stop` and check for `stopped` and close code 1000."""
        self.send({"type": "stop"})
        self.expect(Stopped)
        code = self.close_code()
        assert code == 1000, f"after stopped: expected close code 1000, got {code}"

    # --- receiving -----------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> ServerMessage:
        """The next message. timeout: s. Raises: TimeoutError; EOFError if the connection is over."""
        return self.read(*self.receive_frame(timeout))

    def read(self, opcode: Opcode, data: bytes) -> ServerMessage:
        """Decode a frame."""
        return read_server(data.decode() if opcode is Opcode.TEXT else data, self.spec)

    def receive_frame(self, timeout: float | None = None) -> tuple[Opcode, bytes]:
        """The next frame."""
        until = time.monotonic() + (self._timeout if timeout is None else timeout)
        while not self._frames:
            if self._is_over:
                raise EOFError(f"the connection is over: close code {self._wire.close_code}")
            self._pump(until)
        return self._frames.popleft()

    def expect(self, kind: type, timeout: float | None = None) -> Any:
        """The next message, checked to be of this kind."""
        message = self.receive(timeout)
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
        return message

    def expect_error(self, code: str, timeout: float | None = None) -> Error:
        error = self.expect(Error, timeout)
        assert error.code == code, f"expected an error with code {code}, got {error.code}: {error.error}"
        return error

    def expect_silence(self, seconds: float) -> None:
        """Check that no message arrives for this long."""
        try:
            message = self.receive(seconds)
        except TimeoutError:
            return
        raise AssertionError(f"expected no message, got {message!r}")

    def close_code(self) -> int:
        """Wait until the server closes. Returns: the close code; 1006 without a close frame."""
        until = time.monotonic() + self._timeout
        while not self._is_over:
            assert not self._frames, f"expected the end, got {self._frames[0][1][:300]!r}"
            self._pump(until)
        return self._wire.close_code

    # --- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Send a close frame and close the socket without waiting for the answer."""
        with suppress(Exception):
            self._wire.send_close(1000)
            self._flush()
        self._socket.close()

    def drop(self, reset: bool = False) -> None:
        """Close the socket without a close frame, with FIN or RST."""
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    # --- bytes ---------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._wire.state is CLOSED

    def _flush(self) -> None:
        """Send all pending data; also reads, to avoid a deadlock of both sides."""
        until = time.monotonic() + self._timeout
        while writes := self._wire.data_to_send():
            for data in writes:
                self._send_all(data, until)

    def _send_all(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        try:
            if not data:  # websockets' marker for the end of the stream
                self._socket.shutdown(socket.SHUT_WR)
            while view and not self._is_over:
                readable, writable, _ = select.select([self._socket], [self._socket], [], until - time.monotonic())
                if not readable and not writable:
                    raise TimeoutError("expected a server that reads, got one that does not")
                if readable:
                    self._read()
                if writable:
                    with suppress(BlockingIOError):
                        view = view[self._socket.send(view[: 2**18], socket.MSG_DONTWAIT) :]
        except TimeoutError:
            raise
        except OSError:  # the connection is lost
            self._wire.receive_eof()

    def _pump(self, until: float) -> None:
        """Wait for data and read it. Raises: TimeoutError."""
        readable, _, _ = select.select([self._socket], [], [], max(until - time.monotonic(), 0))
        if not readable:
            raise TimeoutError("expected something from the server, got nothing")
        self._read()
        self._flush()  # answers to pings and to a close

    def _read(self) -> None:
        try:
            data = self._socket.recv(2**18)
        except ConnectionResetError:
            data = b""
        if data:
            self._wire.receive_data(data)
        else:
            self._wire.receive_eof()
        for event in self._wire.events_received():
            if not isinstance(event, Frame):
                continue
            if event.opcode is Opcode.PONG:
                self._frames.append((event.opcode, bytes(event.data)))
            elif event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                self._parts.append(event)
                if event.fin:
                    opcode, whole = self._parts[0].opcode, b"".join(bytes(part.data) for part in self._parts)
                    self._frames.append((opcode, whole))
                    self._parts.clear()
