"""The authority and its gateways under any order of events: no slot is used twice, no ticket is overtaken."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.cluster.authority import Authority
from server.cluster.messages import (
    Beat,
    Cancel,
    Finish,
    FromAuthority,
    FromGateway,
    Hello,
    Requeue,
    Submit,
    Swap,
    read_from_authority,
    read_from_gateway,
)
from server.cluster.records import GatewayRecord
from server.cluster.shared_dispatcher import SharedDispatcher
from server.dispatch.dispatcher import PendingSession
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.queue import Needs, Queue
from server.dispatch.workers import WorkerAddress, Workers
from tests.server.dispatch.test_queue import Clock, body

N_GATEWAYS, N_SLOTS, TTL_S, RECOVERY_S, MAX_QUEUE = 2, 1, 10.0, 5.0, 4
PICK = st.integers(0, 20)
GATEWAY = st.integers(0, N_GATEWAYS - 1)


class GatewayModel:
    """A gateway with the program's dispatcher, and a connection whose messages are on their way for any time."""

    def __init__(self, name: str, clock: Clock):
        self.name, self.clock = name, clock
        self.n_beats = 0
        self.record: GatewayRecord | None = None
        self.up: deque[str] = deque()
        self.down: deque[str] = deque()
        self.restart()

    def restart(self) -> None:
        """A new process, without sessions."""
        self.dispatcher = SharedDispatcher(
            Workers((), self.clock, self.clock), Queue(100, self.clock, self.clock), Eta(EtaConfig()), self.clock
        )
        self.sessions: list[PendingSession] = []
        self.used: list[PendingSession] = []  # with a connection to their worker

    def connect(self) -> None:
        self.up, self.down = deque(), deque()
        self.send(self.dispatcher.hello(self.name, ""))
        self.dispatcher.tell = self.send

    def send(self, message: FromGateway) -> None:
        self.up.append(message.model_dump_json())


