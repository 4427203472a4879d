"""The least one unit can take on a device: its regions' own floors, one after the other.

Knows how often a unit runs each region. Does not measure.
"""

from benchmarks.model.floors import work_of
from benchmarks.timing import Ceilings
from benchmarks.token2wav.work import chunk_work
from models.graphs.captured import Bucket
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.settings import FRAMES_PER_TOKEN
from worker.assembly.parts import EngineParts

SPEECH_TOKENS = 25
FED_TOKENS = 9  # speak and eight tokens of text
PROMPT_FRAMES = 150
SPEECH_ROWS = 512  # of a turn, held; a second adds 36
ROWS, ROWS_WITH_PICTURE = 16, 96  # that a unit's prefill is padded to


def unit_floor(
    parts: EngineParts, ceilings: Ceilings, *, speaks: bool, batch: int, context: int, n_frames: int, steps: int
) -> float:
    """Milliseconds: the sum over regions of the longer of copying and multiplying, for `batch` sessions at once.

    context: rows each of them holds. n_frames: pictures in a unit, 0 or 1. steps: Euler steps.
    """
    regions = parts.duplex.runner.regions
    kv = {"batch": batch, "kv": context}
    # One code at a time, whatever number of steps a call of the region makes.
    speech = {"batch": batch, "kv": SPEECH_ROWS}
    runs: list[tuple[str, Bucket, int]] = [
        ("audio_unit", {"batch": batch}, 1),
        ("unit_prefill", {**kv, "rows": ROWS_WITH_PICTURE if n_frames else ROWS}, 1),
    ]
    if n_frames:
        runs.append(("vision", {"slices": batch, "patches": regions.shapes.patches[0]}, 1))
    if speaks:
        runs += [
            ("unit_step", kv, FED_TOKENS),
            ("speech_begin", {**speech, "tokens": regions.shapes.tokens[0]}, 1),
            ("speech_step", speech, SPEECH_TOKENS),
        ]
    dtype = str(parts.model.dtype).removeprefix("torch.")
    total = 0.0
    for name, bucket, times in runs:
        work = work_of(regions, name, bucket)
        rate = ceilings.matmul["float64" if work.is_float64 else dtype]
        total += times * 1e3 * max((work.weights + work.state) / ceilings.copy, work.flops / rate)
    if speaks and parts.vocoder is not None:
        seen = PROMPT_FRAMES + HISTORY_FRAMES
        sound = chunk_work(parts.vocoder.parts, batch, steps, FRAMES_PER_TOKEN * SPEECH_TOKENS, seen)
        total += sound.floor_ms(ceilings, dtype)
    return total
