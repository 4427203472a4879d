"""Compiles the kernels of quantised weights for other GPUs, without a device: code size and shared memory.

`python -m benchmarks.kernels.targets` compiles every kernel for every target; a kernel that does not compile, or needs
more shared memory than a target has, is an error. Sizes of tiles are those of the released language model.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before Triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from models.checkpoint.precision import Kind
from models.checkpoint.quantized import KINDS, QuantizedMatrix
from models.kernels import quantized_gemm
from models.kernels.quantized_gemm import many_tiles, quantized_tiles

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # of a program, by compute capability
KERNELS = ("few", "gated", "many")
SHAPES = {"few": (4096, 12288), "gated": (24576, 4096), "many": (4096, 4096)}  # N, K
FEW_ROWS, MANY_ROWS = (1, 64), 512


class TargetKernel(NamedTuple):
    """A kernel with its constants. signature: types of its other arguments."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    signature: dict[str, str]
    warps: int
    stages: int


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
        tiles = many_tiles(MANY_ROWS, weight)
        constants = {"BM": tiles.rows, "BN": tiles.columns, "BK": tiles.inner, "TILES": stored // tiles.inner}
        signature = {**types, "bias": "*bf16", "out": "*bf16"}
        yield TargetKernel(
            f"many {kind}", quantized_gemm._many_kernel, {**constants, **common, "BIAS": True}, signature,
            tiles.warps, tiles.stages,
        )  # fmt: skip
        return
    gated = kernel == "gated"
    plan = quantized_tiles(weight)
    for rows in FEW_ROWS:
        constants = {
            "BN": plan.rows, "BM": max(16, rows), "BK": plan.columns,
            "TILES": stored // plan.splits // plan.columns, "GATED": gated, "PDL": capability >= 90,
        }  # fmt: skip
        signature = {**types, "out": "*bf16" if gated else "*fp32", "ROWS": "i32", "x_stride": "i32"}
        yield TargetKernel(
            f"{kernel} {kind}, {rows} rows", quantized_gemm._few_kernel, {**constants, **common}, signature,
            plan.warps, plan.stages,
        )  # fmt: skip


def compiled(case: TargetKernel, capability: int) -> dict[str, int]:
    """Bytes of machine code and of shared memory. Raises: what Triton or the assembler raise."""
    names = list(case.kernel.arg_names)
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in case.signature if name != "M"}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"code_bytes": len(found.asm["cubin"]), "shared_bytes": found.metadata.shared}


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
    args = parser.parse_args(argv)
    n_failed = 0
    print(f"{'kernel':24}{'target':>8}{'code':>10}{'shared':>10}{'s':>8}")
    for capability in args.targets:
        for kernel in args.kernels:
            for kind in args.kinds:
                for case in cases(kernel, kind, capability):
                    n_failed += not _report(case, capability)
    return 1 if n_failed else 0


def _report(case: TargetKernel, capability: int) -> bool:
    start = time.perf_counter()
    label = f"{case.name:24}{f'sm_{capability}':>8}"
    try:
        found = compiled(case, capability)
    except Exception as error:  # of the compiler or the assembler: reported, and the others still compile
        print(f"{label} {type(error).__name__}: {str(error)[-300:]}")
        return False
    fits = found["shared_bytes"] <= SHARED_BYTES[capability]
    figures = f"{found['code_bytes']:>10}{found['shared_bytes']:>10}{time.perf_counter() - start:>8.1f}"
    print(label + figures + ("" if fits else f"  expected at most {SHARED_BYTES[capability]} bytes"))
    return fits


if __name__ == "__main__":
    sys.exit(main())
