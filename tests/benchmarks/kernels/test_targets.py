"""Kernels compile for other GPUs and fit, in a process without Triton's interpreter.

`python -m benchmarks.kernels.targets` compiles all of them.
"""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for GPUs, for hosts without one")
TALKER = "product gate and up 12288 x 2048"  # needs narrower tiles on sm_86 and sm_89


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (["80"], ["--kinds", "fp8", "--kernels", "many", "dequantize"]),
        (["86", "89"], ["--kernels", "products", "--names", TALKER]),
    ],
)
def test_kernels_compile_for_other_gpus(targets: list[str], options: list[str]) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.kernels.targets", "--jobs", "1", "--targets", *targets]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"expected it to compile, got {done.stdout}{done.stderr}"
    for target in targets:
        assert done.stdout.count(f"sm_{target}") == 2, f"sm_{target}: expected 2 kernels, got {done.stdout}"
