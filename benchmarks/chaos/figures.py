"""What a fault did to each session, by comparison with an undisturbed run of the same sessions."""

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.chaos.clients import ChaosClient, FaultSign, Unit


@dataclass(frozen=True)
class Undisturbed:
    """The units of one session without a fault."""

    units: tuple[Unit, ...]

    @classmethod
    def of(cls, client: ChaosClient) -> "Undisturbed":
        return cls(tuple(client.units))


@dataclass(frozen=True)
class SessionFigures:
    """One session under a fault. Times in s.

    name: of the session. recovery: to the first result after the fault. silence: the longest time between two results.
    lost_units: units without a result, except for the last ones, which wait for theirs. lost_text: characters, and
    lost_sound: seconds, that the undisturbed run has in units of the same conversation and that were not received.
    shorter_sound: seconds that the undisturbed run has more of turns whose speech the model ended in an earlier unit.
    n_before, n_same_before: units that were answered before the fault, and those with the same decision, text and
    context as undisturbed; n_after, n_same_after: later ones. late: units whose result took more than a second, or had
    not come when the session was stopped. begun_again: conversations after the first one. moves: to another worker.
    n_units: units sent. difference: the first unit that is not the same.
    """

    name: str
    recovery: float | None
    silence: float
    lost_units: int
    lost_text: int
    lost_sound: float
    shorter_sound: float
    n_before: int
    n_same_before: int
    n_after: int
    n_same_after: int
    late: int
    begun_again: int
    moves: int
    n_units: int
    difference: str


def session_figures(client: ChaosClient, undisturbed: Undisturbed, at: float) -> SessionFigures:
    """Compare a session with its undisturbed run. at: time of the fault, monotonic s."""
    answers = sorted(unit.answered_at for unit in client.units if unit.fingerprint and unit.answered_at)
    after = [moment for moment in answers if moment >= at]
    gaps = np.diff([moment for moment in answers if moment < at][-1:] + after)
    counts = {True: 0, False: 0}
    same = {True: 0, False: 0}
    lost_units = lost_text = 0
    lost_sound, shorter_sound, difference = 0.0, 0.0, ""
    has_ended = False  # the speech of this turn, and not yet as undisturbed
    for unit, expected in zip(client.units, undisturbed.units, strict=False):
        if unit.n_begun:
            continue
        if unit.is_waiting:
            continue
        if unit.fingerprint is None:
            lost_units += 1
            lost_text += len(expected.fingerprint.text) if expected.fingerprint else 0
            lost_sound += expected.sound_s
            continue
        is_before = unit.answered_at is not None and unit.answered_at < at
        is_same = unit.fingerprint == expected.fingerprint
        counts[is_before] += 1
        same[is_before] += is_same
        if not (is_same or difference):
            difference = f"unit {unit.number}: expected {expected.fingerprint}, got {unit.fingerprint}"
        if is_same:
            missing = max(0.0, expected.sound_s - unit.sound_s)
            shorter_sound += missing if has_ended else 0.0
            lost_sound += 0.0 if has_ended else missing
        has_ended = (has_ended or unit.end_of_turn) and not expected.end_of_turn
    return SessionFigures(
        name=client.name,
        recovery=after[0] - at if after else None,
        silence=float(gaps.max()) if len(gaps) else 0.0,
        lost_units=lost_units,
        lost_text=lost_text,
        lost_sound=lost_sound,
        shorter_sound=shorter_sound,
        n_before=counts[True],
        n_same_before=same[True],
        n_after=counts[False],
        n_same_after=same[False],
        late=sum(unit.is_late for unit in client.units),
        begun_again=client.n_begun,
        moves=len(client.moves),
        n_units=len(client.units),
        difference=difference,
    )


