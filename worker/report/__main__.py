"""`python -m worker.report`: the compile report of a running worker, of a checkpoint's regions, or of any module.

Knows its command line, and prints. Exit status: 0 if all is well; 1 if the report tells of a problem; 2 if there is
nothing to report on.
"""

import argparse
import contextlib
import http.client
import importlib
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from models.errors import ModelError
from worker.report.compile_report import CompileReport, ReportError, write_report

URL = "http://127.0.0.1:22400"
TIMEOUT_S = 10.0
MAX_BYTES = 64 << 20
MODES = ("default", "reduce-overhead", "max-autotune")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker.report", description="What is compiled, how much faster it is, and whether it is right."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--url", default=URL, help="a running worker (default: %(default)s)")
    what.add_argument("--module", metavar="PKG.MOD:BUILD", help="a function that returns an nn.Module and its inputs")
    what.add_argument(
        "--model-path", metavar="DIR", help="a checkpoint or model id: build, tune and measure its regions here"
    )
    parser.add_argument("--mode", choices=MODES, default="default", help="of torch.compile (default: %(default)s)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--dynamic", dest="dynamic", action="store_true", default=None, help="one graph for all sizes")
    sizes.add_argument("--static", dest="dynamic", action="store_false", help="a graph for each size")
    parser.add_argument("--backend", default="inductor", help="of torch.compile, for --module (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:0 (default: a module's own, a GPU for a checkpoint)")
    parser.add_argument("--runs", type=_positive, metavar="N", help="timed calls each (default: 50; of regions 20)")
    parser.add_argument("--region", action="append", metavar="NAME", help="of a checkpoint, this one only; repeatable")
    parser.add_argument("--all-buckets", action="store_true", help="of a checkpoint, not only smallest and largest")
    parser.add_argument(
        "--max-sessions", type=_positive, metavar="N", help="of a checkpoint: slots (default: what fits)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        report = _report(args)
        print(report.table())
        if args.json:
            write_report(report, args.json)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {args.json}: expected a place for a file, got {error.strerror}", file=sys.stderr)
        return 2
    return 1 if report.problems() else 0


def _report(args: argparse.Namespace) -> CompileReport:
    if not (args.module or args.model_path):
        return fetch(args.url)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a foreign module prints is not part of the report
        return _of_module(args) if args.module else _of_regions(args)


def fetch(url: str) -> CompileReport:
    """The report of the worker at `url`. Raises: ReportError."""
    address = url.rstrip("/") + "/compile_report"
    expected = "a worker with a compile report"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            return CompileReport.from_json(answer.read(MAX_BYTES))
    except urllib.error.HTTPError as error:
        raise ReportError(address, expected=expected, got=f"{error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or error.reason
        raise ReportError(address, expected=expected, got=reason) from None
    except ReportError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ReportError(address, expected=expected, got=error) from None


def _of_module(args: argparse.Namespace) -> CompileReport:
    # Loading torch takes seconds that asking a worker need not take.
    from worker.report.module_report import module_report

    module, inputs = built(load(args.module))
    return module_report(
        module,
        inputs,
        name=type(module).__name__,
        mode=args.mode,
        dynamic=args.dynamic,
        backend=args.backend,
        runs=args.runs or 50,
        device=args.device,
    )


def _of_regions(args: argparse.Namespace) -> CompileReport:
    from worker.config.compile import CompileConfig
    from worker.config.session import EngineConfig
    from worker.report.start_report import compiled_report

    how: dict[str, Any] = {"enabled": True, "mode": args.mode}
    if args.dynamic is not None:
        how["dynamic"] = args.dynamic
    config = EngineConfig(
        model_path=args.model_path,
        device=args.device or "auto",
        max_sessions=args.max_sessions,
        compile=CompileConfig(**how),
    )
    buckets = "all" if args.all_buckets else "smallest+largest"
    return compiled_report(config, names=args.region, buckets=buckets, runs=args.runs or 20)


def load(name: str) -> Callable[[], Any]:
    """The function that `pkg.mod:build` names. Raises: ReportError."""
    place, _, function = name.partition(":")
    expected = "pkg.mod:build, a function in a module that can be imported"
    if not place or not function:
        raise ReportError("--module", expected=expected, got=repr(name))
    try:
        build = getattr(importlib.import_module(place), function, None)
    except Exception as error:  # of a file that nobody here knows
        raise ReportError(f"--module {name}", expected=expected, got=f"{type(error).__name__}: {error}") from None
    if not callable(build):
        raise ReportError(f"--module {name}", expected=expected, got=f"no function {function} in {place}")
    return build


def built(build: Callable[[], Any]) -> tuple[Any, Any]:
    """What it gives: a module and its inputs. Raises: ReportError."""
    from torch import nn

    name = f"{getattr(build, '__name__', 'build')}()"
    expected = "(module, inputs)"
    try:
        given = build()
    except Exception as error:
        raise ReportError(name, expected=expected, got=f"{type(error).__name__}: {error}") from error
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)):
        got = type(given).__name__
        if isinstance(given, tuple):
            got = f"({', '.join(type(one).__name__ for one in given)})"
        raise ReportError(name, expected=expected, got=got)
    return given


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
