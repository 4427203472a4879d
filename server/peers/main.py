"""`python -m server.peers.main FD`: a process that holds the connections of calls. The gateway starts it.

FD is a socket that is connected to the gateway. The process ends with that link. Its settings come over the link, so
that no password is on a command line.
"""

import asyncio
import logging
import os
import socket
import sys

from server.peers.frames import FrameKind, LinkFrame, read_frame, write_frame
from server.peers.network import PortRangeLoop, use_network
from server.peers.peer import OfferError, Peer
from worker import log
from worker.config.webrtc import WebRtcConfig

LOG = logging.getLogger("server.peers.main")


class PeerHost:
    """All calls of this process. loop: runs it."""

    def __init__(self, loop: PortRangeLoop):
        self._loop = loop
        self._peers: dict[int, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, link: socket.socket) -> None:
        """Serve calls until the link ends."""
        reader, writer = await asyncio.open_unix_connection(sock=link)
        config = WebRtcConfig()
        while True:
            try:
                frame = await read_frame(reader)
            except (asyncio.IncompleteReadError, OSError):
                return
            if frame.kind is FrameKind.SETTINGS:
                config = WebRtcConfig.model_validate_json(frame.data)
                use_network(self._loop, config)
            elif frame.kind is FrameKind.PING:
                write_frame(writer, FrameKind.PONG, 0)
            elif frame.kind is FrameKind.OFFER:
                self._open(frame, config, writer)
            elif frame.kind is FrameKind.CLOSE:
                self._close(frame.call)
            elif frame.call in self._peers:
                self._handle(frame, writer)

    def _open(self, frame: LinkFrame, config: WebRtcConfig, writer: asyncio.StreamWriter) -> None:
        def send(kind: FrameKind, data: bytes) -> None:
            write_frame(writer, kind, frame.call, data)

        peer = self._peers[frame.call] = Peer(config, send)

        async def answer() -> None:
            try:
                send(FrameKind.ANSWER, (await peer.answer(frame.data.decode())).encode())
            except OfferError as error:
                send(FrameKind.REFUSED, str(error).encode())
                self._close(frame.call)
            except Exception:
                send(FrameKind.GONE, b"the connection cannot be made")
                raise

        self._start(answer())

    def _handle(self, frame: LinkFrame, writer: asyncio.StreamWriter) -> None:
        """Give a frame to its call; an error ends that call alone."""
        try:
            self._peers[frame.call].handle(frame)
        except Exception:
            LOG.exception("a call fails at %s", frame.kind.name)
            write_frame(writer, FrameKind.GONE, frame.call, b"the connection fails")

    def _close(self, call: int) -> None:
        peer = self._peers.pop(call, None)
        if peer is not None:
            self._start(peer.close())

    def _start(self, running: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.create_task(running, name="call")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("a call failed", exc_info=error)


def main(argv: list[str]) -> int:
    log.set_up(log.level_of(None, os.environ))
    for name in ("aiortc", "aioice"):  # their debug messages hold what the clients send
        logging.getLogger(name).setLevel(logging.WARNING)
    loop = PortRangeLoop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(PeerHost(loop).run(socket.socket(fileno=int(argv[0]))))
    os._exit(0)  # threads of decoders may still run; nothing is left to save


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