@dataclass
class FaultRow:
    """The outcome of one fault. Times are monotonic s, but for `back_s`.

    name, what: of the fault. hit, neighbours: sessions that it hits, and the others. at: when it began; with a folder
    that is full or read-only that is `folder_at`, and `at` when a worker was killed. back_s: until all processes serve
    again. has_new_session: whether another session could begin meanwhile. reason: why the fault was left out.
    """

    name: str
    what: str
    notices: list[FaultSign] = field(default_factory=list)
    hit: list[SessionFigures] = field(default_factory=list)
    neighbours: list[SessionFigures] = field(default_factory=list)
    at: float = 0.0
    folder_at: float | None = None
    back_s: float | None = None
    has_new_session: bool | None = None
    reason: str = ""

    def first_signs(self, begin: float, end: float = math.inf) -> str:
        """The first sign of each program in a span of time, and after how long."""
        found: dict[str, float] = {}
        for notice in sorted(self.notices):
            if begin <= notice.at < end:
                found.setdefault(notice.who, notice.at - begin)
        return ", ".join(f"{who} {seconds:.2f} s" for who, seconds in found.items()) or "none"

    def to_json(self) -> dict[str, Any]:
        """As JSON, with times from the fault on."""
        notices = [[round(one.at - self.at, 3), one.who, one.text] for one in sorted(self.notices)]
        sessions = {kind: [asdict(one) for one in getattr(self, kind)] for kind in ("hit", "neighbours")}
        names = ("name", "what", "back_s", "has_new_session", "reason")
        return {**{name: getattr(self, name) for name in names}, "notices": notices, **sessions}


def cells(row: FaultRow) -> list[str]:
    """The row of the table: fault, first signs and their times, recovery, lost sound, lost text, neighbours."""
    if row.reason:
        return [row.what, f"left out: {row.reason}", *["-"] * 4]
    noticed = row.first_signs(row.at)
    if row.folder_at is not None:
        noticed = f"folder: {row.first_signs(row.folder_at, row.at)}; kill: {noticed}"
    return [row.what, noticed, _recovery(row), *_losses(row.hit), _neighbours(row.neighbours)]


def _recovery(row: FaultRow) -> str:
    times = [one.recovery for one in row.hit if one.recovery is not None]
    texts = [f"{max(times):.2f} s" if times else "none" if row.hit else "not needed"]
    if any(one.recovery is None for one in row.hit) and times:
        texts.append(f"{sum(one.recovery is None for one in row.hit)} without")
    if late := sum(one.late for one in row.hit):
        texts.append(f"{late} of {sum(one.n_units for one in row.hit)} units late")
    if row.back_s is not None:
        texts.append(f"process {row.back_s:.1f} s")
    if row.has_new_session is not None:
        texts.append("new session" if row.has_new_session else "no new session")
    return "; ".join(texts)


def _losses(hit: Sequence[SessionFigures]) -> list[str]:
    if not hit:
        return ["none", "none"]
    sound, text, units = (max(getattr(one, name) for one in hit) for name in ("lost_sound", "lost_text", "lost_units"))
    texts = [f"{text} characters"] if text else []
    texts += [f"{units} units without a result"] if units else []
    texts += ["the context"] if any(one.begun_again for one in hit) else []
    n_different = sum(one.n_after - one.n_same_after for one in hit)
    texts += [f"{n_different} later units differ"] if n_different else []
    return [f"{sound:.1f} s" if sound > 0.05 else "none", ", ".join(texts) or "none"]


def _neighbours(neighbours: Sequence[SessionFigures]) -> str:
    if not neighbours:
        return "-"
    n_same = sum(one.n_same_before + one.n_same_after for one in neighbours)
    n = sum(one.n_before + one.n_after for one in neighbours)
    late = sum(one.late for one in neighbours)
    return f"{n_same} of {n} units the same, {late} late"


def percentiles(values: Collection[float]) -> dict[str, float]:
    """p50, p95 and the maximum."""
    if not values:
        return {}
    p50, p95 = np.percentile(list(values), (50, 95))
    return {"p50": float(p50), "p95": float(p95), "max": float(max(values))}
