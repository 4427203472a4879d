"""Which linear layers of a model are quantised, and to which kind: one kind for each part. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from models.errors import SettingsError

Kind = Literal["fp8", "int8", "int4"]
Weights = Literal["bf16", "fp8", "int8", "int4"]
FlowWeights = Literal["bf16", "fp8", "int8"]
Part = Literal["llm", "tts", "vpm", "apm", "flow"]
Place = Literal["llm", "down", "head", "tts", "vpm", "apm", "flow"]
PARTS: tuple[Part, ...] = get_args(Part)
GROUPS = (128, 64, 32)  # columns with one scale and one zero of int4: the first that divides the columns
MIN_ROW_VALUES = 32  # in shorter rows the scale takes more bytes than rounding saves
BYTES: dict[Kind, float] = {"fp8": 1, "int8": 1, "int4": 0.5 + 3 / GROUPS[0]}  # of a weight, without scales of rows
# Prefixes of the names of linear layers. Projections between parts, embeddings and convolutions are not quantised.
_LLM_LAYERS, _DOWN = "llm.model.layers.", ".down_proj.weight"
_LAYERS: dict[Place, str] = {
    "llm": _LLM_LAYERS,
    "head": "llm.lm_head.",
    "tts": "tts.model.layers.",
    "vpm": "vpm.encoder.layers.",
    "apm": "apm.layers.",
}
_FLOW = "flow."  # prefix of the flow's weights, whose names in the vocoder's own file do not have it
_FLOW_LAYERS = (f"{_FLOW}encoder.encoders.", f"{_FLOW}encoder.up_encoders.", f"{_FLOW}decoder.estimator.blocks.")
_FLOW_ONCE = (".linear_pos.weight", ".adaLN_modulation.1.weight")  # run once, on constants
_FLOW_EXPECTED = "bf16, fp8 or int8: its layers are small, so that groups of int4 would save no time"
_MULTIPLE = 16  # of columns, as the kernels read them


@dataclass(frozen=True)
class Precision:
    """Kinds by part; None: not quantised.

    Attributes:
        down: of the down projections of the language model; None: as `llm`.
        head: of the language model's output head.
        flow: of the layers of the vocoder's flow; not int4.
    """

    llm: Kind | None = None
    down: Kind | None = None
    head: Kind | None = None
    tts: Kind | None = None
    vpm: Kind | None = None
    apm: Kind | None = None
    flow: Kind | None = None

    def kind_of(self, name: str, shape: tuple[int, ...]) -> Kind | None:
        """The kind of a weight by its name in the model; None for one that stays in the model's dtype.

        A matrix whose columns int4 cannot group is int8.
        """
        place = place_of(name, shape)
        kind = None if place is None else self.at(place)
        return "int8" if kind == "int4" and group_size(shape[1]) is None else kind

    def flow_kind_of(self, name: str, shape: tuple[int, ...]) -> Kind | None:
        """As `kind_of`, of a weight of the vocoder's flow, by its name in the flow."""
        return self.kind_of(_FLOW + name, shape)

    def at(self, place: Place) -> Kind | None:
        kinds: dict[Place, Kind | None] = {"llm": self.llm, "head": self.head, "tts": self.tts, "vpm": self.vpm}
        kinds |= {"apm": self.apm, "flow": self.flow}
        return (self.down or self.llm) if place == "down" else kinds[place]

    def __str__(self) -> str:
        """The kind of each part, or one kind for all of them; the flow is named only if it is quantised."""
        kinds: dict[str, str] = {part: self.at(part) or "bf16" for part in PARTS if part != "flow"}
        if self.down not in (None, self.llm):
            kinds["llm"] += f" and {self.down}"
        named = [f"{part} {kind}" for part, kind in kinds.items()] if len(set(kinds.values())) > 1 else [kinds["llm"]]
        return ", ".join([*named, f"flow {self.flow}"] if self.flow else named)

    @property
    def label(self) -> str:
        """The preset's name; of other kinds a text such as `bf16_flow-int8`, which an address takes as it is."""
        own = str(self).replace(" and ", "-").replace(", ", "_").replace(" ", "-")
        return next((name for name, preset in PRESETS.items() if preset == self), own)


def place_of(name: str, shape: tuple[int, ...]) -> Place | None:
    """Where a weight that can be quantised is, by its name in the model; None for all other weights."""
    if len(shape) != 2 or not name.endswith(".weight") or shape[1] < MIN_ROW_VALUES or shape[1] % _MULTIPLE:
        return None
    if name.startswith(_LLM_LAYERS) and name.endswith(_DOWN):
        return "down"
    if name.startswith(_FLOW_LAYERS):
        return None if name.endswith(_FLOW_ONCE) else "flow"
    return next((place for place, prefix in _LAYERS.items() if name.startswith(prefix)), None)


def group_size(n_columns: int) -> int | None:
    """Columns of a group of int4; None if no group size divides the columns."""
    return next((group for group in GROUPS if n_columns % group == 0), None)


UNQUANTIZED = Precision()
# int4 is for the layers that are large: the head, which determines the logits directly, and the small parts are int8.
# A number of fp8 (e4m3) has three bits of mantissa and errs by 2.6 % of itself, whatever its scale; one of int8, in as
# many bytes, by 0.9 % of the row's typical number. With fp8 in all layers a region errs by 5 to 9 times what bfloat16
# changes.
# `fp8` does not quantise the vision encoder, so that every region stays within 4 times the error of bfloat16, the
# bound of `benchmarks.duplex`. With int8 there, vision erred by 6.2 times on one H200 (released size, random weights).
# The encoder takes 0.42 GB more than in int8, a small part of the model. Nor does `fp8` quantise the speech model
# (0.19 GB): its steps wait for kernels, not for weights, and those of bfloat16 take less time. `int8` and `int4` save
# these bytes. No preset quantises the vocoder's flow (0.31 GB): reading its weights is a small part of its time.
PRESETS: dict[Weights, Precision] = {
    "bf16": UNQUANTIZED,
    "fp8": Precision(llm="int8", down="fp8", head="int8", apm="int8"),
    "int8": Precision(llm="int8", head="int8", tts="int8", vpm="int8", apm="int8"),
    "int4": Precision(llm="int4", head="int8", tts="int8", vpm="int8", apm="int8"),
}


def chosen_precision(weights: Weights, parts: Mapping[Part, Weights | None] | None = None) -> Precision:
    """The preset with some parts in kinds of their own; None keeps the preset's. `llm` is as in its own preset.

    Raises: SettingsError for int4 in the flow.
    """
    precision = PRESETS[weights]
    for part, own in (parts or {}).items():
        if part == "flow" and own == "int4":
            raise SettingsError("weights of the flow", expected=_FLOW_EXPECTED, got=own)
        if own is not None:
            kind: Kind | None = None if own == "bf16" else own
            if part == "llm":
                like = PRESETS[own]
                precision = replace(precision, llm=like.llm, down=like.down, head=like.head)
            else:
                precision = replace(precision, **{part: kind})
    return precision
