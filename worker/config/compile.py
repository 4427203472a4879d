"""`service.compile`: what is compiled and how, and the backend flags. Torch-free."""

from typing import Literal, Self, get_args

from pydantic import Field

from worker.config.settings import Settings

Target = Literal["vpm", "llm.model", "resampler", "tts.model", "apm", "token2wav.flow", "token2wav.hift"]
TARGETS: tuple[Target, ...] = get_args(Target)
SpeechTarget = Literal["talker", "code_predictor", "codec"]
SPEECH_TARGETS: tuple[SpeechTarget, ...] = get_args(SpeechTarget)

S3Mode = Literal["off", "default", "reduce-overhead", "max-autotune"]


class S3CompileModes(Settings):
    """Mode of torch.compile of each component of S3Gen."""

    tokenizer: S3Mode = Field("default", description="mode of torch.compile of the S3 tokenizer's layers")
    speaker_encoder: S3Mode = Field("default", description="of CAMPPlus's layers")
    encoder: S3Mode = Field("default", description="of the upsampling conformer's layers")
    estimator: S3Mode = Field("default", description="of the U-Net's layers; no effect if the solve compiles")
    solve: S3Mode = Field("off", description="of all Euler steps as one graph; minutes for each bucket")
    f0: S3Mode = Field("default", description="of the pitch")
    hift: S3Mode = Field("default", description="of HiFT's activation; default: the project's kernels where they run")


class CompileConfig(Settings):
    """With `enabled` false the model runs eagerly, and of the other keys only `tf32`, `cudnn_benchmark` and `attention`
    have an effect, if they are given; see docs/compile.md.
    """

    enabled: bool | Literal["auto"] = Field(
        "auto", description="compile and capture at start; auto: on a GPU; false: plain eager"
    )
    targets: tuple[Target, ...] = Field(TARGETS, strict=False, description="parts to compile; the others run eagerly")
    speech_targets: tuple[SpeechTarget, ...] = Field(
        SPEECH_TARGETS,
        strict=False,
        description="parts of the speech model whose layers compile where kernels do not run",
    )
    mode: Literal["default", "reduce-overhead", "max-autotune"] = Field("default", description="mode of torch.compile")
    dynamic: bool = Field(True, description="true: one graph for all sizes; false: one per bucket")
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto", description="capture whole regions; auto: on a GPU, unless the mode captures graphs itself"
    )
    kernels: Literal["auto", "off"] = Field(
        "auto",
        description="the project's own GPU kernels in place of compiled layers; auto: on a GPU with Triton, in mode "
        "default and with attention auto",
    )
    voices: bool = Field(
        False, description="compile and capture the networks that prepare voices too, at start; they take 0.5 GB"
    )
    tf32: bool = Field(True, description="TF32 in float32 matrix products: tensor cores, 13 fewer mantissa bits")
    cudnn_benchmark: bool = Field(False, description="let cuDNN benchmark its convolutions at each new shape")
    attention: Literal["auto", "flash", "sdpa", "eager"] = Field(
        "auto",
        description="attention kernels; flash: PyTorch's flash kernels where they apply, not the package flash-attn; "
        "sdpa: all of PyTorch's; eager: plain matrix products",
    )

    def enabled_on(self, device_type: str) -> bool:
        """Whether a model on a device of this type, `cuda` or `cpu`, is compiled."""
        return device_type == "cuda" if self.enabled == "auto" else self.enabled

    @property
    def captures(self) -> bool:
        """Whether regions of a model on a GPU are captured."""
        return self.cuda_graphs == "on" or (self.cuda_graphs == "auto" and self.mode == "default")

    @property
    def allows_kernels(self) -> bool:
        """Whether the project's own kernels may run the layers of a model on a GPU, if compilation is on.

        Without CUDA graphs their hundreds of launches are slower than compiled layers.
        """
        has_defaults = self.mode == "default" and self.attention == "auto" and self.cuda_graphs != "off"
        return self.kernels == "auto" and has_defaults

    def resolved(self, device_type: str) -> Self:
        """These settings with `enabled` true or false, as `enabled_on` gives it."""
        return self.model_copy(update={"enabled": self.enabled_on(device_type)})
