"""Each check of the authority by itself: tickets of other gateways, lost and repeated messages, ends and drains."""

from typing import Any

import pytest

from server.cluster.authority import Authority
from server.cluster.messages import (
    Beat,
    Cancel,
    Cancelled,
    Claim,
    Finish,
    FromAuthority,
    Granted,
    Hello,
    Located,
    Reclaim,
    Requeue,
    Submit,
    Swap,
    TicketRefused,
)
from server.cluster.records import GatewayRecord
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue
from server.dispatch.workers import Worker, WorkerAddress, Workers
from tests.server.dispatch.test_queue import Clock, body

TTL_S, RECOVERY_S = 10.0, 5.0


class Scene:
    """An authority with workers of one slot each, or of `slots`."""

    def __init__(self, *slots: int, known: tuple[str, ...] = (), max_queue: int = 9):
        self.clock, self.sent = Clock(), dict[str, list[FromAuthority]]()
        self.authority = Authority(
            Workers((), self.clock, self.clock),
            Queue(max_queue, self.clock, self.clock),
            Eta(EtaConfig()),
            term=1,
            known=known,
            max_spare=9,
            ttl_s=TTL_S,
            recovery_s=RECOVERY_S,
            clock=self.clock,
        )
        self.workers = [self.authority.add_worker(WorkerAddress("w", 1 + index)) for index in range(len(slots))]
        for worker, n in zip(self.workers, slots, strict=True):
            self.report(worker, n, n)

    def report(self, worker: Worker, total: int, free: int) -> None:
        self.authority.workers.record_health(worker, body("BUSY", total, free))

    def connect(self, name: str, *claims: Claim) -> GatewayRecord:
        sent = self.sent.setdefault(name, [])
        hello = Hello(gateway=name, address=f"{name}:1", claims=list(claims))
        return self.authority.connect(hello, lambda message: sent.append(message))

    def submit(self, gateway: GatewayRecord, ticket: str, **fields: Any) -> Claim:
        claim = claimed(ticket, **fields)
        self.authority.submit(gateway, Submit(claim=claim))
        return claim

    def sent_to(self, name: str, kind: type[FromAuthority]) -> list[Any]:
        return [one for one in self.sent[name] if isinstance(one, kind)]

    @property
    def waiting(self) -> list[str]:
        return [ticket.ticket_id for ticket in self.authority.queue]


def claimed(ticket: str, **fields: Any) -> Claim:
    given = {"number": 0, "request_type": "omni_duplex", "session": f"s-{ticket}", "owner": "", **fields}
    return Claim(ticket=ticket, **given)


def held(ticket: str, worker: str = "w:1", **fields: Any) -> Claim:
    return claimed(ticket, **{"number": 7, "worker": worker, **fields})


def test_ticket_of_another_gateway_is_not_claimed() -> None:
    scene = Scene(1)
    mine = scene.connect("mine")
    scene.submit(mine, "t")
    leases = list(scene.workers[0].leases)
    for claim in (held("t"), claimed("t", number=3), claimed("t")):
        scene.connect("other", claim)
        assert "t" in mine.entries and scene.workers[0].leases == leases, f"expected the first lease, got {mine}"
    assert scene.authority.gateways["other"].entries == {}, "expected no ticket of the other gateway, got one"


def test_messages_about_tickets_of_other_gateways_do_nothing() -> None:
    scene = Scene(1)
    mine, other = scene.connect("mine"), scene.connect("other")
    scene.submit(mine, "t")
    authority = scene.authority
    for message in (Finish(ticket="t"), Requeue(ticket="t"), Swap(ticket="t", by="t")):
        getattr(authority, message.type)(other, message)
    assert len(scene.workers[0].leases) == 1 and scene.waiting == [], f"expected the lease to stay, got {mine}"


def test_submit_is_repeated_by_the_claim_and_counts_once() -> None:
    scene = Scene(1)
    gateway = scene.connect("g", claimed("t"))
    assert [one.ticket for one in scene.sent_to("g", Granted)] == ["t"], "expected the lost `submit` to get the slot"
    scene.submit(gateway, "t")
    assert len(scene.sent_to("g", Granted)) == 1 and len(gateway.entries) == 1, f"expected one ticket, got {gateway}"
    scene.submit(gateway, "u", limit=1, owner="o")
    scene.submit(gateway, "u", limit=1, owner="o")
    scene.connect("other", claimed("v", limit=1, owner="o"))
    assert scene.sent_to("other", TicketRefused), "expected the limit to apply to a repeated ticket, got none"
    assert scene.waiting == ["u"] and not scene.sent_to("g", TicketRefused), "expected one ticket, got a refusal"


