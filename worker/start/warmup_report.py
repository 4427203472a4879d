"""The results of a warm-up, and the log line of each of its units. Torch-free.

The line has the stages of the public implementation; `UnitTimes.of` describes the differences.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Self

from worker.admission.unit_cost import Burst, UnitCost
from worker.loop.results import StageTimes, UnitLoad, UnitResult

LISTEN, SPEAK = "LISTEN", "SPEAK"
MAX_SHOWN = 20  # characters of a unit's text


@dataclass(frozen=True)
class UnitTimes:
    """The times of one unit's stages in ms, by the names in the log line."""

    vis_proc: float
    vis_emb: float
    vis_feed: float
    aud_proc: float
    aud_emb: float
    aud_feed: float
    llm: float
    tts_prep: float
    tts: float
    token2wav: float

    @classmethod
    def of(cls, times: StageTimes, *, vis_proc: float, aud_proc: float) -> Self:
        """The times of the log line from a unit's stage times.

        The mel spectrogram and the encoder are one stage on the device, so that `aud_emb` includes both. All rows of a
        unit, of frames and sound, enter the context in one forward: `aud_feed` is its time, and `vis_feed` is 0.

        Args:
            vis_proc: ms on the caller's thread until the engine has the unit: decoding frames and cutting patches.
            aud_proc: ms of checking the sound there.
        """
        return cls(
            vis_proc=vis_proc,
            vis_emb=times.see,
            vis_feed=0.0,
            aud_proc=aud_proc,
            aud_emb=times.hear,
            aud_feed=times.prefill,
            llm=times.decode,
            tts_prep=times.condition,
            tts=times.speech,
            token2wav=times.sound,
        )

    @property
    def prefill(self) -> float:
        return self.vis_proc + self.vis_emb + self.vis_feed + self.aud_proc + self.aud_emb + self.aud_feed

    @property
    def generate(self) -> float:
        return self.llm + self.tts_prep + self.tts + self.token2wav


def burst_of(results: Sequence[UnitResult]) -> Burst | None:
    """The time of units that were sent at once; None if no result has a load."""
    loads = [result.times.load for result in results if result.times.load is not None]
    if not loads:
        return None
    n_spoken = sum(not result.is_listen for result in results)
    return Burst(len(results), max(load.seconds for load in loads), n_spoken)


@dataclass
class WarmUpReport:
    """Decision, text and times of each unit, and facts about the whole warm-up.

    Attributes:
        total_s: seconds from the first step to the last.
        tts_triggered: a unit of any session has spoken.
        fallback_used: speech regions that no unit ran have run on example input.
        n_burst_units: further units, of several sessions at once.
        lone: load of each unit that ran alone, and whether it spoke.
        bursts: times of units of several sessions at once.
        cost: of units that were forced to speak; None if it was not measured.
        compiled_graphs: graphs that torch compiled during the warm-up; 0 if everything was compiled before.
    """

    decisions: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    times: list[UnitTimes] = field(default_factory=list)
    total_s: float = 0.0
    tts_triggered: bool = False
    fallback_used: bool = False
    n_burst_units: int = 0
    lone: list[tuple[UnitLoad, bool]] = field(default_factory=list)
    bursts: list[Burst] = field(default_factory=list)
    cost: UnitCost | None = None
    compiled_graphs: int = 0

    @property
    def n_units(self) -> int:
        return len(self.decisions)

    def add(self, result: UnitResult, times: UnitTimes) -> None:
        self.decisions.append(LISTEN if result.is_listen else SPEAK)
        self.texts.append(result.text)
        self.times.append(times)
        if result.times.load is not None:
            self.lone.append((result.times.load, not result.is_listen))

    def add_burst(self, results: list[UnitResult]) -> None:
        """Count units that were sent at once."""
        self.n_burst_units += len(results)
        if (burst := burst_of(results)) is not None:
            self.bursts.append(burst)

    def line(self, n_units: int, elapsed_s: float) -> str:
        """The log line of the latest unit. n_units: the maximum number of units."""
        number, unit = self.n_units, self.times[-1]
        remaining_s = elapsed_s / number * (n_units - number)
        text = json.dumps(self.texts[-1][:MAX_SHOWN], ensure_ascii=False)  # escapes line breaks
        prefill, generate = self._stages(unit, "vis_proc", "aud_feed"), self._stages(unit, "llm", "token2wav")
        return (
            f"unit={number}/{n_units} | prefill: {prefill} total={unit.prefill:.1f}ms"
            f" | generate: {generate} total={unit.generate:.1f}ms"
            f" | decision={self.decisions[-1]} {text} | elapsed={elapsed_s:.1f}s remaining~{remaining_s:.1f}s"
        )

    @staticmethod
    def _stages(unit: UnitTimes, first: str, last: str) -> str:
        values = asdict(unit)
        names = list(values)
        chosen = names[names.index(first) : names.index(last) + 1]
        return " ".join(f"{name}={values[name]:.1f}ms" for name in chosen)
