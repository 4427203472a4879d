"""Long conversations: constant time and memory per unit, and no references to closed sessions.

`benchmarks/soak/engine.py` does the same for a quarter of an hour.
"""

import gc
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worker.engine.failing_regions import counted
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    Director,
    SmallEngine,
    assert_mirrors,
    make_config,
    make_prompt,
    short_speech,
)
from worker.config.session import WindowConfig
from worker.loop.session import Session

N_SESSIONS, N_UNITS, WARM, STEP = 4, 56, 32, 8
SPEAKS, ENDS = 3, 4  # of `STEP` units: the one that begins a turn and the one that ends it
# The allocator's pages vary a little. A leak of all incoming sound would be 10 MB over the test.
MAX_BYTES = 4 * 2**20
MAX_OBJECTS = 40  # the loop creates thousands per unit
BUSY = (
    "mel_unit",
    "audio_unit",
    "unit_prefill",
    "unit_step",
    "spoken_rows",
    "speech_begin",
    "speech_step",
    "llm_evict",
)


class Chairman(Director):
    """Makes all sessions speak in the same few units, which keeps the test short."""

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        ids, place, n = job.language.special, job.session.n_decided % STEP, len(job.decoder.all_ids)
        if place not in (SPEAKS, ENDS):
            return ids.listen
        ending = [ids.turn_eos, ids.chunk_eos] if place == ENDS else [ids.chunk_eos]
        return ids.speak if n == 0 else token if n < 3 else ending[n - 3]


class Soak:
    """Four sessions with different settings that run one unit each per step."""

    def __init__(self) -> None:
        self.engine = SmallEngine(make_config(N_SESSIONS), Chairman(), short_history=False)
        basic = WindowConfig(mode="basic", high_tokens=60, low_tokens=40)
        memory = WindowConfig(mode="context", max_units=2, previous_max_tokens=12)
        configs = [
            ALOUD.model_copy(update={"window": basic, "drain_s": 1}),
            ALOUD.model_copy(update={"window": memory, "drain_s": 1}),
            QUIET.model_copy(update={"window": basic, "compat": "reference"}),
            QUIET.model_copy(update={"window": memory}),
        ]
        self.sessions: list[Session] = [
            self.engine.open(f"session {number}", config, make_prompt(ref=1, speaker=number % 2))
            for number, config in enumerate(configs)
        ]
        self.n_done = 0

    def run(self, n_units: int) -> Counter[str]:
        """Run the next units. Returns: number of outcomes by kind."""
        outcomes: Counter[str] = Counter()
        for _ in range(n_units):
            for number, session in enumerate(self.sessions):
                pictures = [number] if self.n_done % 20 == 5 * number else []
                self.engine.send(session, (self.n_done + number) % 7, pictures=pictures)
            self.engine.settle()
            self.engine.loop.observer.logits.clear()
            for session in self.sessions:
                last = self.engine.take(session.id)[-1]
                outcomes[type(last).__name__] += 1
                outcomes["turns ended"] += getattr(last, "end_of_turn", False)
                outcomes["spoken"] += getattr(last, "n_speech_tokens", 0) > 0
            self.n_done += 1
        return outcomes


@pytest.fixture(autouse=True, scope="module")
def _short_speech() -> Iterator[None]:
    with short_speech():
        yield


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def n_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to tell its memory")
def test_long_sessions_use_constant_time_and_memory() -> None:
    """tests/test_compile_equivalence.py does as much with compiled regions."""
    soak = Soak()
    unit_steps = soak.engine.unit_steps
    soak.run(WARM)
    sizes, objects, calls, outcomes = [rss()], [n_objects()], [], Counter()
    for _ in range(WARM, N_UNITS, STEP):
        with counted(unit_steps.regions) as counts, counted(soak.engine.vocoder.regions) as more:
            outcomes += soak.run(STEP)
        calls.append(counts | more)
        sizes.append(rss())
        objects.append(n_objects())
    grown = min(sizes[-2:]) - max(sizes[:2])
    assert grown < MAX_BYTES, f"expected at most {MAX_BYTES} bytes more, got {grown}: {np.diff(sizes)}"
    assert objects[-1] - objects[0] < MAX_OBJECTS, f"expected at most {MAX_OBJECTS} more, got {np.diff(objects)}"
    for counts in calls:
        regular = {name: counts[name] for name in ("mel_unit", "audio_unit")}
        assert set(regular.values()) == {STEP}, f"expected {STEP} calls of each, got {regular}"
    for name in BUSY:
        spread = [counts[name] for counts in calls]
        assert min(spread) > 0, f"{name}: expected calls, got {spread}"
        assert max(spread) <= 2 * min(spread), f"{name}: expected a constant number of calls, got {spread}"
    n_units = N_SESSIONS * (N_UNITS - WARM)
    assert outcomes["UnitResult"] == n_units, f"expected {n_units} results, got {outcomes}"
    assert outcomes["turns ended"] and outcomes["spoken"], f"expected spoken and ended turns, got {outcomes}"
    for session in soak.sessions:
        assert_mirrors(unit_steps, session.slot)
        rows = unit_steps.context_len(session.slot)
        assert session.window.events > 20, f"{session.id}: expected many evictions, got {session.window.events}"
        assert rows < 200, f"{session.id}: expected a small context, got {rows} rows"
        assert session.n_units == N_UNITS, f"{session.id}: expected {N_UNITS} units, got {session.n_units}"
