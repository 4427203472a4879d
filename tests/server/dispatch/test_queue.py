"""The dispatcher under any order of events: no ticket is lost or overtaken, no slot is leased twice."""

from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.dispatch.dispatcher import Dispatcher, PendingSession
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.missing_model import missing_model
from server.dispatch.queue import Queue, QueueFullError, Ticket
from server.dispatch.spare_slots import SpareSlot
from server.dispatch.workers import WorkerAddress, Workers

MAX_SIZE, N_WORKERS, MAX_SPARE = 4, 2, 1
PICK = st.integers(0, 20)


class Clock:
    """A clock that tests advance. now: s."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def body(state: str, total: int, free: int) -> dict[str, object]:
    return {"state": state, "worker_status": "idle", "slots": {"total": total, "free": free}}


class DispatcherMachine(RuleBasedStateMachine):
    """Clients and workers act in any order; the invariants are checked after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.workers = Workers([WorkerAddress("127.0.0.1", 1000 + i) for i in range(N_WORKERS)], self.clock, self.clock)
        self.dispatcher = Dispatcher(
            self.workers,
            Queue(MAX_SIZE, self.clock, self.clock),
            Eta(EtaConfig(min_samples=1)),
            clock=self.clock,
            max_spare=MAX_SPARE,
        )
        self.sessions: list[PendingSession] = []  # neither finished nor cancelled
        self.borrowed: list[SpareSlot] = []  # not given back
        self.reclaimed: list[str] = []  # names whose slot was reclaimed
        self.last_positions: dict[Ticket, int] = {}
        self.has_requeued = False

    # --- clients -------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(["audio_duplex", "omni_duplex", "chat", "half_duplex_audio"]))
    def submit(self, kind):
        n_before = len(self.dispatcher.queue)
        try:
            pending = self.dispatcher.submit(kind, "name")
        except QueueFullError as error:
            assert n_before >= MAX_SIZE, f"expected room for {MAX_SIZE}, got {error} at {n_before}"
            return
        assert pending.lease is not None or n_before < MAX_SIZE, f"expected at most {MAX_SIZE} tickets, got one more"
        assert pending.lease is None or not n_before, f"expected a position after {n_before}, got a slot"
        self.sessions.append(pending)

    @precondition(lambda self: self.sessions)
    @rule(pick=PICK)
    def finish(self, pick):
        pending = self.sessions.pop(pick % len(self.sessions))
        self.dispatcher.finish(pending)
        self.dispatcher.finish(pending)  # the second call does nothing

    @precondition(lambda self: self.sessions)
    @rule(pick=PICK)
    def cancel(self, pick):
        pending = self.sessions[pick % len(self.sessions)]
        waits = pending.lease is None
        for expected in (waits, False):
            got = self.dispatcher.cancel(pending.ticket.ticket_id)
            assert got == expected, f"expected success once, and only for a waiting ticket, got {got} for {pending}"
        if waits:
            assert pending.is_cancelled and pending.changed.is_set(), "expected the client to be notified"
            self.sessions.remove(pending)

    @precondition(lambda self: any(pending.lease is not None for pending in self.sessions))
    @rule(pick=PICK)
    def requeue(self, pick):
        active = [pending for pending in self.sessions if pending.lease is not None]
        pending = active[pick % len(active)]
        self.workers.suspend(pending.lease.worker)
        self.has_requeued = True
        self.dispatcher.requeue(pending)

    @precondition(lambda self: self.workers.leases)
    @rule(pick=PICK)
    def add_unit(self, pick):
        self.workers.leases[pick % len(self.workers.leases)].n_units += 1

    @rule(number=st.integers(0, 10**9))
    def borrow(self, number):
        name = f"spare {number} {len(self.borrowed)}"
        self.borrowed.append(self.dispatcher.borrow("transcription", name, "", lambda: self.reclaimed.append(name)))

    @precondition(lambda self: self.borrowed)
    @rule(pick=PICK)
    def give_back(self, pick):
        slot = self.borrowed.pop(pick % len(self.borrowed))
        self.dispatcher.give_back(slot)
        self.dispatcher.give_back(slot)  # the second call does nothing

    # --- workers -------------------------------------------------------------------------------

    @rule(index=st.integers(0, N_WORKERS - 1), n_slots=st.integers(0, 3), n_external=st.integers(0, 1))
    def ready(self, index, n_slots, n_external):
        worker = self.workers.all[index]
        n_free = max(0, n_slots - n_external - len(worker.leases))
        self.workers.record_health(worker, body("BUSY" if n_free < n_slots else "IDLE", n_slots, n_free))
        assert worker.n_free <= n_free, f"expected at most the {n_free} that the worker has free, got {worker.n_free}"
        self.dispatcher.dispatch()

    @rule(index=st.integers(0, N_WORKERS - 1), state=st.sampled_from(["LOADING", "DRAINING", "FAILED", "UNLOADED"]))
    def not_ready(self, index, state):
        self.workers.record_health(self.workers.all[index], body(state, 2, 2))
        self.dispatcher.dispatch()

    @rule(index=st.integers(0, N_WORKERS - 1))
    def lose(self, index):
        self.workers.record_loss(self.workers.all[index])
        self.dispatcher.dispatch()

    @rule(seconds=st.floats(0.1, 200))
    def pass_time(self, seconds):
        self.clock.now += seconds

    # --- invariants ----------------------------------------------------------------------------

    @invariant()
    def each_session_waits_or_has_a_slot(self):
        for pending in self.sessions:
            waits = pending.ticket in self.dispatcher.queue
            assert waits != (pending.lease is not None), f"expected a position or a slot, got {pending}"
            assert (self.dispatcher.position_of(pending) is not None) == waits, (
                f"expected a position only while waiting, got {pending}"
            )
        waiting = [pending.ticket for pending in self.sessions if pending.lease is None]
        assert set(waiting) == set(self.dispatcher.queue), (
            f"expected {len(waiting)} tickets, got {len(self.dispatcher.queue)}"
        )

    @invariant()
    def each_slot_belongs_to_one_session(self):
        leased = [one.lease for one in (*self.sessions, *self.borrowed) if one.lease is not None]
        held = [lease for worker in self.workers.all for lease in worker.leases]
        assert len(set(map(id, leased))) == len(leased) and set(map(id, leased)) == set(map(id, held)), (
            f"expected each of {len(held)} slots with one client, got {len(leased)}"
        )

    @invariant()
    def queue_is_in_order_of_arrival(self):
        numbers = [ticket.number for ticket in self.dispatcher.queue]
        assert numbers == sorted(set(numbers)), f"expected the order of arrival, got {numbers}"

    @invariant()
    def no_ticket_waits_while_a_slot_is_free(self):
        n_free = self.workers.n_free
        assert not (n_free and len(self.dispatcher.queue)), (
            f"expected no free slot, got {n_free} and {len(self.dispatcher.queue)}"
        )

    @invariant()
    def spare_slots_are_for_sessions_first(self):
        lent = [slot for slot in self.borrowed if slot.lease is not None]
        n_back, n_tickets = sum(slot.is_reclaimed for slot in lent), len(self.dispatcher.queue)
        assert n_back >= min(len(lent), n_tickets), f"expected {n_tickets} of {len(lent)} reclaimed, got {n_back}"
        assert len(set(self.reclaimed)) == len(self.reclaimed), f"expected one call each, got {self.reclaimed}"
        waits = any(slot.lease is None for slot in self.borrowed)
        able = [one for one in self.workers.all if one.n_free and not any(lease.is_spare for lease in one.leases)]
        assert not (waits and able and not n_tickets), f"expected a spare slot of {able} to be lent"
        for worker in self.workers.all:
            n = sum(lease.is_spare for lease in worker.leases)
            assert n <= MAX_SPARE, f"expected at most {MAX_SPARE} spare slots of a worker, got {n}"

    @invariant()
    def positions_only_improve(self):
        positions = {ticket: one.position for ticket, one in self.dispatcher.positions().items()}
        assert list(positions.values()) == list(range(1, len(positions) + 1)), (
            f"expected 1, 2 ..., got {positions.values()}"
        )
        if not self.has_requeued:
            for ticket, position in positions.items():
                last = self.last_positions.get(ticket, position)
                assert position <= last, f"expected {last} or less, got {position}"
        self.last_positions, self.has_requeued = positions, False

    def teardown(self):
        for pending in self.sessions:
            self.dispatcher.finish(pending)
        for slot in self.borrowed:
            self.dispatcher.give_back(slot)
        assert not self.workers.leases and not len(self.dispatcher.queue) and not self.dispatcher._pending, (
            "expected nothing left"
        )


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(max_examples=60, stateful_step_count=40)


