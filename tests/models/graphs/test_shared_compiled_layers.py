"""Shared functions: compiled on their own beside layers, once per shape, for all regions that call them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from models.errors import SettingsError
from models.graphs.captured import Bucket
from models.graphs.region_graphs import Region, RegionTable, compile_counters
from models.graphs.shape_table import ShapeTable
from models.graphs.shared_function import SharedFunction
from models.load import load_model
from models.sampling.settings import CHAT_TEXT
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Runner


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def middle(x: Tensor) -> Tensor:
    return x.sort(1).values[:, x.shape[1] // 2]


def shifted(function: SharedFunction, x: Tensor) -> Tensor:
    return function(x + 1)


def negated(function: SharedFunction, x: Tensor) -> Tensor:
    return -function(-x)


def untouched(x: Tensor) -> Tensor:
    return x + 1


class Table(RegionTable):
    """Two regions that call one shared function, and one that does not."""

    def __init__(self) -> None:
        self.function = SharedFunction(middle)

        def example(bucket: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
            return (torch.randn(bucket["batch"], 5),), {}

        axes, bound = {"batch": "batch"}, (self.function,)
        regions = [
            Region("shifted", "middle", shifted, bound, axes, example),
            Region("negated", "state, middle", negated, bound, axes, example),
            Region("untouched", "state", untouched, (), axes, example),
        ]
        super().__init__(nn.Module(), regions, ShapeTable(batch=(2, 3)), {"middle": self.function})

    def clear_scratch(self) -> None:
        pass


def n_compiled(table: RegionTable, *names: str) -> int:
    """Graphs that are compiled by calling regions at every size."""
    before = compile_counters()["graphs"]
    table.warm_up(names)
    return compile_counters()["graphs"] - before


def test_shared_function_runs_compiled_and_eagerly():
    function, x = SharedFunction(middle), torch.randn(3, 5)
    expected = middle(x)
    for change in (lambda: None, lambda: function.compile(backend="eager"), function.uncompile):
        change()
        assert torch.equal(function(x), expected)


def test_regions_share_the_graphs_of_a_function():
    """One graph for each of two shapes, compiled by the first caller; code around the function stays eager."""
    table = Table()
    table.compile(["shifted", "negated"], by_layer=True, backend="eager")
    assert [n_compiled(table, name) for name in ("shifted", "negated", "shifted", "untouched")] == [2, 0, 0, 0]
    x = torch.randn(3, 5)
    assert torch.equal(table("shifted", x), middle(x + 1))
    assert torch.equal(table("negated", x), -middle(-x))
    before = compile_counters()["graphs"]
    table("negated", torch.randn(4, 5))
    assert compile_counters()["graphs"] - before == 1, "expected one more graph for another shape"


def test_uncompile_restores_eager_mode():
    table = Table()
    table.compile(["negated"], by_layer=True, backend="eager")
    assert n_compiled(table, "negated") == 2
    table.uncompile()
    torch._dynamo.reset()
    assert n_compiled(table, "negated", "shifted") == 0


def test_region_compiled_whole_inlines_the_shared_function():
    table = Table()
    table.compile(["negated"], backend="eager")
    before = compile_counters()["graph_breaks"]
    assert n_compiled(table, "negated") == 2, "expected one graph per size, with the function inlined"
    assert compile_counters()["graph_breaks"] == before
    assert n_compiled(table, "shifted") == 0, "expected an eager function in other regions"


def test_refuses_region_without_shared_functions_or_layers():
    expected = r"compile by layer: expected a region of \['middle'\], got \['untouched'\]"
    with pytest.raises(SettingsError, match=expected):
        Table().compile(["untouched"], by_layer=True)


class Scale(nn.Module):
    """A layer whose graph is of its width."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : len(self.weight)] * self.weight


class Narrowing(RegionTable):
    """One region through layers of one class and many widths, more than the compiler allows graphs of one function."""

    stacks: ClassVar = {"scales": ((Scale, ("forward",)),)}

    def __init__(self) -> None:
        root, widths = nn.Module(), range(torch._dynamo.config.recompile_limit + 4, 0, -1)
        root.scales = nn.Sequential(*(Scale(width) for width in widths))

        def example(bucket: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
            return (torch.randn(bucket["batch"], widths[0]),), {}

        def run(x: Tensor) -> Tensor:
            return root.scales(x)

        super().__init__(root, [Region("narrowing", "scales", run, (), {"batch": "batch"}, example)], ShapeTable((2,)))

    def clear_scratch(self) -> None:
        pass


@torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256)
def test_layers_of_many_widths_compile_within_the_limit() -> None:
    table = Narrowing()
    n_widths = len(table.root.scales)
    table.compile(by_layer=True, backend="eager", dynamic=True)
    assert n_compiled(table, "narrowing") >= n_widths - 1 and n_compiled(table, "narrowing") == 0
    assert torch._dynamo.config.recompile_limit == 2 * n_widths, "the limit still ends endless compilation"


def test_prefill_and_step_share_the_graph_of_choose(tiny):
    """A layer has one graph per number of rows; `choose` has one for both regions, with the same result."""
    model = load_model(tiny)
    shapes = Shapes(
        batch=(2,),
        slices=(1,),
        patches=(16,),
        clip_frames=(40,),
        rows=(8,),
        kv=(64,),
        spoken=(4,),
        tokens=(4,),
        speech_kv=(32,),
    )
    sets = TokenSets.build([TokenSet()], model.config.vocab_size)
    results = []
    for is_compiled in (False, True):
        runner = Runner(model, sets, n_slots=2, llm_len=64, tts_len=32, shapes=shapes)
        if is_compiled:
            runner.regions.compile(["unit_prefill", "unit_step"], by_layer=True, backend="eager")
            assert n_compiled(runner.regions, "unit_prefill") == 2, "expected a graph of a layer and one of choose"
            assert n_compiled(runner.regions, "unit_step") == 1, "expected a graph of a layer for one row"
        for slot in (0, 1):
            runner.state.text.configure(slot, replace(CHAT_TEXT, greedy=True), seed=slot)
        slots, on = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
        ids, rows = torch.arange(16).view(2, 8) + 5, torch.zeros(2, 8, model.config.hidden_size)
        is_row, n_new = torch.zeros(2, 8, dtype=torch.bool), torch.tensor([8, 6])
        packed, _ = runner.regions("unit_prefill", slots, ids, rows, is_row, n_new, on, kv_len=64)
        results.append([packed[0].tolist()])
        for place in range(4):
            places = torch.full((2,), place)
            packed, _ = runner.regions("unit_step", slots, packed[0], on, places, on.clone(), kv_len=64)
            results[-1].append(packed[0].tolist())
    assert results[0] == results[1], f"expected {results[0]}, got {results[1]}"
