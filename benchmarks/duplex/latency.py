"""One session, one unit after the other: how long LISTEN and SPEAK units take, by stage, and what they need at least.

Contexts grow as in a conversation. Knows modes, rows and floors. Does not know how an engine starts.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import report
from benchmarks.duplex.engine import Running, device_used
from benchmarks.duplex.floor import unit_floor
from benchmarks.duplex.sessions_under_test import LISTEN, SPEAK, STAGES, Scenes, SentUnit, Talker, converse, percentiles
from benchmarks.timing import Ceilings

LOG = logging.getLogger(__name__)
CONVERSATION = 30  # units that count; then the next conversation begins, before its window slides
UNCOUNTED = 3


def latency(
    running: Running, *, n_units: int, context: int, n_frames: int, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """n_units: of each mode. context: rows at the beginning.

    Returns: {rows, memory}, given to `save` after each row.
    """
    scenes, result = Scenes(n_frames), {"rows": [], "memory": {"ready": running.start["peak_memory"]}}
    if running.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(running.device)
    for mode in (LISTEN, SPEAK):
        result["rows"].append(_row(running, mode, n_units, context, scenes))
        result["memory"]["serving"] = report.peak_memory(running.device)
        result["memory"]["device_used_bytes"] = device_used(running.device)
        save(result)
    return result


def add_floors(found: dict[str, Any], running: Running, ceilings: Ceilings, n_frames: int) -> None:
    """What the device needs for each row at least, at the mean context it was measured with."""
    steps = running.spec.n_steps
    for row in found["rows"]:
        speaks, context = row["mode"] == SPEAK, sum(row["llm_rows"]) // 2
        try:
            row["floor_ms"] = unit_floor(
                running.parts, ceilings, speaks=speaks, batch=1, context=context, n_frames=n_frames, steps=steps
            )
        except (AttributeError, KeyError, TypeError):  # a count that lags behind the model must not cost the others
            LOG.exception("no floor")


def _row(running: Running, mode: str, n_units: int, context: int, scenes: Scenes) -> dict[str, Any]:
    units: list[SentUnit] = []
    before = running.late()
    while len(units) < n_units:
        talker = Talker(running, f"{mode} {len(units)}", context=context)
        converse(running, [talker], scenes, UNCOUNTED)
        units += converse(running, [talker], scenes, min(CONVERSATION, n_units - len(units)), first=UNCOUNTED)
        talker.close()
    times = {stage: [getattr(unit.result.times, stage) for unit in units] for stage in STAGES}
    rows = [unit.result.context_len for unit in units]
    late = running.late()
    n_sound = [unit.n_samples for unit in units]
    return {
        "mode": mode,
        "n": len(units),
        "total_ms": percentiles([unit.total_ms for unit in units]),
        "first_sound_ms": percentiles([unit.first_sound_ms for unit in units]),
        "stages_ms": {stage: percentiles(values) for stage, values in times.items() if any(values)},
        "floor_ms": None,
        "llm_rows": [min(rows), max(rows)],
        "n_tokens": sorted({unit.result.n_tokens for unit in units}),
        "n_codes": sorted({unit.result.n_speech_tokens for unit in units}),
        "samples_mean": sum(n_sound) / len(n_sound),
        "late": {name: late[name] - before[name] for name in late},
    }
