"""The WebSocket under every client: opening it, and the error that tells how it ended."""

import os
import ssl as tls

from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_socket
from websockets.exceptions import InvalidHandshake, InvalidStatus

from clients.address import TargetAddress
from clients.errors import ConnectionLost, Refused
from worker.key_text import CLIENT_KEY_VARIABLE
from worker.protocol.codes import CloseCode
from worker.protocol.messages import Error

OPEN_S = 15.0  # longer than a worker waits for a free slot
CLOSE_S = 3.0
PING_S, PONG_S = 5.0, 15.0  # between pings; for the answer, after which the connection counts as lost
MAX_FRAME = 64 * 2**20


async def open_socket(
    address: TargetAddress, context: tls.SSLContext | None, *, insecure: bool, key: str | None, timeout: float
) -> ClientConnection:
    """An open connection.

    Args:
        address: its address.
        context: the TLS context for wss; None: the default one.
        insecure: whether to accept any certificate.
        key: API key; None: that of the environment variable DUOLOGUE_API_KEY, if it is set.
        timeout: limit for opening it, in s.
    Raises:
        Refused: if the server refuses the handshake.
        ConnectionLost: if there is no connection.
    """
    key = key or os.environ.get(CLIENT_KEY_VARIABLE)
    try:
        return await connect_socket(
            address.url,
            additional_headers={"Authorization": f"Bearer {key}"} if key else None,
            ssl=address.tls(context, insecure=insecure),
            proxy=None if address.is_local else True,
            compression=None,  # sound hardly compresses
            max_size=MAX_FRAME,
            open_timeout=timeout,
            close_timeout=CLOSE_S,
            ping_interval=PING_S,
            ping_timeout=PONG_S,
        )
    except InvalidStatus as error:
        raise Refused(address.url, error.response.status_code) from None
    except (OSError, TimeoutError, InvalidHandshake, EOFError, UnicodeError) as error:  # Unicode: an invalid host name
        expected = "a certificate that is trusted" if isinstance(error, tls.SSLError) else "a server that answers"
        raise ConnectionLost(address.url, expected=expected, got=str(error) or type(error).__name__) from None


def lost(socket: ClientConnection, address: TargetAddress, last_error: Error | None) -> ConnectionLost:
    """The error for a connection that ended before its conversation did. last_error: the server's last one."""
    code = socket.close_code
    got = "the end of the connection" if code in (None, CloseCode.ABNORMAL) else f"close code {code}"
    if reason := socket.close_reason:
        got += f" ({reason})"
    if last_error is not None:
        got += f"; the last error was {last_error.code}: {last_error.error}"
    return ConnectionLost(address.url, expected="a conversation that goes on", got=got)
