"""Hyper-parameters of the speech tokenizer and of the speaker encoder, from the checkpoint's files. Torch-free.

Keys that determine a tensor's shape are required. Other keys default to the released value. Unknown keys are ignored,
unless one resembles a missing key.
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.checkpoint.config import Count, Positive, read_json, validate_section
from models.errors import ConfigError

SAMPLE_RATE = 24_000
CODE_GROUPS = 16  # codes of one frame
FRAME_SAMPLES = 1920  # 80 ms, 12.5 frames a second
ENCODER_STRIDE = 2  # of the encoder's last convolution, which follows its transformer

LayerCount = Annotated[int, Field(ge=1, le=1000, strict=True)]
Ratios = tuple[Count, ...]


class _CodecSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SpeechDecoderConfig(_CodecSection):
    """Codes to sound. Widths halve in each block after the first convolution.

    latent_dim: channels of the convolutions before `decoder_dim`. codebook_dim: twice the width of a codebook.
    """

    latent_dim: Count
    codebook_dim: Annotated[int, Field(ge=2, multiple_of=2, strict=True)]
    codebook_size: Count
    decoder_dim: Count
    hidden_size: Count
    intermediate_size: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2, strict=True)]
    num_attention_heads: Count
    num_key_value_heads: Count
    num_hidden_layers: LayerCount
    num_quantizers: Literal[16] = 16
    sliding_window: Annotated[int, Field(ge=2, strict=True)] = 72
    upsample_rates: Ratios = (8, 5, 4, 3)
    upsampling_ratios: Ratios = (2, 2)
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10_000.0
    attention_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"


class SpeechEncoderConfig(_CodecSection):
    """Sound to codes: Mimi's encoder. The channels double with each stride.

    `sliding_window` of the file is not read: the public implementation attends to all earlier columns.
    """

    num_filters: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2, strict=True)]
    num_hidden_layers: LayerCount
    num_quantizers: Count
    codebook_size: Count
    codebook_dim: Count
    upsampling_ratios: Ratios = (8, 6, 5, 4)
    kernel_size: Count = 7
    last_kernel_size: Count = 3
    residual_kernel_size: Count = 3
    compress: Count = 2
    norm_eps: Positive = 1e-5
    rope_theta: Positive = 10_000.0
    num_semantic_quantizers: Literal[1] = 1
    num_residual_layers: Literal[1] = 1
    audio_channels: Literal[1] = 1
    use_causal_conv: Literal[True] = True
    use_conv_shortcut: Literal[False] = False
    pad_mode: Literal["constant"] = "constant"
    hidden_act: Literal["gelu"] = "gelu"
    attention_bias: Literal[False] = False


class SpeechTokenizerConfig(_CodecSection):
    """`speech_tokenizer/config.json`."""

    model_type: Literal["qwen3_tts_tokenizer_12hz"] = "qwen3_tts_tokenizer_12hz"
    encoder_config: SpeechEncoderConfig
    decoder_config: SpeechDecoderConfig
    encoder_valid_num_quantizers: Literal[16] = 16
    input_sample_rate: Literal[24000] = 24000
    output_sample_rate: Literal[24000] = 24000
    decode_upsample_rate: Literal[1920] = 1920
    encode_downsample_rate: Literal[1920] = 1920

    def check(self) -> None:
        """Raises: ConfigError naming the key whose value contradicts another key's."""
        encoder, decoder = self.encoder_config, self.decoder_config
        n_blocks = len(decoder.upsample_rates)
        encoder_stride = ENCODER_STRIDE * math.prod(encoder.upsampling_ratios)
        decoder_stride = math.prod(decoder.upsampling_ratios + decoder.upsample_rates)
        for ok, key, expected, got in (
            (
                decoder_stride == FRAME_SAMPLES,
                "decoder_config: product of the ratios",
                FRAME_SAMPLES,
                decoder_stride,
            ),
            (
                encoder_stride == FRAME_SAMPLES,
                "encoder_config: stride of the ratios",
                FRAME_SAMPLES,
                encoder_stride,
            ),
            (
                decoder.decoder_dim % 2**n_blocks == 0,
                "decoder_config.decoder_dim",
                f"a multiple of {2**n_blocks}",
                decoder.decoder_dim,
            ),
            (
                decoder.num_attention_heads % decoder.num_key_value_heads == 0,
                "decoder_config.num_attention_heads",
                f"a multiple of {decoder.num_key_value_heads}",
                decoder.num_attention_heads,
            ),
            (
                encoder.num_attention_heads % encoder.num_key_value_heads == 0,
                "encoder_config.num_attention_heads",
                f"a multiple of {encoder.num_key_value_heads}",
                encoder.num_attention_heads,
            ),
            (
                encoder.num_quantizers >= CODE_GROUPS,
                "encoder_config.num_quantizers",
                f"at least {CODE_GROUPS}",
                encoder.num_quantizers,
            ),
            (
                encoder.codebook_size == decoder.codebook_size,
                "encoder_config.codebook_size",
                f"{decoder.codebook_size} (decoder_config)",
                encoder.codebook_size,
            ),
        ):
            if not ok:
                raise ConfigError(f"config.json: {key}", expected=expected, got=got)


class SpeakerEncoderConfig(_CodecSection):
    """`speaker_encoder_config` of a Base model. Defaults are the released values, which its file omits."""

    enc_dim: Count
    mel_dim: Count = 128
    enc_channels: tuple[Count, Count, Count, Count, Count] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[Count, Count, Count, Count, Count] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[Count, Count, Count, Count, Count] = (1, 2, 3, 4, 1)
    enc_attention_channels: Count = 128
    enc_res2net_scale: Annotated[int, Field(ge=2, strict=True)] = 8
    enc_se_channels: Count = 128
    sample_rate: Literal[24000] = 24000

    def check(self) -> None:
        """Raises: ConfigError naming the key whose value contradicts another key's."""
        first, *blocks, last = self.enc_channels
        for ok, key, expected, got in (
            (set(blocks) == {first}, "enc_channels", f"{first} in the first four", list(self.enc_channels)),
            (last == 3 * first, "enc_channels", f"{3 * first} in the last", last),
            (first % self.enc_res2net_scale == 0, "enc_channels", f"a multiple of {self.enc_res2net_scale}", first),
            (all(n % 2 for n in self.enc_kernel_sizes), "enc_kernel_sizes", "odd sizes", list(self.enc_kernel_sizes)),
        ):
            if not ok:
                raise ConfigError(f"speaker_encoder_config.{key}", expected=expected, got=got)


def load_speech_tokenizer_config(folder: str | Path) -> SpeechTokenizerConfig:
    """The sizes of a speech tokenizer.

    Args:
        folder: `speech_tokenizer/` of a checkpoint, or the tokenizer published alone.
    Raises: ConfigError naming the key that is missing, misspelt or invalid.
    """
    file = Path(folder) / "config.json"
    config = validate_section(SpeechTokenizerConfig, read_json(file), str(file))
    config.check()
    return config


def parse_speaker_encoder_config(raw: dict[str, Any], name: str = "speaker_encoder_config") -> SpeakerEncoderConfig:
    """The sizes in a parsed `speaker_encoder_config`. Raises: ConfigError as `load_speech_tokenizer_config`."""
    config = validate_section(SpeakerEncoderConfig, raw, name)
    config.check()
    return config