def dispatcher_of(n_slots: int, max_size: int = 10, **options: Any) -> Dispatcher:
    workers = Workers([WorkerAddress("127.0.0.1", 1)])
    workers.record_health(workers.all[0], body("IDLE", n_slots, n_slots))
    return Dispatcher(workers, Queue(max_size), Eta(EtaConfig()), **options)


def test_requeued_session_waits_even_with_queue_size_0() -> None:
    dispatcher = dispatcher_of(1, max_size=0)
    seated = dispatcher.submit("omni_duplex", "a")
    with pytest.raises(QueueFullError):
        dispatcher.submit("omni_duplex", "b")
    dispatcher.workers.suspend(seated.lease.worker)
    dispatcher.requeue(seated)
    assert dispatcher.position_of(seated).position == 1, "expected the admitted session to wait"


def test_requeued_sessions_keep_their_order_in_full_queue() -> None:
    dispatcher = dispatcher_of(3, max_size=2)
    seated = [dispatcher.submit("omni_duplex", name) for name in "abc"]
    dispatcher.workers.suspend(dispatcher.workers.all[0])
    for i in (2, 0, 1):
        dispatcher.requeue(seated[i])
    late = [pending.ticket.session_id for pending in seated]
    assert [ticket.session_id for ticket in dispatcher.queue] == late == ["a", "b", "c"], list(dispatcher.queue)
    with pytest.raises(QueueFullError):
        dispatcher.submit("omni_duplex", "d")
    dispatcher.workers.record_health(dispatcher.workers.all[0], body("IDLE", 3, 1))
    dispatcher.workers.all[0].n_external = 2
    dispatcher.dispatch()
    assert [pending.lease is not None for pending in seated] == [True, False, False], (
        "expected the oldest ticket to be first"
    )


