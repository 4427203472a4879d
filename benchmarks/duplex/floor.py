"""Lower bound of one unit's time on a device: the sum of its regions' lower bounds.

Contains how often a unit runs each region. Does not measure.
"""

from benchmarks.model.floors import work_of
from benchmarks.timing import Ceilings
from benchmarks.token2wav.work import chunk_work
from models.graphs.captured import Bucket
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.settings import FRAMES_PER_TOKEN
from worker.assembly.parts import EngineParts

SPEECH_TOKENS = 25
FED_TOKENS = 9  # the speak token and eight text tokens
PROMPT_FRAMES = 150
SPEECH_ROWS = 512  # cache rows held by a turn; one second adds 36
ROWS, ROWS_WITH_IMAGE = 16, 80  # padded sizes of a unit's prefill


def unit_floor(
    parts: EngineParts,
    ceilings: Ceilings,
    *,
    speaks: bool,
    batch: int,
    context: int,
    n_frames: int,
    steps: int,
    encodes_frames: bool = True,
) -> float:
    """Milliseconds for `batch` sessions at once: the sum over regions of max(copy time, multiply time).

    Args:
        speaks: the unit decodes text and makes sound.
        context: context rows that each session holds.
        n_frames: images in a unit, 0 or 1.
        steps: Euler steps.
        encodes_frames: the images are encoded with the unit, not before it.
    """
    regions = parts.unit_steps.regions
    kv = {"batch": batch, "kv": context}
    # Counted one speech token at a time; a call of the region may make several steps.
    speech = {"batch": batch, "kv": SPEECH_ROWS}
    runs: list[tuple[str, Bucket, int]] = [
        ("audio_unit", {"batch": batch}, 1),
        ("unit_prefill", {**kv, "rows": ROWS_WITH_IMAGE if n_frames else ROWS}, 1),
    ]
    if n_frames and encodes_frames:
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
        attended = PROMPT_FRAMES + HISTORY_FRAMES
        sound = chunk_work(parts.vocoder.parts, batch, steps, FRAMES_PER_TOKEN * SPEECH_TOKENS, attended)
        total += sound.floor_ms(ceilings, dtype)
    return total
