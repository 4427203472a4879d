"""Engine settings as named toggles: one setting each on top of eager float32, and all together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from models.graphs.compiler import reset_compiler
from worker.assembly.backend_flags import apply_backend_flags, reset_backend_flags
from worker.config.compile import CompileConfig


@dataclass(frozen=True)
class Toggle:
    """Settings of one row.

    Attributes:
        bf16: weights and activations of the language models or of the flow.
        compiled: layers compile.
        graphs: regions are captured as CUDA graphs.
        kernels: the project's own kernels instead of compiled layers, for networks that have some: the language models
            of Qwen3-TTS, and S3Gen's HiFT if its other components compile.
        mode: of torch.compile.
    """

    bf16: bool = False
    tf32: bool = False
    cudnn_benchmark: bool = False
    attention: Literal["auto", "flash", "sdpa", "eager"] = "auto"
    compiled: bool = False
    graphs: bool = False
    kernels: bool = False
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def needs_gpu(self) -> bool:
        return self.graphs or self.kernels or self.mode != "default"


ALL = Toggle(bf16=True, tf32=True, cudnn_benchmark=True, compiled=True, graphs=True)
# The form that serves Qwen3-TTS (`worker.speech.parts`): its language models on kernels, all regions captured.
SERVED = Toggle(bf16=True, tf32=True, graphs=True, kernels=True)
# The form that serves S3Gen (`worker.conversion.converter`): HiFT on kernels, other components compiled, all captured.
S3GEN_SERVED = replace(ALL, kernels=True)
TOGGLES = {
    "eager": Toggle(),
    "all": ALL,
    "kernels": SERVED,
    "kernels_compile": replace(SERVED, compiled=True),  # the codec on compiled layers; all of S3Gen but HiFT
    "tf32": Toggle(tf32=True),
    "cudnn_benchmark": Toggle(cudnn_benchmark=True),
    "attention_flash": Toggle(bf16=True, attention="flash"),
    "attention_eager": Toggle(bf16=True, attention="eager"),
    "bf16": Toggle(bf16=True),
    "graphs": Toggle(bf16=True, graphs=True),
    "compile": Toggle(bf16=True, compiled=True),
    "reduce_overhead": Toggle(bf16=True, compiled=True, mode="reduce-overhead"),
}


@contextmanager
def in_force(toggle: Toggle, device: torch.device) -> Iterator[None]:
    """Backend flags of the toggle, and a fresh compiler."""
    reset_compiler()
    reset_backend_flags()
    flags = CompileConfig(tf32=toggle.tf32, cudnn_benchmark=toggle.cudnn_benchmark, attention=toggle.attention)
    apply_backend_flags(flags, device)
    try:
        yield
    finally:
        reset_backend_flags()
        if device.type == "cuda":
            torch.cuda.empty_cache()
