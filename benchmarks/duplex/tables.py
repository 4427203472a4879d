"""Tables and summary of the unit benchmark's results. Does not measure."""

from typing import Any

from benchmarks.duplex.live_sessions import max_served_sessions
from benchmarks.duplex.memory_table import memory_lines
from benchmarks.duplex.region_profile import profile_lines
from worker.loop.results import NO_STAGES

JsonDict = dict[str, Any]
SUMMARY = (
    *("listen_p95_ms", "speak_p95_ms", "first_sound_p95_ms"),
    *("listen_edge_p95_ms", "speak_edge_p95_ms", "first_sound_edge_p95_ms", "first_sound_32_p95_ms"),
    *("sessions_ok", "cold_start_s", "cached_start_s"),
    *("recompiles", "graph_breaks", "cudagraph_skips", "peak_gb", "date", "torch", "command"),
)
# Names of the figures of quantised weights, and with a copy for decoding, beside those of bf16.
SEPARATE = {
    "listen_p95_ms": "listen_{}_p95_ms",
    "speak_p95_ms": "speak_{}_p95_ms",
    "first_sound_p95_ms": "first_sound_{}_p95_ms",
    "listen_edge_p95_ms": "listen_edge_{}_p95_ms",
    "speak_edge_p95_ms": "speak_edge_{}_p95_ms",
    "first_sound_edge_p95_ms": "first_sound_edge_{}_p95_ms",
    "first_sound_32_p95_ms": "first_sound_32_{}_p95_ms",
    "sessions_ok": "sessions_{}",
    "peak_gb": "peak_{}_gb",
}
GB = 1e9
LATE = {
    "graphs": "recompiles",
    "graph_breaks": "graph breaks",
    "graph_skips": "calls without a CUDA graph",
    "cudagraph_skips": "refusals of Inductor to capture",
}


def format_process(name: str, found: JsonDict) -> list[str]:
    """Lines of one process's table."""
    lines = [f"== {name}"]
    if "start" in found:
        lines.append(_format_start(found["start"]))
    if "latency" in found:
        lines += _format_latency(found["latency"])
    if "sessions" in found:
        lines += _format_sessions(found["sessions"])
    if "first_sound" in found:
        lines += _format_first_sound(found["first_sound"])
    if "profile" in found:
        lines += profile_lines(found["profile"])
    if name.startswith("profile") and "start" in found:
        rows = found.get("profile", {}).get("rows", [])
        lines += memory_lines(found["start"], rows[-1]["peak_memory"] if rows else None)
    if "against_eager" in found:
        lines.append(_format_against_eager(found["against_eager"]))
    for what, one in found.get("identity", {}).items():
        verdict = ", ".join(
            f"{kind} the same" if at is None else f"{kind} differ from number {at} on"
            for kind, at in one["first"].items()
        )
        lines.append(
            f"{what.replace('_', ' ')}: {verdict} ({one['n_units']} units, {one['n_ids']} ids, {one['n_codes']} codes)"
        )
    narrow = found.get("narrow")
    for n, tables in found.get("regions", {}).items():
        lines += _format_regions(n, tables, narrow)
    if narrow and narrow["error"]:
        lines.append(missing_narrow_note(narrow))
    if found.get("regions_left_out"):
        lines.append(f"regions not finished: {found['regions_left_out']}")
    process = found.get("process", {})
    if process.get("killed") or process.get("status"):
        lines.append(f"{process.get('killed') or 'ended'}, exit status {process['status']}")
    return lines


