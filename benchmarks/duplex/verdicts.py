"""What the unit benchmark has found against what it is to reach: a figure, two bounds, passed or failed.

Knows targets and the form of results. Does not measure. Choices against eager are told and not judged: two that are
nearly equally likely may change places with one rounding. So is what the served type comes to without our kernels.
"""

import math
from typing import Any

from benchmarks.duplex.tables import GB, no_narrow, peak_gb, start_s, summary

Found = dict[str, Any]
MEAN, LARGEST = 1e-6, 1e-5  # of float32 compiled against eager, absolute
RELATIVE = 2e-2  # of a region, norm of the difference over the norm
# Keys of the summary: what, unit, must, aim.
TARGETS = {
    "listen_p95_ms": ("LISTEN unit, p95", "ms", 25, 15),
    "speak_p95_ms": ("SPEAK unit, p95", "ms", 130, 90),
    "first_sound_p95_ms": ("first sound, p95", "ms", 90, 60),
    "recompiles": ("recompiles after warm-up", "", 0, 0),
    "graph_breaks": ("graph breaks after warm-up", "", 0, 0),
    "cudagraph_skips": ("skips after warm-up", "", 0, 0),
    "peak_gb": ("peak memory, allocated, one session", "GB", 21.5, 20.5),
}
SESSIONS = (16, 32)
STARTS = {"cold": (240, 120), "cached": (60, 30)}


def verdicts(result: Found) -> list[Found]:
    """One for each thing that is judged: {what, unit, figure, must, aim, passes, reaches_aim, note}.

    passes, reaches_aim: None where it was not measured, or has no bound.
    """
    processes, figures = result["processes"], summary(result)
    found = [_upper(*TARGETS[key][:2], figures[key], *TARGETS[key][2:]) for key in TARGETS]
    found.insert(3, _sessions(processes.get("sessions", {}), figures["sessions_ok"]))
    at = 4
    for part, engine in (("latency", "1 slot"), ("sessions", "slots for all sessions")):
        for kind, name in (("cold", f"cold {part}"), ("cached", part)):
            seconds = start_s(processes.get(name)) if f"cold {part}" in processes else None
            if seconds is not None or part == "sessions":
                found.insert(at, _upper(f"{kind} start, {engine}", "s", seconds, *STARTS[kind]))
                at += 1
    return [*found, *_same(processes.get("correctness", {})), *_exactness(processes), *_regions(processes)]


def verdict_lines(result: Found) -> list[str]:
    """All verdicts as a table, with what the memory and the engine's sizes were."""
    told = [f"{'target':46}{'measured':>14}{'must':>10}{'':6}{'aim':>10}"]
    for one in result.get("verdicts") or verdicts(result):
        bounds = [
            f"{_shown(one[bound]):>10} {_word(one[passed]):5}"
            for bound, passed in (("must", "passes"), ("aim", "reaches_aim"))
        ]
        told.append(f"{one['what']:46}{_shown(one['figure'], one['unit']):>14}{''.join(bounds)} {one['note']}".rstrip())
    told += _memory(result["processes"].get("latency", {}))
    for name in ("latency", "sessions"):
        if "bytes_of_1000_rows" in (start := result["processes"].get(name, {}).get("start", {})):
            told.append(_sizes(name, result["settings"], start))
    correctness = result["processes"].get("correctness", {})
    if (narrow := correctness.get("narrow")) and narrow["error"]:
        told.append(no_narrow(narrow))
    if (eager := correctness.get("against_eager")) is not None:
        first = eager["first"]
        where = f", first unit {first['unit']}, step {first['step']}" if first else ""
        told.append(f"not judged: {eager['n_differ']} of {eager['n_choices']} choices are not eager's{where}")
    return told


def _upper(what: str, unit: str, figure: float | None, must: float, aim: float | None = None, note: str = "") -> Found:
    def within(bound: float | None) -> bool | None:
        return None if figure is None or bound is None else figure <= bound  # a NaN is not

    return {
        "what": what,
        "unit": unit,
        "figure": figure,
        "must": must,
        "aim": aim,
        "passes": within(must),
        "reaches_aim": within(aim),
        "note": note,
    }


def _sessions(found: Found, served: int | None) -> Found:
    must, aim = SESSIONS
    claim = found.get("sessions", {}).get("claim")
    note = "" if claim is None or claim["is_long"] else f"by {claim['units']} units, fewer than asked for"
    passes, reaches = (None if served is None else served >= bound for bound in SESSIONS)
    return {
        **_upper("live sessions, below 0.1 % misses", "", served, must, aim, note),
        "passes": passes,
        "reaches_aim": reaches,
    }


