"""Which linear layers of a model are quantised, and to which kind: one kind for each part. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

Kind = Literal["fp8", "int8", "int4"]
Weights = Literal["bf16", "fp8", "int8", "int4"]
Part = Literal["llm", "tts", "vpm", "apm"]
Place = Literal["llm", "head", "tts", "vpm", "apm"]
PARTS: tuple[Part, ...] = get_args(Part)
GROUPS = (128, 64, 32)  # columns with one scale and one zero of int4: the first that divides the columns
MIN_ROW_VALUES = 32  # in shorter rows the scale takes more bytes than rounding saves
BYTES: dict[Kind, float] = {"fp8": 1, "int8": 1, "int4": 0.5 + 3 / GROUPS[0]}  # of a weight, without scales of rows
# Prefixes of the names of linear layers. Projections between parts, embeddings and convolutions are not quantised.
_LAYERS: dict[Place, str] = {
    "llm": "llm.model.layers.",
    "head": "llm.lm_head.",
    "tts": "tts.model.layers.",
    "vpm": "vpm.encoder.layers.",
    "apm": "apm.layers.",
}
_MULTIPLE = 16  # of columns, as the kernels read them


@dataclass(frozen=True)
class Precision:
    """Kinds by part; None: not quantised. head: of the language model's output head."""

    llm: Kind | None = None
    head: Kind | None = None
    tts: Kind | None = None
    vpm: Kind | None = None
    apm: Kind | None = None

    def kind_of(self, name: str, shape: tuple[int, ...]) -> Kind | None:
        """The kind of a weight by its name in the model; None for one that stays in the model's dtype.

        A matrix whose columns int4 cannot group is int8.
        """
        place = place_of(name, shape)
        kind = None if place is None else self.at(place)
        return "int8" if kind == "int4" and group_size(shape[1]) is None else kind

    def at(self, place: Place) -> Kind | None:
        return {"llm": self.llm, "head": self.head, "tts": self.tts, "vpm": self.vpm, "apm": self.apm}[place]

    def __str__(self) -> str:
        kinds = {part: self.at(part) or "bf16" for part in PARTS}
        if len(set(kinds.values())) == 1:
            return kinds["llm"]
        return ", ".join(f"{part} {kind}" for part, kind in kinds.items())


def place_of(name: str, shape: tuple[int, ...]) -> Place | None:
    """Where a weight that can be quantised is, by its name in the model; None for all other weights."""
    if len(shape) != 2 or not name.endswith(".weight") or shape[1] < MIN_ROW_VALUES or shape[1] % _MULTIPLE:
        return None
    return next((place for place, prefix in _LAYERS.items() if name.startswith(prefix)), None)


def group_size(n_columns: int) -> int | None:
    """Columns of a group of int4; None if no group size divides the columns."""
    return next((group for group in GROUPS if n_columns % group == 0), None)


UNQUANTIZED = Precision()
# int4 is for the layers that are large: the head, which determines the logits directly, and the small parts are int8.
PRESETS: dict[Weights, Precision] = {
    "bf16": UNQUANTIZED,
    "fp8": Precision("fp8", "fp8", "fp8", "fp8", "fp8"),
    "int8": Precision("int8", "int8", "int8", "int8", "int8"),
    "int4": Precision("int4", "int8", "int8", "int8", "int8"),
}


def chosen_precision(weights: Weights, parts: Mapping[Part, Weights | None] | None = None) -> Precision:
    """The preset with some parts in kinds of their own; None keeps the preset's. The output head follows `llm`."""
    precision = PRESETS[weights]
    for part, own in (parts or {}).items():
        if own is not None:
            kind: Kind | None = None if own == "bf16" else own
            changes: dict[str, Kind | None] = {part: kind}
            if part == "llm":
                changes["head"] = PRESETS[own].head
            precision = replace(precision, **changes)
    return precision
