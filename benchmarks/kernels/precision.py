"""Decode steps and prefills with quantised weights, in each preset of `model.weights`."""

from collections.abc import Callable, Iterator
from functools import cache, partial

from benchmarks.kernels.regions import BATCH, KV, measure_region, released_regions, tiny_regions
from benchmarks.kernels.timing import Case, Figures, Meter
from benchmarks.timing import DeviceClock
from models.checkpoint.precision import PRESETS, Weights
from models.graphs.captured import Bucket
from models.stages.region_table import Regions
from worker.assembly.backend_flags import apply_backend_flags
from worker.config.compile import CompileConfig

STEPS = (BATCH[0], BATCH[-1])
PREFILL = {"batch": 1, "rows": 96, **KV}


def region_cases(meter: Meter) -> Iterator[Case]:
    """A decode step of one and of many sessions and a prefill, for each preset; one model is in memory at a time."""
    apply_backend_flags(CompileConfig(), meter.device)
    clock = DeviceClock(meter.device)
    presets: tuple[Weights, ...] = ("int4",) if meter.is_tiny else tuple(PRESETS)
    for weights in presets:
        # Gigabytes, so created when their first row starts.
        make = cache(partial(_regions, meter, weights))
        calls: list[tuple[str, Bucket]] = [("unit_step", {"batch": n, **KV}) for n in STEPS]
        calls.append(("unit_prefill", PREFILL))
        if meter.is_tiny:
            calls = [("unit_step", {"batch": 1, "kv": 64})]
        for name, bucket in calls:
            yield Case(f"{name}, {weights}", dict(bucket), partial(_measure_step, make, clock, name, bucket))
        del make


def _regions(meter: Meter, weights: Weights) -> Regions:
    precision = PRESETS[weights]
    return tiny_regions(precision) if meter.is_tiny else released_regions(meter, precision)


def _measure_step(make: Callable[[], Regions], clock: DeviceClock, name: str, bucket: Bucket) -> Figures:
    figures = measure_region(make, clock, name, bucket, {})
    layers = make().root.llm.model.layers
    n_bytes = sum(weight.nbytes for weight in layers.parameters())
    return figures and {**figures, "gb": n_bytes / 1e9}
