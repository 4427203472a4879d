"""How many sessions of each kind this machine serves in time: units of one session, and of all slots at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.admission.session_capacity import TARGET_S
from worker.admission.unit_cost import Burst, UnitCost
from worker.assembly.sizes import runs_eager
from worker.engine import Engine
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.start.warmup_session import WarmUpSession, WarmUpUnit

ROUNDS = 3  # of which the slowest counts, without the first


@dataclass(frozen=True)
class SessionKind:
    """A kind of session: whether its units have pictures, and whether they all speak."""

    name: str
    has_picture: bool
    speaks: bool


KINDS = (
    SessionKind("omni duplex, every unit speaks", True, True),
    SessionKind("omni duplex, listening", True, False),
    SessionKind("audio duplex, every unit speaks", False, True),
    SessionKind("audio duplex, listening", False, False),
)


@dataclass(frozen=True)
class KindCost:
    """Times of one kind in s. n: slots, and sessions in the burst. most: of them, those answered before the target."""

    kind: SessionKind
    lone_s: float
    n: int
    together_s: float
    most: int


def measure(
    engine: Engine, units: Sequence[WarmUpUnit], prompt: SystemPrompt, kinds: Sequence[SessionKind] = KINDS
) -> list[KindCost]:
    """The cost of each kind on a running engine without sessions, which are closed afterwards.

    Args:
        engine: that is warmed up.
        units: input, used in turn.
        prompt: of all sessions; with a voice if units are to speak.
        kinds: to measure.
    """
    config = engine.config.session.model_copy(update={"seed": 0})
    shares_calls = not runs_eager(engine.parts.model, engine.config)
    sessions = [WarmUpSession(engine, f"plan {number}", config, prompt) for number in range(engine.n_slots)]
    try:
        costs = []
        for kind in kinds:
            for session in sessions:
                session.prepare()
            lone_s = _slowest(sessions[:1], units, kind)
            together_s = _slowest(sessions, units, kind) if len(sessions) > 1 else lone_s
            burst = Burst(len(sessions), together_s, 0) if len(sessions) > 1 else None
            most = UnitCost.fitted(lone_s, burst, shares_calls=shares_calls).most(TARGET_S)
            costs.append(KindCost(kind, lone_s, len(sessions), together_s, min(most, len(sessions))))
        return costs
    finally:
        for closing in [session.handle.close() for session in sessions]:
            closing.result()


def _slowest(sessions: Sequence[WarmUpSession], units: Sequence[WarmUpUnit], kind: SessionKind) -> float:
    """The slowest unit of all rounds but the first."""
    slowest = 0.0
    for number in range(ROUNDS):
        for session in sessions:
            unit = units[number % len(units)]
            session.send(unit, has_picture=kind.has_picture, speaks=kind.speaks)
        loads = [session.result().times.load for session in sessions]
        if number:
            slowest = max(slowest, *(load.seconds for load in loads if load is not None))
    return slowest


def time_lines(costs: Sequence[KindCost]) -> list[str]:
    """The costs as a table."""
    lines = [
        f"time: sessions, at most one a slot, whose units are all answered within {1000 * TARGET_S:.0f} ms, "
        "measured on this machine"
    ]
    for cost in costs:
        together = f"{cost.n} at once {1000 * cost.together_s:.0f} ms"
        what = "no session" if not cost.most else f"{cost.most} sessions" if cost.most > 1 else "1 session"
        lines.append(f"  {cost.kind.name:<32} alone {1000 * cost.lone_s:.0f} ms, {together}: {what}")
    return lines
