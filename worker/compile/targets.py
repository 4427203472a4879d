"""The compile targets: their layers, the regions that compile as a whole, and the regions that run them.

Contains names only. Torch-free.

On a GPU the cost is kernel launches, so the log-mel and the samplers compile too. On a CPU those would take minutes of
C++ for a millisecond a call, so only layers compile. Of HiFT only the activation compiles on either device: captured,
the whole network is one launch. If the project's own kernels run a target, nothing of it compiles: the parts without a
kernel, such as the log-mel, are a few dozen operations, and capturing them costs less start time than compiling them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from worker.config.compile import Target

Table = Literal["omni", "vocoder"]


@dataclass(frozen=True)
class CompileTarget:
    """One target.

    Attributes:
        table: the table of its regions.
        stage: the stage of a unit; regions of one stage never run at the same time.
        stacks: stacks of equal layers; one layer compiles, and all of the stack share its code.
        regions: regions that run the stacks.
        functions: functions inside regions that compile on a GPU.
        whole: regions that compile as a whole on a GPU.
        on_cpu: smaller modules that compile on a CPU in place of the functions.
        eager: regions that never compile, but are captured.
    """

    table: Table
    stage: Literal["see", "hear", "text", "speech", "sound"]
    stacks: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()

    def parts(self, is_gpu: bool, by_kernels: bool = False) -> tuple[str, ...]:
        """Stacks and functions that compile. by_kernels: the project's own kernels run its layers."""
        return () if by_kernels else (*self.stacks, *(self.functions if is_gpu else self.on_cpu))

    def whole_regions(self, is_gpu: bool, by_kernels: bool = False) -> tuple[str, ...]:
        return self.whole if is_gpu and not by_kernels else ()

    @property
    def all_regions(self) -> tuple[str, ...]:
        return (*self.regions, *self.whole, *self.eager)


COMPILE_TARGETS: dict[Target, CompileTarget] = {
    "vpm": CompileTarget("omni", "see", ("vpm",), ("vision",)),
    "resampler": CompileTarget("omni", "see", ("resampler",), ("vision",)),
    "apm": CompileTarget("omni", "hear", ("apm",), ("audio_unit", "audio_overlap"), whole=("mel_unit",)),
    "llm.model": CompileTarget(
        "omni",
        "text",
        ("llm.model",),
        ("unit_step", "unit_prefill"),
        functions=("choose",),
        # Rare and memory-bound: compiling costs more than it saves.
        eager=("llm_evict",),
    ),
    "tts.model": CompileTarget(
        "omni",
        "speech",
        ("tts.model",),
        ("speech_step", "speech_begin"),
        functions=("draw",),
        # Two dozen operations: capturing them costs less start time than compiling them.
        eager=("spoken_rows",),
    ),
    "token2wav.flow": CompileTarget(
        "vocoder",
        "sound",
        regions=("flow",),
        functions=("flow",),
        eager=("begin",),  # as `spoken_rows`
        on_cpu=("flow.encoder", "flow.decoder.estimator"),
    ),
    # As a whole, its eight lengths of columns take the compiler minutes, and one graph for all lengths fails.
    "token2wav.hift": CompileTarget("vocoder", "sound", ("hift",), ("hift",)),
}
# Functions with cumulative sums. Kernels that `max-autotune` benchmarked for them crashed with an illegal memory access
# (torch 2.11, CUDA), and they contain no matrix product that autotuning would speed up.
SAMPLERS = ("choose", "draw")
NO_AUTOTUNE = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": "default"}  # mode -> their mode

STACKED = tuple(
    dict.fromkeys(name for target in COMPILE_TARGETS.values() for name in target.regions if target.table == "omni")
)
WHOLE = tuple(name for target in COMPILE_TARGETS.values() for name in target.whole if target.table == "omni")
EAGER = tuple(name for target in COMPILE_TARGETS.values() for name in target.eager if target.table == "omni")
FLOW = COMPILE_TARGETS["token2wav.flow"].regions
SOUND = (*COMPILE_TARGETS["token2wav.flow"].eager, *COMPILE_TARGETS["token2wav.hift"].regions)
SERVING = (*STACKED, *WHOLE, *EAGER, *FLOW, *SOUND)


def compiles(targets: Collection[Target], *, is_gpu: bool, by_kernels: Collection[Target]) -> bool:
    """Whether anything of these targets compiles. by_kernels: those whose layers the project's own kernels run."""
    return any(
        COMPILE_TARGETS[name].parts(is_gpu, name in by_kernels)
        or COMPILE_TARGETS[name].whole_regions(is_gpu, name in by_kernels)
        for name in targets
    )
