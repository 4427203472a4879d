"""Compiles the project's kernels for other GPUs, without a device: registers, stack and shared memory.

`python -m benchmarks.kernels.targets` compiles every kernel for every target, with the tiles and options that the code
chooses there; a kernel that does not compile, or needs more shared memory than a target has, is an error. A stack has
the registers that did not fit. Sizes are the released ones. Of the kernels of quantised weights, those of pairs are
those of the language model's layers on targets that have them, and of words on the others; the rest multiply weights of
other sizes. All other kernels are those that `launches` records.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernels.launches import GROUPS, compiling_for, launches
from models.checkpoint.precision import Kind
from models.checkpoint.quantized import KINDS, QuantizedMatrix
from models.kernels import paired_gemm, quantized_gemm, word_gemm
from models.kernels.paired_gemm import paired_tiles
from models.kernels.quantized_gemm import dequantize_tiles, many_tiles, quantized_tiles
from models.kernels.word_gemm import word_tiles

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # of a program, by compute capability
QUANTISED = ("pairs", "gated pairs", "words", "gated words", "few", "gated", "many", "dequantize")
KERNELS = (*QUANTISED, *GROUPS)
PAIR_TARGETS = (90,)
GATE_UP, DOWN = (24576, 4096), (4096, 12288)
SHAPES = {name: GATE_UP if "gated" in name else DOWN for name in QUANTISED} | {"many": (4096, 4096)}  # N, K
FEW_ROWS, WORD_ROWS, PAIR_ROWS = (1, 64), (1, 16, 32, 64), (1, 8, 16, 32, 64)
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


class TargetKernel(NamedTuple):
    """A kernel with its constants. signature: types of its other arguments."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    signature: dict[str, str]
    warps: int
    stages: int


class KernelReport(NamedTuple):
    """What is printed of a kernel. kernel: its id, or the line of one that does not compile."""

    line: str
    fits: bool
    kernel: int | str


def cases(kernel: str, kind: Kind, capability: int) -> Iterator[TargetKernel]:
    """The cases of one kernel: for few rows one for each number of rows."""
    N, K = SHAPES[kernel]
    weight = _matrix(N, K, kind)
    is_int4 = kind == "int4"
    types = {"x": "*bf16", "values": "*i8" if kind == "int8" else "*u8", "M": "i32", "N": "i32", "K": "i32"}
    types |= {"scale": "*fp16", "zeros": "*u8"} if is_int4 else {"scale": "*fp32", "zeros": "*fp32"}
    common = {"INT4": is_int4, "PRECISION": "tf32"}
    stored = weight.values.shape[1]
    if kernel == "many":
        tiles = many_tiles(weight)
        n_tiles, is_split = stored // tiles.splits // tiles.inner, tiles.splits > 1
        constants = {"BM": tiles.rows, "BN": tiles.columns, "BK": tiles.inner, "TILES": n_tiles}
        signature = {**types, "bias": "*bf16", "out": "*fp32" if is_split else "*bf16"}
        yield TargetKernel(
            f"many {kind}", quantized_gemm._many_kernel,
            {**constants, **common, "BIAS": not is_split}, signature, tiles.warps, tiles.stages,
        )  # fmt: skip
        return
    if kernel == "dequantize":
        signature = {name: types[name] for name in ("values", "scale", "zeros", "N", "K")} | {"out": "*bf16"}
        rows, columns = dequantize_tiles(weight)
        constants = {"BN": rows, "BK": columns, "INT4": is_int4}
        yield TargetKernel(f"dequantize {kind}", quantized_gemm._dequantize_kernel, constants, signature, 4, 3)
        return
    if kernel.endswith("pairs"):
        if capability in PAIR_TARGETS:
            yield from _pair_cases(weight, kernel, types)
        return
    if kernel.endswith("words"):
        yield from _word_cases(weight, kernel, types, common, capability)
        return
    gated = kernel == "gated"
    plan = quantized_tiles(weight)
    for rows in FEW_ROWS:
        constants = {
            "BN": plan.rows, "BM": max(16, rows), "BK": plan.columns,
            "TILES": stored // plan.splits // plan.columns, "GATED": gated, "PDL": capability >= 90,
            "EARLY": False,
        }  # fmt: skip
        signature = {**types, "out": "*bf16" if gated else "*fp32", "ROWS": "i32", "x_stride": "i32"}
        yield TargetKernel(
            f"{kernel} {kind}, {rows} rows", quantized_gemm._few_kernel, {**constants, **common}, signature,
            plan.warps, plan.stages,
        )  # fmt: skip


def _word_cases(
    weight: QuantizedMatrix, kernel: str, types: dict[str, str], common: dict[str, Any], capability: int
) -> Iterator[TargetKernel]:
    gated = kernel == "gated words"
    common = {**common, "PDL": capability >= 90, "EARLY": False}
    for rows in WORD_ROWS:
        plan = word_tiles(weight, rows, gated=gated)
        assert plan is not None, f"{weight.shape}: expected a weight that is read as words"
        constants = {"BN": plan.rows, "BM": 8 if rows <= 8 else rows, "BK": plan.words, "STAGES": plan.stages}
        constants |= {"FP8": weight.kind == "fp8", "GATED": gated, **common}
        signature = {
            **types,
            "x_words": "*i64",
            "values": "*i32",
            "zeros": "*i32",
            "out": "*bf16" if gated else "*fp32",
        }
        signature |= {"scale": "*i32" if common["INT4"] else "*fp32"}
        signature |= dict.fromkeys(("ROWS", "x_stride", "TILES"), "i32")
        name = f"{kernel} {weight.kind}, {rows} rows"
        yield TargetKernel(name, word_gemm.word_kernel, constants, signature, plan.warps, plan.stages)


