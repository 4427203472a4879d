"""Runs a folder of recorded sessions: each alone, all in one engine, and the recorded parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.parity.report import Report
from tests.parity.run import run_parity
from tests.traces import turns
from tests.traces.compare import compare
from tests.traces.folder import Trace
from tests.traces.play import play
from tests.traces.stage import RecordedModel
from tests.traces.turns import run_turns

SNAPSHOTS = 8  # prompts saved when sessions run together, so that some start from a copy


@dataclass(frozen=True)
class Outcome:
    """Checks of one trace. how: `alone` or `together`."""

    name: str
    how: str
    report: Report


def run_alone(cast: RecordedModel, names: Sequence[str]) -> Iterator[Outcome]:
    """Each trace in its own engine; an error is a miss, and the other traces still run."""
    for name in names:
        report = Report()
        try:
            trace = cast.folder.trace(name)
            (account,) = play(cast, [trace])
            compare(trace, account, report)
        except Exception as error:
            report.fail(name, "run", f"{type(error).__name__}: {error}")
        yield Outcome(name, "alone", report)


def run_together(cast: RecordedModel, names: Sequence[str]) -> Iterator[Outcome]:
    """All traces as sessions of one engine, with their units in shared batches."""
    reports = {name: Report() for name in names}
    try:
        traces: list[Trace] = [cast.folder.trace(name) for name in names]
        for trace, account in zip(traces, play(cast, traces, snapshots=SNAPSHOTS), strict=True):
            compare(trace, account, reports[trace.name])
    except Exception as error:
        for name, report in reports.items():
            report.fail(name, "run", f"{type(error).__name__}: {error}")
    for name, report in reports.items():
        yield Outcome(name, "together", report)


def run_cases(cast: RecordedModel) -> Outcome:
    """The recorded parts other than duplex sessions."""
    report, stages = run_parity(str(cast.folder.path))
    n_before = len(report.checks)
    try:
        run_turns(cast, report)
    except Exception as error:
        report.fail(turns.NAME, "run", f"{type(error).__name__}: {error}")
    if len(report.checks) > n_before:
        stages.append(turns.NAME)
    return Outcome("cases", ", ".join(stages) or "none", report)
