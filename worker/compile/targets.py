"""What each compile target holds: layers that compile by themselves, regions that compile whole, regions that run them.

Knows names only. Torch-free.

On a GPU launches are what costs, so the log-mel and the samplers compile too. On a CPU those would take minutes of
C++ for a millisecond a call: there only layers compile. Of HiFT it is the activation, everywhere: captured, all of it
is one launch anyway. Where the project's own kernels run a target, nothing of it compiles: what has no kernel, such as
the log-mel, is a few dozen operations, which captured cost less than the start that compiling them would hold up.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from worker.config.compile import Target

Table = Literal["omni", "vocoder"]


@dataclass(frozen=True)
class CompileTarget:
    """One target.

    table: whose regions. stage: of a unit; its regions never run at the same time. stacks: layers, one of which is
    compiled and shared by all of its kind. regions: those that run them. pieces, whole: further parts of regions, and
    regions, that compile in one piece on a GPU. on_cpu: smaller parts that take their place on a CPU. eager: regions of
    the target that never compile, but are captured.
    """

    table: Table
    stage: Literal["see", "hear", "text", "speech", "sound"]
    stacks: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()

    def parts(self, is_gpu: bool, by_kernels: bool = False) -> tuple[str, ...]:
        """Stacks and pieces that compile. by_kernels: the project's own kernels run its layers."""
        return () if by_kernels else (*self.stacks, *(self.pieces if is_gpu else self.on_cpu))

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
        ("unit_step", "unit_prefill", "llm_prefill"),
        pieces=("choose",),
        # Rare, large and memory-bound: compiling would cost more than it gives.
        eager=("llm_evict",),
    ),
    "tts.model": CompileTarget(
        "omni",
        "speech",
        ("tts.model",),
        ("speech_step", "speech_begin"),
        pieces=("draw",),
        # Two dozen operations: captured, they cost less than the start that compiling them would hold up.
        eager=("spoken_rows",),
    ),
    "token2wav.flow": CompileTarget(
        "vocoder",
        "sound",
        regions=("flow",),
        pieces=("flow",),
        eager=("begin",),  # as `spoken_rows`
        on_cpu=("flow.encoder", "flow.decoder.estimator"),
    ),
    # Whole, its eight lengths of columns take the compiler minutes, and with one graph for all it fails.
    "token2wav.hift": CompileTarget("vocoder", "sound", ("hift",), ("hift",)),
}
# With running sums. Kernels of such, tried by `max-autotune` in several layouts, have ended a process by an illegal
# memory access (torch 2.11, CUDA), and there is no product in them to choose a kernel for.
SAMPLERS = ("choose", "draw")
UNTRIED = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": "default"}  # their modes
# Run once a prompt, with one slot: captured they would save nothing.
NEVER_CAPTURED = ("llm_prefill",)

STACKED = tuple(
    dict.fromkeys(
        name
        for target in COMPILE_TARGETS.values()
        for name in target.regions
        if target.table == "omni" and name not in NEVER_CAPTURED
    )
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
