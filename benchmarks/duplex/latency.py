"""Latency of LISTEN and SPEAK units of one session, by stage, with their lower bounds.

Units run one after the other, so the context grows as in a conversation. Does not start engines.
"""

import logging
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from benchmarks import report
from benchmarks.duplex.bench_sessions import (
    LISTEN,
    SPEAK,
    STAGES,
    BenchSession,
    SentUnit,
    SyntheticMedia,
    percentiles,
    run_units,
)
from benchmarks.duplex.engine import RunningEngine, device_used
from benchmarks.duplex.floor import unit_floor
from benchmarks.timing import Ceilings

LOG = logging.getLogger(__name__)
CONVERSATION_UNITS = 30  # timed units of one conversation; a new one starts before the window slides
WARM_UP_UNITS = 3  # of each conversation, not timed


def measure_latency(
    running: RunningEngine,
    *,
    n_units: int,
    context: int,
    n_frames: int,
    lead_s: float,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Time the units of both modes, with images that come before their units and with images that come with them.

    Args:
        n_units: timed units of each mode.
        context: context rows at the start of a conversation.
        n_frames: images in each unit.
        lead_s: seconds by which images come before their units; 0: measure only images that come with their units.
        save: called with the result after each row.
    Returns: {rows, memory}.
    """
    media, result = SyntheticMedia(n_frames), {"rows": [], "memory": {"ready": running.start["peak_memory"]}}
    if running.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(running.device)
    leads = (lead_s, 0.0) if n_frames and lead_s else (0.0,)
    for mode, lead in product((LISTEN, SPEAK), leads):
        result["rows"].append(_measure_row(running, mode, n_units, context, media, lead))
        result["memory"]["serving"] = report.peak_memory(running.device)
        result["memory"]["device_used_bytes"] = device_used(running.device)
        save(result)
    return result


def add_floors(found: dict[str, Any], running: RunningEngine, ceilings: Ceilings, n_frames: int) -> None:
    """Add the lower bound to each row, at the mean context of its units."""
    steps = running.spec.n_steps
    for row in found["rows"]:
        speaks, context = row["mode"] == SPEAK, sum(row["llm_rows"]) // 2
        is_fed = row["lead_s"] and running.spec.early_prefill is not False
        try:
            row["floor_ms"] = unit_floor(
                running.parts,
                ceilings,
                speaks=speaks,
                batch=1,
                context=context,
                n_frames=0 if is_fed else n_frames,
                steps=steps,
                encodes_frames=not row["lead_s"],
            )
        except (AttributeError, KeyError, TypeError):  # an outdated count must not discard the measured rows
            LOG.exception("%s: lower bound not computed", row["mode"])


def _measure_row(
    running: RunningEngine, mode: str, n_units: int, context: int, media: SyntheticMedia, lead_s: float
) -> dict[str, Any]:
    units: list[SentUnit] = []
    before, n_used = running.compile_counts_since_ready(), running.engine.early_pictures.used
    while len(units) < n_units:
        session = BenchSession(running, f"{mode} {len(units)}", context=context)
        run_units(running, [session], media, WARM_UP_UNITS, lead_s=lead_s)
        n = min(CONVERSATION_UNITS, n_units - len(units))
        units += run_units(running, [session], media, n, first=WARM_UP_UNITS, lead_s=lead_s)
        session.close()
    times = {stage: [getattr(unit.result.times, stage) for unit in units] for stage in STAGES}
    rows = [unit.result.context_len for unit in units]
    late = running.compile_counts_since_ready()
    n_sound = [unit.n_samples for unit in units]
    return {
        "mode": mode,
        "lead_s": lead_s,
        "n_early_slices": running.engine.early_pictures.used - n_used,
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
