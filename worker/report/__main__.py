"""`python -m worker.report`: prints the compile report of a running worker, a checkpoint's regions, or any module.

Exit status: 0 without problems; 1 if the report has problems; 2 if there is no report.
"""

import argparse
import contextlib
import http.client
import importlib
import io
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from models.errors import ModelError
from worker.report.compile_report import CompileReport, ReportError, write_report

URL = "http://127.0.0.1:22400"
TIMEOUT_S = 10.0
MAX_BYTES = 64 << 20
MODES = ("default", "reduce-overhead", "max-autotune")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker.report",
        description="Reports compilation, speed-up and equality with eager mode.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--url", default=URL, help="a running worker (default: %(default)s)")
    what.add_argument("--module", metavar="PKG.MOD:BUILD", help="a function that returns an nn.Module and its inputs")
    what.add_argument(
        "--model-path", metavar="DIR", help="a checkpoint or model id: build, compile and measure its regions"
    )
    parser.add_argument("--mode", choices=MODES, default="default", help="mode of torch.compile (default: %(default)s)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--dynamic", dest="dynamic", action="store_true", default=None, help="one graph for all sizes")
    sizes.add_argument("--static", dest="dynamic", action="store_false", help="a graph for each size")
    parser.add_argument("--backend", default="inductor", help="backend, for --module (default: %(default)s)")
    parser.add_argument("--device", help="cpu, cuda or cuda:0 (default: the module's; for a checkpoint the GPU)")
    parser.add_argument("--runs", type=_positive, metavar="N", help="timed calls (default: 50; for regions 20)")
    parser.add_argument("--region", action="append", metavar="NAME", help="measure this region only; repeatable")
    parser.add_argument("--all-buckets", action="store_true", help="measure all buckets, not only smallest and largest")
    parser.add_argument(
        "--max-sessions", type=_positive, metavar="N", help="of a checkpoint: slots (default: what fits)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
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
        print(f"error: {args.json}: expected a writable file, got {error.strerror}", file=sys.stderr)
        return 2
    return 1 if report.problems() else 0


def _report(args: argparse.Namespace) -> CompileReport:
    if not (args.module or args.model_path):
        return fetch(args.url)
    with contextlib.redirect_stdout(sys.stderr):  # output of the measured module is not part of the report
        return _of_module(args) if args.module else _of_regions(args)


def fetch(url: str) -> CompileReport:
    """The report of the worker at `url`. Raises: ReportError."""
    address = url.rstrip("/") + "/compile_report"
    expected = "a worker with a compile report"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:  # noqa: S310
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
    # Imported here, because reading a worker's report does not need torch.
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
    from worker.report.region_report import Buckets
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
    buckets: Buckets = "all" if args.all_buckets else "smallest+largest"
    return compiled_report(config, names=args.region, buckets=buckets, runs=args.runs or 20)


def load(name: str) -> Callable[[], Any]:
    """The function that `pkg.mod:build` names. Raises: ReportError."""
    place, _, function = name.partition(":")
    expected = "pkg.mod:build, a function in a module that can be imported"
    if not place or not function:
        raise ReportError("--module", expected=expected, got=repr(name))
    try:
        build = getattr(importlib.import_module(place), function, None)
    except Exception as error:  # of any file
        raise ReportError(f"--module {name}", expected=expected, got=f"{type(error).__name__}: {error}") from None
    if not callable(build):
        raise ReportError(f"--module {name}", expected=expected, got=f"no function {function} in {place}")
    return cast(Callable[[], Any], build)


def built(build: Callable[[], Any]) -> tuple[Any, Any]:
    """The module and inputs that a build function returns. Raises: ReportError."""
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
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
