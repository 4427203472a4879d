"""S3Gen's components, and the compile mode of each. Contains what compiles; running and capturing is the table's.

The unit of compilation is a layer where a component repeats one, since its layers then share a graph, else the region.
On the project's own kernels HiFT does not compile.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from models.token2wav.backends import Kernels
from models.token2wav.s3gen.region_table import S3Regions

ComponentName = Literal["tokenizer", "speaker_encoder", "encoder", "estimator", "solve", "f0", "hift"]
Mode = Literal["off", "default", "reduce-overhead", "max-autotune"]
COMPONENTS: tuple[ComponentName, ...] = get_args(ComponentName)
# A captured region must not capture graphs of its own.
_INSIDE_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@dataclass(frozen=True)
class Component:
    """One component.

    Attributes:
        region: that runs it.
        stack: its repeated layers, which compile; None: the region compiles as a whole.
    """

    region: str
    stack: str | None


PLAN: dict[ComponentName, Component] = {
    "tokenizer": Component("s3_tokens", "tokenizer"),
    "speaker_encoder": Component("s3_speaker", "speaker_encoder"),
    "encoder": Component("s3_encode", "flow.encoder"),
    "estimator": Component("s3_solve", "flow.decoder.estimator"),
    "solve": Component("s3_solve", None),
    "f0": Component("s3_pitch", None),
    "hift": Component("s3_decode", "mel2wav"),
}


class S3Modes(BaseModel):
    """The mode of torch.compile of each component, or `off`.

    `solve` is all Euler steps in one graph; its compilation takes minutes for every bucket. It contains the estimator,
    so that only one of the two has an effect: `solve` if it is not `off`. With `hift` at `default`, HiFT decodes on the
    project's own kernels where they run, and compiles elsewhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokenizer: Mode = "default"
    speaker_encoder: Mode = "default"
    encoder: Mode = "default"
    estimator: Mode = "default"
    solve: Mode = "off"
    f0: Mode = "default"
    hift: Mode = "default"

    @classmethod
    def all(cls, mode: Mode) -> "S3Modes":
        """One mode for every component but the whole solve."""
        return cls(**dict.fromkeys((name for name in COMPONENTS if name != "solve"), mode))

    def of(self, name: ComponentName) -> Mode:
        mode: Mode = getattr(self, name)
        return mode


def compile_components(
    regions: S3Regions,
    modes: S3Modes,
    *,
    captures: bool,
    dynamic: bool = True,
    backend: Any = "inductor",
    kernels: Kernels = "plain",
) -> None:
    """Wrap components with torch.compile; compilation happens in `warm_up` or `capture`.

    Args:
        regions: all of them run eagerly before.
        modes: of each component.
        captures: regions are captured afterwards, so that modes which capture graphs themselves do not.
        dynamic: one graph for all sizes instead of one for each bucket.
        backend: of torch.compile.
        kernels: of HiFT, as `S3Regions.use_kernels`, if its mode is `default`; "plain" with any other mode.
    Raises: SettingsError for "fused" where kernels cannot run.
    """
    is_fused = regions.use_kernels(kernels if modes.hift == "default" else "plain")
    for name, component in PLAN.items():
        mode: str = modes.of(name)
        is_replaced = (name == "estimator" and modes.solve != "off") or (name == "hift" and is_fused)
        if mode == "off" or is_replaced:
            continue
        if captures:
            mode = _INSIDE_GRAPHS.get(mode, mode)
        elif mode != "default":
            regions.marks_steps = True
        options = {"mode": mode, "dynamic": dynamic, "backend": backend}
        if backend != "inductor":
            del options["mode"]  # only inductor has modes
        if component.stack is None:
            regions.compile([component.region], **options)
        else:
            regions.compile_parts([component.stack], **options)