class ClusterMachine(RuleBasedStateMachine):
    """Gateways, an authority that is replaced, and one worker whose slots are what its sessions hold."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.term = Clock(), 0
        self.gateways = [GatewayModel(f"g{index}", self.clock) for index in range(N_GATEWAYS)]
        self.known: list[str] = []
        self.granted: list[int] = []
        self.new_authority()

    def new_authority(self) -> None:
        """An authority with what is stored: the term before, the gateways and the worker."""
        self.term += 1
        self.authority = Authority(
            Workers((), self.clock, self.clock),
            Queue(MAX_QUEUE, self.clock, self.clock),
            Eta(EtaConfig()),
            term=self.term,
            known=self.known,
            ttl_s=TTL_S,
            recovery_s=RECOVERY_S,
            clock=self.clock,
        )
        self.worker = self.authority.add_worker(WorkerAddress("w", 1))
        for gateway in self.gateways:
            gateway.record, gateway.dispatcher.tell = None, None
            gateway.up, gateway.down = deque(), deque()

    @property
    def n_used(self) -> int:
        return sum(len(gateway.used) for gateway in self.gateways)

    # --- the network ---------------------------------------------------------------------------

    @rule(pick=GATEWAY)
    def connect(self, pick):
        gateway = self.gateways[pick]
        if gateway.dispatcher.tell is None:
            gateway.connect()
            self.up(pick)
            self.beat(pick)

    @rule(pick=GATEWAY)
    def disconnect(self, pick):
        gateway = self.gateways[pick]
        gateway.dispatcher.disconnected()
        if gateway.record is not None and gateway.record.tell is not None:
            self.authority.disconnect(gateway.record, gateway.record.tell)
        gateway.record = None
        gateway.up, gateway.down = deque(), deque()

    @rule(pick=GATEWAY)
    def up(self, pick):
        gateway = self.gateways[pick]
        if not gateway.up:
            return
        message = read_from_gateway(gateway.up.popleft())
        if isinstance(message, Hello):
            down = gateway.down

            def tell(given: FromAuthority) -> None:
                down.append(given.model_dump_json())

            gateway.record = self.authority.connect(message, tell)
            self.known = sorted({*self.known, gateway.name})
            return
        record = gateway.record
        assert record is not None, f"expected hello first, got {message}"
        if record.tell is None:  # expired: the authority closes the connection
            self.disconnect(pick)
            return
        match message:
            case Submit():
                self.authority.submit(record, message)
            case Requeue():
                self.authority.requeue(record, message)
            case Swap():
                self.authority.swap(record, message)
            case Finish():
                self.authority.finish(record, message)
            case Cancel():
                self.authority.cancel(message)
            case Beat():
                self.authority.beat(record, message)

    @rule(pick=GATEWAY)
    def down(self, pick):
        gateway = self.gateways[pick]
        if gateway.down and gateway.dispatcher.tell is not None:
            gateway.dispatcher.receive(read_from_authority(gateway.down.popleft()))

    @rule(pick=GATEWAY)
    def exchange(self, pick):
        """All messages of a gateway arrive, and those that answer them."""
        gateway = self.gateways[pick]
        self.connect(pick)
        self.beat(pick)
        while gateway.up or gateway.down:
            self.up(pick)
            self.down(pick)

    @rule(pick=GATEWAY)
    def beat(self, pick):
        gateway = self.gateways[pick]
        if gateway.dispatcher.tell is not None:
            gateway.n_beats += 1
            gateway.dispatcher.tell(gateway.dispatcher.next_beat(gateway.n_beats))

    # --- sessions ------------------------------------------------------------------------------

    @rule(pick=GATEWAY, arrives=st.booleans())
    def submit(self, pick, arrives):
        gateway = self.gateways[pick]
        gateway.sessions.append(gateway.dispatcher.submit("omni_duplex", "s"))
        if arrives:
            self.exchange(pick)

    @rule(pick=GATEWAY, which=PICK, arrives=st.booleans())
    def use(self, pick, which, arrives):
        """A session connects to its worker, which has a slot for it or not."""
        gateway = self.gateways[pick]
        if arrives:
            self.exchange(pick)
        granted = [one for one in gateway.sessions if one.lease is not None and one not in gateway.used]
        if not granted:
            return
        pending = granted[which % len(granted)]
        if not gateway.dispatcher.may_use(pending.lease):
            gateway.dispatcher.requeue(pending)
        else:
            assert self.n_used < N_SLOTS, f"expected a free slot of {N_SLOTS}, got a lease of one that is used"
            gateway.used.append(pending)

    @rule(pick=GATEWAY, which=PICK)
    def finish(self, pick, which):
        gateway = self.gateways[pick]
        if gateway.sessions:
            pending = gateway.sessions.pop(which % len(gateway.sessions))
            if pending in gateway.used:
                gateway.used.remove(pending)
            gateway.dispatcher.finish(pending)

    @rule(pick=GATEWAY, which=PICK, other=GATEWAY)
    def cancel_elsewhere(self, pick, which, other):
        waiting = [one for one in self.gateways[pick].sessions if one.lease is None]
        if waiting:
            self.gateways[other].dispatcher.cancel_elsewhere(waiting[which % len(waiting)].ticket.ticket_id, None)

    # --- processes -----------------------------------------------------------------------------

    @rule()
    def poll(self):
        n_free = N_SLOTS - self.n_used
        self.authority.workers.record_health(self.worker, body("BUSY", N_SLOTS, n_free))
        self.authority.poll()

    @rule(seconds=st.sampled_from([1, 4, 30]), cut=st.integers(0, N_GATEWAYS))
    def pass_time(self, seconds, cut):
        """Time passes, with polls of the worker; one gateway may be cut off or hang, or none."""
        for _ in range(seconds):
            self.clock.now += 1
            self.poll()
            for pick in range(N_GATEWAYS):
                if pick != cut:
                    self.exchange(pick)

    @rule(pick=GATEWAY)
    def kill_gateway(self, pick):
        self.disconnect(pick)
        self.gateways[pick].restart()

    @rule()
    def replace_authority(self):
        self.new_authority()

    @initialize()
    def begin(self):
        self.settle()

    @rule()
    def settle(self):
        """All messages arrive and all gateways are connected: all states agree, and the queue is in order."""
        for pick, gateway in enumerate(self.gateways):
            if gateway.record is None or gateway.record.tell is None:
                self.disconnect(pick)
            self.connect(pick)
        self.poll()
        for _ in range(100):
            if not any(gateway.up or gateway.down for gateway in self.gateways):
                break
            for pick in range(N_GATEWAYS):
                self.up(pick)
                self.down(pick)
        self.authority.poll()
        self.authority.tell_places(is_due=True)
        for pick in range(N_GATEWAYS):
            while self.gateways[pick].down:
                self.down(pick)
        positions = []
        for gateway in self.gateways:
            gateway.sessions = [one for one in gateway.sessions if one.refusal is None and not one.is_cancelled]
            for pending in gateway.sessions:
                entry = self.authority.gateways[gateway.name].entries.get(pending.ticket.ticket_id)
                assert entry is not None, f"expected the ticket at the authority, got {pending}"
                assert (entry.lease is None) == (pending.lease is None), f"expected one view, got {entry}, {pending}"
                if pending.lease is None:
                    positions.append((entry.ticket.number, gateway.dispatcher.position_of(pending).position))
            n_known = len(self.authority.gateways[gateway.name].entries)
            assert n_known == len(gateway.sessions), f"expected {len(gateway.sessions)} tickets, got {n_known}"
        got = [position for _, position in sorted(positions)]
        assert got == list(range(1, len(positions) + 1)), f"expected places in the order of arrival, got {positions}"

    # --- invariants ----------------------------------------------------------------------------

    @invariant()
    def no_slot_is_used_twice(self):
        assert self.n_used <= N_SLOTS, f"expected at most {N_SLOTS} sessions at the worker, got {self.n_used}"

    @precondition(lambda self: self.authority is not None)
    @invariant()
    def no_ticket_overtakes(self):
        waiting = [ticket.number for ticket in self.authority.queue]
        assert waiting == sorted(waiting), f"expected the order of arrival, got {waiting}"
        if self.worker.n_free and not self.authority.is_recovering:
            assert not waiting, f"expected no ticket to wait for a free slot, got {waiting}"


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(max_examples=40, stateful_step_count=25)


def test_session_of_a_gateway_that_is_cut_off_keeps_its_slot() -> None:
    cluster = ClusterMachine()
    cluster.settle()
    cluster.submit(0, True)
    cluster.use(0, 0, False)
    cluster.submit(1, True)
    cluster.pass_time(30, cut=0)
    waiting = cluster.gateways[1].sessions[0]
    assert waiting.lease is None, "expected the other gateway's session to wait for a slot in use, got a lease"
    cluster.settle()
    assert cluster.gateways[0].sessions[0].lease is not None, "expected the lease to be claimed again, got none"
    cluster.finish(0, 0)
    cluster.pass_time(1, cut=N_GATEWAYS)
    assert waiting.lease is not None, "expected a slot after the session's end, got none"


def test_a_session_whose_gateway_is_killed_keeps_its_slot_with_another_one() -> None:
    cluster = ClusterMachine()
    cluster.settle()
    cluster.submit(0, True)
    cluster.use(0, 0, False)
    cluster.submit(1, True)
    [lost] = cluster.gateways[0].used
    cluster.kill_gateway(0)
    other = cluster.gateways[1]
    needs = Needs(frozenset({"precision:fp8"}))
    taken = other.dispatcher.adopt(other.dispatcher.workers.all[0], "omni_duplex", lost.ticket.session_id, needs=needs)
    assert taken.lease is not None and taken.lease.needs == needs, f"expected {needs} for a move, got {taken.lease}"
    other.sessions.append(taken)
    other.used.append(taken)
    cluster.pass_time(30, cut=N_GATEWAYS)
    cluster.settle()
    waiting = other.sessions[0]
    assert waiting.lease is None and len(cluster.worker.leases) == 1, f"expected one lease, got {cluster.worker.leases}"
    cluster.finish(1, 1)
    cluster.pass_time(1, cut=N_GATEWAYS)
    assert waiting.lease is not None, "expected a slot after the session's end, got none"


def test_lease_that_expires_before_its_use_is_not_used() -> None:
    cluster = ClusterMachine()
    cluster.settle()
    cluster.submit(0, True)
    cluster.submit(1, True)
    cluster.pass_time(30, cut=0)
    cluster.use(1, 0, False)
    assert cluster.n_used == 1, "expected the slot to pass to the other gateway, got no use"
    cluster.use(0, 0, False)
    first = cluster.gateways[0].sessions[0]
    assert cluster.n_used == 1 and first.lease is None, f"expected the first session to wait again, got {first}"


def test_new_authority_waits_for_the_gateways_of_the_one_before() -> None:
    cluster = ClusterMachine()
    cluster.settle()
    cluster.submit(0, True)  # has a lease, and is not at the worker yet
    cluster.submit(1, True)
    cluster.replace_authority()
    cluster.poll()
    cluster.exchange(1)
    waiting = cluster.gateways[1].sessions[0]
    assert waiting.lease is None, "expected no slot before all gateways have claimed theirs, got a lease"
    cluster.settle()
    cluster.use(0, 0, True)
    assert cluster.n_used == 1 and waiting.lease is None, f"expected the lease to be kept, got {waiting}"


def test_places_outlive_a_lost_connection_and_a_new_authority() -> None:
    cluster = ClusterMachine()
    cluster.settle()
    for pick in (0, 1, 0, 1):
        cluster.submit(pick, True)
    for lose in (cluster.replace_authority, lambda: cluster.disconnect(1)):
        lose()
        cluster.exchange(0)
        cluster.settle()
        got = [
            cluster.gateways[pick].dispatcher.position_of(cluster.gateways[pick].sessions[which]).position
            for pick, which in ((1, 0), (0, 1), (1, 1))
        ]
        assert got == [1, 2, 3], f"expected the order of arrival across gateways, got {got}"


def test_a_slot_ends_the_wait_at_once_after_another_one() -> None:
    """The second slot comes while positions are reused; a client that finds its position waits on."""
    cluster = ClusterMachine()
    cluster.settle()
    for _ in range(3):
        cluster.submit(0, True)
    dispatcher = cluster.gateways[0].dispatcher
    first, second, third = cluster.gateways[0].sessions
    assert first.lease is not None and dispatcher.position_of(first) is None
    for waiting in (second, third):
        dispatcher.finish(cluster.gateways[0].sessions.pop(0))
        cluster.exchange(0)
        assert waiting.lease is not None, "expected the freed slot, got none"
        assert dispatcher.position_of(waiting) is None, "expected no position with a slot, got one"
