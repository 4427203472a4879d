"""Compares a replayed session with its recording: one check per field and unit.

Contains the recording's fields and their tolerances. Does not run anything. A field that the recording lacks is not
compared, so a trimmed recording is compared in its remaining fields; an unknown field is a miss.
"""

from typing import Any

import torch
from torch import Tensor

from tests.parity.checksum import allowed
from tests.parity.report import Report
from tests.traces.account import SessionRecord
from tests.traces.folder import Trace
from tests.traces.watch import Feed

LOGITS = 1e-3  # of the largest logit of the trace
CONTEXT = 1e-3  # keys and values: many layers, whose keys are rotated at every eviction

# Fields of the recorder, not of the session: names, counters, wording of its logs.
OF_THE_RECORDER = frozenset({"unit", "reason_given"})


def compare(trace: Trace, account: SessionRecord, report: Report) -> None:
    """Add a check for every field of the recording."""
    _Comparison(trace, account, report).run()


class _Comparison:
    def __init__(self, trace: Trace, account: SessionRecord, report: Report):
        self._trace, self._account, self._report = trace, account, report
        pending = [t.abs().max() for name, t in trace.tensors.items() if name.endswith("pending_logits")]
        tops = [
            abs(value)
            for unit in trace.expected["units"]
            for step in unit["generate"].get("steps", [])
            for value in step.get("raw_top", [])
        ]
        self._logits_within = LOGITS * max([*map(float, pending), *tops, 1.0])

    def run(self) -> None:
        name, account, expected = self._trace.name, self._account, self._trace.expected
        skipped = {"ops"} if account.from_snapshot else set()
        self._fields(f"{name} prepare", account.prepare, expected.get("prepare", {}), skipped)
        self._report.equal(name, "units", len(account.units), len(expected["units"]))
        for number, (got, unit) in enumerate(zip(account.units, expected["units"], strict=False)):
            for phase, fields in unit.items():
                case = f"{name} u{number} {phase}"
                if phase in OF_THE_RECORDER:
                    continue
                if phase not in got:
                    self._unknown(case, phase)
                elif fields is None or got[phase] is None:
                    self._report.equal(case, "whether it happened", got[phase] is not None, fields is not None)
                else:
                    # Without success the recorded mode belongs to an earlier unit.
                    stale = set() if fields.get("success", True) else {"mode"}
                    self._fields(case, got[phase], fields, stale)
            self._report.equal(f"{name} u{number}", "counts of host and device", *got["counts"])
        self._fields(f"{name} final", account.final, expected.get("final", {}), set())
        for tensor in sorted(self._trace.tensors):
            self._tensor(tensor)

    def _fields(self, case: str, got: dict[str, Any], expected: dict[str, Any], skipped: set[str]) -> None:
        for name, want in expected.items():
            if name in skipped or name in OF_THE_RECORDER:
                continue
            if name not in got:
                self._unknown(case, name)
            elif name == "ops":
                self._ops(case, got[name], want)
            elif name == "steps":
                self._list(case, name, got[name], want, self._step)
            elif name == "tts":
                self._list(case, name, got[name], want, lambda case, *pair: self._fields(case, *pair, set()))
            elif name == "window":
                self._fields(f"{case} window", got[name], want, set())
            elif name == "kv":
                for part, layers in want.items():
                    self._list(case, part, got[name][part], layers, lambda case, *pair: self._sums(case, "sums", *pair))
            elif name.endswith("chk"):
                self._sums(case, name, got[name], want)
            else:
                self._report.equal(case, name, got[name], want)

    def _list(self, case: str, name: str, got: list[Any], expected: list[Any], compare_one: Any) -> None:
        if len(got) != len(expected):
            self._report.fail(case, name, f"expected {len(expected)} entries, got {len(got)}")
            return
        for number, pair in enumerate(zip(got, expected, strict=True)):
            compare_one(f"{case} {name}{number}", *pair)

    def _ops(self, case: str, feeds: list[Feed], expected: list[dict[str, Any]]) -> None:
        """Rows fed in a phase, split as in the recording, which feeds more and shorter spans."""
        places = [feed.past + row for feed in feeds for row in range(len(feed.ids))]
        wanted = [op["past"] + row for op in expected for row in range(op["n"])]
        self._report.equal(case, "ops: rows fed", places, wanted)
        if places != wanted:
            return
        ids = [one for feed in feeds for one in feed.ids]
        rows = torch.cat([feed.rows for feed in feeds]) if feeds else torch.zeros(0, 0)
        end = 0
        for number, op in enumerate(expected):
            start, end = end, end + op["n"]
            if op.get("ids") is not None:
                self._report.equal(case, f"ops{number} ids", ids[start:end], op["ids"])
            if "chk" in op:
                self._report.sums_if(case, f"ops{number} chk", rows[start:end], op["chk"])

    def _step(self, case: str, got: dict[str, Any], expected: dict[str, Any]) -> None:
        logits: Tensor = got["logits"].double().cpu()
        for name, want in expected.items():
            if name == "raw_top_ids":
                # Ids with nearly equal logits may be swapped.
                near = torch.tensor(expected["raw_top"], dtype=torch.float64)
                self._report.within(case, name, logits[want], near, self._logits_within)
            elif name == "raw_top":
                want = torch.tensor(want, dtype=torch.float64)
                self._report.within(case, name, logits.topk(len(want)).values, want, self._logits_within)
            elif name == "logits_chk":
                self._report.sums_if(case, name, logits, want)
            elif name in got:
                self._report.equal(case, name, got[name], want)
            else:
                self._unknown(case, name)

    def _sums(self, case: str, name: str, got: list[float], expected: list[float]) -> None:
        pair = (torch.tensor(sums, dtype=torch.float64) for sums in (got, expected))
        self._report.within(case, name, *pair, allowed(expected))

    def _tensor(self, name: str) -> None:
        case, expected = f"{self._trace.name} {name.split('.')[0]}", self._trace.tensors[name]
        got = self._account.tensors.get(name)
        if got is None:
            self._report.fail(case, name, "expected a tensor, got none")
        elif name.endswith("pending_logits"):
            self._report.within(case, name, got, expected, self._logits_within)
        else:
            tolerance = CONTEXT if ".after_evict." in name else 1e-4
            self._report.close(case, name, got, expected, tolerance)

    def _unknown(self, case: str, name: str) -> None:
        self._report.fail(case, name, "expected one of the fields that are compared, got an unknown one")
