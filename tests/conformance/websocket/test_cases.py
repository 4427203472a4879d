"""WebSocket conformance of the gateway's socket, by the cases of the Autobahn suite."""

import asyncio
import logging
from collections.abc import Iterable

import pytest

from tests.conformance.websocket.cases import CASES, OFFERS, PROTOCOL, WebSocketCase
from tests.conformance.websocket.raw_socket import PONG, TEXT, RawSocket, frame
from tests.server.live_gateway import RunningGateway, echo, run, running_gateway, scripted_worker

N_AT_ONCE = 4


async def opened(gateway: RunningGateway, name: str, offer: str = "") -> RawSocket:
    """A connection whose messages come back."""
    socket = await RawSocket.open(gateway.port, f"/ws/duplex/{name}", offer)
    while b'"queue_done"' not in (await socket.message())[1]:
        pass
    return socket


async def stays_open(socket: RawSocket, case: WebSocketCase) -> str | None:
    """Returns: what is wrong, for a case after which the connection is open."""
    await socket.send(case.send, case.chop)
    messages, pongs = [], []
    while len(messages) < len(case.echoes) or len(pongs) < len(case.pongs):
        kind, data = await socket.message()
        (pongs if kind == PONG else messages).append(data if kind == PONG else (kind, data))
    if tuple(messages) != case.echoes or tuple(pongs) != case.pongs:
        return f"expected the messages and pongs of the case, got {str(messages)[:200]} and {str(pongs)[:200]}"
    return None


async def closes(socket: RawSocket, case: WebSocketCase) -> str | None:
    """Returns: what is wrong, for a case that ends the connection."""
    await socket.send(case.send, case.chop)
    received = await socket.until_closed()
    if received.close_code not in case.code:
        return f"expected a close code of {case.code}, got {received.close_code}"
    if tuple(received.messages) != case.echoes[: len(received.messages)] or received.pongs:
        return f"expected nothing but the first echoes, got {str(received.messages)[:200]}, pongs {received.pongs}"
    return None


async def run_cases(gateway: RunningGateway, cases: Iterable[WebSocketCase]) -> list[str]:
    """Returns: what is wrong, by case. Cases that leave the connection open share one."""
    wrong, shared = [], await opened(gateway, f"case_{id(cases)}")
    for case in cases:
        try:
            if not case.code:
                found = await stays_open(shared, case)
            else:
                socket = await opened(gateway, f"case_{case.number.replace('.', '_')}")
                found = await closes(socket, case)
                socket.close()
        except (TimeoutError, EOFError, ConnectionError, AssertionError) as error:
            found = f"{type(error).__name__} {error}"
            shared.close()
            shared = await opened(gateway, f"again_{case.number.replace('.', '_')}")
        if found is not None:
            wrong.append(f"{case.number}: {found}")
    shared.close()
    return wrong


def test_cases_of_the_autobahn_suite(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with scripted_worker(echo, slots=4 * N_AT_ONCE) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            shares = [CASES[start::N_AT_ONCE] for start in range(N_AT_ONCE)]
            wrong = [
                line for share in await asyncio.gather(*(run_cases(gateway, one) for one in shares)) for line in share
            ]
            assert not wrong, "\n".join(wrong)
            await gateway.wait_idle()

    numbers = [case.number for case in CASES]
    assert len(set(numbers)) == len(numbers) > 250, f"expected more than 250 cases, each once, got {len(numbers)}"
    run(scenario)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert not errors, f"expected no errors in the log for clients' faults, got {len(errors)}: {errors[:3]}"


def test_compression_is_declined() -> None:
    """12.* and 13.*: no offer is accepted, messages pass uncompressed, and a compressed one is an error."""

    async def scenario() -> None:
        async with scripted_worker(echo) as port, running_gateway(port) as gateway:
            await gateway.wait_for_slot()
            for number, offer in enumerate(OFFERS):
                socket = await opened(gateway, f"offer_{number}", offer)
                assert socket.extensions == "", f"{offer}: expected no extension, got {socket.extensions}"
                await socket.send(frame(TEXT, b"plain"))
                assert await socket.message() == (TEXT, b"plain")
                await socket.send(frame(TEXT, b"\xcaH\xcd\xc9\xc9\x07\x00", rsv=4))
                received = await socket.until_closed()
                assert received.close_code == PROTOCOL, f"{offer}: expected {PROTOCOL}, got {received}"
                socket.close()
            await gateway.wait_idle()

    run(scenario)
