"""The gateway as a process: flags, refused settings, TLS and stop signals."""

import asyncio
import re
import resource
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from websockets import connect

from benchmarks.serve.fake_worker import FakeWorker
from server.main import certificate, main
from server.serving import ServeOptions, Tls, serve
from tests.server.certificates import make_certificate
from tests.server.live_gateway import ANSWER_S, CHUNK, STOP, Client, connect_to, run, wait_until
from worker.config.service import default_config
from worker.protocol.codes import ErrorCode
from worker.protocol.connection import listen

LISTENING = re.compile(r"listening on (https?)://127\.0\.0\.1:(\d+)")


@asynccontextmanager
async def process(root: Path, folder: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, str]]:
    """A gateway process that listens. Yields: the process, its port, its scheme."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    config = folder / "config.json"
    config.write_text("{}")
    command = [sys.executable, "-m", "server.main", "--config", str(config), "--port", str(port), *flags]
    started = await asyncio.create_subprocess_exec(*command, cwd=root, stderr=asyncio.subprocess.PIPE)
    try:
        lines = []
        async with asyncio.timeout(ANSWER_S):
            while not (found := LISTENING.search("".join(lines))):
                line = (await started.stderr.readline()).decode()
                assert line, f"expected it to listen, got {lines}"
                lines.append(line)
        reading = asyncio.create_task(started.stderr.read())  # a full pipe would block the process
        yield started, int(found[2]), found[1]
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()
        await reading


async def prepared(port: int, name: str) -> Client:
    return await (await connect_to(port, name)).prepared()


def refusal(flags: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error line for invalid flags."""
    status = main(list(flags))
    text = capsys.readouterr().err
    assert status == 2, f"{flags}: expected status 2, got {status} and {text!r}"
    assert text.startswith("error: ") and text.count("\n") == 1, f"{flags}: expected one line, got {text!r}"
    return text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "127.0.0.1"], "--workers: expected HOST:PORT"),
        (["--workers", "127.0.0.1:0"], "--workers"),
        (["--workers", "127.0.0.1:65536"], "--workers"),
        (["--workers", "127.0.0.1:²"], "--workers"),
        (["--workers", "127.0.0.1:1,,127.0.0.1:2"], "--workers"),
        (["--workers", "http://127.0.0.1:22400"], "--workers"),
        (["--workers", "::1:22400"], "--workers"),
        (["--workers", "a b:22400"], "--workers"),
        (["--workers", "a@b:22400"], "--workers"),
        (["--workers", "127.0.0.1:1,127.0.0.1:1"], "each address once"),
        (["--num-workers", "0"], "--num-workers: expected 1 to 1024, got 0"),
        (["--num-workers", "1025"], "--num-workers"),
        (["--host", "0.0.0.0"], "--remote"),
        (["--host", "example.org"], "--remote"),
        (["--https"], "openssl req"),
        (["--port", "0"], "service.gateway_port"),
        (["--port", "70000"], "service.gateway_port"),
        (["--drain-timeout", "-1"], "service.drain_timeout_s"),
        (["--max-queue-size", "-1"], "service.max_queue_size"),
        (["--ssl-certfile", "cert.pem"], "service.ssl_keyfile"),
        (["--ssl-certfile", "/no/cert.pem", "--ssl-keyfile", "/no/key.pem"], "/no/cert.pem"),
        (["--log-level", "LOUD"], "log level"),
        (["--config", "/no/config.json"], "config.json"),
    ],
)
def test_refuses_invalid_flags(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(flags, capsys)
    assert words in text, f"{flags}: expected {words!r}, got {text!r}"


def test_refuses_timeout_flag_with_its_replacement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--timeout", "300"])
    text = capsys.readouterr().err
    assert caught.value.code == 2 and "expected service.worker_timeout_s in the settings, got --timeout 300" in text


def test_refuses_worker_ports_out_of_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DUOLOGUE_SERVICE_WORKER_BASE_PORT", "65530")
    assert "expected 1 to 6, got 7" in refusal(["--num-workers", "7"], capsys)


def test_refuses_taken_port(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        text = refusal(["--port", str(port)], capsys)
    assert f"127.0.0.1:{port}" in text and "in use" in text, text


def test_exits_if_port_is_taken_after_the_check(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as mine, listen("127.0.0.1", mine.getsockname()[1]) as other:
        other.listen()
        status = serve(default_config(), mine, ServeOptions([], tmp_path))
        assert status == 1, f"expected exit status 1, got {status}"
    messages = [record.getMessage() for record in caplog.records if record.name == "worker.protocol.connection"]
    assert len(messages) == 1 and "cannot listen" in messages[0], (
        f"expected one message with the reason, got {messages}"
    )


def test_refuses_unknown_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--nonsense"], ["--port", "x"], ["--http", "--https"], ["--lang", "fr"]):
        with pytest.raises(SystemExit) as left:
            main(flags)
        assert left.value.code == 2 and capsys.readouterr().err, flags


def test_serves_https(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cert, key = make_certificate(tmp_path, "mine")
    _, other = make_certificate(tmp_path, "other")
    assert "its own key" in refusal(["--ssl-certfile", str(cert), "--ssl-keyfile", str(other)], capsys)
    locked = make_certificate(tmp_path, "locked", "-passout", "pass:secret")
    assert "certificate" in refusal(["--ssl-certfile", str(locked[0]), "--ssl-keyfile", str(locked[1])], capsys)
    trusting = ssl.create_default_context(cafile=str(cert))

    async def scenario() -> None:
        async with FakeWorker(1) as worker:
            flags = ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--workers", f"127.0.0.1:{worker.port}"]
            async with process(root, tmp_path, *flags) as (started, port, scheme):
                assert scheme == "https", scheme
                async with httpx.AsyncClient(verify=trusting) as http:
                    assert (await http.get(f"https://127.0.0.1:{port}/livez")).json() == {"alive": True}
                url = f"wss://127.0.0.1:{port}/ws/duplex/omni_me"
                async with connect(url, ssl=trusting, compression=None) as socket:
                    client = Client(socket)
                    await client.prepared()
                    await client.unit()
                    client.socket.transport.abort()
                    await wait_until(lambda: not worker.sessions, "the slot of a lost connection")
                started.send_signal(signal.SIGINT)
                assert await asyncio.wait_for(started.wait(), ANSWER_S) == 0

    run(scenario)


def test_http_flag_overrides_certificate(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path, "mine")
    config = default_config()
    service = config.service.model_copy(update={"ssl_certfile": cert, "ssl_keyfile": key})
    config = config.model_copy(update={"service": service})
    assert certificate(config, https=False, http=False) == Tls(cert, key)
    assert certificate(config, https=False, http=True) is None


def test_stop_waits_for_sessions(root: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeWorker(1) as worker:
            flags = ["--workers", f"127.0.0.1:{worker.port}", "--drain-timeout", "60"]
            async with process(root, tmp_path, *flags) as (started, port, _):
                soft, hard = resource.prlimit(started.pid, resource.RLIMIT_NOFILE)
                assert soft == hard, f"expected the hard limit of open files ({hard}), got {soft}"
                talking = await prepared(port, "talks")
                waiting = await connect_to(port, "waits")
                await waiting.receive("queued")
                started.send_signal(signal.SIGTERM)
                assert (await waiting.receive_until("error"))["code"] == ErrorCode.DRAINING
                assert (await waiting.wait_closed())[0] == 1012
                late = await connect_to(port, "late")
                assert (await late.receive("error"))["code"] == ErrorCode.DRAINING
                assert (await late.wait_closed())[0] == 1012
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                    ready = await http.get("/readyz")
                assert (ready.status_code, ready.json()["draining"]) == (503, True), ready.text
                await talking.send(CHUNK, STOP)
                await talking.receive("result")
                await talking.receive("stopped")
                assert await talking.wait_closed() == (1000, "stopped")
                assert await asyncio.wait_for(started.wait(), ANSWER_S) == 0

    run(scenario)


def test_stop_closes_sessions_after_timeout(root: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with FakeWorker(2) as worker:
            flags = ["--workers", f"127.0.0.1:{worker.port}", "--drain-timeout", "0.5"]
            async with process(root, tmp_path, *flags) as (started, port, _):
                clients = [await prepared(port, f"talks{i}") for i in range(2)]
                started.send_signal(signal.SIGTERM)
                for client in clients:
                    assert (await client.receive("error"))["code"] == ErrorCode.DRAINING
                    assert (await client.wait_closed())[0] == 1012
                assert await asyncio.wait_for(started.wait(), ANSWER_S) == 0
                assert not worker.sessions, worker.sessions

    run(scenario)


@pytest.mark.parametrize(
    ("flags", "makes_key"), [(["--remote"], True), (["--remote", "--insecure"], False), ([], False)]
)
def test_remote_gateway_without_keys_makes_one(
    flags: list[str],
    makes_key: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It prints a link with the key, once, and hands the key to the server."""
    served: list[ServeOptions] = []
    monkeypatch.setenv("DUOLOGUE_SERVICE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("server.main.serve", lambda config, bound, options: served.append(options) or 0)
    with listen("127.0.0.1", 0) as one:
        port = one.getsockname()[1]
    assert main([*flags, "--http", "--port", str(port)]) == 0
    [options], printed = served, capsys.readouterr().out
    assert (options.start_key is not None) == makes_key and printed.count("open http") == makes_key, printed
    assert options.start_key is None or f"/#{options.start_key}\n" in printed
    assert repr(options).count("duo_") == 0, "expected no key in a text of the options"