def _same(found: Found) -> list[Found]:
    """Number of kinds that differ: of ids, codes and sound for two runs, of ids beside neighbours."""
    judged = []
    for key, kinds in (("two_runs", ("ids", "codes", "sound")), ("with_neighbours", ("ids",))):
        if (one := found.get("identity", {}).get(key)) is not None:
            differing = [kind for kind, at in one["first"].items() if at is not None]
            n = sum(kind in kinds for kind in differing)
            what = f"{key.replace('_', ' ')}: of {', '.join(kinds)} differ"
            note = f"differ: {', '.join(differing)}" if differing else ""
            judged.append(_upper(what, "", n, 0, note=note))
    return judged


def _exactness(processes: Found) -> list[Found]:
    judged = []
    for name, kernels in (("float32", False), ("float32 kernels", True)):
        regions = [one for _, one in _each(processes.get(name, {}))]
        if not regions:
            continue
        errors = [one["error"] for one in regions if one["error"]]
        note = f"{len(errors)} regions failed: {errors[0]}" if errors else ""
        toggles = processes[name].get("start", {}).get("toggles", {})
        if kernels and not toggles.get("kernels"):
            note = "kernels were off"
        elif not kernels and (toggles.get("kernels") or toggles.get("vocoder_kernels")):
            note = "kernels were on"
        for kind, bound in (("mean", MEAN), ("largest", LARGEST)):
            figure = _most(one[f"alike_{kind}"] for one in regions)
            judged.append(_upper(f"{name}, against eager: {kind} |d|", "", figure, bound, note=note))
            if note:
                judged[-1]["passes"] = False
    return judged


def _regions(processes: Found) -> list[Found]:
    """Of the model as it serves: for each region the largest over its calls, each from the same state as its twin's."""
    narrow = processes.get("correctness", {}).get("narrow")
    by_name: dict[str, list[Found]] = {}
    for name, one in _each(processes.get("correctness", {})):
        by_name.setdefault(name, []).append(one)
    judged = []
    for name, ones in by_name.items():
        errors = [one["error"] for one in ones if one["error"]]
        n, alike = sum(one["n"] for one in ones), sum(one["n_alike"] for one in ones)
        note = errors[0] if errors else f"{n - alike} of {n} calls chose otherwise, not judged" if alike < n else ""
        if narrow and not narrow["error"]:
            note = "; ".join(part for part in (note, _beside(ones, narrow["dtype"])) if part)
        figure = _most(one["alike_relative"] for one in ones if one["n_alike"]) if alike else None
        judged.append(_upper(f"region {name}: |d|/|ref|", "", figure, RELATIVE, note=note))
        if errors:
            judged[-1]["passes"] = False
    for name in ("correctness", "float32", "float32 kernels"):
        if left_out := processes.get(name, {}).get("regions_left_out"):
            judged.append(_upper(f"{name}: regions", "", None, 0, note=f"not finished: {left_out}"))
            judged[-1]["passes"] = False
    return judged


def _beside(ones: list[Found], dtype: str) -> str:
    """What a plain eager engine of the served type comes to, and ours, over the same calls."""
    both = [one for one in ones if one["n_both"]]
    if not both:
        why = "no call alike in both" if any(one["n_narrow"] for one in ones) else "not measured"
        return f"eager {dtype}: {why}"
    ours, plain = (_most(one[key] for one in both) for key in ("both_relative", "narrow_relative"))
    n, alike = sum(one["n_both"] for one in both), sum(one["n_alike"] for one in ones)
    return f"eager {dtype} {plain:.2e}, ours {ours:.2e}, over {n} of {alike} calls"


def _each(found: Found) -> list[tuple[str, Found]]:
    tables = [table for tables in found.get("regions", {}).values() for table in tables.values()]
    return [(name, one) for table in tables for name, one in table.items()]


def _most(values: Any) -> float:
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _memory(latency: Found) -> list[str]:
    allocated, reserved = peak_gb(latency), peak_gb(latency, "reserved_bytes")
    if allocated is None:
        return []
    memory = latency["latency"]["memory"]
    now = memory["serving"]
    return [
        f"memory, one session, GB: tensors at most {allocated:.2f} (serving {now['allocated_bytes'] / GB:.2f}), "
        f"reserved at most {reserved:.2f} (serving {now['reserved_bytes'] / GB:.2f}), "
        f"in use on the device at the end {memory['device_used_bytes'] / GB:.2f}"
    ]


def _sizes(name: str, settings: Found, start: Found) -> str:
    return (
        f"{name}: slots of {settings['llm_len']} rows and {settings['voices_s']:g} s of voices, where a worker has "
        f"8192 and 60 by default; 1000 rows more are {start['bytes_of_1000_rows'] / GB:.3f} GB, "
        f"a second more {start['bytes_of_a_voice_second'] / GB:.4f} GB"
    )


def _shown(figure: float | None, unit: str = "") -> str:
    if figure is None:
        return "-"
    number = f"{figure:.2e}" if isinstance(figure, float) and 0 < abs(figure) < 0.1 else f"{figure:g}"
    return f"{number} {unit}".rstrip()


def _word(passed: bool | None) -> str:
    return {None: "", True: "pass", False: "FAIL"}[passed]
