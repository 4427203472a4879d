"""Any sequence of client commands and failures: no slot is lost or assigned twice, only legal events succeed, and host
counters equal those of the slots.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from torch import Tensor

from models.errors import ContextOverflowError, ModelError, SlotError
from tests.models.stages.slot_copies import assert_same, copy_state
from tests.worker.engine.failing_regions import Broken, broken, of_slot
from tests.worker.loop.engines import (
    ALOUD,
    N_SLOTS,
    QUIET,
    Director,
    SmallEngine,
    assert_mirrors,
    make_config,
    make_prompt,
    short_speech,
    voice,
)
from worker.config.session import WindowConfig
from worker.early.trial import EarlyTrial
from worker.loop.early.headroom import Headroom
from worker.loop.prompt.system_prompt import Adjustment
from worker.loop.results import Failure, UnitResult
from worker.loop.session import Gate, OrderError, Session, SessionPhase

MAX_WAITING = 3
PROMPTS = ("Be kind.", "Be brief.", "Be good.", "so " * 300)
NAMES = ("ada", "bob", "cy", "di", "eve")
SMALL_WINDOW = WindowConfig(mode="basic", high_tokens=40, low_tokens=20)
MEMORY = WindowConfig(mode="context", max_units=1, previous_max_tokens=6)
CONFIGS = (
    QUIET.model_copy(update={"window": SMALL_WINDOW}),
    ALOUD.model_copy(update={"window": SMALL_WINDOW, "drain_s": 1}),
    ALOUD.model_copy(update={"window": MEMORY, "compat": "reference"}),
)
REGIONS = ("mel_unit", "unit_prefill", "unit_step", "speech_begin", "speech_step", "llm_evict")
LIVE = (SessionPhase.READY, SessionPhase.PREFILLED, SessionPhase.GENERATED)


@cache
def engine() -> tuple[SmallEngine, list[Tensor]]:
    """One engine for all examples, so that remaining state would affect the next one; and copies of its fresh slots."""
    small = SmallEngine(make_config(max_waiting_units=MAX_WAITING), Director(listen=0.15, unit_end=0.4))
    return small, copy_state(small.unit_steps.state)


def is_legal(event: str, session: Session) -> bool:
    """Whether an event is legal, independent of the tables in `worker.loop.session`."""
    live, gate = session.phase in LIVE, session.gate
    return {
        "prepare": session.phase in (SessionPhase.NEW, SessionPhase.READY) and gate is Gate.OPEN,
        "unit": live and takes_units(session) and len(session.waiting) < MAX_WAITING,
        "pause": live and gate is Gate.OPEN,
        "resume": live and gate is Gate.PAUSED,
        "stop": live,
        "clear_stop": live and gate is Gate.STOPPED,
        "break": live,
        "adjust": session.phase is SessionPhase.READY,
        "close": session.phase is not SessionPhase.CLOSED,
    }[event]


def takes_units(session: Session) -> bool:
    """Whether a unit is legal: a stopped session in reference mode accepts units too."""
    return session.gate is Gate.OPEN or (session.reference and session.gate is Gate.STOPPED)


class Conversations(RuleBasedStateMachine):
    """Sessions of one engine under any sequence of client commands and device failures."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.small, self.fresh = engine()
        self.taken: Counter[str] = Counter()  # units accepted, by session object
        self.open: list[Session] = []

    # --- client commands -----------------------------------------------------------------------

    @rule(target=sessions, name=st.sampled_from(NAMES), config=st.sampled_from(CONFIGS), ready=st.integers(0, 3))
    def open_session(self, name: str, config: Any, ready: int) -> Any:
        in_use = any(session.id == name for session in self.open)
        expected = OrderError if in_use else SlotError if len(self.open) == N_SLOTS else None
        try:
            session = self.small.sessions.open(name, config, self.small.events[name].append)
        except ModelError as error:
            assert type(error) is expected, f"expected {expected}, got {error!r}"
            return multiple()
        assert expected is None, f"expected {expected}, got a session"
        self.open.append(session)
        self.small.take(name)
        if ready:
            self.small.sessions.prepare(session, make_prompt(speaker=0))
        return session

    @initialize(target=sessions, config=st.sampled_from(CONFIGS), n_samples=st.sampled_from((16_000, 9_000)))
    def open_first_session(self, config: Any, n_samples: int) -> Any:
        """Open, prepare and send a unit: most rules need a session that has one."""
        session = self.open_session(NAMES[0], config, ready=1)
        self.send_to_all(seed=0, n=12, n_samples=n_samples)
        return session

    @rule(session=sessions, text=st.sampled_from(PROMPTS), speaker=st.sampled_from((None, 0)))
    def prepare(self, session: Session, text: str, speaker: int | None) -> None:
        with self._lawful("prepare", session):
            try:
                self.small.sessions.prepare(session, make_prompt(text, speaker=speaker))
            except OrderError:
                raise
            except ModelError:
                assert session.phase is SessionPhase.NEW, (
                    f"expected a new session after a bad prompt, got {session.phase}"
                )
                assert_same(self.small.unit_steps.state, self.fresh, [session.slot])

    @rule(
        session=sessions,
        seed=st.one_of(st.none(), st.integers(0, 9)),
        n=st.sampled_from((16_000, 16_000, 300, 9_000, 33_000)),
        pictures=st.sampled_from(((), (), (1,))),
        force_listen=st.sampled_from((False, False, True)),
    )
    def send(self, session: Session, seed: int | None, n: int, **settings: Any) -> None:
        """A unit; a short one may run early."""
        early = EarlyTrial() if n < 16_000 else None
        with self._lawful("unit", session):
            self.small.send(session, seed, n, early=early, **settings)
            self.taken[session.id] += 1

    @rule(session=sessions, event=st.sampled_from(("pause", "resume", "resume", "stop", "clear_stop", "clear_stop")))
    def change_gate(self, session: Session, event: str) -> None:
        with self._lawful(event, session):
            getattr(self.small.sessions, event)(session)

    @rule(
        session=sessions,
        settings=st.sampled_from(({}, {"generate_audio": True}, {"generate_audio": False}, {"top_k": 3}, {"seed": 5})),
        text=st.sampled_from((None, *PROMPTS)),
        speaker=st.sampled_from((None, 0, 1)),
    )
    def adjust(self, session: Session, settings: dict[str, Any], text: str | None, speaker: int | None) -> None:
        change = Adjustment(
            session.config.adjusted(settings),
            None if text is None else make_prompt(text),
            None if speaker is None else voice(speaker),
        )
        with self._lawful("adjust", session):
            before, config = self._all(), session.config
            try:
                self.small.sessions.adjust(session, change)
            except OrderError:
                raise
            except ModelError as error:
                assert "seed" in settings or isinstance(error, ContextOverflowError), repr(error)
                assert (self._all(), session.config) == (before, config), "expected nothing changed after a refusal"

    @rule(session=sessions, on=st.booleans())
    def break_speech(self, session: Session, on: bool) -> None:
        with self._lawful("break", session):
            self.small.sessions.break_speech(session, on)

    @rule(session=consumes(sessions))
    def close(self, session: Session) -> None:
        with self._lawful("close", session):
            slot = session.slot
            self.small.sessions.close(session)
            self.open.remove(session)
            assert_same(self.small.unit_steps.state, self.fresh, [slot])

    # --- engine ------------------------------------------------------------------

    @rule(seed=st.integers(0, 9), n=st.integers(1, 20), n_samples=st.sampled_from((16_000, 16_000, 9_000)))
    def send_to_all(self, seed: int, n: int, n_samples: int) -> None:
        """Send a unit to every session that accepts one, and run the loop for some iterations."""
        for one in self.open:
            if one.phase is SessionPhase.NEW:
                self.prepare(one, PROMPTS[0], speaker=0)
            if one.gate is not Gate.OPEN:
                self.change_gate(one, "resume" if one.gate is Gate.PAUSED else "clear_stop")
            if is_legal("unit", one):
                self.send(one, seed, n_samples)
        self.step(n)

    @rule(n=st.integers(1, 4))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.small.step()

    @rule()
    def settle(self) -> None:
        self.small.settle()
        for session in self.open:
            assert not session.is_busy and not session.waiting, f"{session.id}: expected no unit left"

    @rule(session=sessions, name=st.sampled_from(REGIONS), n=st.integers(1, 6), after=st.booleans())
    def fail_in_region(self, session: Session, name: str, n: int, after: bool) -> None:
        table = self.small.unit_steps.regions
        with broken(table, name, of_slot(session.slot), "after" if after else "before"):
            self.step(n)

    # --- invariants ---------------------------------------------------------------------

    @invariant()
    def each_slot_is_free_or_used_once(self) -> None:
        slots = [session.slot for session in self.open]
        free = self.small.unit_steps.free_slots
        assert sorted(slots + free) == list(range(N_SLOTS)), f"expected each slot once, got {slots} and {free} free"
        voices = [session.speech.vocoder_slot for session in self.open if session.speech.vocoder_slot is not None]
        assert len(set(voices)) == len(voices), f"expected a vocoder slot each, got {voices}"
        n_free = self.small.vocoder.n_free
        assert len(voices) + n_free == N_SLOTS, f"expected {N_SLOTS} vocoder slots, got {voices} and {n_free} free"

    @invariant()
    def each_voice_is_held_by_its_sessions(self) -> None:
        vocoder = self.small.vocoder
        held = Counter(one.voice for part in (vocoder._sessions, vocoder._next_voices) for one in part.values())
        users = {slot: entry.users for slot, entry in vocoder.voices._by_slot.items() if entry.users}
        assert users == held, f"expected a user for each session and its next voice {held}, got {users}"

    @invariant()
    def host_counters_equal_the_slots(self) -> None:
        for slot in range(N_SLOTS):
            assert_mirrors(self.small.unit_steps, slot)

    @invariant()
    def each_busy_session_has_one_job(self) -> None:
        jobs = Counter(job.session.id for job in self.small.loop.jobs)
        busy = Counter(session.id for session in self.open if session.is_busy)
        assert jobs == busy, f"expected one job for each busy session {dict(busy)}, got {dict(jobs)}"

    @invariant()
    def window_length_equals_the_context_length(self) -> None:
        for session in self.open:
            if session.phase is SessionPhase.READY:
                rows = self.small.unit_steps.context_len(session.slot) + len(session.pending)
                assert rows == session.window.length, f"{session.id}: expected {session.window.length} rows, got {rows}"

    @invariant()
    def each_unit_has_at_most_one_outcome(self) -> None:
        for session in self.open:
            events = self.small.events[session.id]
            n = sum(isinstance(event, UnitResult | Failure) for event in events)
            errors = [event.error for event in events if isinstance(event, Failure)]
            n_resets = sum(isinstance(error, Broken) for error in errors)  # closing a unit may fail after its result
            assert n <= self.taken[session.id] + n_resets, (
                f"{session.id}: {n} outcomes of {self.taken[session.id]} units"
            )
            odd = [error for error in errors if not isinstance(error, Broken | ModelError)]
            assert not odd, f"expected typed errors, got {odd}"

    def teardown(self) -> None:
        self.small.close_all()
        assert self.small.unit_steps.n_free == self.small.vocoder.n_free == N_SLOTS
        assert_same(self.small.unit_steps.state, self.fresh, range(N_SLOTS))

    @contextmanager
    def _lawful(self, event: str, session: Session) -> Iterator[None]:
        """Check that the block raises OrderError and changes nothing if the event is illegal, else succeeds."""
        legal, before = is_legal(event, session), self._all()
        try:
            yield
        except OrderError:
            assert not legal, f"{event} while {session.phase} and {session.gate}: expected success, got OrderError"
            after = self._all()
            assert after == before, f"{event}: expected nothing changed, got {after}, before {before}"
        else:
            assert legal, f"{event} while {session.phase} and {session.gate}: expected OrderError, got none"

    def _all(self) -> list[Any]:
        """Host state of all sessions and slots."""
        states = [
            (one.phase, one.gate, len(one.waiting), one.interrupt_requested, one.window.length, one.speech.vocoder_slot)
            for one in self.open
        ]
        counters = [self.small.unit_steps.counters(slot) for slot in range(N_SLOTS)]
        return [states, [tuple(v for k, v in at._asdict().items() if k not in ("tail", "heard")) for at in counters]]


class TestConversations(Conversations.TestCase):
    settings = settings(max_examples=20, stateful_step_count=30)

    def run(self, result: Any = None) -> Any:
        with short_speech(), mock.patch.object(Headroom, "allows", return_value=True):
            return super().run(result)