def summary(result: JsonDict) -> JsonDict:
    """Figures of one run by name; None if this run has not measured them."""
    processes = result["processes"]
    latency, sessions = processes.get("latency", {}), processes.get("sessions", {})
    measured = latency.get("latency", {}).get("rows", [])
    # Pictures come before their units where both cases were measured.
    edge, rows = (
        {row["mode"]: row for row in reversed(measured) if bool(_lead_s(row)) is ahead} for ahead in (False, True)
    )
    rows = {**edge, **rows}
    served = sessions.get("sessions", {}).get("rows", [])
    first = [row["first_run"] for row in served if "first_run" in row]
    turns = processes.get("first_sound", {}).get("first_sound", {}).get("rows", [])
    late = [row["late"] for row in (*measured, *served, *first, *turns)]
    slots = "sessions" if "cold sessions" in processes or "sessions" in processes else "latency"
    figures = {
        "listen_p95_ms": _p95(rows.get("LISTEN"), "total_ms"),
        "speak_p95_ms": _p95(rows.get("SPEAK"), "total_ms"),
        "first_sound_p95_ms": _p95(rows.get("SPEAK"), "first_sound_ms"),
        "listen_edge_p95_ms": _p95(edge.get("LISTEN"), "total_ms"),
        "speak_edge_p95_ms": _p95(edge.get("SPEAK"), "total_ms"),
        "first_sound_edge_p95_ms": _p95(edge.get("SPEAK"), "first_sound_ms"),
        "first_sound_32_p95_ms": _p95(next(filter(_is_32_as_served, turns), None), "first_sound_ms"),
        "sessions_ok": max_served_sessions(served) if served else None,
        "cold_start_s": start_s(processes.get(f"cold {slots}")),
        "cached_start_s": start_s(processes.get(slots)) if f"cold {slots}" in processes else None,
        "recompiles": sum(one["graphs"] for one in late) if late else None,
        "graph_breaks": sum(one["graph_breaks"] for one in late) if late else None,
        "cudagraph_skips": sum(one["graph_skips"] + one["cudagraph_skips"] for one in late) if late else None,
        "peak_gb": peak_gb(latency),
        "date": result["environment"]["date"],
        "torch": result["environment"]["torch"],
        "command": " && ".join(" ".join(one) for one in commands(result)),
    }
    return {name: _round(figures[name]) for name in SUMMARY}


def _is_32_as_served(row: JsonDict) -> bool:
    """Whether a row of first sounds has 32 sessions, placed and ordered as by a worker."""
    return row["sessions"] == 32 and row["units"] == "spread" and row["order"] != "none"


def kept_summary(result: JsonDict, kept: JsonDict) -> JsonDict:
    """What a file of summaries holds after a run.

    Runs with quantised weights, or a copy for decoding, add their figures to those of other runs.

    Args:
        kept: content of the file before the run.
    """
    figures, settings = summary(result), result["settings"]
    names = [one for one in (settings.get("weights", "bf16"),) if one != "bf16"]
    names += ["copy"] if settings.get("decode_copy") else []
    if not names:
        return {**{name: value for name, value in kept.items() if name not in SUMMARY}, **figures}
    own = "_".join(names)
    added = {named.format(own): figures[name] for name, named in SEPARATE.items() if figures[name] is not None}
    if not added:
        return kept
    return {**kept, **added, f"command_{own}": figures["command"], f"date_{own}": figures["date"]}


def commands(result: JsonDict) -> list[list[str]]:
    """Commands with which the result was measured."""
    return [result["command"], *(one["command"] for one in result.get("resumed", []))]


def toggle_table(processes: dict[str, JsonDict]) -> list[str]:
    """Table with one line per measured way; empty if there is none."""
    names = [name.removeprefix("toggle ") for name in processes if name.startswith("toggle ")]
    if not names:
        return []
    lines = [
        f"{'way':16}{'LISTEN p50/p95/p99':>24}{'SPEAK p50/p95/p99':>26}{'first sound p95':>17}{'GB':>7}"
        f"{'cold s':>8}{'cached s':>10}{'breaks':>10}{'graphs':>10}{'skips':>12}   at start / later"
    ]
    for name in names:
        found, cached = processes[f"toggle {name}"], processes.get(f"cached {name}", {})
        rows = {row["mode"]: row for row in found.get("latency", {}).get("rows", [])}
        times = [_p50_p95_p99(rows.get(mode), "total_ms") for mode in ("LISTEN", "SPEAK")]
        counts = [
            _counts(found, *kinds) for kinds in (("graph_breaks",), ("graphs",), ("graph_skips", "cudagraph_skips"))
        ]
        first, peak = _p95(rows.get("SPEAK"), "first_sound_ms"), peak_gb(found)
        starts = (cached, found) if found.get("is_kept") else (found, cached)  # first the start from an empty cache
        if peak is None and "allocated_bytes" in (ready := found.get("start", {}).get("peak_memory", {})):
            peak = ready["allocated_bytes"] / GB  # the way was killed before its first row
        lines.append(
            f"{name:16}{times[0]:>24}{times[1]:>26}{_format_number(first):>17}{_format_number(peak):>7}"
            f"{_format_number(start_s(starts[0])):>8}{_format_number(start_s(starts[1])):>10}{counts[0]:>10}{counts[1]:>10}{counts[2]:>12}"
            f"{_remarks(found)}"
        )
    return lines


