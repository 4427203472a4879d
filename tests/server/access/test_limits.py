"""Limits and quotas: exact with parallel requests, per key and per address, kept over a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.access.access import Access
from server.access.identity import Identity, IdentityKind, KeyLimits
from server.access.refusal import AccessRefusedError
from server.access.usage import DAY_S, DayUsage
from server.dispatch.queue import ANY_WORKER
from server.live.closes import SessionEnd
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession, LiveSessions
from server.live.quota_watch import QuotaWatch
from tests.server.access.keyed_gateway import ADMIN, USER, bearer, user_and_admin
from tests.server.routes.asgi_gateway import IDLE, asgi_client, gateway_of

KEY = Identity("user", IdentityKind.KEY, "192.0.2.1", KeyLimits(sessions=2, requests_per_day=3, minutes_per_day=1))
NOON = 20_000 * DAY_S + DAY_S / 2


def usage_in(folder: Path, now: float = NOON) -> DayUsage:
    return DayUsage(folder / "usage.json", lambda: now)


def test_daily_requests_are_exact_with_50_parallel_ones(tmp_path: Path) -> None:
    gateway = gateway_of(config=user_and_admin(tmp_path, requests_per_day=20))

    async def scenario() -> None:
        async with asgi_client(gateway) as client:

            async def post() -> Any:
                return await client.raw.post("/api/streaming/stop", json={}, headers=bearer(USER))

            answers = await asyncio.gather(*(post() for _ in range(50)))
            statuses = [answer.status_code for answer in answers]
            assert (statuses.count(200), statuses.count(429)) == (20, 30), statuses
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert 1 <= int(refused.headers["retry-after"]) <= DAY_S
            assert "requests of this key today: expected at most 20, got more" in refused.json()["detail"]
            error = await client.raw.post("/v1/audio/speech", json={}, headers=bearer(USER))
            assert error.json()["error"]["code"] == "rate_limit_exceeded" and "retry-after" in error.headers
            assert (await client.raw.get("/status", headers=bearer(USER))).status_code == 200, "reading is not counted"
            assert (await client.raw.post("/api/streaming/stop", json={}, headers=bearer(ADMIN))).status_code == 200
            listed = (await client.raw.get("/api/access/keys", headers=bearer(ADMIN))).json()["keys"]
            assert [(key["name"], key["today"]["requests"]) for key in listed] == [("user", 20), ("boss", 1)], listed

    asyncio.run(scenario())


def test_sessions_at_once_are_exact_with_50_parallel_ones(tmp_path: Path) -> None:
    gateway = gateway_of(config=user_and_admin(tmp_path))
    slots, dispatcher = gateway.slots, gateway.dispatcher

    async def submit(identity: Identity) -> Any:
        try:
            return slots.submit("chat", "x", identity)
        except SessionEnd as end:
            return end.close

    async def scenario() -> None:
        dispatcher.workers.record_health(dispatcher.workers.all[0], {**IDLE, "slots": {"total": 8, "free": 8}})
        admitted: list[Any] = []
        anonymous, here = Identity(address="192.0.2.9"), Identity(address="127.0.0.1")
        for identity, expected in ((KEY, 2), (anonymous, 4), (here, 50)):
            got = await asyncio.gather(*(submit(identity) for _ in range(50)))
            admitted = [one for one in got if hasattr(one, "ticket")]
            assert len(admitted) == expected, f"{identity.owner}: expected {expected}, got {len(admitted)}"
            refused = [one for one in got if not hasattr(one, "ticket")]
            assert all(one.retry_after_s and one.error.code == "limit_reached" for one in refused)
            # What another gateway has admitted goes on, and counts.
            admitted.append(slots.adopt(dispatcher.workers.all[0], "chat", "taken", identity, ANY_WORKER))
            dispatcher.finish(admitted.pop(0))
            if identity is not here:
                assert not hasattr(await submit(identity), "ticket"), f"{identity.owner}: expected no further session"
            for pending in admitted:
                dispatcher.finish(pending)
                dispatcher.finish(pending)  # counts once
            again = await submit(identity)
            assert hasattr(again, "ticket"), f"{identity.owner}: expected a session after the others ended"
            dispatcher.finish(again)

    asyncio.run(scenario())


def test_full_queue_returns_the_permit(tmp_path: Path) -> None:
    config = user_and_admin(tmp_path)
    service = config.service.model_copy(update={"max_queue_size": 0})
    gateway = gateway_of(config=config.model_copy(update={"service": service}))
    for _ in range(5):
        with pytest.raises(SessionEnd) as caught:
            gateway.slots.submit("chat", "x", KEY)
        assert caught.value.close.reason == "Queue full", caught.value.close


def test_minutes_end_running_sessions_and_refuse_new_ones(tmp_path: Path) -> None:
    gateway = gateway_of(config=user_and_admin(tmp_path, minutes_per_day=1.0))
    dispatcher, usage = gateway.dispatcher, gateway.access.usage
    key = gateway.access.keys.named("user")
    assert key is not None
    identity = key.identity("192.0.2.1")

    async def scenario() -> None:
        dispatcher.workers.record_health(dispatcher.workers.all[0], IDLE)
        session = LiveSession("x", Kind.DUPLEX, identity)
        session.pending = gateway.slots.submit("omni_duplex", "x", identity)
        session.task = asyncio.ensure_future(asyncio.sleep(60))
        live = LiveSessions()
        live.add(session)
        watch = QuotaWatch(live, dispatcher)
        lease = session.pending.lease
        assert lease is not None
        lease.since -= 40
        watch.poll()
        watch.poll()
        assert 40 <= usage.of("user").session_s < 41 and session.forced_close is None
        dispatcher.requeue(session.pending, was_used=True)  # it moves to another worker
        lease = session.pending.lease
        assert lease is not None, "expected the free slot at once"
        watch.poll()
        assert 40 <= usage.of("user").session_s < 41 and session.forced_close is None
        lease.since -= 25
        watch.poll()
        assert session.forced_close is not None and session.forced_close.how == "limit"
        dispatcher.finish(session.pending)
        assert 65 <= usage.of("user").session_s < 66
        with pytest.raises(SessionEnd, match="Limit reached"):
            gateway.slots.submit("omni_duplex", "y", identity)
        await asyncio.gather(session.task, return_exceptions=True)

    asyncio.run(scenario())


def test_what_is_left_of_a_keys_requests_is_told_in_the_words_of_the_api(tmp_path: Path) -> None:
    usage = usage_in(tmp_path)
    usage.count_request(KEY)
    limit = {"name": "requests", "limit": 3, "remaining": 2, "reset_seconds": DAY_S / 2}
    assert usage.left(KEY) == [limit] and usage.left(Identity()) == []


def test_counters_survive_a_restart_and_end_with_the_day(tmp_path: Path) -> None:
    usage = usage_in(tmp_path)
    for _ in range(3):
        usage.count_request(KEY)
    usage.add_session(KEY, 61.5)
    asyncio.run(usage.save())
    again = usage_in(tmp_path)
    assert (again.of("user").requests, again.of("user").session_s) == (3, 61.5)
    with pytest.raises(AccessRefusedError) as caught:
        again.count_request(KEY)
    assert caught.value.status == 429 and caught.value.retry_after_s == DAY_S / 2
    with pytest.raises(AccessRefusedError):
        again.check_minutes(KEY)
    tomorrow = usage_in(tmp_path, NOON + DAY_S)
    tomorrow.count_request(KEY)
    tomorrow.check_minutes(KEY)
    assert tomorrow.of("user").requests == 1


def test_gateways_of_a_cluster_count_apart_in_a_shared_folder(tmp_path: Path) -> None:
    """A gateway that starts again has its own count, not that of the one which wrote last."""

    def usage_of(gateway: str) -> DayUsage:
        return Access.of(user_and_admin(tmp_path), lambda _: None, gateway=gateway).usage

    for name, n in (("g0:8006", 3), ("a/b", 1), ("", 2)):
        usage = usage_of(name)
        for _ in range(n):
            usage.count_request(KEY)
        asyncio.run(usage.save())
    assert [usage_of(name).of("user").requests for name in ("g0:8006", "a/b", "", "new")] == [3, 1, 2, 0]


@pytest.mark.parametrize("content", ["", "{", '{"day": "x"}', '{"day": 1, "keys": {"user": {"requests": -1}}}'])
def test_damaged_counters_begin_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "usage.json").write_text(content)
    assert usage_in(tmp_path).of("user").requests == 0
