"""Pieces: what several regions share compiles by itself where layers do, once for each shape."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.errors import SettingsError
from models.graphs.captured import Bucket
from models.graphs.region_graphs import Region, RegionTable, ShapeTable, SharedFunction, compile_counters
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


def shifted(piece: SharedFunction, x: Tensor) -> Tensor:
    return piece(x + 1)


def turned(piece: SharedFunction, x: Tensor) -> Tensor:
    return -piece(-x)


def untouched(x: Tensor) -> Tensor:
    return x + 1


class Table(RegionTable):
    """Two regions around one piece, and one without."""

    def __init__(self) -> None:
        self.piece = SharedFunction(middle)

        def example(bucket: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
            return (torch.randn(bucket["batch"], 5),), {}

        axes, bound = {"batch": "batch"}, (self.piece,)
        regions = [
            Region("shifted", "middle", shifted, bound, axes, example),
            Region("turned", "state, middle", turned, bound, axes, example),
            Region("untouched", "state", untouched, (), axes, example),
        ]
        super().__init__(nn.Module(), regions, ShapeTable(batch=(2, 3)), {"middle": self.piece})

    def clear_scratch(self) -> None:
        pass


def n_compiled(table: RegionTable, *names: str) -> int:
    """Graphs that come with a call of regions at every size."""
    before = compile_counters()["graphs"]
    table.warm_up(names)
    return compile_counters()["graphs"] - before


def test_a_piece_is_its_function_compiled_or_not():
    piece, x = SharedFunction(middle), torch.randn(3, 5)
    expected = middle(x)
    for change in (lambda: None, lambda: piece.compile(backend="eager"), piece.uncompile):
        change()
        assert torch.equal(piece(x), expected)


def test_regions_share_a_piece_and_its_graphs():
    """One graph for each of two shapes, made by whoever comes first; what is around the piece stays eager."""
    table = Table()
    table.compile(["shifted", "turned"], by_layer=True, backend="eager")
    assert [n_compiled(table, name) for name in ("shifted", "turned", "shifted", "untouched")] == [2, 0, 0, 0]
    x = torch.randn(3, 5)
    assert torch.equal(table("shifted", x), middle(x + 1))
    assert torch.equal(table("turned", x), -middle(-x))
    before = compile_counters()["graphs"]
    table("turned", torch.randn(4, 5))
    assert compile_counters()["graphs"] - before == 1, "expected a graph of its own for another shape"


def test_uncompile_undoes_it():
    table = Table()
    table.compile(["turned"], by_layer=True, backend="eager")
    assert n_compiled(table, "turned") == 2
    table.uncompile()
    torch._dynamo.reset()
    assert n_compiled(table, "turned", "shifted") == 0


def test_a_region_compiled_whole_holds_its_piece():
    table = Table()
    table.compile(["turned"], backend="eager")
    before = compile_counters()["graph_breaks"]
    assert n_compiled(table, "turned") == 2, "expected one graph a size, the piece inside"
    assert compile_counters()["graph_breaks"] == before
    assert n_compiled(table, "shifted") == 0, "expected the piece as it was outside"


def test_a_region_without_piece_or_layers_is_refused():
    expected = r"compile by layer: expected a region of \['middle'\], got \['untouched'\]"
    with pytest.raises(SettingsError, match=expected):
        Table().compile(["untouched"], by_layer=True)


def test_choosing_is_one_piece_of_prefill_and_step(tiny):
    """A layer has a graph for each number of rows; choosing has one for both regions, and chooses the same."""
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
    told = []
    for is_compiled in (False, True):
        runner = Runner(model, sets, n_slots=2, llm_len=64, tts_len=32, shapes=shapes)
        if is_compiled:
            runner.regions.compile(["unit_prefill", "unit_step"], by_layer=True, backend="eager")
            assert n_compiled(runner.regions, "unit_prefill") == 2, "expected a layer and choosing"
            assert n_compiled(runner.regions, "unit_step") == 1, "expected a layer for one row"
        for slot in (0, 1):
            runner.state.text.configure(slot, replace(CHAT_TEXT, greedy=True), seed=slot)
        slots, on = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
        ids, rows = torch.arange(16).view(2, 8) + 5, torch.zeros(2, 8, model.config.hidden_size)
        is_row, n_new = torch.zeros(2, 8, dtype=torch.bool), torch.tensor([8, 6])
        packed, _ = runner.regions("unit_prefill", slots, ids, rows, is_row, n_new, on, kv_len=64)
        told.append([packed[0].tolist()])
        for place in range(4):
            places = torch.full((2,), place)
            packed, _ = runner.regions("unit_step", slots, packed[0], on, places, on.clone(), kv_len=64)
            told[-1].append(packed[0].tolist())
    assert told[0] == told[1], f"expected {told[0]}, got {told[1]}"
