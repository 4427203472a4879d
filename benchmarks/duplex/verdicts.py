"""Judges the unit benchmark's figures against their targets.

Contains the targets and the verdicts. Does not measure. Two figures are reported without a verdict: choices that differ
from eager, because rounding may swap two nearly equally likely tokens, and the error of the served dtype without our
kernels.
"""

import math
from collections.abc import Iterable
from typing import Any

from benchmarks.duplex.tables import GB, missing_narrow_note, peak_gb, start_s, summary

JsonDict = dict[str, Any]
MEAN, LARGEST = 1e-6, 1e-5  # absolute error of compiled float32 against eager
RELATIVE = 2e-2  # of a region: norm of the difference / norm of the reference
# The same of quantised weights, as a multiple of the error of a plain eager engine in the served dtype.
QUANTISED = {"fp8": 4.0, "int8": 4.0, "int4": math.inf}
# By key of the summary: description, unit, required bound (must), target (aim).
TARGETS = {
    "listen_p95_ms": ("LISTEN unit, p95", "ms", 25, 15),
    "speak_p95_ms": ("SPEAK unit, p95", "ms", 130, 90),
    "first_sound_p95_ms": ("first sound, p95", "ms", 90, 60),
    "recompiles": ("recompiles after warm-up", "", 0, 0),
    "graph_breaks": ("graph breaks after warm-up", "", 0, 0),
    "cudagraph_skips": ("skips after warm-up", "", 0, 0),
    "peak_gb": ("peak memory, allocated, one session", "GB", 21.5, 20.5),
    "first_sound_32_p95_ms": ("first sound, p95, 32 sessions, half speaking", "ms", 160, None),
}
SESSIONS = (16, 32)
STARTS = {"cold": (240, 120), "cached": (60, 30)}


def verdicts(result: JsonDict) -> list[JsonDict]:
    """Verdicts: {what, unit, figure, must, aim, passes, reaches_aim, note} each.

    passes, reaches_aim: None if the figure was not measured or has no bound.
    """
    processes, figures = result["processes"], summary(result)
    found = [_judge_upper(*TARGETS[key][:2], figures[key], *TARGETS[key][2:]) for key in TARGETS]
    found.insert(3, _judge_sessions(processes.get("sessions", {}), figures["sessions_ok"]))
    index = 4
    for part, engine in (("latency", "1 slot"), ("sessions", "slots for all sessions")):
        for kind, name in (("cold", f"cold {part}"), ("cached", part)):
            seconds = start_s(processes.get(name)) if f"cold {part}" in processes else None
            if seconds is not None or part == "sessions":
                found.insert(index, _judge_upper(f"{kind} start, {engine}", "s", seconds, *STARTS[kind]))
                index += 1
    return [
        *found,
        *_judge_repeats(processes.get("correctness", {})),
        *_judge_exactness(processes),
        *_judge_regions(processes, result.get("settings", {}).get("weights", "bf16")),
    ]


def format_verdicts(result: JsonDict) -> list[str]:
    """Lines of the verdict table, followed by memory and engine sizes."""
    lines = [f"{'target':46}{'measured':>14}{'must':>10}{'':6}{'aim':>10}"]
    for one in result.get("verdicts") or verdicts(result):
        bounds = [
            f"{_format_figure(one[bound]):>10} {_pass_text(one[passed]):5}"
            for bound, passed in (("must", "passes"), ("aim", "reaches_aim"))
        ]
        lines.append(
            f"{one['what']:46}{_format_figure(one['figure'], one['unit']):>14}{''.join(bounds)} {one['note']}".rstrip()
        )
    lines += _memory_lines(result["processes"].get("latency", {}))
    for name in ("latency", "sessions"):
        if "bytes_of_1000_rows" in (start := result["processes"].get(name, {}).get("start", {})):
            lines.append(_size_line(name, result["settings"], start))
    correctness = result["processes"].get("correctness", {})
    if (narrow := correctness.get("narrow")) and narrow["error"]:
        lines.append(missing_narrow_note(narrow))
    if (eager := correctness.get("against_eager")) is not None:
        first = eager["first"]
        where = f", first unit {first['unit']}, step {first['step']}" if first else ""
        lines.append(f"not judged: {eager['n_differ']} of {eager['n_choices']} choices differ from eager's{where}")
    return lines


def _judge_upper(
    what: str, unit: str, figure: float | None, must: float, aim: float | None = None, note: str = ""
) -> JsonDict:
    def within(bound: float | None) -> bool | None:
        return None if figure is None or bound is None else figure <= bound  # false for NaN

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


def _judge_sessions(found: JsonDict, served: int | None) -> JsonDict:
    must, aim = SESSIONS
    claim = found.get("sessions", {}).get("claim")
    note = "" if claim is None or claim["is_long"] else f"by {claim['units']} units, fewer than requested"
    passes, reaches_aim = (None if served is None else served >= bound for bound in SESSIONS)
    return {
        **_judge_upper("live sessions, below 0.1 % misses", "", served, must, aim, note),
        "passes": passes,
        "reaches_aim": reaches_aim,
    }


