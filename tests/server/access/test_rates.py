"""Rates: of requests, messages, bytes, costly messages and pixels, by connection and client; shares of threads."""

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.access import connection_pace, guard
from server.access.clients import Clients
from server.access.connection_pace import ConnectionPace
from server.access.identity import Identity, IdentityKind
from server.access.limit import Limit
from server.access.message_kinds import limits_of
from server.access.refusal import AccessRefusedError
from server.access.shares import ThreadShares
from server.access.token_bucket import TokenBucket
from server.access.usage import DayUsage
from server.metrics import GatewayMetrics
from tests.server.access.keyed_gateway import USER, bearer, config_with, entry
from tests.server.routes.asgi_gateway import asgi_client, gateway_of
from worker.config.access import ClientLimits
from worker.config.layers import setting_fields
from worker.config.service import ROOT, Config
from worker.protocol.live_http import TransportLimit

KEY = Identity("user", IdentityKind.KEY, "192.0.2.1")
BOUND = re.compile(r"(^|_)(max|timeout|grace|retention|mode_s)(_|$)|_mode_s$")
NO_BOUND = {"max_warmup_chunks", "max_port"}  # of the warm-up, which no client causes; the end of a range of ports
NO_SETTING = {
    "client_secrets",
    "body_bytes",
    "held_bytes",
    "requests_per_day",
    "minutes_per_day",
}  # of a key, or constant


def clients_in(
    folder: Path, clock: Callable[[], float], count: Callable[[Limit], None] = lambda _: None, **limits: Any
) -> Clients:
    return Clients(ClientLimits(**limits), DayUsage(folder / "usage.json"), count, clock)


def test_sockets_and_requests_of_an_address(tmp_path: Path) -> None:
    now = 0.0
    clients = clients_in(tmp_path, lambda: now, sockets=2, requests_per_s=1.0, metrics_per_s=0.2, takeovers_per_s=0.1)
    one, other, here = (Identity(address=text) for text in ("192.0.2.1", "192.0.2.2", "::1"))
    for identity in (one, other):
        clients.open_socket(identity)
        clients.open_socket(identity)
        with pytest.raises(AccessRefusedError) as caught:
            clients.open_socket(identity)
        assert caught.value.status == 429 and caught.value.retry_after_s and caught.value.limit is Limit.SOCKETS
    for _ in range(100):  # ten times the rate, and any number of sockets
        clients.open_socket(here)
        clients.count_request(here, "/")
    with pytest.raises(AccessRefusedError) as caught:
        clients.count_request(here, "/")
    assert caught.value.limit is Limit.REQUESTS and "at most 10 a second (requests_per_s)" in str(caught.value)
    clients.close_socket(one)
    clients.open_socket(one)
    for path in (*["/metrics"] * 2, *["/"] * 7):
        clients.count_request(one, path)
    with pytest.raises(AccessRefusedError) as caught:
        clients.count_request(one, "/metrics")
    assert caught.value.limit is Limit.METRICS, caught.value
    with pytest.raises(AccessRefusedError):
        clients.count_request(one, "/")
    clients.count_takeover(one)
    with pytest.raises(AccessRefusedError, match=r"at most 0.1 a second \(takeovers_per_s\)") as caught:
        clients.count_takeover(one)
    assert caught.value.limit is Limit.TAKEOVERS
    clients.forgive_takeover(one)
    clients.count_takeover(one)
    now = 2.0
    clients.count_request(one, "/")
    clients.count_request(replace(KEY, address="192.0.2.1"), "/")  # a key is a client of its own
    assert len(clients) == 4
    clients.close_socket(other)
    clients.close_socket(other)
    now = 500.0
    clients.count_request(KEY, "/")
    assert len(clients) == 3, "expected clients without sockets to be forgotten"


def test_bucket_refuses_without_counting() -> None:
    bucket = TokenBucket(2.0, 0.0)
    assert [bucket.take(0.0) for _ in range(20)] == [0.0] * 20
    assert bucket.take(0.0) == bucket.take(0.0) == 0.5
    assert bucket.take(0.5) == 0.0 and bucket.take(0.5) > 0
    assert bucket.spend(10, 100.0) == 0.0 and bucket.spend(30, 100.0) == 10.0


