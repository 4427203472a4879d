"""Products and decode steps with quantised weights, next to the same in bfloat16.

`unpacked_us` is the library's product of a weight that is dequantised at each call: what kernels of many rows replace.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.regions import BATCH, KV, measure_region, released_regions, tiny_regions
from benchmarks.kernels.timing import Case, Figures, Meter, gb_per_s, relative_error
from benchmarks.timing import DeviceClock
from models.checkpoint.precision import PRESETS, Kind, Weights
from models.checkpoint.quantized import KINDS, quantize
from models.graphs.captured import Bucket
from models.kernels.quantized_gemm import quantized_linear
from models.kernels.skinny_gemm import MAX_ROWS, skinny_linear
from models.stages.region_table import Regions
from worker.assembly.backend_flags import apply_backend_flags
from worker.config.compile import CompileConfig

SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))  # of the language model's layers
ROWS = (1, 8, 32, 64, 96, 512, 2048)
SCALE = 0.02
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


def product_cases(meter: Meter) -> Iterator[Case]:
    """Each shape and kind, for few and for many rows."""
    shapes, rows = (((80, 64),), (3,)) if meter.is_tiny else (SHAPES, ROWS)
    for N, K in shapes:
        for kind in KINDS:
            for M in rows:
                yield Case(f"product, {kind}", {"N": N, "K": K, "M": M}, partial(_measure, meter, kind, N, K, M))


def _measure(meter: Meter, kind: Kind, N: int, K: int, M: int) -> Figures:
    n_plain = meter.n_copies(2 * N * K)
    plain = [meter.randn(N, K, scale=SCALE) for _ in range(n_plain)]
    first = quantize(plain[0], kind)
    matrices = [first, *(quantize(plain[i % n_plain], kind) for i in range(1, meter.n_copies(first.nbytes)))]
    x = meter.randn(M, K)

    def ours(i: int) -> Tensor:
        return quantized_linear(x, matrices[i % len(matrices)])

    def in_bfloat16(i: int) -> Tensor:
        weight = plain[i % n_plain]
        return skinny_linear(x, weight) if M <= MAX_ROWS else F.linear(x, weight)

    def unpacked(i: int) -> Tensor:
        return F.linear(x, matrices[i % len(matrices)].dequantized(dtype=x.dtype))

    times = [
        meter.time_us(call, max(n, 4))
        for call, n in ((ours, len(matrices)), (in_bfloat16, n_plain), (unpacked, len(matrices)))
    ]
    return {
        "ours_us": times[0],
        "plain_us": times[1],
        "unpacked_us": times[2],
        "gb_per_s": gb_per_s(first.nbytes, times[0]),
        "error": relative_error(ours(0), F.linear(x.float(), first.dequantized(dtype=torch.float32))),
    }