def test_claimed_slot_is_kept_and_the_slot_of_a_session_from_before_is_not_counted_twice() -> None:
    scene = Scene(2)
    scene.report(scene.workers[0], 2, 1)
    gateway = scene.connect("g", held("t"))
    [lease] = scene.workers[0].leases
    assert (scene.workers[0].n_external, scene.workers[0].n_free) == (0, 1), "expected the slot to count once"
    scene.connect("g", held("t"))
    assert scene.workers[0].leases == [lease], "expected the lease to be kept, got another one"
    scene.connect("g", claimed("t", number=7))
    assert len(scene.sent_to("g", Granted)) == 1, "expected a slot for the ticket that waits again, got none"
    scene.connect("g")
    assert (gateway.entries, scene.workers[0].leases) == ({}, []), f"expected tickets without a claim to end: {gateway}"


def test_slots_of_speech_are_not_counted_twice() -> None:
    scene = Scene(1)
    models = {"models": {"speech": {"slots": {"total": 2, "free": 1}}}}
    scene.authority.workers.record_health(scene.workers[0], {**body("BUSY", 1, 1), **models})
    scene.connect("g", held("t", request_type="speech"))
    assert scene.workers[0].n_free_of("speech") == 1, "expected the slot to count once"


def test_waiting_ticket_that_is_claimed_with_a_slot_leaves_the_queue() -> None:
    scene = Scene(1)
    first = scene.connect("first")
    scene.submit(first, "a")
    waiting = scene.connect("g")
    scene.submit(waiting, "b")
    scene.connect("g", claimed("b", number=2))
    assert scene.waiting == ["b"], f"expected one place in the queue, got {scene.waiting}"
    scene.connect("g", held("b"))
    assert scene.waiting == [], f"expected no place beside the slot, got {scene.waiting}"


def test_only_the_present_connection_of_a_gateway_is_lost() -> None:
    scene = Scene(1)
    gateway = scene.connect("g")
    before = gateway.tell
    assert before is not None
    scene.submit(gateway, "a")
    scene.submit(gateway, "b")
    scene.connect("g", held("a"), claimed("b", number=9))
    scene.authority.disconnect(gateway, before)
    assert (gateway.tell is None, scene.waiting) == (False, ["b"]), "expected the newer connection to stay"


def test_spare_slot_waits_only_for_a_connected_gateway() -> None:
    scene = Scene(1)
    first, away = scene.connect("first"), scene.connect("away")
    scene.submit(first, "a")
    scene.submit(away, "spare", is_spare=True)
    scene.authority.disconnect(away, away.tell)
    scene.authority.finish(first, Finish(ticket="a"))
    assert scene.workers[0].leases == [], "expected no slot for a gateway that is away, got one"


def test_limit_counts_sessions_but_neither_spare_slots_nor_moves() -> None:
    scene = Scene(2, 2)
    gateway = scene.connect("g")
    scene.submit(gateway, "a", owner="o", limit=1)
    scene.submit(gateway, "spare", owner="o", limit=1, is_spare=True)
    scene.submit(gateway, "move", owner="o", moves="a")
    scene.submit(gateway, "other", owner="p", limit=1)
    assert {one.ticket for one in scene.sent_to("g", Granted)} == {"a", "spare", "move", "other"}
    scene.authority.finish(gateway, Finish(ticket="other"))
    scene.submit(gateway, "b", owner="o", limit=2)
    assert scene.sent_to("g", TicketRefused) == [], "expected a second session below the limit, got a refusal"
    scene.submit(gateway, "c", owner="o", limit=2)
    assert scene.sent_to("g", TicketRefused) == [TicketRefused(ticket="c", why="sessions")]


def test_refused_ticket_of_a_full_queue_leaves_nothing() -> None:
    scene = Scene(max_queue=1)
    gateway = scene.connect("g")
    scene.submit(gateway, "a")
    scene.submit(gateway, "b")
    assert scene.sent_to("g", TicketRefused) == [TicketRefused(ticket="b", why="queue_full")]
    assert list(gateway.entries) == ["a"], f"expected one ticket, got {list(gateway.entries)}"


def test_no_slot_is_assigned_before_all_known_gateways_have_claimed_theirs() -> None:
    scene = Scene(1, 1, known=("first", "second"))
    first = scene.connect("first", held("old", "w:1"))
    scene.submit(first, "new")
    scene.submit(first, "move", moves="old")
    scene.authority.poll()
    assert scene.sent_to("first", Granted) == [], "expected no slot while the other gateway may claim it, got one"
    assert scene.sent_to("first", TicketRefused) == [TicketRefused(ticket="move", why="busy")]
    scene.connect("second")
    assert not scene.authority.is_recovering and [one.ticket for one in scene.sent_to("first", Granted)] == ["new"]


def test_free_slot_goes_to_the_earlier_ticket() -> None:
    scene = Scene(1)
    gateway = scene.connect("g")
    for ticket in ("a", "b"):
        scene.submit(gateway, ticket)
    scene.report(scene.workers[0], 2, 1)  # free, and not assigned yet
    scene.submit(gateway, "c")
    assert [one.ticket for one in scene.sent_to("g", Granted)] == ["a", "b"], "expected the order of arrival"


