"""Sizes of the regions by device and settings: with kernels, compiled, or neither."""

from models.layers.kv_pages import PageSizes
from models.omni import OmniModel
from models.stages.region_table import Shapes
from models.token2wav.stream.region_table import VocoderShapes
from worker.assembly.kv_layout import layout_of
from worker.config.session import EngineConfig

SPEECH_ROWS = 4096
POOLED_SPEECH_ROWS = 1024  # of a shared pool for each slot: 28 s of speech in one turn on average, at 36 rows a second
PAGE_ROWS = 128  # of a shared pool; a multiple of the kernels' tiles of keys
# Without compiling and capturing a size costs nothing, and time grows with what is padded. A frame of the page has 1024
# patches.
EAGER_SIZES = {
    "slices": (1, 2, 4),
    "patches": (1024, 1088, 4096),
    "rows": (16, 32, 64, 80, 96, 128, 256, 512),
    "kv": tuple(range(256, 8193, 256)),
    "speech_kv": (64, 128, 192, 256, 512, 4096),
}
EAGER_VOCODER_SIZES = {"speech_tokens": tuple(range(1, 29)), "columns": tuple(range(256, 1665, 32))}


def shapes_of(model: OmniModel, batch: tuple[int, ...], config: EngineConfig, *, by_kernels: bool = False) -> Shapes:
    """Sizes of the omni model. batch: of its axis. by_kernels: the project's kernels run its layers."""
    if model.device.type == "cpu" and config.compile.enabled_on("cpu"):
        # Each size costs seconds of compiling, and size 1 always compiles separately.
        return Shapes(batch=batch, slices=(2, 4), rows=(16, 80, 512))
    if runs_eager(model, config):
        return Shapes(batch=batch, **EAGER_SIZES)
    if by_kernels:  # kernels read only the valid rows, so one size is enough
        return Shapes(batch=batch, kv=(llm_len(model, config),), speech_kv=(tts_len(model),))
    return Shapes(batch=batch)


def runs_eager(model: OmniModel, config: EngineConfig) -> bool:
    """Whether the model runs on a CPU and is not compiled."""
    return model.device.type == "cpu" and not config.compile.enabled_on("cpu")


def vocoder_shapes_of(batch: tuple[int, ...], *, by_kernels: bool, eager: bool) -> VocoderShapes:
    """Sizes of the vocoder. eager: as `runs_eager` returns; the others as in `shapes_of`."""
    if eager:
        return VocoderShapes(batch=batch, **EAGER_VOCODER_SIZES)
    if by_kernels:  # kernels read only the valid columns, so one size is enough; the tokens of a batch are padded
        # The first piece of a unit with the default `sound_ramp`, the rest of it, and whole seconds or ends of turns.
        return VocoderShapes(batch=batch, speech_tokens=(8, 17, 28), columns=(1664,))
    return VocoderShapes(batch=batch)


def llm_len(model: OmniModel, config: EngineConfig) -> int:
    """Context rows that a slot may hold."""
    return min(config.llm_len, model.config.max_position_embeddings)


def tts_len(model: OmniModel) -> int:
    """Rows of the speech model that a slot holds."""
    return min(SPEECH_ROWS, model.config.tts_config.max_position_embeddings)


def llm_slot_rows(model: OmniModel, config: EngineConfig) -> int:
    """Context rows that a slot takes: all that it may hold, or the pages of a default session."""
    most = llm_len(model, config)
    return most if layout_of(config) == "slots" else _whole_pages(min(config.rows_of(config.session), most))


def tts_slot_rows(model: OmniModel, config: EngineConfig) -> int:
    """Rows of the speech model that a slot takes: all that it may hold, or its part of the pool."""
    most = tts_len(model)
    return most if layout_of(config) == "slots" else _whole_pages(min(POOLED_SPEECH_ROWS, most))


def speech_pages(model: OmniModel, config: EngineConfig, n_slots: int) -> PageSizes | None:
    """The pool of speech rows: `tts_slot_rows` for each slot, at least all rows of one slot; None without a pool."""
    if layout_of(config) == "slots":
        return None
    n_rows = max(n_slots * tts_slot_rows(model, config), _whole_pages(tts_len(model)))
    return PageSizes(PAGE_ROWS, n_rows // PAGE_ROWS, "speech rows")


def _whole_pages(n_rows: int) -> int:
    return -(-n_rows // PAGE_ROWS) * PAGE_ROWS
