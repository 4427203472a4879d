"""What the benchmarks of the engine say of compiling on their command lines."""

import argparse

from worker.compile_config import TARGETS, CompileConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compile", action="store_true", help="under torch.compile")
    parser.add_argument("--dynamic", action="store_true", help="with --compile: one graph for all sizes")
    parser.add_argument("--graphs", action="store_true", help="replay CUDA graphs, compiled or not")


def compile_config(options: argparse.Namespace) -> CompileConfig:
    """Compiling and capturing are chosen one by one here, so that each can be measured."""
    return CompileConfig(
        enabled=options.compile or options.graphs,
        targets=TARGETS if options.compile else (),
        dynamic=options.dynamic,
        cuda_graphs="on" if options.graphs else "off",
    )
