"""The report's comparison, copies and repeated runs of values."""

import mmap
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from worker import version
from worker.report import measures

NAN, INF = float("nan"), float("inf")


@dataclass
class Output:
    logits: Tensor
    cache: tuple[Tensor, ...] = ()


class Named(NamedTuple):
    first: Tensor
    second: int


def nested(value: float = 1.0) -> dict[str, Any]:
    tensor = torch.full((2, 3), value)
    return {"a": Output(tensor, (tensor + 1,)), "b": [Named(tensor, 3), None, "text"], "c": OrderedDict(x=tensor)}


def test_copies_nested_tensors():
    value = nested()
    copied = measures.cloned(value)
    assert measures.is_identical(value, copied)
    for (path, one), (_, other) in zip(measures.leaves(value), measures.leaves(copied), strict=True):
        assert not isinstance(one, Tensor) or one.data_ptr() != other.data_ptr(), f"{path}: expected a copy"
    kinds = [type(copied["a"]), type(copied["b"][0]), type(copied["c"])]
    assert kinds == [Output, Named, OrderedDict], f"expected the same kinds, got {kinds}"


@pytest.mark.parametrize(
    ("eager", "compiled", "is_equal"),
    [
        (nested(), nested(), True),
        (nested(), nested(1.1), False),
        (torch.tensor([1.0, NAN, INF]), torch.tensor([1.0, NAN, INF]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([INF]), torch.tensor([-INF]), False),
        (torch.tensor([0.0]), torch.tensor([0.5e-6]), True),
        (torch.tensor([0.0]), torch.tensor([2e-5]), False),
        (torch.tensor([1e6]), torch.tensor([1e6 + 1]), True),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125]).bfloat16(), True),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([1.0625]).bfloat16(), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.ones(2), torch.ones(3), False),
        (torch.ones(2), torch.ones(2).double(), False),
        ((torch.ones(2),), (torch.ones(2), 1), False),
        ({"n": 3, "t": "x"}, {"n": 3, "t": "x"}, True),
        ({"n": 3}, {"n": 4}, False),
        (torch.empty(0), torch.empty(0), True),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), False),
    ],
)
def test_compares_within_limits(eager: Any, compiled: Any, is_equal: bool):
    found = measures.compare(eager, compiled)
    assert found.is_equal == is_equal, f"expected {is_equal}, got {found}"


def test_measures_differences():
    found = measures.compare(
        {"x": torch.tensor([3.0, 4.0]), "n": torch.tensor([1, 2, 3])},
        {"x": torch.tensor([3.0, 3.0]), "n": torch.tensor([1, 0, 0])},
    )
    assert (found.mae, found.max_abs, found.relative) == pytest.approx((0.5, 1.0, 0.2))
    assert (found.n_unequal, found.dtype) == (2, "float32")
    shapes = measures.compare(torch.ones(2), torch.ones(3))
    assert shapes.note == "output: [2] float32 eager, [3] float32 compiled", f"got {shapes.note}"


def test_identical_compares_every_bit():
    assert measures.is_identical(torch.tensor([NAN]), torch.tensor([NAN]))
    assert not measures.is_identical(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not measures.is_identical((torch.ones(1),), (torch.ones(1), torch.ones(1)))


def test_repeats_distinguishes_seeded_and_unseeded_runs():
    count = [0]

    def counted() -> Tensor:
        count[0] += 1
        return torch.tensor(count[0])

    got = [measures.repeats(run, 3) for run in (lambda: torch.ones(2), lambda: torch.rand(2), counted)]
    assert got == ["yes", "per seed", "no"]


def test_preserves_the_callers_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measures.repeats(lambda: torch.rand(4), 2)
    measures.seeded(lambda: torch.rand(4))
    assert torch.equal(torch.rand(3), expected)


def test_header_has_the_gpus_driver_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    values = {"memory_allocated": 1, "memory_reserved": 2, "max_memory_allocated": 3, "mem_get_info": (4, 9)}
    for name, value in {**values, "get_device_name": "card", "get_allocator_backend": "native"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(measures, "mapped_bytes", lambda device: 10)
    monkeypatch.setattr(version, "DRIVER_FILE", tmp_path / "none")
    monkeypatch.setattr(version.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="580.65.06\n580.65.06\n"))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    header = measures.header("it", torch.device("cuda"), {})
    assert (header.device, header.driver) == ("cuda (card)", "580.65.06")
    assert header.memory == {"allocated": 11, "reserved": 12, "peak": 13, "free": 4}
    assert header.allocator == "native PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_cpu_memory_is_growth():
    memory = measures.PeakMemory(torch.device("cpu"))
    kept: list[mmap.mmap] = []

    def fill() -> None:  # a mapping of its own: the C library may serve a tensor from memory that is resident already
        kept.append(mmap.mmap(-1, 256 << 20))
        np.frombuffer(kept[0], np.uint8)[:] = 1

    grown = memory.of(fill)
    assert memory.kind == "resident growth"
    assert 200e6 < memory.both(1, grown).compiled_bytes < 400e6, f"expected about 268 MB, got {grown}"
    assert memory.of(kept.clear) == 0, "expected no growth where memory is given back"
