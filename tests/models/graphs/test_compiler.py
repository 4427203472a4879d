"""torch's compiler while it is not there: nothing was counted, nothing has to be held back or forgotten."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import nn

from models.graphs import compiler
from models.layers.weights import on_meta


def test_what_is_not_loaded_has_counted_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(compiler.sys.modules, "torch._dynamo")
    with mock.patch.object(torch._dynamo, "reset") as reset:
        assert not compiler.is_loaded()
        assert compiler.counters()["stats"]["unique_graphs"] == 0
        assert isinstance(compiler.force_eager(), nullcontext)
        compiler.reset_compiler()
    assert not reset.called


def test_what_is_loaded_is_asked() -> None:
    assert compiler.is_loaded() and compiler.counters() is torch._dynamo.utils.counters
    run = torch.compile(lambda x: x + 1, backend="eager")
    before = compiler.counters()["stats"]["unique_graphs"]
    with compiler.force_eager():
        run(torch.ones(3))
    assert compiler.counters()["stats"]["unique_graphs"] == before, "expected it as it is written"
    run(torch.ones(3))
    assert compiler.counters()["stats"]["unique_graphs"] == before + 1


def test_modules_on_meta_have_shapes_alone() -> None:
    with on_meta():
        module = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2), nn.LayerNorm(2))
    assert all(tensor.is_meta for tensor in module.parameters())
    assert [tuple(tensor.shape) for tensor in module.parameters()] == [(5, 3), (2, 3), (2,), (2,), (2,)]
    assert nn.LayerNorm(2).weight.tolist() == [1, 1], "expected values again behind it"
