"""Times our GPU kernels, individually and in whole regions, next to the operations they replace.

`python -m benchmarks.kernels --help` lists the options; README.md contains the results. All sizes are those of the
released model, in bfloat16, with random weights. Contains parts, budget and table; the other modules contain the cases.
"""

import argparse
import gc
import os
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.kernels.timing import Case, Meter
from worker.assembly.backend_flags import reset_backend_flags

BUDGET_S = 300.0
MAX_ERROR_LEN = 300  # characters of an error message in the result


class Part(NamedTuple):
    """A part: module and function of its cases, and the format of each figure."""

    module: str
    cases: str
    columns: dict[str, str]


PRODUCTS = {"ours_us": ".1f", "library_us": ".1f", "gb_per_s": ".0f", "library_gb_per_s": ".0f", "error": ".1e"}
QUANTIZED = {
    "bf16_us": ".1f",
    **{
        f"{kind}_{name}": form
        for kind in ("fp8", "int8", "int4")
        for name, form in (("us", ".1f"), ("gb_per_s", ".0f"))
    },
    "fp8_tiles": "",
    "int4_tiles": "",
    "error": ".1e",
}
ATTENTION = {
    "ours_us": ".1f",
    "pages_us": ".1f",
    "sdpa_us": ".1f",
    "flex_us": ".1f",
    "gb_per_s": ".0f",
    "error": ".1e",
    "pages_error": ".1e",
}
# In the order of a run: the cases that matter least come last.
PARTS = {
    "regions": Part("regions", "cases", {"p50_ms": ".3f", "p95_ms": ".3f", "kernels": "d", "busy_ms": ".3f"}),
    "products": Part("products", "cases", PRODUCTS),
    "precision": Part("precision", "region_cases", {"p50_ms": ".3f", "p95_ms": ".3f", "kernels": "d", "gb": ".2f"}),
    "quantized": Part("quantized", "product_cases", QUANTIZED),
    "rows": Part("rows", "row_cases", {"ours_us": ".2f", "plain_us": ".2f", "error": ".1e"}),
    "codes": Part("rows", "speech_token_cases", {"ours_us": ".1f", "plain_us": ".1f", "same_codes": ""}),
    "tokens": Part("rows", "token_cases", {"ours_us": ".1f", "plain_us": ".1f", "same_tokens": ""}),
    "attention": Part("attention", "cases", ATTENTION),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Times the GPU kernels.")
    parser.add_argument("--parts", type=_names, default=tuple(PARTS), help=f"some of {','.join(PARTS)}, in this order")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument(
        "--tiny", action="store_true", help="with --device cpu: check that every part runs, at tiny sizes"
    )
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="start no further row after this many seconds")
    parser.add_argument("--json", type=Path, help="write all results to this file, after each row")
    options = parser.parse_args(arguments)
    if not options.parts or set(options.parts) - PARTS.keys():
        parser.error(f"--parts: expected some of {','.join(PARTS)}, got {','.join(options.parts)}")
    if options.tiny != (options.device == "cpu"):
        parser.error(
            "expected --device cuda, or --device cpu --tiny (each kernel once in Triton's interpreter, untimed)"
        )
    if options.device == "cuda" and not has_cuda:
        parser.error("expected a GPU, got none; --device cpu --tiny runs each kernel once in Triton's interpreter")
    if find_spec("triton") is None:
        parser.error("Triton: expected an installed package (part of the GPU builds of torch), got none")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


class KernelBench:
    """One run: its rows and its remaining time."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self._started_at = time.monotonic()
        self.options = options
        self.meter = Meter(torch.device(options.device), is_tiny=options.tiny)
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.meter.device),
            "settings": {"dtype": str(self.meter.dtype).removeprefix("torch."), "budget_s": options.budget_s},
            "rows": [],
            "left_out": [],
        }

    def run(self) -> dict[str, Any]:
        for name in self.options.parts:
            part = PARTS[name]
            print(f"{name:74}" + "".join(f"{column:>17}" for column in part.columns), flush=True)
            reset_backend_flags()  # errors are relative to float32
            try:
                self._run_part(name, part)
            except Exception as error:  # in the setup that the part's cases share; the other parts still run
                self._add({"part": name, "name": "", "sizes": {}, "error": _error_text(error)})
            self._clear()
        self._save()
        if self.result["left_out"]:
            print(f"left out after {self.options.budget_s:g} s: {'; '.join(self.result['left_out'])}")
        print(f"total {self.result['wall_s']:.1f} s")
        return self.result

    @torch.no_grad()
    def _run_part(self, name: str, part: Part) -> None:
        # Imported late: kernels need Triton, and TRITON_INTERPRET must be set before they are imported.
        cases = getattr(import_module(f"benchmarks.kernels.{part.module}"), part.cases)
        if self._is_over():
            self.result["left_out"].append(name)
            return
        for case in cases(self.meter):
            if self._is_over():
                self.result["left_out"].append(_case_label(name, case))
                continue
            start = time.monotonic()
            row = {"part": name, "name": case.name, "sizes": case.sizes}
            try:
                row["figures"] = case.run()
            except Exception as error:  # a failure is recorded as a row, and the run continues
                row["error"] = _error_text(error)
            self._add({**row, "seconds": time.monotonic() - start})

    def _is_over(self) -> bool:
        return time.monotonic() - self._started_at > self.options.budget_s

    def _add(self, row: report.Row) -> None:
        self.result["rows"].append(row)
        self._save()
        print(format_row(row), flush=True)

    def _clear(self) -> None:
        """Free the weights and the compiled code of the last part."""
        gc.collect()
        if self.meter.is_cuda:
            torch.compiler.reset()
            torch.cuda.empty_cache()

    def _save(self) -> None:
        self.result["wall_s"] = time.monotonic() - self._started_at
        self.result["peak_memory"] = report.peak_memory(self.meter.device)
        if self.options.json is not None:
            report.write_json(self.options.json, self.result)


def format_row(row: report.Row) -> str:
    """A row of the part's table; figures that were not measured are dashes."""
    sizes = " ".join(f"{key}={value}" for key, value in row["sizes"].items())
    head = f"{row['name']:20} {sizes:53}"
    if "error" in row:
        return f"{head} failed: {row['error']}"
    figures = row["figures"]
    return head + "".join(
        f"{'-' if figures.get(column) is None else format(figures[column], form):>17}"
        for column, form in PARTS[row["part"]].columns.items()
    )


def _case_label(part: str, case: Case) -> str:
    return " ".join([part, case.name, *(f"{key}={value}" for key, value in case.sizes.items())])


def _error_text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_LEN]


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    KernelBench(options, ["python", "-m", "benchmarks.kernels", *arguments]).run()


if __name__ == "__main__":
    main()
