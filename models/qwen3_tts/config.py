"""Hyper-parameters of the Qwen3-TTS language models from a checkpoint's `config.json`. Torch-free.

Keys that determine a tensor's shape, and ids of control codes, are required: the defaults of the public package are
not the released values. Unknown keys are ignored, unless one resembles a missing key.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.checkpoint.config import Count, Positive, read_json, validate_section
from models.errors import ConfigError

CONTROL_CODES = 1024  # ids of the codec vocabulary above the acoustic codes
FRAMES_PER_SECOND = 12.5

TokenId = Annotated[int, Field(ge=0, strict=True)]
ModelKind = Literal["base", "custom_voice", "voice_design"]


class _TalkerSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RopeScaling(_TalkerSection):
    """Rotary sections. The three position rows are always equal, so that every split is the ordinary rotation."""

    rope_type: Literal["default"] = "default"
    interleaved: bool = True
    mrope_section: tuple[Count, Count, Count] = (24, 20, 20)


class CodePredictorConfig(_TalkerSection):
    """Code predictor: the fifteen residual codes of a frame."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2, strict=True)]
    vocab_size: Count
    num_code_groups: Literal[16] = 16
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 1_000_000.0
    rope_scaling: None = None
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False


class TalkerConfig(_TalkerSection):
    """Talker: text and codes to the first code of each frame."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2, strict=True)]
    vocab_size: Annotated[int, Field(gt=CONTROL_CODES, strict=True)]
    text_vocab_size: Count
    text_hidden_size: Count
    num_code_groups: Literal[16]
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 1_000_000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: Count = 32768
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    use_sliding_window: Literal[False] = False
    codec_pad_id: TokenId
    codec_bos_id: TokenId
    codec_eos_token_id: TokenId
    codec_think_id: TokenId
    codec_nothink_id: TokenId
    codec_think_bos_id: TokenId
    codec_think_eos_id: TokenId
    codec_language_id: dict[str, TokenId]
    spk_id: dict[str, TokenId] = {}
    spk_is_dialect: dict[str, Literal[False] | str] = {}
    code_predictor_config: CodePredictorConfig

    @property
    def n_codes(self) -> int:
        """Number of acoustic codes; larger ids control the speech."""
        return self.vocab_size - CONTROL_CODES


class Qwen3TTSConfig(_TalkerSection):
    """The language models of one checkpoint, and the ids that lay out its prompts."""

    tts_model_type: ModelKind
    tts_model_size: str = ""
    tokenizer_type: Literal["qwen3_tts_tokenizer_12hz"] = "qwen3_tts_tokenizer_12hz"
    im_start_token_id: TokenId = 151644
    im_end_token_id: TokenId = 151645
    assistant_token_id: TokenId = 77091
    tts_pad_token_id: TokenId = 151671
    tts_bos_token_id: TokenId = 151672
    tts_eos_token_id: TokenId = 151673
    talker_config: TalkerConfig

    @property
    def languages(self) -> dict[str, int]:
        """Control code of each language that a request may name, without dialects."""
        dialects = {name for name in self.talker_config.spk_is_dialect.values() if name}
        ids = self.talker_config.codec_language_id
        return {name: code for name, code in ids.items() if name not in dialects and not name.endswith("_dialect")}

    @property
    def speakers(self) -> dict[str, int]:
        """Control code of each built-in speaker."""
        return self.talker_config.spk_id

    def check(self) -> None:
        """Raises: ConfigError naming the key whose value contradicts another key's."""

        def need(ok: bool, key: str, expected: object, got: object) -> None:
            if not ok:
                raise ConfigError(f"config.json: {key}", expected=expected, got=got)

        talker = self.talker_config
        predictor = talker.code_predictor_config
        for path, part in (("talker_config", talker), ("talker_config.code_predictor_config", predictor)):
            heads, kv_heads = part.num_attention_heads, part.num_key_value_heads
            need(heads % kv_heads == 0, f"{path}.num_attention_heads", f"a multiple of {kv_heads}", heads)
        codes = predictor.vocab_size
        expected = f"{talker.n_codes} (vocab_size of the talker less {CONTROL_CODES})"
        need(codes == talker.n_codes, "talker_config.code_predictor_config.vocab_size", expected, codes)
        sections = talker.rope_scaling.mrope_section
        half = talker.head_dim // 2
        need(sum(sections) == half, "talker_config.rope_scaling.mrope_section", f"a sum of {half}", sections)

        codec_ids = {key: value for key, value in talker if key.startswith("codec_") and isinstance(value, int)}
        named = {f"codec_language_id.{name}": code for name, code in talker.codec_language_id.items()}
        named |= {f"spk_id.{name}": code for name, code in talker.spk_id.items()}
        for key, code in (codec_ids | named).items():
            need(code < talker.vocab_size, f"talker_config.{key}", f"below {talker.vocab_size}", code)
        for speaker, dialect in talker.spk_is_dialect.items():
            known = not dialect or dialect in talker.codec_language_id
            need(known, f"talker_config.spk_is_dialect.{speaker}", "a key of codec_language_id", dialect)
        for key, token in self:
            if key.endswith("_token_id"):
                need(token < talker.text_vocab_size, key, f"below {talker.text_vocab_size}", token)


def load_qwen3_tts_config(path: str | Path) -> Qwen3TTSConfig:
    """The hyper-parameters of a checkpoint.

    Args:
        path: the checkpoint's folder, or its `config.json`.
    Raises: ConfigError naming the key that is missing, misspelt or invalid.
    """
    path = Path(path)
    return parse_qwen3_tts_config(read_json(path / "config.json" if path.is_dir() else path))


def parse_qwen3_tts_config(raw: dict[str, Any]) -> Qwen3TTSConfig:
    """The hyper-parameters in a parsed `config.json`. Raises: ConfigError as `load_qwen3_tts_config`."""
    config = validate_section(Qwen3TTSConfig, raw, "config.json")
    config.check()
    return config
