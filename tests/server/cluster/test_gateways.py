"""Two gateways, an authority and fake workers on real sockets."""

from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from benchmarks.serve.fake_worker import FakeWorker
from server.access.usage import DayUsage, KeyUsage
from server.cluster.link import AuthorityLink
from server.cluster.messages import Claim, FromAuthority, Hello, Submit, read_from_authority
from server.cluster.shared_dispatcher import SharedDispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import Workers
from server.serving import Tls
from tests.launcher.processes import free_ports
from tests.server.access.keyed_gateway import USER, bearer, entry
from tests.server.certificates import make_certificate
from tests.server.cluster.clusters import SECRET, running_authority, running_gateways
from tests.server.live_gateway import ANSWER_S, Client, run, wait_until
from worker.key_text import new_key
from worker.protocol.codes import CloseCode


@pytest.fixture(autouse=True)
def beat_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.cluster.link.BEAT_S", 0.1)
    monkeypatch.setattr("server.cluster.link.RETRY_S", 0.05)
    monkeypatch.setattr("server.cluster.shared_dispatcher.ANSWER_S", ANSWER_S)


OTHER = new_key()


def n_sessions(worker: FakeWorker) -> int:
    return sum(connection.conversation is not None for connection in worker.connections)


def test_two_gateways_share_slots_and_one_queue(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(slots=1) as first,
            FakeWorker(slots=1) as second,
            running_authority(tmp_path / "state", first, second) as authority,
            running_gateways(authority.url, ("g0", "g1"), 2) as gateways,
        ):
            clients = [await (await gateways[n % 2].connect(f"omni_{n}")).prepared() for n in range(2)]
            assert n_sessions(first) == n_sessions(second) == 1, "expected one session at each worker"
            waiting = []
            for n in range(4):
                client = await gateways[n % 2].connect(f"omni_waiting_{n}")
                queued = await client.receive("queued")
                assert queued["position"] == queued["queue_length"] == n + 1, f"expected position {n + 1}, got {queued}"
                waiting.append((client, queued["ticket_id"]))
            # Any gateway cancels a ticket.
            assert (await gateways[0].http.delete(f"/api/queue/{waiting[3][1]}")).json()["success"]
            while (await waiting[3][0].receive_raw()).find('"cancelled"') < 0:
                pass
            for n in range(3):  # the slots go to the tickets in their order, whichever gateway they wait at
                await (clients + [one for one, _ in waiting])[n].close()
                await (await waiting[n][0].with_slot()).send({"type": "prepare"})
                await waiting[n][0].receive("prepared")
                assert n_sessions(first) + n_sessions(second) <= 2, "expected at most two sessions at the workers"

    run(scenario)


def test_sessions_outlive_the_authority_and_a_new_one_learns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)  # below those that other processes get: the second authority has the same one

    async def scenario() -> None:
        async with FakeWorker(slots=2) as worker, AsyncExitStack() as rest:
            async with AsyncExitStack() as first:
                authority = await first.enter_async_context(running_authority(tmp_path / "state", worker, port=port))
                gateways = await rest.enter_async_context(running_gateways(authority.url, ("g0", "g1"), 1))
                clients = [await (await one.connect(f"omni_{n}")).prepared() for n, one in enumerate(gateways)]
                waiting = await gateways[1].connect("omni_waiting")
                await waiting.receive("queued")
            for client in clients:  # without an authority
                await client.unit()
            with monkeypatch.context() as patch:
                patch.setattr("server.cluster.shared_dispatcher.ANSWER_S", 0.1)
                late = await gateways[0].connect("omni_late")
                assert (await late.receive("queued"))["position"] == 1, "expected the place at this gateway"
            async with running_authority(tmp_path / "state", port=port) as second:
                state = second.service.authority
                assert state.term == 2, f"expected a higher term, got {state.term}"
                await wait_until(lambda: len(state.workers.leases) == 2 and len(state.queue) == 2, "all claims")
                for client in clients:
                    await client.unit()
                await clients[0].close()
                await waiting.with_slot()  # before the one that came without an authority
                assert len(state.queue) == 1, f"expected the late ticket to wait, got {len(state.queue)}"
                await clients[1].close()
                await late.with_slot()

    run(scenario)


