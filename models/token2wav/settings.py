"""Hyper-parameters of the vocoder's networks: ranges and released values. Reads no files.

`FlowConfig` holds the values of `flow.yaml`. The other networks have no settings file: their sizes are read from the
shapes of their weights, and all else is fixed by their training.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

MEL_RATE = 50  # mel frames per second
FRAMES_PER_TOKEN = 2
SAMPLE_RATE = 24_000
RATE_16K = 16_000  # sample rate of the speaker encoder and of the speech tokenizer
SAMPLES_PER_FRAME = SAMPLE_RATE // MEL_RATE
SAMPLES_PER_TOKEN = FRAMES_PER_TOKEN * SAMPLES_PER_FRAME
SILENCE_TOKEN = 4218  # fills the lookahead of a voice's prompt and the start of every turn

Count = Annotated[int, Field(ge=1)]
# Limited, because layers are built before missing weights are detected, and a settings file can contain any number.
LayerCount = Annotated[int, Field(ge=1, le=1000)]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EncoderConfig(_Settings):
    """The upsampling conformer. Defaults are the released values."""

    width: Count = 512
    heads: Count = 8
    inner: Count = 2048
    n_layers: LayerCount = 6  # at token rate
    n_up_layers: LayerCount = 4  # at mel rate
    lookahead: Count = 3  # tokens after a chunk that the encoder reads

    @model_validator(mode="after")
    def _heads_divide(self) -> "EncoderConfig":
        if self.width % self.heads or self.width % 2:
            raise ValueError(f"expected an even width that {self.heads} heads divide, got {self.width}")
        return self


class DiTConfig(_Settings):
    """The flow's velocity estimator. Defaults are the released values."""

    width: Count = 512
    heads: Count = 8
    head_dim: Count = 64
    depth: LayerCount = 16
    mlp_ratio: Annotated[float, Field(gt=0)] = 4.0


class FrontConfig(_Settings):
    """The part of a flow that does not depend on the estimator. Defaults are the released values."""

    vocab_size: Count = 6561
    n_mels: Count = 80
    speaker_dim: Count = 192
    cfg_rate: Annotated[float, Field(ge=0)] = 0.7
    encoder: EncoderConfig = EncoderConfig()


class FlowConfig(FrontConfig):
    """Speech tokens to mel frames: encoder and estimator. n_timesteps: solver steps that the weights are made for."""

    estimator: DiTConfig = DiTConfig()
    n_timesteps: Annotated[int, Field(ge=1, le=50)] = 10


class HiftConfig(_Settings):
    """Mel frames to samples. `base_channels` halves with each of the three upsampling stages."""

    n_mels: Count = 80
    base_channels: Annotated[int, Field(ge=8, multiple_of=8)] = 512
    f0_channels: Count = 512


class CampPlusConfig(_Settings):
    """The speaker encoder's sizes."""

    n_mels: Annotated[int, Field(ge=8, multiple_of=8)] = 80
    embedding: Count = 192
    growth: Count = 32
    bottleneck: Count = 4  # width inside a dense layer, in multiples of `growth`
    channels: Count = 128  # after the first convolution over time
    front_channels: Count = 32  # of the two-dimensional front end


class S3TokenizerConfig(_Settings):
    """The speech tokenizer's sizes; heads are always 64 wide."""

    n_mels: Count = 128
    width: Annotated[int, Field(ge=64, multiple_of=64)] = 1280
    n_layers: Count = 6
    # Published versions of the same network use different values for the first norm of a block: 1e-5 and 1e-6.
    first_norm_eps: float = 1e-5


class UNetConfig(_Settings):
    """Chatterbox's velocity estimator. Defaults are the released values.

    `in_channels` is the sum of the noisy mel, the encoder's mel and the prompt's mel, `out_channels` each, and the
    speaker vector.
    """

    in_channels: Count = 320
    out_channels: Count = 80
    channels: Count = 256
    heads: Count = 8
    head_dim: Count = 64
    blocks: Count = 4  # transformer blocks per stage
    mid_blocks: Count = 12  # stages between the two ends of the skip connection
    meanflow: bool = False  # distilled: estimates the mean velocity between two times

    @model_validator(mode="after")
    def _speaker_fits(self) -> "UNetConfig":
        if self.in_channels <= 3 * self.out_channels or self.in_channels % 2:
            expected = f"an even number of in_channels above 3 x {self.out_channels}"
            raise ValueError(f"expected {expected}, got {self.in_channels}")
        return self


class S3FlowConfig(FrontConfig):
    """Chatterbox's speech tokens to mel frames: the same encoder with a U-Net estimator."""

    estimator: UNetConfig = UNetConfig()

    @model_validator(mode="after")
    def _estimator_fits(self) -> "S3FlowConfig":
        got = self.estimator.in_channels, self.estimator.out_channels
        if got != (4 * self.n_mels, self.n_mels):
            raise ValueError(f"expected an estimator from {4 * self.n_mels} to {self.n_mels} channels, got {got}")
        return self


class S3GenConfig(_Settings):
    """All networks of Chatterbox's vocoder."""

    flow: S3FlowConfig = S3FlowConfig()
    vocoder: HiftConfig = HiftConfig()
    speaker_encoder: CampPlusConfig = CampPlusConfig()
    tokenizer: S3TokenizerConfig = S3TokenizerConfig()

    @model_validator(mode="after")
    def _sizes_match(self) -> "S3GenConfig":
        for what, expected, got in (
            ("mel bins of the vocoder", self.flow.n_mels, self.vocoder.n_mels),
            ("values of a speaker vector", self.flow.speaker_dim, self.speaker_encoder.embedding),
        ):
            if expected != got:
                raise ValueError(f"{what}: expected {expected}, got {got}")
        return self