def _pair_cases(weight: QuantizedMatrix, kernel: str, types: dict[str, str]) -> Iterator[TargetKernel]:
    gated, is_int4, is_fp8 = kernel == "gated pairs", weight.kind == "int4", weight.kind == "fp8"
    values = {"int8": "*i8", "int4": "*u8", "fp8": "*fp8e4nv"}[weight.kind]
    signature = {**types, "x": "*fp8e4nv" if is_fp8 else "*i8", "values": values, "out": "*bf16" if gated else "*fp32"}
    signature |= {"steps": "*fp32", "sums": "*i32", "ROWS": "i32", "TILES": "i32"}
    signature |= {"scale": "*i32", "zeros": "*i32"} if is_int4 else {}
    for rows in PAIR_ROWS:
        plan = paired_tiles(weight, rows, gated=gated)
        constants = {
            "BN": plan.rows, "BM": max(8 if is_fp8 else 4, rows), "STAGES": plan.stages, "FP8": is_fp8,
            "INT4": is_int4, "GATED": gated, "INTERPRETED": False, "PDL": True,
        }  # fmt: skip
        name = f"{kernel} {weight.kind}, {rows} rows"
        yield TargetKernel(name, paired_gemm.paired_kernel, constants, signature, plan.warps, plan.stages)


def _compile(case: TargetKernel, capability: int) -> Any:
    """Raises: what Triton or the assembler raise."""
    names = list(case.kernel.arg_names)
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in case.signature if name not in ("M", "TILES")}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _usage(code: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread, as the assembler's tool prints them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = USAGE.search(printed)
    assert found is not None, f"expected registers and stack, got {printed}"
    return int(found[1]), int(found[2])


def _matrix(N: int, K: int, kind: Kind) -> QuantizedMatrix:
    """A matrix without data."""
    with torch.device("meta"):
        if kind == "int4":
            values = torch.empty(N, K // 2, dtype=torch.uint8)
            zeros = torch.empty(K // 128, N, dtype=torch.uint8)
            return QuantizedMatrix(values, torch.empty(K // 128, N, dtype=torch.float16), zeros)
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        return QuantizedMatrix(torch.empty(N, K, dtype=dtype), torch.empty(N))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.targets", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--targets", nargs="+", type=int, choices=SHARED_BYTES, default=list(SHARED_BYTES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--names", default="", metavar="TEXT", help="only kernels whose printed name contains it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: as many as cores")
    args = parser.parse_args(argv)
    parts = [(kernel, capability, args.kinds, args.names) for capability in args.targets for kernel in args.kernels]
    print(f"{'kernel':64}{'target':>8}{'registers':>11}{'stack':>8}{'code':>10}{'shared':>10}{'s':>8}")
    n_kernels = n_failed = 0
    with ExitStack() as stack:
        each: Callable[..., Iterable[list[KernelReport]]] = map
        if args.jobs > 1:
            context = get_context("spawn")  # torch has threads, which a forked process would lack
            each = stack.enter_context(ProcessPoolExecutor(args.jobs, mp_context=context)).map
        for results in each(_results, parts):
            n_kernels += len(results)
            n_failed += sum(not one.fits for one in results)
            for one in results:
                print(one.line, flush=True)
    print(f"{n_kernels} kernels, {n_failed} failed")
    return 1 if n_failed else 0


def _results(part: tuple[str, int, list[Kind], str]) -> list[KernelReport]:
    """The results of one entry of KERNELS on one target."""
    kernel, capability, kinds, text = part
    if kernel not in GROUPS:
        named = [case for kind in kinds for case in cases(kernel, kind, capability) if text in case.name]
        return [_result(case.name, capability, partial(_compile, case, capability)) for case in named]
    # Launches with the same types and constants have the same kernel, and its first result counts.
    results: dict[int | str, KernelReport] = {}
    with compiling_for(capability):
        for one in launches(kernel, capability, SHARED_BYTES[capability]):
            if text in one.name:
                result = _result(one.name, capability, one.compile)
                results.setdefault(result.kernel, result)
    return list(results.values())


def _result(name: str, capability: int, compile_kernel: Callable[[], Any]) -> KernelReport:
    start = time.perf_counter()
    label = f"{name:64}{f'sm_{capability}':>8}"
    try:
        found = compile_kernel()
        registers, stack = _usage(found.asm["cubin"])
    except Exception as error:  # of the compiler or the assembler: reported, and the others still compile
        line = f"{label} {type(error).__name__}: {str(error)[-300:]}"
        return KernelReport(line, False, line)
    shared = found.metadata.shared
    fits = shared <= SHARED_BYTES[capability]
    figures = f"{registers:>11}{stack:>8}{len(found.asm['cubin']):>10}{shared:>10}{time.perf_counter() - start:>8.1f}"
    expected = "" if fits else f"  expected at most {SHARED_BYTES[capability]} bytes"
    return KernelReport(f"{label}{figures}{expected}", fits, id(found))


if __name__ == "__main__":
    sys.exit(main())
