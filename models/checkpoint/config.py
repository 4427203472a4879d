"""Typed hyper-parameters from a checkpoint's `config.json`: names, ranges, and relations between them. Torch-free.

Keys that determine a tensor's shape are required, except in `tts_config`. Other keys default to the released value,
because ports and re-exports often omit them. Unknown keys are ignored, unless one resembles a missing key.
"""

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.errors import ConfigError

Count = Annotated[int, Field(gt=0, strict=True)]
AttentionType = Literal["full_attention", "sliding_window", "sliding_recompute", "reindex"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


S = TypeVar("S", bound=BaseModel)


class VisionConfig(_Section):
    """SigLIP encoder `vpm`. image_size: side of the position table in pixels."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    image_size: Count
    # Fixed: image sizes, limits and position tables are in patches of this side.
    patch_size: Literal[14]
    num_channels: Literal[3] = 3
    layer_norm_eps: Positive = 1e-6
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"

    @property
    def table_side(self) -> int:
        """Side of the position table in patches."""
        return self.image_size // self.patch_size


class AudioConfig(_Section):
    """Whisper encoder `apm`."""

    d_model: Count
    encoder_layers: Count
    encoder_attention_heads: Count
    encoder_ffn_dim: Count
    num_mel_bins: Count = 80
    max_source_positions: Count = 1500
    activation_function: Literal["gelu"] = "gelu"
    scale_embedding: Literal[False] = False


class TTSConfig(_Section):
    """Llama-shaped model `tts` of speech tokens: 25 a second; the last id is EOS.

    `transformers` omits keys of a nested section that equal its class's defaults. Every key therefore defaults to the
    released value here; where that is wrong, loading lists the tensors whose shapes differ.
    """

    llm_dim: Count = 4096
    hidden_size: Count = 768
    intermediate_size: Count = 3072
    num_hidden_layers: Count = 20
    num_attention_heads: Count = 12
    num_key_value_heads: Count = 12
    num_audio_tokens: Count = 6562
    num_text_tokens: Count = 152064
    audio_bos_token_id: Annotated[int, Field(ge=0)] = 151687
    text_eos_token_id: Annotated[int, Field(ge=0)] = 151692
    num_vq: Literal[1] = 1
    projector_type: Literal["mlp"] = "mlp"
    condition_type: Literal["hidden_text_merge"] = "hidden_text_merge"
    backbone_model: Literal["llama"] = "llama"
    hidden_act: Literal["silu"] = "silu"
    normalize_projected_hidden: bool = True
    attention_type: AttentionType = "full_attention"
    streaming_sliding_window_audio_window_size: Count = 300
    max_position_embeddings: Count = 4096
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10000.0
    # Size of a table that the checkpoint contains and the model does not use.
    vocab_size: Count = 32000

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def speech_eos_id(self) -> int:
        """The speech token that ends speech."""
        return self.num_audio_tokens - 1


class SliceConfig(_Section):
    """How an image is cut into slices. A slice has about scale_resolution * scale_resolution pixels."""

    patch_size: Count = 14
    scale_resolution: Count = 448
    max_slice_nums: Count = 1


class SideLaneConfig(_Section):
    """Tokens between which a model that is trained for it writes text that is not spoken, such as calls of functions.

    Released checkpoints have the tokens of the default, and are not trained to use them in a duplex session.
    """

    start: Annotated[str, Field(min_length=1)] = "<tool_call>"
    end: Annotated[str, Field(min_length=1)] = "</tool_call>"


class OmniConfig(_Section):
    """The whole model: the Qwen3-shaped `llm` at the top level, and one section for each other part."""

    model_type: Literal["minicpmo"] = "minicpmo"
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    vocab_size: Count
    head_dim: Count = 128
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 1_000_000.0
    max_position_embeddings: Count = 40960
    tie_word_embeddings: Literal[False] = False
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    # Attention is full and causal. Some ports write a window size with `use_sliding_window` off; it has no effect.
    use_sliding_window: Literal[False] = False
    rope_scaling: None = None

    query_num: Count = 64
    drop_vision_last_layer: bool = False
    slice_config: SliceConfig = SliceConfig()
    # Fixed: token counts, placeholders and units assume ten audio embeddings a second.
    audio_pool_step: Literal[5] = 5
    audio_chunk_length: Finite = 1.0
    init_vision: bool = True
    init_audio: bool = True
    init_tts: bool = True
    vision_config: VisionConfig
    audio_config: AudioConfig
    tts_config: TTSConfig = TTSConfig()
    side_lane: SideLaneConfig | None = None
    # A small model whose speech was trained on duplex units alone: its answers are spoken in units too.
    talker: bool = False

    @property
    def resampler_heads(self) -> int:
        """Heads of the resampler's attention; the released model fixes their width to 128."""
        return self.hidden_size // 128

    def check(self) -> None:
        """Raises: ConfigError naming the key whose value contradicts another key's."""

        def need(ok: bool, key: str, expected: object, got: object) -> None:
            if not ok:
                raise ConfigError(f"config.json: {key}", expected=expected, got=got)

        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        need(heads % kv_heads == 0, "num_attention_heads", f"a multiple of {kv_heads}", heads)
        need(self.head_dim % 2 == 0, "head_dim", "an even number", self.head_dim)
        need(self.hidden_size % 128 == 0, "hidden_size", "a multiple of 128 (resampler heads)", self.hidden_size)

        vision, audio, tts = self.vision_config, self.audio_config, self.tts_config
        for path, width, heads in (
            ("vision_config", vision.hidden_size, vision.num_attention_heads),
            ("audio_config", audio.d_model, audio.encoder_attention_heads),
            ("tts_config", tts.hidden_size, tts.num_attention_heads),
        ):
            need(width % heads == 0, f"{path}: attention heads", f"a divisor of width {width}", heads)
        need(vision.table_side > 0, "vision_config.image_size", f"at least {vision.patch_size}", vision.image_size)
        patch = self.slice_config.patch_size
        need(vision.patch_size == patch, "slice_config.patch_size", vision.patch_size, patch)
        left = vision.num_hidden_layers - self.drop_vision_last_layer
        need(left > 0, "vision_config.num_hidden_layers", "at least one layer left", left)
        inner = audio.encoder_ffn_dim
        need(inner == 4 * audio.d_model, "audio_config.encoder_ffn_dim", 4 * audio.d_model, inner)
        if not self.init_tts:
            return
        need(tts.llm_dim == self.hidden_size, "tts_config.llm_dim", f"{self.hidden_size} (hidden_size)", tts.llm_dim)
        need(tts.head_dim % 2 == 0, "tts_config: head width", "an even number", tts.head_dim)
        heads, kv_heads = tts.num_attention_heads, tts.num_key_value_heads
        need(heads % kv_heads == 0, "tts_config.num_attention_heads", f"a multiple of {kv_heads}", heads)
        for key in ("audio_bos_token_id", "text_eos_token_id"):
            token = getattr(tts, key)
            need(token < tts.num_text_tokens, f"tts_config.{key}", f"below {tts.num_text_tokens}", token)


class PreprocessorConfig(_Section):
    """`preprocessor_config.json`: slice limits and image numbering of chat images."""

    max_slice_nums: Count = 9
    scale_resolution: Count = 448
    patch_size: Count = 14
    use_image_id: bool = True
    image_feature_size: Count = 64


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: ConfigError if the file is missing, unreadable or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), expected="a JSON file", got="no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), expected="a JSON file", got=str(error)) from None
    if not isinstance(value, dict):
        raise ConfigError(str(path), expected="a JSON object", got=type(value).__name__)
    return value