def test_acquires_slot_of_least_loaded_worker() -> None:
    workers = Workers([WorkerAddress("127.0.0.1", 1), WorkerAddress("127.0.0.1", 2)])
    workers.record_health(workers.all[0], body("IDLE", 2, 2))
    workers.record_health(workers.all[1], body("IDLE", 4, 4))
    taken = [workers.acquire("omni_duplex", "x").worker.index for _ in range(6)]
    assert sorted(taken) == [0, 0, 1, 1, 1, 1] and taken[:2] == [0, 1], f"expected an even load, got {taken}"
    assert workers.acquire("omni_duplex", "x") is None


def test_waiting_sessions_are_notified_of_changes() -> None:
    dispatcher = dispatcher_of(1)
    first, second, third = (dispatcher.submit("omni_duplex", name) for name in "abc")
    assert dispatcher.position_of(third).position == 2
    dispatcher.finish(second)
    assert third.changed.is_set() and dispatcher.position_of(third).position == 1, dispatcher.position_of(third)
    third.changed.clear()
    dispatcher.finish(first)
    assert third.changed.is_set() and third.lease is not None and dispatcher.position_of(third) is None


def test_sessions_above_a_fallen_capacity_count_in_promises_and_reclaim_lent_slots() -> None:
    clock, reclaimed = Clock(), []
    dispatcher = dispatcher_of(3, clock=clock, max_spare=1)
    sessions = [dispatcher.submit("omni_duplex", name) for name in "ab"]
    lent = dispatcher.borrow("transcription", "t", "", lambda: reclaimed.append("t"))
    assert lent.lease is not None and all(one.lease is not None for one in sessions)
    dispatcher.workers.record_health(dispatcher.workers.all[0], body("BUSY", 2, 0))
    dispatcher.dispatch()
    assert reclaimed == ["t"], "a lent slot is reclaimed although no ticket waits"
    dispatcher.give_back(lent)
    dispatcher.workers.record_health(dispatcher.workers.all[0], body("BUSY", 1, 0))
    for lease, since in zip(dispatcher.workers.leases, (0.0, 40.0), strict=True):
        lease.since = since
    clock.now = 40.0
    waiting = dispatcher.submit("omni_duplex", "c")
    # Both last 90 s: the first one ends in 50 s and frees no slot, the second one in 90 s.
    assert dispatcher.position_of(waiting).wait_s == 90
    dispatcher.finish(sessions[0])
    assert waiting.lease is None
    dispatcher.finish(sessions[1])
    assert waiting.lease is not None