def _judge_repeats(found: JsonDict) -> list[JsonDict]:
    """Judge the number of kinds that differ: ids, codes and sound between two runs, ids beside neighbours."""
    judged = []
    for key, kinds in (("two_runs", ("ids", "codes", "sound")), ("with_neighbours", ("ids",))):
        if (one := found.get("identity", {}).get(key)) is not None:
            differing = [kind for kind, at in one["first"].items() if at is not None]
            n = sum(kind in kinds for kind in differing)
            what = f"{key.replace('_', ' ')}: of {', '.join(kinds)} differ"
            note = f"differ: {', '.join(differing)}" if differing else ""
            judged.append(_judge_upper(what, "", n, 0, note=note))
    return judged


def _judge_exactness(processes: JsonDict) -> list[JsonDict]:
    judged = []
    for name, kernels in (("float32", False), ("float32 kernels", True)):
        regions = [one for _, one in _all_regions(processes.get(name, {}))]
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
            figure = _max_or_nan(one[f"alike_{kind}"] for one in regions)
            judged.append(_judge_upper(f"{name}, against eager: {kind} |d|", "", figure, bound, note=note))
            if note:
                judged[-1]["passes"] = False
    return judged


def _judge_regions(processes: JsonDict, weights: str) -> list[JsonDict]:
    """Judge each region of the served model by the largest error of its calls, all from the twin's state.

    weights: quantised ones are judged by the error of the plain eager engine, over the calls alike in both.
    """
    narrow = processes.get("correctness", {}).get("narrow")
    by_name: dict[str, list[JsonDict]] = {}
    for name, one in _all_regions(processes.get("correctness", {})):
        by_name.setdefault(name, []).append(one)
    judged = []
    for name, ones in by_name.items():
        errors = [one["error"] for one in ones if one["error"]]
        n, alike = sum(one["n"] for one in ones), sum(one["n_alike"] for one in ones)
        note = errors[0] if errors else f"{n - alike} of {n} calls chose otherwise, not judged" if alike < n else ""
        if narrow and not narrow["error"]:
            note = "; ".join(part for part in (note, _narrow_note(ones, narrow["dtype"])) if part)
        if weights in QUANTISED:
            judged.append(
                _judge_upper(f"region {name}: |d| in {weights}", "x", _times_plain(ones), QUANTISED[weights], note=note)
            )
        else:
            figure = _max_or_nan(one["alike_relative"] for one in ones if one["n_alike"]) if alike else None
            judged.append(_judge_upper(f"region {name}: |d|/|ref|", "", figure, RELATIVE, note=note))
        if errors:
            judged[-1]["passes"] = False
    for name in ("correctness", "float32", "float32 kernels"):
        if left_out := processes.get(name, {}).get("regions_left_out"):
            judged.append(_judge_upper(f"{name}: regions", "", None, 0, note=f"not finished: {left_out}"))
            judged[-1]["passes"] = False
    return judged


def _times_plain(ones: list[JsonDict]) -> float | None:
    """Error of the served engine as a multiple of the plain one's; None without a call that is alike in both."""
    both = [one for one in ones if one["n_both"]]
    if not both:
        return None
    ours, plain = (_max_or_nan(one[key] for one in both) for key in ("both_relative", "narrow_relative"))
    return ours / plain if plain else math.inf if ours else 0.0


def _narrow_note(ones: list[JsonDict], dtype: str) -> str:
    """Error of a plain eager engine in the served dtype, and of the served engine, over the same calls."""
    both = [one for one in ones if one["n_both"]]
    if not both:
        reason = "no call alike in both" if any(one["n_narrow"] for one in ones) else "not measured"
        return f"eager {dtype}: {reason}"
    ours, plain = (_max_or_nan(one[key] for one in both) for key in ("both_relative", "narrow_relative"))
    n, alike = sum(one["n_both"] for one in both), sum(one["n_alike"] for one in ones)
    return f"eager {dtype} {plain:.2e}, ours {ours:.2e}, over {n} of {alike} calls"


def _all_regions(found: JsonDict) -> list[tuple[str, JsonDict]]:
    tables = [table for tables in found.get("regions", {}).values() for table in tables.values()]
    return [(name, one) for table in tables for name, one in table.items()]


def _max_or_nan(values: Iterable[float]) -> float:
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _memory_lines(latency: JsonDict) -> list[str]:
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


def _size_line(name: str, settings: JsonDict, start: JsonDict) -> str:
    return (
        f"{name}: slots of {settings['llm_len']} rows and {settings['voices_s']:g} s of voices, where a worker has "
        f"8192 and 60 by default; 1000 rows more are {start['bytes_of_1000_rows'] / GB:.3f} GB, "
        f"a second more {start['bytes_of_a_voice_second'] / GB:.4f} GB"
    )


def _format_figure(figure: float | None, unit: str = "") -> str:
    if figure is None:
        return "-"
    number = f"{figure:.2e}" if isinstance(figure, float) and 0 < abs(figure) < 0.1 else f"{figure:g}"
    return f"{number} {unit}".rstrip()


def _pass_text(passed: bool | None) -> str:
    return {None: "", True: "pass", False: "FAIL"}[passed]
