"""Command line of the model benchmark, as typed settings. Loads no model."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from models.stages.region_table import Shapes

CONFIGS = {"tiny": Path("assets/tiny"), "real": Path("tests/data/released_config.json")}
MODES = ("eager", "compiled", "by_layer", "graph")


@dataclass(frozen=True)
class BenchSettings:
    """What to run; see `--help`."""

    config: Path
    device: torch.device
    dtype: torch.dtype
    regions: tuple[str, ...] | None
    modes: tuple[str, ...] | None
    sizes: dict[str, tuple[int, ...]]
    repeats: int
    budget_s: float
    backend: str
    json: Path | None
    tf32: bool
    kernels: bool


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in _names(text)}))


def _axis(text: str) -> tuple[str, tuple[int, ...]]:
    axis, _, sizes = text.partition("=")
    if axis not in {field.name for field in fields(Shapes)} or not sizes:
        raise argparse.ArgumentTypeError(f"expected AXIS=N,N with AXIS a field of Shapes, got {text}")
    return axis, _sizes(sizes)


def parse(arguments: list[str]) -> BenchSettings:
    """Parse the command line. Invalid arguments end the process with a message."""
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model", description="Times every region of the model.")
    parser.add_argument(
        "--config", default="tiny", help="tiny, real, a checkpoint folder, or a config.json for random weights"
    )
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on cuda, float32 on cpu")
    parser.add_argument("--regions", type=_names, help="comma-separated; default: all, the most important first")
    parser.add_argument("--modes", type=_names, help=f"some of {','.join(MODES)}; default depends on size and device")
    parser.add_argument("--repeats", type=int, help="timed calls per mode; default: 30 on cuda, 10 on cpu")
    parser.add_argument("--batch", type=_sizes, help="short for --sizes batch=...")
    parser.add_argument("--sizes", type=_axis, nargs="+", default=[], metavar="AXIS=N,N", help="rows=16,96 kv=2048 ...")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no measurement after this many seconds"
    )
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    parser.add_argument("--json", type=Path, help="result file, rewritten after each timing")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in float32 products")
    parser.add_argument("--kernels", action="store_true", help="run layers by the project's GPU kernels")
    options = parser.parse_args(arguments)

    is_cuda = options.device == "cuda"
    if is_cuda and not has_cuda:
        parser.error("--device: expected a CUDA device, got none")
    for mode in options.modes or ():
        if mode not in MODES:
            parser.error(f"--modes: expected some of {', '.join(MODES)}, got {mode}")
        if mode == "graph" and not is_cuda:
            parser.error("--modes: graph needs --device cuda")
    if options.kernels and not is_cuda:
        parser.error("--kernels needs --device cuda")
    repeats = options.repeats or (30 if is_cuda else 10)
    if repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {repeats}")
    config = CONFIGS.get(options.config, Path(options.config))
    if not config.exists():
        parser.error(f"--config: expected a folder or file, got {config}, which does not exist")
    return BenchSettings(
        config=config,
        device=torch.device(options.device),
        dtype=getattr(torch, options.dtype or ("bfloat16" if is_cuda else "float32")),
        regions=options.regions,
        modes=options.modes,
        sizes=dict(options.sizes) | ({"batch": options.batch} if options.batch else {}),
        repeats=repeats,
        budget_s=options.budget_s,
        backend=options.backend,
        json=options.json,
        tf32=options.tf32,
        kernels=options.kernels,
    )