def test_texts_that_wait_do_not_refuse_sessions() -> None:
    dispatcher = dispatcher_of(0, max_size=2)
    texts = [dispatcher.submit("speech", f"text {number}") for number in range(2)]
    with pytest.raises(QueueFullError):
        dispatcher.submit("speech", "third text")
    assert dispatcher.submit("omni_duplex", "session").lease is None and not any(one.lease for one in texts)


def test_tickets_wait_for_slots_of_their_own_model() -> None:
    workers = Workers([WorkerAddress("127.0.0.1", 1000)])
    slots = {"total": 1, "free": 1}
    workers.record_health(workers.all[0], {**body("IDLE", 1, 1), "models": {"omni": True, "speech": {"slots": slots}}})
    dispatcher = Dispatcher(workers, Queue(9), Eta(EtaConfig()))
    running = [dispatcher.submit(kind, f"running {kind}") for kind in ("chat", "speech")]
    waiting = [dispatcher.submit(kind, f"waiting {kind}") for kind in ("chat", "chat", "speech")]
    assert all(one.lease for one in running) and not any(one.lease for one in waiting)
    positions = [dispatcher.position_of(one) for one in waiting]
    assert [one and (one.position, one.queue_length) for one in positions] == [(1, 2), (2, 2), (1, 1)]
    dispatcher.finish(running[1])
    assert waiting[2].lease is not None and waiting[0].lease is None, "earlier chats do not hold up a text"
    assert (workers.n_free, workers.n_free_of("speech"), workers.n_excess) == (0, 0, 0)
    dispatcher.finish(running[0])
    assert waiting[0].lease is not None
    slots["free"] = 0
    workers.record_health(workers.all[0], {**body("IDLE", 1, 0), "models": {"speech": {"slots": slots}}})
    dispatcher.finish(waiting[2])
    assert workers.n_free_of("speech") == 1, "the slot was this gateway's"
    workers.record_health(workers.all[0], {**body("IDLE", 1, 0), "models": {"speech": {"slots": slots}}})
    assert workers.n_free_of("speech") == 0, "a program without this gateway has it"
    workers.record_health(workers.all[0], body("IDLE", 1, 0))  # its speech model was unloaded
    assert workers.n_slots_of("speech") == 0 and workers.n_free_of("speech") == 0


def test_models_that_no_worker_serves() -> None:
    workers = Workers([WorkerAddress("127.0.0.1", 1000), WorkerAddress("127.0.0.1", 1001)])
    first, second = workers.all
    found = partial(missing_model, workers)
    assert found("speech") is None, "no worker has answered yet"
    workers.record_health(first, {**body("IDLE", 1, 1), "models": {"speech": None, "speech_error": None}})
    gone = found("speech")
    assert gone and not gone.is_final and str(gone) == "speech model: expected one that is loaded, got none"
    assert found("omni") is None and (other := found("conversion")) and other.is_final
    workers.record_health(second, body("LOADING", 0, 0))
    assert found("speech") is None, "the second worker may serve it soon"
    for state in ("LOADING", "DRAINING"):
        for path, is_missing in (("/speech", False), (None, True)):
            models = {"speech": None, "speech_path": path, "conversion": None}
            workers.record_health(second, {**body(state, 0, 0), "models": models})
            assert (found("speech") is not None) == is_missing, f"{state}, {path}: got {found('speech')}"
            assert found("conversion") is None, "the settings of a converter are not known"
    workers.record_health(second, {**body("FAILED", 0, 0), "error": "no memory"})
    failed = found("speech")
    assert failed and not failed.is_final and str(failed).endswith("got none: no memory"), "it may be restarted"
    workers.record_health(first, {**body("IDLE", 1, 1), "models": {"speech": None, "speech_error": "no weights"}})
    assert (final := found("speech")) and final.is_final and str(final).endswith("no weights")