def load_config(path: str | Path) -> OmniConfig:
    """The hyper-parameters of a checkpoint.

    Args:
        path: the checkpoint's folder, or its `config.json`.
    Raises: ConfigError naming the key that is missing, misspelt or invalid.
    """
    path = Path(path)
    return parse_config(read_json(path / "config.json" if path.is_dir() else path))


def parse_config(raw: dict[str, Any]) -> OmniConfig:
    """The hyper-parameters in a parsed `config.json`. Raises: ConfigError as `load_config`."""
    config = validate_section(OmniConfig, raw, "config.json")
    config.check()
    return config


def load_preprocessor_config(path: str | Path) -> PreprocessorConfig:
    """Settings of chat images; the released values if the folder has no `preprocessor_config.json`."""
    file = Path(path) / "preprocessor_config.json"
    return validate_section(PreprocessorConfig, read_json(file) if file.exists() else {}, file.name)


def validate_section(section: type[S], raw: dict[str, Any], name: str) -> S:
    """The settings in a parsed JSON object.

    Args:
        section: their type.
        raw: the object.
        name: of the file, for errors.
    Raises: ConfigError naming every key that is missing, misspelt or invalid.
    """
    _reject_misspelt(section, raw, name)
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        lines = []
        for e in error.errors():
            got = "nothing" if e["type"] == "missing" else repr(e["input"])
            lines.append(f"{'.'.join(map(str, e['loc']))} ({e['msg']}, got {got})")
        raise ConfigError(name, expected="every key valid", got="; ".join(lines)) from None


def _reject_misspelt(section: type[BaseModel], raw: dict[str, Any], file: str, prefix: str = "") -> None:
    """Raises: ConfigError for an unknown key that resembles a missing one; other unknown keys are common."""
    absent = [key for key in section.model_fields if key not in raw]
    for key, value in raw.items():
        if key in section.model_fields:
            inner = section.model_fields[key].annotation
            if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, BaseModel):
                _reject_misspelt(inner, value, file, f"{prefix}{key}.")
        elif near := difflib.get_close_matches(key, absent, n=1, cutoff=0.9):
            raise ConfigError(file, expected=f"key {prefix}{near[0]}", got=f"key {prefix}{key}")