def test_what_comes_over_a_connection_that_no_longer_counts(tmp_path: Path) -> None:
    """The authority takes no ticket from it, and a gateway that fails at a message connects again."""

    async def scenario() -> None:
        async with FakeWorker(slots=1) as worker, running_authority(tmp_path / "state", worker) as authority:
            state = authority.service.authority
            await wait_until(lambda: state.workers.n_free == 1, "the worker")
            claim = Claim(ticket="t", number=0, request_type="chat", session="s", owner="")
            async with connect(f"{authority.url}/gateway", proxy=None) as expired:
                await expired.send(Hello(gateway="g").model_dump_json())
                await expired.recv()  # welcome
                state.gateways["g"].expires_at = 0.0
                state.poll()
                await expired.send(Submit(claim=claim).model_dump_json())
                await expired.wait_closed()
                assert expired.close_code == CloseCode.REPLACED, f"expected REPLACED, got {expired.close_code}"
                assert not state.workers.leases, "expected no lease without a gateway"
            async with connect(f"{authority.url}/gateway", proxy=None) as again:
                await again.send(Hello(gateway="g", claims=[claim]).model_dump_json())
                while (message := read_from_authority(str(await again.recv()))).type != "granted":
                    pass
                assert message.ticket == "t", f"expected the slot of the ticket, got {message}"

            dispatcher = SharedDispatcher(Workers(()), Queue(10), Eta(EtaConfig()))
            receive, failed = dispatcher.receive, []

            def fail_once(message: FromAuthority) -> None:
                dispatcher.receive = receive
                failed.append(message)
                raise KeyError(message.type)

            dispatcher.receive = fail_once
            link = AuthorityLink(dispatcher, DayUsage(tmp_path / "usage"), authority.url, "g1", 1)
            link.start()
            await wait_until(lambda: failed and len(dispatcher.workers.all) == 1, "the list of workers")
            await link.stop()

    run(scenario)


def test_session_of_a_worker_that_drains_moves_to_a_slot_of_the_authority(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(slots=1) as first,
            FakeWorker(slots=1) as second,
            running_authority(tmp_path / "state", first, second) as authority,
            running_gateways(authority.url, ("g0", "g1"), 2) as gateways,
        ):
            state = authority.service.authority
            client = await (await gateways[0].connect("omni_moves")).with_slot()
            await client.send({"type": "prepare", "spec": {"resume": True}})
            await client.receive("prepared")
            await client.unit()
            other = await (await gateways[1].connect("omni_other")).prepared()
            (leaving,) = [one for one in state.workers.all if one.leases[0].session_id == "omni_moves"]
            state.drain_worker(leaving)
            waiting = await gateways[1].connect("omni_waiting")
            await waiting.receive("queued")
            await client.unit()  # there is no other slot yet
            await other.close()  # which goes to the ticket that waits, or to the session that moves
            await waiting.close()
            while '"session_moved"' not in str(await client.receive_raw()):
                pass
            await client.unit()
            (target,) = [one for one in state.workers.all if one is not leaving]
            await wait_until(lambda: not leaving.leases and len(target.leases) == 1, "one lease")
            await wait_until(lambda: len(state.gateways["g0"].entries) == 1, "one ticket")
            lease = gateways[0].gateway.dispatcher.workers.leases
            assert [str(one.worker.address) for one in lease] == [str(target.address)], f"got {lease}"

    run(scenario)


