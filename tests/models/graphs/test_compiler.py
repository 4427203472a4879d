"""Access to torch's compiler: nothing is counted, paused or reset before it is imported."""

from contextlib import nullcontext
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch import nn

from models.graphs import compiler
from models.layers.weights import on_meta


@pytest.fixture(autouse=True)
def _loaded() -> None:
    """Import the compiler: not at collection, which all processes do and which this would double."""
    import_module("torch._dynamo")


def test_compiler_that_is_not_loaded_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(compiler.sys.modules, "torch._dynamo")
    with mock.patch.object(torch._dynamo, "reset") as reset:
        assert not compiler.is_loaded()
        assert compiler.counters()["stats"]["unique_graphs"] == 0
        assert isinstance(compiler.force_eager(), nullcontext)
        compiler.reset_compiler()
    assert not reset.called


def test_counters_of_a_loaded_compiler() -> None:
    assert compiler.is_loaded() and compiler.counters() is torch._dynamo.utils.counters
    run = torch.compile(lambda x: x + 1, backend="eager")
    before = compiler.counters()["stats"]["unique_graphs"]
    with compiler.force_eager():
        run(torch.ones(3))
    assert compiler.counters()["stats"]["unique_graphs"] == before, "expected eager execution"
    run(torch.ones(3))
    assert compiler.counters()["stats"]["unique_graphs"] == before + 1


def test_modules_on_meta_are_not_initialized() -> None:
    with on_meta():
        module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    assert all(tensor.is_meta for tensor in module.parameters())
    assert [tuple(tensor.shape) for tensor in module.parameters()] == [(5, 3), (2, 3), (2,), (2,), (2,)]
    assert nn.LayerNorm(2).weight.tolist() == [1, 1], "expected initialized values after the context"