def _counts(found: JsonDict, *kinds: str) -> str:
    """Compile counts until the engine was ready, and of the units after that."""
    ready = found.get("start", {}).get("counts")
    late = [row["late"] for row in found.get("latency", {}).get("rows", [])]
    start = sum(ready[kind] for kind in kinds) if ready else "-"
    return f"{start} / {sum(one[kind] for one in late for kind in kinds) if late else '-'}"


def _remarks(found: JsonDict) -> str:
    start = found.get("start", {})
    remarks = [found.get("process", {}).get("killed", ""), *(f"{one} eager" for one in start.get("fell_back", []))]
    if not found.get("is_complete") and not remarks[0]:
        remarks.append("failed")
    return "  " + ", ".join(one for one in remarks if one)


def _format_start(start: JsonDict) -> str:
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in start["seconds"].items())
    counts = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in start["counts"].items())
    more = [f"fell back: {', '.join(start['fell_back'])}"] if start["fell_back"] else []
    more += [f"without a graph: {', '.join(start['not_captured'])}"] if start["not_captured"] else []
    line = (
        f"start {start['total_s']:.1f} s without weights ({phases}); {start['max_sessions']} slots, "
        f"{start['n_graphs']} CUDA graphs, cache {start['hits']} hits, {start['misses']} misses; {counts}; "
        f"peak {_format_memory(start['peak_memory'])}"
    )
    return "; ".join([line, *more, *start["notes"]])


def _format_latency(found: JsonDict) -> list[str]:
    lines = [
        f"{'mode':7}{'picture':9}{'units':>6}{'total p50':>11}{'p95':>8}{'p99':>8}"
        f"{'first sound p50':>17}{'p95':>8}{'p99':>8}"
        f"{'floor':>8}{'rows':>12}  stages p50/p95, ms"
    ]
    for row in found["rows"]:
        total, first = row["total_ms"], row["first_sound_ms"] or {}
        stages = " ".join(
            f"{stage} {times['p50']:.1f}/{times['p95']:.1f}"
            for stage, times in row["stages_ms"].items()
            if stage not in NO_STAGES and times["p95"] >= 0.05
        )
        lines.append(
            f"{row['mode']:7}{_picture(row):9}{row['n']:6}{total['p50']:11.1f}{total['p95']:8.1f}{total['p99']:8.1f}"
            f"{_format_number(first.get('p50')):>17}{_format_number(first.get('p95')):>8}{_format_number(first.get('p99')):>8}"
            f"{_format_number(row['floor_ms'], 2):>8}{'{}-{}'.format(*row['llm_rows']):>12}  {stages}"
        )
    lines.append(_format_late(found["rows"]))
    memory = found["memory"]
    used = memory.get("device_used_bytes")
    lines.append(
        f"peak memory: load and warm-up {_format_memory(memory['ready'])}, serving {_format_memory(memory['serving'])}"
        f"{f', device in use {used / GB:.2f} GB' if used else ''}"
    )
    return lines


def _lead_s(row: JsonDict) -> float:
    """Seconds by which pictures came before their units; 0 in results of earlier versions."""
    lead_s: float = row.get("lead_s", 0.0)
    return lead_s


def _picture(row: JsonDict) -> str:
    """When the pictures of a row came."""
    return f"-{1000 * _lead_s(row):.0f} ms" if _lead_s(row) else "at edge"