class Paced:
    """A connection whose clock stands still unless it is moved. slept: seconds of each wait."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: float):
        self.now, self.slept, self.refused = 0.0, list[float](), list[str]()
        self.reached: list[Limit] = []
        self.clients = clients_in(folder, lambda: self.now, self.reached.append, **limits)

        async def sleep(seconds: float) -> None:
            if seconds:
                self.slept.append(round(seconds, 6))

        monkeypatch.setattr(connection_pace.asyncio, "sleep", sleep)

    def connect(self, address: str) -> ConnectionPace:
        return self.clients.pace_of(Identity(address=address), {})

    async def send(self, pace: ConnectionPace, *messages: str | bytes) -> list[str]:
        """Receive the messages through the guard. Returns: the types of what the application gets."""
        left = list(messages)

        async def receive() -> dict[str, Any]:
            one = left.pop(0)
            return {"type": "websocket.receive", "text" if isinstance(one, str) else "bytes": one}

        async def refuse(error: AccessRefusedError) -> None:
            self.refused.append(str(error))

        paced = pace.paced(receive, refuse)
        return [(await paced())["type"].removeprefix("websocket.") for _ in messages]


@pytest.mark.parametrize("address", ["192.0.2.1", "127.0.0.1"])
def test_fast_senders_are_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    async def scenario() -> None:
        paced = Paced(tmp_path, monkeypatch, socket_messages_per_s=2.0, socket_mb_per_s=0.1)
        first = paced.connect(address)
        assert await paced.send(first, *["x"] * 20) == ["receive"] * 20 and not paced.slept, "expected a burst of 10 s"
        await paced.send(first, "x")
        assert (paced.slept, paced.reached) == ([0.5], [Limit.SOCKET_MESSAGES])
        paced.now = 100.0
        await paced.send(first, b"x" * 1_200_000)
        assert (paced.slept[1:], paced.reached[1:]) == ([2.0], [Limit.SOCKET_BYTES])
        await paced.send(paced.connect(address), "x")
        assert len(paced.slept) == 2, "expected another connection to have a rate of its own"
        await first.decode(400_000_000)
        assert (paced.slept[2:], paced.reached[2:]) == ([2.5], [Limit.PIXELS])

    asyncio.run(scenario())


def test_all_connections_of_a_client_share_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        paced = Paced(tmp_path, monkeypatch, messages_per_s=1.0)
        for _ in range(10):
            await paced.send(paced.connect("192.0.2.1"), "x")
        assert not paced.slept
        await paced.send(paced.connect("192.0.2.1"), "x")
        await paced.send(paced.connect("192.0.2.2"), "x")
        assert (paced.slept, paced.reached) == ([1.0], [Limit.MESSAGES])

    asyncio.run(scenario())


def test_costly_messages_end_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        paced = Paced(tmp_path, monkeypatch, interrupts_per_s=0.3, prepares_per_s=0.2)
        pace = paced.connect("127.0.0.1")
        others = ['{"type":"audio_chunk","audio_base64":"AAAA"}', '{"a":"b"}', "", b"\x02\0\0\0{}"]
        assert await paced.send(pace, *others * 5) == ["receive"] * 20
        assert await paced.send(pace, *['{"type": "interrupt"}'] * 4) == ["receive"] * 3 + ["disconnect"]
        assert await paced.send(pace, *['{"type": "prepare"}'] * 3) == ["receive"] * 2 + ["disconnect"]
        assert paced.reached == [Limit.INTERRUPTS, Limit.PREPARES] and not paced.slept
        assert "expected at most 0.3 a second (interrupts_per_s), got more" in paced.refused[0], paced.refused
        for _ in range(8):  # a client has the rates of eight connections
            await paced.send(paced.connect("192.0.2.1"), *['{"type":"prepare"}'] * 2)
        assert await paced.send(paced.connect("192.0.2.1"), '{"type":"prepare"}') == ["disconnect"]

    asyncio.run(scenario())


def test_a_connection_above_its_own_limit_costs_a_second_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        paced = Paced(tmp_path, monkeypatch, interrupts_per_s=0.1, requests_per_s=4.0)
        identity, message = Identity(address="192.0.2.1"), '{"type": "interrupt"}'
        for _ in range(20):
            paced.clients.count_request(identity, "/")
        for _ in range(4):  # of 40 requests, 20 are left; the client's own share of interrupts is for eight
            assert await paced.send(paced.connect("192.0.2.1"), *[message] * 2) == ["receive", "disconnect"]
        # Each of the four took four requests. The client has none of its interrupts left now: this costs no requests.
        for _ in range(9):
            assert await paced.send(paced.connect("192.0.2.1"), message) == ["disconnect"]
        for _ in range(4):
            paced.clients.count_request(identity, "/")
        with pytest.raises(AccessRefusedError):
            paced.clients.count_request(identity, "/")

    asyncio.run(scenario())


def test_a_charge_leaves_a_debt_of_a_second_at_most() -> None:
    bucket = TokenBucket(4.0, 0.0)
    bucket.charge(38.0, 0.0)
    assert bucket.take(0.0) == 0.0
    for _ in range(5):
        bucket.charge(4.0, 0.0)
    assert bucket.take(0.0) == 5 / 4
    assert bucket.spend(20.0, 0.0) == 6.0
    bucket.charge(4.0, 0.0)
    assert bucket.spend(0.0, 0.0) == 6.0, "expected a larger debt to stay as it is"


def test_refusals_of_a_limit_wait_and_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "DELAY_S", 30.0)
    monkeypatch.setattr(guard, "MAX_DELAYED_CLIENT", 2)
    gateway = gateway_of(config=config_with(tmp_path, entry("user", USER), requests_per_s=0.3))

    async def scenario() -> None:
        async with asgi_client(gateway) as client:

            async def status() -> int:
                return (await client.raw.get("/status", headers=bearer(USER))).status_code

            assert [await status() for _ in range(3)] == [200] * 3, "expected a burst of 10 s"
            asked = [asyncio.create_task(status()) for _ in range(4)]
            done, waiting = await asyncio.wait(asked, timeout=1.0)
            assert ([one.result() for one in done], len(waiting)) == ([429, 429], 2)
            for one in waiting:  # their clients leave
                one.cancel()
            await asyncio.wait(waiting)
            assert not (await asyncio.wait([asyncio.create_task(status())], timeout=0.2))[0]
            assert (await client.raw.get("/status")).status_code == 401, "expected no wait without a limit"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('{"type":"session.update","session":{}}', {Limit.PREPARES}),
        ('{ "x": {"type":"y"}, "type" \n : \n "response.cancel"}', {Limit.INTERRUPTS}),
        ('{"type":"prep\\u0061re"}', {Limit.PREPARES}),
        ('{"\\u0074ype":"interrupt"}', {Limit.PREPARES}),
        ('{"type":"response\\u002ecancel"}', {Limit.PREPARES}),
        ('{"type":"x"' + " " * 2**18 + ',"type":"interrupt"}', {Limit.INTERRUPTS}),
        ('{"type":"x","a":"' + "A" * (2**18 - 24) + '","type":"interrupt"}', {Limit.INTERRUPTS}),
        ('{"type"' + " " * 600 + ':"interrupt"}', {Limit.PREPARES}),
        ('{"type":' + " " * 600 + '"interrupt"}', {Limit.PREPARES}),
        (b"\x15\0\0\0" + b'{"type": "interrupt"}' + bytes(9), {Limit.INTERRUPTS}),
        ('{"type":"audio_chunk","text":"caf\\u00e9 \\u4f60 \\"type\\":\\"prepare\\""}', set()),
        ('{"type":"x","properties":{"type":{"type":"string"}},"required":["type"]}', set()),
        (b"\x16\0\0\0" + b'{"type":"audio_chunk"}' + b'{"type": "interrupt"}', set()),
    ],
)
def test_costly_messages_are_found_however_they_are_written(message: str | bytes, expected: set[Limit]) -> None:
    assert asyncio.run(limits_of(message)) == expected


def test_a_client_runs_one_job_at_a_time_and_cannot_occupy_the_threads() -> None:
    async def scenario() -> None:
        threads, gate, running = ThreadShares(2), threading.Event(), list[str]()

        def job(name: str) -> None:
            running.append(name)
            gate.wait(30)

        async def ask(client: str, name: str) -> None:
            connection_pace.CONNECTION.set(SimpleNamespace(share=client))  # type: ignore[arg-type]
            await threads.run(job, name)

        greedy = [asyncio.create_task(ask("greedy", f"greedy {number}")) for number in range(8)]
        await asyncio.sleep(0)
        greedy[0].cancel()  # its job has begun: it keeps the client's turn
        good = asyncio.create_task(ask("good", "good"))
        while len(running) < 2:
            await asyncio.sleep(0.001)
        assert sorted(running) == ["good", "greedy 0"], running
        gate.set()
        await asyncio.gather(good, *greedy[1:])
        assert sorted(running)[1:] == [f"greedy {number}" for number in range(8)]

    asyncio.run(scenario())


def test_every_limit_is_documented_with_its_setting_and_metric() -> None:
    text = (ROOT / "docs" / "limits.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]+?) \|", text, re.MULTILINE))
    names = {limit.value for limit in (*Limit, *TransportLimit)}
    assert rows.keys() == names, f"expected a row for each of {names ^ rows.keys()} and no other"
    for name, field in ClientLimits.model_fields.items():
        if field.default is not None:
            assert rows[name].startswith(f"{field.default:g}"), f"{name}: expected {field.default:g}, got {rows[name]}"
    assert ClientLimits.model_fields.keys() | NO_SETTING == names, "expected a setting for each limit"
    metrics = GatewayMetrics().registry
    assert all(metrics.get_sample_value("duologue_gateway_limits_total", {"limit": name}) == 0 for name in names)


def test_every_limit_of_a_session_and_size_names_an_answer_and_a_metric() -> None:
    text, metrics = ((ROOT / "docs" / name).read_text() for name in ("limits.md", "metrics.md"))
    rows = re.findall(r"^\| (?!`[a-z_]+` \||limit \||-)(.+) \|$", text, re.MULTILINE)
    assert len(rows) > 20, f"expected the rows of all tables, got {len(rows)}"
    for row in rows:
        limit, *cells = row.split(" | ")
        assert len(cells) == 3 and all(cells), f"{limit}: expected default, answer and metric, got {cells}"
        named = set(re.findall(r"`(?:gateway_|worker_)?([a-z_]+)`", cells[-1])) - {"how", "outcome", "code", "limit"}
        unknown = [name for name in named if f"| `{name}` |" not in metrics]
        assert (named or cells[-1].startswith("none: ")) and not unknown, f"{limit}: got {named}, unknown {unknown}"


def test_every_other_bound_is_documented_with_its_default_and_metrics() -> None:
    """Settings outside `service.limits` that end or refuse something a client does."""
    text = (ROOT / "docs" / "limits.md").read_text()
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    rows = dict(re.findall(r"`([a-z_]+\.[a-z_.]+)`(?: \||,) (.+)$", text, re.MULTILINE))
    groups = ("service.limits.", "duplex.session.")
    bounds = {
        setting.key: setting
        for setting in setting_fields(Config)
        if BOUND.search(setting.name) and setting.name not in NO_BOUND and not setting.key.startswith(groups)
    }
    assert len(bounds) > 10 and rows.keys() >= bounds.keys(), (
        f"expected a row for each of {bounds.keys() - rows.keys()}"
    )
    for key, setting in bounds.items():
        default = setting.parent.model_fields[setting.name].default
        shown = "null" if default is None else f"{default:g}"
        assert rows[key].startswith(shown), f"{key}: expected the default {shown}, got {rows[key]}"
        named = set(re.findall(r"`(?:gateway_|worker_)?([a-z_]+)`", rows[key].split(" | ")[-1])) - {"how", "outcome"}
        unknown = [name for name in named if f"| `{name}` |" not in metrics]
        assert named and not unknown, f"{key}: expected metrics of metrics.md, got {named}, unknown {unknown}"
