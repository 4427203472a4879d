"""`model.weights` and `model.part_weights`: the precision of the model's linear layers. Torch-free."""

from typing import Literal

from pydantic import Field

from models.checkpoint.precision import FlowWeights, Part, Precision, Weights, chosen_precision
from worker.config.settings import Settings

KVLayout = Literal["slots", "pages"]
KVLayoutSetting = Literal["auto", "slots", "pages"]
DECODE_COPY_TEXT = (
    "a copy of the language model's weights in 12 bits without loss, from which products of up to 64 rows read: "
    "shorter decode steps, three quarters of these weights' memory more, and with few units in flight a unit's first "
    "sound is made before the rest; auto: with at most four slots on a GPU of 64 GB or more that has room for the "
    "slots beside it, if the weights are bf16"
)
KV_LAYOUT_TEXT = (
    "slots: every slot has `duplex.context_rows` rows of keys and values; pages: sessions share a pool of rows and "
    "get as many as their settings need, and a pool of the speech model's rows, which turns take while they speak; "
    "auto: pages on a GPU with the project's kernels if `duplex.max_sessions` is above four or, without it, more than "
    "four sessions fit as pages, or more than in slots; slots otherwise, for float32, and if sessions are in reference "
    "mode by default"
)
WEIGHTS_TEXT = (
    "weights of linear layers; bf16: as in `model.dtype`; int8: one scale a row; fp8: `tts` and `vpm` as in "
    "`model.dtype`, the down projections of `llm` in e4m3, all others in int8; int4: groups of 128 columns, and int8 "
    "for the output head and the parts other than `llm`"
)


class PartWeights(Settings):
    """Weights of single parts; null: as `model.weights` says."""

    llm: Weights | None = Field(None, description="of the language model and its output head; null: `model.weights`")
    tts: Weights | None = Field(None, description="of the speech model; null: `model.weights`")
    vpm: Weights | None = Field(None, description="of the vision encoder; null: `model.weights`")
    apm: Weights | None = Field(None, description="of the audio encoder; null: `model.weights`")
    flow: FlowWeights | None = Field(
        None,
        description="of the layers of the vocoder's flow, which are too small to gain from groups of int4; null: bf16",
    )

    def precision(self, weights: Weights) -> Precision:
        """The kinds of all parts."""
        own: dict[Part, Weights | None] = {"llm": self.llm, "tts": self.tts, "vpm": self.vpm, "apm": self.apm}
        return chosen_precision(weights, {**own, "flow": self.flow})