def _format_first_sound(found: JsonDict) -> list[str]:
    lines = [
        f"{'sessions':>8}{'units':>8}{'order':>19}{'turns':>7}{'first sound p50/p95':>21}{'later units':>15}"
        f"{'LISTEN p50/p95':>17}{'missed':>8}{'delay p50/p95':>17}{'gaps':>6}"
    ]
    for row in found["rows"]:
        lines.append(
            f"{row['sessions']:8}{row['units']:>8}{row['order']:>19}{row['n_turns']:7}"
            f"{_p50_p95(row, 'first_sound_ms'):>21}{_p50_p95(row, 'later_sound_ms'):>15}"
            f"{_p50_p95(row, 'listen_ms'):>17}{row['n_missed']:8}"
            f"{_p50_p95(row, 'playback_delay_ms'):>17}{row['n_turns_with_gaps']:6}"
            f"{'  stopped, overloaded' if row['is_overloaded'] else ''}"
        )
        lines += [f"  {error}" for error in row["errors"]]
    lines += [f"left out for lack of time: {one}" for one in found["left_out"]]
    lines += [f"failed: {one}" for one in found["failed"]]
    return [*lines, _format_late(found["rows"])] if found["rows"] else lines


def _format_sessions(found: JsonDict) -> list[str]:
    lines = [
        f"{'sessions':>8}{'units':>7}{'all p50/p95/p99':>22}{'LISTEN p50/p95':>17}{'SPEAK p50/p95':>17}"
        f"{'first sound':>15}{'missed':>8}{'rate':>9}{'GPU %':>7}{'core %':>8}{'engine %':>10}{'alloc GB':>10}"
        f"{'reserved':>10}{'device':>8}{'samples':>9}{'sent late p99':>15}{'rows':>12}"
    ]
    for row in found["rows"]:
        busy = row["busy"]
        lines.append(
            f"{row['sessions']:8}{row['n']:7}{_p50_p95_p99(row, 'total_ms'):>22}{_p50_p95(row, 'listen_ms'):>17}"
            f"{_p50_p95(row, 'speak_ms'):>17}{_p50_p95(row, 'first_sound_ms'):>15}"
            f"{row['n_missed']:8}{row['miss_rate']:9.4f}"
            f"{_format_number(busy['gpu_percent'], 0):>7}{busy['process_core_percent']:8.0f}"
            f"{_format_number(busy['engine_thread_percent'], 0):>10}"
            f"{_gb(row['peak_memory'].get('allocated_bytes')):>10}{_gb(row['peak_memory'].get('reserved_bytes')):>10}"
            f"{_gb(row['device_used_bytes']):>8}"
            f"{_format_number(row['samples_per_spoken_unit'], 0):>9}"
            f"{_format_number((row['send_late_ms'] or {}).get('p99')):>15}"
            f"{'{}-{}'.format(*row['llm_rows']) if row['llm_rows'] else '-':>12}"
            f"{'  stopped, overloaded' if row['is_overloaded'] else ''}"
        )
        lines += [f"  {error}" for error in row["errors"]]
        if any((row.get("trials") or {}).values()):
            lines.append("  early trials: " + ", ".join(f"{name} {n:.0f}" for name, n in row["trials"].items()))
    lines += [f"left out for lack of time: {one}" for one in found["left_out"]]
    lines += [f"failed: {one}" for one in found["failed"]]
    if found["rows"]:
        lines.append(_format_late(found["rows"]))
        lines.append(
            f"GPU %: {found['rows'][0]['busy']['gpu_source']}; sessions served: {max_served_sessions(found['rows'])}"
        )
    if claim := found["claim"]:
        short = "" if claim["is_long"] else ", fewer than requested"
        lines.append(f"claimed: {claim['sessions']} sessions, by {claim['units']} units{short}")
    return lines


def _format_late(rows: list[JsonDict]) -> str:
    counts = ", ".join(f"{sum(row['late'][kind] for row in rows)} {name}" for kind, name in LATE.items())
    return f"after warm-up: {counts}"