@pytest.mark.parametrize("has_tls", [False, True])
def test_client_resumes_its_session_through_another_gateway(tmp_path: Path, has_tls: bool) -> None:
    tls = Tls(*make_certificate(tmp_path, "gateway", subject="DNS:talk.example.org")) if has_tls else None

    async def scenario() -> None:
        keys = {"api_keys": [entry("user", USER), entry("other", OTHER)]}
        async with (
            FakeWorker(slots=1) as worker,
            running_authority(tmp_path / "state", worker, secret=SECRET) as authority,
            running_gateways(authority.url, ("g0", "g1"), 1, secret=SECRET, tls=tls, **keys) as gateways,
        ):
            client = await (await gateways[0].connect("omni_a", additional_headers=bearer(USER))).with_slot()
            await client.send({"type": "prepare", "spec": {"resume": True}})
            token = (await client.receive("prepared"))["resume_token"]
            await client.unit()
            client.abort()

            async def resume(key: str, given: str, received: int) -> Client:
                options = {"path": "/ws/duplex/", "additional_headers": bearer(key)}
                again = await gateways[1].connect("omni_a?resume=1", **options)
                await again.send({"type": "resume_session", "token": given, "received": received})
                return again

            for key, given in ((OTHER, token), (USER, "another")):
                refused = await resume(key, given, 1)
                assert (await refused.receive("error"))["code"] == "resume_refused"
                assert (await refused.wait_closed())[0] == 1008

            usage = [one.gateway.access.usage.own[1]["user"].requests for one in gateways]
            again = await resume(USER, token, 1)
            resumed = await again.receive("session_resumed")
            assert (resumed["next"], resumed["lost"]) == (2, 0), f"expected the result that the client lacks: {resumed}"
            await again.receive("result")
            await again.unit()
            counted = [one.gateway.access.usage.own[1]["user"].requests for one in gateways]
            assert counted == [usage[0], usage[1] + 1], f"expected one request at the second, got {usage}, {counted}"
            again.abort()  # once more, through the gateway that has the session
            options = {"path": "/ws/duplex/", "additional_headers": bearer(USER)}
            last = await gateways[0].connect("omni_a?resume=1", **options)
            await last.send({"type": "resume_session", "token": resumed["resume_token"], "received": 3})
            await last.receive("session_resumed")
            await last.unit()
            await last.close()
            await wait_until(lambda: not authority.service.authority.workers.leases, "the end of the session")
            stranger = {**bearer(USER), "x-duologue-identity": "{}", "x-duologue-worker-secret": "wrong"}
            first = await gateways[0].connect("omni_b", additional_headers=stranger)
            await first.with_slot()  # with its own key, since the secret is not that of the cluster

    run(scenario)


def test_secret_workers_and_usage_of_keys(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            FakeWorker(slots=1) as worker,
            running_authority(tmp_path / "state", secret=SECRET) as authority,
            running_gateways(authority.url, ("g0", "g1"), 0) as gateways,
        ):
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{authority.port}", trust_env=False, verify=False
            ) as http:
                address = f"/workers/127.0.0.1:{worker.port}"
                assert (await http.put(address)).status_code == 403, "expected a refusal without the secret"
                assert (await http.get("/health")).json()["gateways"] == [], "expected no gateway without the secret"
                for one in gateways:
                    one.link._headers = {"x-duologue-worker-secret": SECRET}
                http.headers["x-duologue-worker-secret"] = SECRET
                assert (await http.put("/workers/nowhere")).status_code == 422
                assert (await http.post(address)).status_code == 404
                assert (await http.put(address)).status_code == 200
                for one in gateways:
                    await wait_until(lambda one=one: one.gateway.dispatcher.workers.n_free == 1, "the worker")
                client = await (await gateways[0].connect("omni_a")).prepared()
                assert (await http.post(address)).status_code == 200  # drain
                await client.unit()
                await client.close()
                waiting = await gateways[1].connect("omni_b")
                await waiting.receive("queued")
                state = authority.service.authority
                await wait_until(lambda: not state.workers.leases, "no lease of a worker that drains")
                await wait_until(lambda: n_sessions(worker) == 0, "no session at a worker that drains")
                assert len(state.queue) == 1, f"expected the ticket to wait, got {len(state.queue)}"
                reported = (await http.get("/workers")).json()
                assert [(one["model"], one["labels"], one["length"]) for one in reported["queues"]] == [("omni", [], 1)]
                (drained,) = reported["workers"]
                assert drained["models"]["omni"] == {"slots": 1, "free": 0} and drained["is_draining"], drained
                assert (await http.put(address)).status_code == 200
                await waiting.with_slot()
                assert (await http.delete(address)).status_code == 200
                assert (await http.get("/workers")).json() == {"workers": [], "queues": []}
            usages = [one.gateway.access.usage for one in gateways]
            for usage, n in zip(usages, (3, 4), strict=True):
                used = usage.of("user")
                used.requests, used.session_s = n, 10.0 * n
            for usage in usages:
                await wait_until(
                    lambda usage=usage: usage.total_of("user") == KeyUsage(requests=7, session_s=70.0), "the sum"
                )

    run(scenario)
