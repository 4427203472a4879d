"""Compiles and captures what serving calls, before the first session. Afterwards nothing compiles.

Knows which regions serve and how each is best compiled. Does not know sessions.
"""

import time
from dataclasses import dataclass, field

import torch

from models.graphs import RegionTable
from worker.building import Parts
from worker.config import EngineConfig

# Stacks of layers: one layer is compiled and shared, which is what makes starting short.
STACKED = ("vision", "audio_unit", "audio_overlap", "unit_prefill", "unit_step", "speech_begin", "speech_step")
WHOLE = ("mel_unit", "spoken_rows")
# Rare, large and memory-bound: compiling would cost more than it gives.
EAGER = ("llm_evict",)
FLOW = ("flow",)
SOUND = ("begin", "hift")


@dataclass
class Tuned:
    """What was done. seconds: by step. n_graphs: CUDA graphs captured."""

    seconds: dict[str, float] = field(default_factory=dict)
    n_graphs: int = 0


def tune(parts: Parts, config: EngineConfig) -> Tuned:
    """Compile (`config.compile`) and capture (`config.cuda_graphs`) every bucket of every region that serves."""
    tuned = Tuned()
    tables: list[tuple[RegionTable, tuple[str, ...], tuple[str, ...]]] = [(parts.duplex.runner.regions, STACKED, WHOLE)]
    if parts.vocoder is not None:
        tables.append((parts.vocoder.regions, FLOW, SOUND))
    for table, stacked, whole in tables:
        stacked, whole, eager = ([name for name in names if name in table.table] for names in (stacked, whole, EAGER))
        if config.compile:
            table.compile(stacked, by_layer=True)
            table.compile(whole)
        start = time.perf_counter()
        if config.cuda_graphs and parts.model.device.type == "cuda":
            for name in [*stacked, *whole, *eager]:
                table.capture([name])
                tuned.seconds[name] = _since(start)
                start = time.perf_counter()
        elif config.compile:
            for name in [*stacked, *whole, *eager]:
                table.warm_up([name])
                tuned.seconds[name] = _since(start)
                start = time.perf_counter()
    tuned.n_graphs = sum(table.n_captured for table, _, _ in tables)
    return tuned


def _since(start: float) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