def _format_against_eager(found: JsonDict) -> str:
    first = found["first"]
    if first is None:
        choices = f"all {found['n_choices']} choices of {found['n_units']} units are the same as eager's"
    else:
        choices = (
            f"{found['n_differ']} of {found['n_choices']} choices in {found['n_units']} units differ from eager's, "
            f"first unit {first['unit']}, step {first['step']}: gap {_format_number(first['gap'], 4)} here, "
            f"{_format_number(first['reference_gap'], 4)} in eager"
        )
    return f"greedy: {choices}; median gap of the best two {_format_number(found['median_gap_of_best_two'], 4)}"


def missing_narrow_note(narrow: JsonDict) -> str:
    """Why there are no figures of the twin in the served dtype."""
    return f"no eager {narrow['dtype']} twin: {narrow['error']}"


def _format_regions(n: str, tables: JsonDict, narrow: JsonDict | None) -> list[str]:
    of_narrow = f"; narrow: eager {narrow['dtype']}, over the calls alike in both" if narrow else ""
    lines = [
        f"{'region':16}{'calls':>6}{'|d|/|ref|':>12}{'of slots':>12}{'alike':>6}{'|d|/|ref|':>12}"
        f"{'both':>6}{'|d|/|ref|':>12}{'narrow':>12}{'mean |d|':>12}"
        f"{'max |d|':>12}  integers"
        f"   ({n} at once, against eager float32{of_narrow})"
    ]
    regions = {name: one for table in tables.values() for name, one in table.items()}
    for name, one in regions.items():
        integers = f"{one['integers']} of {one['n_integers']} differ" if one["n_integers"] else "-"
        lines.append(
            f"{name:16}{one['n']:6}{one['relative']:12.2e}{one['state_relative']:12.2e}{one['n_alike']:6}"
            f"{one['alike_relative']:12.2e}{_narrow_columns(one)}{one['mean']:12.2e}"
            f"{one['largest']:12.2e}  {integers}{'  ' + one['error'] if one['error'] else ''}"
            f"{'  narrow: ' + one['narrow_error'] if one.get('narrow_error') else ''}"
        )
    if regions:
        worst = {kind: max(regions, key=lambda name: regions[name][kind]) for kind in ("relative", "mean", "largest")}
        lines.append("largest: " + ", ".join(f"{kind} {regions[at][kind]:.2e} ({at})" for kind, at in worst.items()))
    return lines


def _narrow_columns(one: JsonDict) -> str:
    """Columns: calls that both engines ran, and the errors of the served engine and of the narrow twin over them."""
    if not one.get("n_narrow"):
        return f"{'-':>6}{'-':>12}{'-':>12}"
    if not one["n_both"]:
        return f"{0:6}{'-':>12}{'-':>12}"
    return f"{one['n_both']:6}{one['both_relative']:12.2e}{one['narrow_relative']:12.2e}"


def _p95(row: JsonDict | None, what: str) -> float | None:
    return row[what]["p95"] if row and row.get(what) else None


def start_s(found: JsonDict | None) -> float | None:
    return found["start"]["total_s"] if found and "start" in found else None


def peak_gb(found: JsonDict, kind: str = "allocated_bytes") -> float | None:
    """Peak memory of the `latency` process over loading, warm-up and units. kind: or `reserved_bytes`."""
    memory = found.get("latency", {}).get("memory", {})
    held = [one[kind] for one in memory.values() if isinstance(one, dict) and kind in one]
    return max(held) / GB if held else None


def _format_memory(peak: JsonDict) -> str:
    if "allocated_bytes" not in peak:
        return f"host {peak['host_bytes'] / GB:.2f} GB"
    return f"{peak['allocated_bytes'] / GB:.2f} GB allocated, {peak['reserved_bytes'] / GB:.2f} reserved"


def _gb(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / GB:.1f}"


def _p50_p95_p99(row: JsonDict | None, what: str) -> str:
    times = (row or {}).get(what)
    return "/".join(f"{times[p]:.1f}" for p in ("p50", "p95", "p99")) if times else "-"


def _p50_p95(row: JsonDict, what: str) -> str:
    times = row.get(what)
    return f"{times['p50']:.1f}/{times['p95']:.1f}" if times else "-"


def _format_number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _round(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
