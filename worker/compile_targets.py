"""What each compile target holds: layers that compile by themselves, regions that compile whole, regions that run them.

Knows names only. Torch-free.

On a GPU launches are what costs, so small regions and the samplers compile too. On a CPU those would take minutes of
C++ for a millisecond a call: there only layers compile. Of HiFT it is the activation, everywhere: captured, all of it
is one launch anyway.
"""

from dataclasses import dataclass
from typing import Literal

from worker.compile_config import Target


@dataclass(frozen=True)
class Aim:
    """One target.

    table: whose regions. stacks: layers, one of which is compiled and shared by all of its kind. regions: those that
    run them. pieces, whole: further parts of regions, and regions, that compile in one piece on a GPU. on_cpu: smaller
    parts that take their place on a CPU. eager: regions of the target that never compile, but are captured.
    """

    table: Literal["omni", "vocoder"]
    stacks: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    eager: tuple[str, ...] = ()

    def parts(self, is_gpu: bool) -> tuple[str, ...]:
        """Stacks and pieces that compile."""
        return (*self.stacks, *(self.pieces if is_gpu else self.on_cpu))

    def whole_regions(self, is_gpu: bool) -> tuple[str, ...]:
        return self.whole if is_gpu else ()

    @property
    def all_regions(self) -> tuple[str, ...]:
        return (*self.regions, *self.whole, *self.eager)


AIMS: dict[Target, Aim] = {
    "vpm": Aim("omni", ("vpm",), ("vision",)),
    "resampler": Aim("omni", ("resampler",), ("vision",)),
    "apm": Aim("omni", ("apm",), ("audio_unit", "audio_overlap"), whole=("mel_unit",)),
    "llm.model": Aim(
        "omni",
        ("llm.model",),
        ("unit_step", "unit_prefill", "llm_prefill"),
        pieces=("choose",),
        # Rare, large and memory-bound: compiling would cost more than it gives.
        eager=("llm_evict",),
    ),
    "tts.model": Aim("omni", ("tts.model",), ("speech_step", "speech_begin"), pieces=("draw",), whole=("spoken_rows",)),
    "token2wav.flow": Aim(
        "vocoder",
        regions=("flow",),
        pieces=("flow",),
        whole=("begin",),
        on_cpu=("flow.encoder", "flow.decoder.estimator"),
    ),
    # Whole, its eight lengths of columns take the compiler minutes, and with one graph for all it fails.
    "token2wav.hift": Aim("vocoder", ("hift",), ("hift",)),
}
# Run once a prompt, with one slot: captured they would save nothing.
NEVER_CAPTURED = ("llm_prefill",)

STACKED = tuple(
    dict.fromkeys(
        name for aim in AIMS.values() for name in aim.regions if aim.table == "omni" and name not in NEVER_CAPTURED
    )
)
WHOLE = tuple(name for aim in AIMS.values() for name in aim.whole if aim.table == "omni")
EAGER = tuple(name for aim in AIMS.values() for name in aim.eager)
FLOW = AIMS["token2wav.flow"].regions
SOUND = (*AIMS["token2wav.flow"].whole, *AIMS["token2wav.hift"].regions)
SERVING = (*STACKED, *WHOLE, *EAGER, *FLOW, *SOUND)