def test_swap_needs_a_slot_and_returns_the_other_one() -> None:
    scene = Scene(1, 1)
    gateway = scene.connect("g")
    scene.submit(gateway, "a")
    first = gateway.entries["a"].lease
    assert first is not None
    scene.submit(gateway, "move", moves="a")
    scene.submit(gateway, "waits")
    scene.authority.swap(gateway, Swap(ticket="a", by="waits"))
    assert gateway.entries["a"].lease is first and scene.waiting == ["waits"], "expected no swap without a slot"
    scene.authority.swap(gateway, Swap(ticket="a", by="move"))
    assert [len(worker.leases) for worker in scene.workers] == [1, 1], "expected the slot that was left to be used"
    assert scene.waiting == [] and sorted(gateway.entries) == ["a", "waits"], f"expected two tickets, got {gateway}"


def test_requeue_takes_the_slot_once_and_spares_a_doubtful_worker() -> None:
    scene = Scene(1)
    gateway = scene.connect("g")
    scene.submit(gateway, "a")
    scene.authority.requeue(gateway, Requeue(ticket="a", is_worker_unsure=True))
    assert scene.waiting == ["a"] and scene.workers[0].leases == [], "expected the ticket to wait and the slot to end"
    assert scene.workers[0].is_suspended, "expected no slot of the worker before its next report"
    scene.authority.requeue(gateway, Requeue(ticket="a"))  # it waits already
    assert scene.waiting == ["a"], f"expected one place, got {scene.waiting}"


@pytest.mark.parametrize(("owner", "is_cancelled"), [(None, True), ("o", True), ("p", False)])
def test_waiting_ticket_is_cancelled_by_its_owner_only(owner: str | None, is_cancelled: bool) -> None:
    scene = Scene(1)
    gateway = scene.connect("g")
    scene.submit(gateway, "a", owner="o")
    scene.submit(gateway, "b", owner="o")
    for ticket in ("a", "b"):
        scene.authority.cancel(Cancel(ticket=ticket, owner=owner))
    assert scene.sent_to("g", Cancelled) == ([Cancelled(ticket="b")] if is_cancelled else []), "of the waiting one only"
    assert len(scene.workers[0].leases) == 1, "expected the session with a slot to stay"


def test_leases_end_when_they_are_not_renewed_and_may_still_be_used() -> None:
    scene = Scene(2)
    silent, other = scene.connect("silent"), scene.connect("other")
    scene.submit(silent, "a")
    scene.clock.now += TTL_S - 1
    scene.authority.beat(other, Beat(number=1))
    scene.clock.now += 1
    scene.authority.poll()
    assert list(scene.authority.gateways) == ["other"] and silent.tell is None, "expected the silent gateway to end"
    assert scene.workers[0].leases == [] and scene.workers[0].n_free == 0, "expected no slot before the next report"


def test_drained_worker_serves_again_once_it_is_registered_again() -> None:
    scene = Scene(1)
    scene.authority.drain_worker(scene.workers[0])
    gateway = scene.connect("g")
    scene.submit(gateway, "a")
    assert scene.waiting == ["a"]
    assert scene.authority.add_worker(WorkerAddress("w", 1)) is scene.workers[0]
    scene.authority.poll()
    assert scene.waiting == [], "expected a slot of the worker, got none"


def test_session_is_located_at_other_gateways_only() -> None:
    scene = Scene(2)
    mine, other = scene.connect("mine"), scene.connect("other")
    for gateway, ticket in ((mine, "a"), (other, "b")):
        scene.submit(gateway, ticket, session="s")
    scene.authority.locate(mine, "s")
    assert scene.sent_to("mine", Located) == [Located(session="s", addresses=["other:1"])]


def test_durations_of_spare_slots_do_not_count() -> None:
    scene = Scene(1)
    gateway = scene.connect("g")
    scene.submit(gateway, "spare", is_spare=True)
    scene.authority.finish(gateway, Finish(ticket="spare", n_units=3, held_s=9.0))
    assert scene.authority.eta.measured["omni_duplex"].n == 0, "expected no sample, got one"
    assert scene.sent_to("g", Reclaim) == []


def test_a_gateway_that_was_away_hears_that_a_session_needs_its_spare_slot() -> None:
    scene = Scene(1)
    spare = Claim(ticket="spare", number=0, request_type="chat", session="s", owner="", is_spare=True)
    away = scene.connect("away", spare)
    [granted] = [one for one in scene.sent["away"] if isinstance(one, Granted)]
    scene.authority.disconnect(away, away.tell)
    other = scene.connect("other")
    scene.authority.submit(other, Submit(claim=spare.model_copy(update={"ticket": "session", "is_spare": False})))
    scene.connect("away", spare.model_copy(update={"number": granted.number, "worker": granted.worker}))
    sent = scene.sent["away"]
    assert Reclaim(ticket="spare") in sent, f"expected the slot to be reclaimed, got {sent}"
