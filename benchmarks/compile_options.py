"""Compile settings of the benchmarks: command line flags, and named settings of the unit benchmark."""

import argparse
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from worker.config.compile import TARGETS, CompileConfig, Target

REFERENCE_TARGETS = ("vpm", "llm.model", "resampler", "tts.model")
MODEL_TARGETS = (*REFERENCE_TARGETS, "apm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="run under torch.compile")
    parser.add_argument("--dynamic", action="store_true", help="with --compile: one graph for all sizes")
    parser.add_argument("--graphs", action="store_true", help="replay CUDA graphs, compiled or not")


def compile_config(options: argparse.Namespace) -> CompileConfig:
    """Settings from the flags, which choose compilation and capture separately, so that each can be measured."""
    return CompileConfig(
        enabled=options.compile or options.graphs,
        targets=TARGETS if options.compile else (),
        dynamic=options.dynamic,
        cuda_graphs="on" if options.graphs else "off",
    )


@dataclass(frozen=True)
class Way:
    """One way to run the engine. what: description. compile: settings of `CompileConfig` that differ from the worker's
    defaults. steps: Euler steps of the flow.
    """

    what: str
    compile: dict[str, Any] = field(default_factory=dict)
    steps: int = 10

    def config(self, targets: Collection[Target] | None = None) -> CompileConfig:
        """The settings that this version of the worker has. targets: replace those of the way."""
        known = {name: value for name, value in self.compile.items() if name in CompileConfig.model_fields}
        given = {} if targets is None else {"targets": tuple(targets)}
        return CompileConfig(**{"enabled": True, **known, **given})


# In the order of a run, the most important first.
WAYS = {
    "ours": Way("the worker's defaults with compilation on"),
    "eager": Way("neither compiled nor captured", {"enabled": False, "kernels": "off"}),
    "reference": Way(
        "the public implementation's four targets, mode default, dynamic, no CUDA graphs",
        {"targets": REFERENCE_TARGETS, "mode": "default", "dynamic": True, "cuda_graphs": "off", "kernels": "off"},
    ),
    "inductor": Way(
        "Inductor's layers in our CUDA graphs, without our kernels", {"cuda_graphs": "on", "kernels": "off"}
    ),
    "reduce-overhead": Way(
        "torch.compile's mode and its CUDA graphs, without our kernels", {"mode": "reduce-overhead"}
    ),
    "no-tf32": Way("float32 products in float32", {"tf32": False}),
    "euler-5": Way("five Euler steps instead of ten", steps=5),
    "sdpa": Way("attention: all of PyTorch's kernels, without ours", {"attention": "sdpa"}),
    "cudnn-benchmark": Way("cuDNN tries its convolutions", {"cudnn_benchmark": True}),
    "flash": Way("attention: flash where it applies, else plain products; without our kernels", {"attention": "flash"}),
    "eager-attention": Way("attention: plain products, without our kernels", {"attention": "eager"}),
    "max-autotune": Way("torch.compile's mode and its CUDA graphs, without our kernels", {"mode": "max-autotune"}),
    "float32": Way("exact float32 products, without our kernels", {"tf32": False, "kernels": "off"}),
    # What is compiled of the vocoder is what `float32` has of it.
    "float32-kernels": Way(
        "exact float32 products, with our kernels; the vocoder eager", {"tf32": False, "targets": MODEL_TARGETS}
    ),
}
TOGGLES = tuple(name for name in WAYS if not name.startswith("float32"))  # those are for correctness
