"""Tickets and slots in any order of events: nobody is lost, nobody overtakes, no slot is lent twice."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.dispatch.dispatcher import Dispatcher, PendingSession
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Queue, QueueFullError, Ticket
from server.dispatch.workers import WorkerAddress, Workers

MOST, N_WORKERS = 4, 2
PICK = st.integers(0, 20)


class Clock:
    """now: s."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def body(state: str, total: int, free: int) -> dict[str, object]:
    return {"state": state, "worker_status": "idle", "slots": {"total": total, "free": free}}


class DeskMachine(RuleBasedStateMachine):
    """Clients and workers do what they like; what must always hold is checked behind every step."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.workers = Workers([WorkerAddress("127.0.0.1", 1000 + i) for i in range(N_WORKERS)], self.clock, self.clock)
        self.dispatcher = Dispatcher(
            self.workers, Queue(MOST, self.clock, self.clock), Eta(EtaConfig(min_samples=1)), clock=self.clock
        )
        self.here: list[PendingSession] = []  # who has neither left nor been cancelled
        self.places: dict[Ticket, int] = {}
        self.has_stepped_back = False

    # --- clients -------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(["audio_duplex", "omni_duplex", "chat", "half_duplex_audio"]))
    def arrive(self, kind):
        n_before = len(self.dispatcher.queue)
        try:
            pending = self.dispatcher.arrive(kind, "someone")
        except QueueFullError as error:
            assert n_before >= MOST, f"expected room for {MOST}, got {error} at {n_before}"
            return
        assert pending.lease is not None or n_before < MOST, f"expected at most {MOST} to wait, got one more"
        assert pending.lease is None or not n_before, f"expected a place behind {n_before}, got a slot"
        self.here.append(pending)

    @precondition(lambda self: self.here)
    @rule(pick=PICK)
    def leave(self, pick):
        pending = self.here.pop(pick % len(self.here))
        self.dispatcher.leave(pending)
        self.dispatcher.leave(pending)  # the second time is nothing

    @precondition(lambda self: self.here)
    @rule(pick=PICK)
    def cancel(self, pick):
        pending = self.here[pick % len(self.here)]
        waits = pending.lease is None
        for expected in (waits, False):
            got = self.dispatcher.cancel(pending.ticket.ticket_id)
            assert got == expected, f"expected success once, and only for who waits, got {got} for {pending}"
        if waits:
            assert pending.is_cancelled and pending.changed.is_set(), "expected the client to be told"
            self.here.remove(pending)

    @precondition(lambda self: self.workers.leases)
    @rule(pick=PICK)
    def step_back(self, pick):
        seated = [pending for pending in self.here if pending.lease is not None]
        pending = seated[pick % len(seated)]
        self.workers.refused(pending.lease.worker)
        self.has_stepped_back = True
        self.dispatcher.step_back(pending)

    @precondition(lambda self: self.workers.leases)
    @rule(pick=PICK)
    def talk(self, pick):
        self.workers.leases[pick % len(self.workers.leases)].n_units += 1

    # --- workers -------------------------------------------------------------------------------

    @rule(index=st.integers(0, N_WORKERS - 1), n_slots=st.integers(0, 3), n_foreign=st.integers(0, 1))
    def ready(self, index, n_slots, n_foreign):
        worker = self.workers.all[index]
        n_free = max(0, n_slots - n_foreign - len(worker.leases))
        self.workers.answered(worker, body("BUSY" if n_free < n_slots else "IDLE", n_slots, n_free))
        assert worker.n_free <= n_free, f"expected at most the {n_free} that the worker has free, got {worker.n_free}"
        self.dispatcher.dispatch()

    @rule(index=st.integers(0, N_WORKERS - 1), state=st.sampled_from(["LOADING", "DRAINING", "FAILED", "UNLOADED"]))
    def not_ready(self, index, state):
        self.workers.answered(self.workers.all[index], body(state, 2, 2))
        self.dispatcher.dispatch()

    @rule(index=st.integers(0, N_WORKERS - 1))
    def gone(self, index):
        self.workers.gone(self.workers.all[index])
        self.dispatcher.dispatch()

    @rule(seconds=st.floats(0.1, 200))
    def pass_time(self, seconds):
        self.clock.now += seconds

    # --- what holds ----------------------------------------------------------------------------

    @invariant()
    def nobody_is_lost(self):
        for pending in self.here:
            waits = pending.ticket in self.dispatcher.queue
            assert waits != (pending.lease is not None), f"expected a place or a slot, got {pending}"
            assert (self.dispatcher.place(pending) is not None) == waits, (
                f"expected a place for who waits only, got {pending}"
            )
        waiting = [pending.ticket for pending in self.here if pending.lease is None]
        assert set(waiting) == set(self.dispatcher.queue), (
            f"expected {len(waiting)} tickets, got {len(self.dispatcher.queue)}"
        )

    @invariant()
    def slots_belong_to_one(self):
        lent = [pending.lease for pending in self.here if pending.lease is not None]
        held = [lease for worker in self.workers.all for lease in worker.leases]
        assert len(set(map(id, lent))) == len(lent) and set(map(id, lent)) == set(map(id, held)), (
            f"expected each of {len(held)} slots with one client, got {len(lent)}"
        )

    @invariant()
    def first_come_first_served(self):
        numbers = [ticket.number for ticket in self.dispatcher.queue]
        assert numbers == sorted(set(numbers)), f"expected the order of arrival, got {numbers}"

    @invariant()
    def nobody_waits_beside_a_free_slot(self):
        n_free = self.workers.n_free
        assert not (n_free and len(self.dispatcher.queue)), (
            f"expected no free slot, got {n_free} and {len(self.dispatcher.queue)}"
        )

    @invariant()
    def places_only_get_better(self):
        places = {ticket: place.position for ticket, place in self.dispatcher.places().items()}
        assert list(places.values()) == list(range(1, len(places) + 1)), f"expected 1, 2 ..., got {places.values()}"
        if not self.has_stepped_back:
            for ticket, place in places.items():
                assert place <= self.places.get(ticket, place), f"expected {self.places[ticket]} or less, got {place}"
        self.places, self.has_stepped_back = places, False

    def teardown(self):
        for pending in self.here:
            self.dispatcher.leave(pending)
        assert not self.workers.leases and not len(self.dispatcher.queue) and not self.dispatcher._pending_sessions, (
            "expected nothing left"
        )


TestDesk = DeskMachine.TestCase
TestDesk.settings = settings(max_examples=60, stateful_step_count=40)


def desk_of(n_slots: int, most: int = 10) -> Dispatcher:
    workers = Workers([WorkerAddress("127.0.0.1", 1)])
    workers.answered(workers.all[0], body("IDLE", n_slots, n_slots))
    return Dispatcher(workers, Queue(most), Eta(EtaConfig()))


def test_no_queue_at_all() -> None:
    dispatcher = desk_of(1, most=0)
    seated = dispatcher.arrive("omni_duplex", "a")
    with pytest.raises(QueueFullError):
        dispatcher.arrive("omni_duplex", "b")
    dispatcher.workers.refused(seated.lease.worker)
    dispatcher.step_back(seated)
    assert dispatcher.place(seated).position == 1, "expected who was let in before to wait"


def test_who_steps_back_keeps_the_place_however_full_it_is() -> None:
    dispatcher = desk_of(3, most=2)
    seated = [dispatcher.arrive("omni_duplex", name) for name in "abc"]
    dispatcher.workers.refused(dispatcher.workers.all[0])
    for i in (2, 0, 1):
        dispatcher.step_back(seated[i])
    late = [pending.ticket.session_id for pending in seated]
    assert [ticket.session_id for ticket in dispatcher.queue] == late == ["a", "b", "c"], list(dispatcher.queue)
    with pytest.raises(QueueFullError):
        dispatcher.arrive("omni_duplex", "d")
    dispatcher.workers.answered(dispatcher.workers.all[0], body("IDLE", 3, 1))
    dispatcher.workers.all[0].n_foreign = 2
    dispatcher.dispatch()
    assert [pending.lease is not None for pending in seated] == [True, False, False], "expected the oldest to be first"


def test_the_emptiest_worker_is_taken() -> None:
    workers = Workers([WorkerAddress("127.0.0.1", 1), WorkerAddress("127.0.0.1", 2)])
    workers.answered(workers.all[0], body("IDLE", 2, 2))
    workers.answered(workers.all[1], body("IDLE", 4, 4))
    taken = [workers.lend("omni_duplex", "x").worker.index for _ in range(6)]
    assert sorted(taken) == [0, 0, 1, 1, 1, 1] and taken[:2] == [0, 1], f"expected them to fill evenly, got {taken}"
    assert workers.lend("omni_duplex", "x") is None


def test_changes_are_told_to_those_who_wait() -> None:
    dispatcher = desk_of(1)
    first, second, third = (dispatcher.arrive("omni_duplex", name) for name in "abc")
    assert dispatcher.place(third).position == 2
    dispatcher.leave(second)
    assert third.changed.is_set() and dispatcher.place(third).position == 1, dispatcher.place(third)
    third.changed.clear()
    dispatcher.leave(first)
    assert third.changed.is_set() and third.lease is not None and dispatcher.place(third) is None
