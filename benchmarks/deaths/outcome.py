"""What a death did to the sessions, as figures and as a row of the table."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.chaos.clients import DEADLINE_S, ChaosClient, FaultSign
from benchmarks.chaos.figures import SessionFigures, Undisturbed, percentiles, session_figures
from benchmarks.serve.cluster_phases import is_late

HEAD = (
    *("death", "sessions", "noticed by, after", "next result, p50 / p95 / max", "lost sound", "lost text"),
    *("same as undisturbed, up to the death / after it", "late units", "neighbours", "worker back"),
)


@dataclass
class DeathOutcome:
    """One death under live sessions. Times in s.

    name: of the process that was killed. gateways: of the sessions. hit, neighbours: sessions whose process died, and
    the others. n_moved: sessions that went on at another worker, or at another gateway. late_before: late units of all
    sessions that were due before the death. back: until the worker served again.
    """

    name: str
    gateways: int
    at: float
    notices: list[FaultSign] = field(default_factory=list)
    hit: list[SessionFigures] = field(default_factory=list)
    neighbours: list[SessionFigures] = field(default_factory=list)
    n_moved: int = 0
    late_before: int = 0
    back: float | None = None

    def first_signs(self) -> dict[str, float]:
        """Seconds from the death to the first sign of it, by process."""
        found: dict[str, float] = {}
        for notice in sorted(self.notices):
            if notice.at >= self.at:
                found.setdefault(notice.who, notice.at - self.at)
        return found

    @property
    def n_sessions(self) -> int:
        return len(self.hit) + len(self.neighbours)

    def figures(self) -> dict[str, Any]:
        """The figures of all sessions together. Sound in s, text in characters."""
        recovered = [one.recovery for one in self.hit if one.recovery is not None]
        return {
            "death": self.name,
            "gateways": self.gateways,
            "sessions": self.n_sessions,
            "hit": len(self.hit),
            "recovered": len(recovered),
            "moved": self.n_moved,
            "noticed_s": self.first_signs(),
            "next_result_s": percentiles(recovered),
            "lost_sound_s": percentiles([one.lost_sound for one in self.hit]),
            "lost_text": sum(one.lost_text for one in self.hit),
            "lost_units": sum(one.lost_units for one in self.hit),
            "begun_again": sum(one.begun_again for one in self.hit),
            "hit_same": _same(self.hit),
            "neighbours_same": _same(self.neighbours),
            "late_before": self.late_before,
            "late_hit": sum(one.late for one in self.hit),
            "late_neighbours": sum(one.late for one in self.neighbours),
            "units": sum(one.n_units for one in (*self.hit, *self.neighbours)),
            "worker_back_s": self.back,
        }

    def to_json(self) -> dict[str, Any]:
        """The figures, those of each session, and all signs with their times from the death on."""
        notices = [[round(one.at - self.at, 3), one.who, one.text] for one in sorted(self.notices)]
        sessions = {kind: [asdict(one) for one in getattr(self, kind)] for kind in ("hit", "neighbours")}
        return {**self.figures(), "notices": notices, "session_figures": sessions}


def _same(sessions: Sequence[SessionFigures]) -> dict[str, int]:
    """Sessions, and units, that are as undisturbed. before, after: the death."""
    return {
        "sessions": len(sessions),
        "same_before": sum(one.n_same_before == one.n_before for one in sessions),
        "same_after": sum(one.n_same_after == one.n_after for one in sessions),
        "units": sum(one.n_before + one.n_after for one in sessions),
        "same_units": sum(one.n_same_before + one.n_same_after for one in sessions),
    }


def outcome_of(
    name: str, gateways: int, at: float, clients: Sequence[ChaosClient], expected: Sequence[Undisturbed], hit: set[int]
) -> DeathOutcome:
    """The outcome, without the signs in logs.

    Args:
        at: time of the death, monotonic s.
        clients: of all sessions, which have been stopped.
        expected: their undisturbed runs.
        hit: indices of the clients whose process died.
    """
    found = DeathOutcome(name, gateways, at)
    for index, (client, undisturbed) in enumerate(zip(clients, expected, strict=True)):
        (found.hit if index in hit else found.neighbours).append(session_figures(client, undisturbed, at))
        found.notices += [one for one in client.notices if one.at >= at]
        found.late_before += sum(is_late(unit, at) for unit in client.units if unit.sent_at < at - DEADLINE_S)
        found.n_moved += index in hit and _has_moved(client, at)
    return found


def hit_by(clients: Sequence[ChaosClient], at: float) -> set[int]:
    """Indices of the clients that have a sign of a death at this time: of a worker or of their connection."""
    return {index for index, client in enumerate(clients) if any(one.at >= at for one in client.notices)}


def _has_moved(client: ChaosClient, at: float) -> bool:
    texts = {one.text for one in client.notices if one.at >= at}
    return not client.n_begun and bool(texts & {"session_moved", "connection replaced"})


def agreement(runs: Sequence[Undisturbed], others: Sequence[Undisturbed]) -> dict[str, int]:
    """Two undisturbed runs of the same sessions: units of both, and those that are the same."""
    pairs = [
        (one.fingerprint, other.fingerprint)
        for run, another in zip(runs, others, strict=False)
        for one, other in zip(run.units, another.units, strict=False)
        if one.fingerprint and other.fingerprint
    ]
    return {"units": len(pairs), "same_units": sum(one == other for one, other in pairs)}


def cells(figures: dict[str, Any]) -> tuple[str, ...]:
    """The row of the table."""
    noticed = ", ".join(f"{who} {seconds:.2f} s" for who, seconds in figures["noticed_s"].items()) or "none"
    sound, lost, hit, others = (figures[key] for key in ("lost_sound_s", "lost_units", "hit_same", "neighbours_same"))
    text = f"{figures['lost_text']} characters, {lost} units without a result" if lost else "none"
    back = figures["worker_back_s"]
    return (
        figures["death"],
        f"{figures['sessions']} at {figures['gateways']} gateways; {figures['hit']} hit, {figures['moved']} moved",
        noticed,
        f"{_three(figures['next_result_s'])}; {figures['recovered']} of {figures['hit']} sessions",
        f"{sound['max']:.2f} s" if sound and sound["max"] > 0.05 else "none",
        text,
        f"{hit['same_before']} / {hit['same_after']} of {hit['sessions']} sessions",
        f"{figures['late_before']} before; of all {figures['units']}: {figures['late_hit']} of sessions that were hit",
        f"{others['same_units']} of {others['units']} units the same, {figures['late_neighbours']} late",
        "-" if back is None else f"{back:.1f} s",
    )


def _three(values: dict[str, float]) -> str:
    return " / ".join(f"{values[key]:.2f}" for key in ("p50", "p95", "max")) + " s" if values else "-"


def lines(figures: dict[str, Any]) -> str:
    """The row as lines of text."""
    first, *rest = zip(HEAD, cells(figures), strict=True)
    return "\n".join((f"{first[1]}:", *(f"  {name}: {cell}" for name, cell in rest)))
