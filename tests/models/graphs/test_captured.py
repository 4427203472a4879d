"""Which calls of a region replay a captured graph, and which count as skipped."""

from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.errors import SettingsError, ShapeError
from models.graphs.captured import Bucket
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable
from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Rows, Runner
from models.stages.unit_steps import UnitSteps
from tests.models.graphs.fake_captures import Replayed, replay_on_cpu
from tests.models.token2wav.stream.vocoders import make_vocoder

BATCHES, ROWS = (1, 2), (4, 8)


@dataclass(frozen=True)
class Sizes(ShapeTable):
    rows: tuple[int, ...] = ROWS


@dataclass(frozen=True)
class Rule:
    """A setting that is not a number."""

    sign: int = 1


def scaled(total: Tensor, x: Tensor, scale: int, rule: Rule) -> Tensor:
    total += x.sum()
    return rule.sign * scale * x


def doubled(total: Tensor, x: Tensor) -> Tensor:
    total += x.sum()
    return 2 * x


def negated(x: Tensor) -> Tensor:
    return -x


class Table(RegionTable):
    """Three regions, two of them over one number, the scratch slot; the last two have equal shapes."""

    def __init__(self) -> None:
        self.total, self.n_cleared = torch.zeros(()), 0

        def example(bucket: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
            return (torch.ones(bucket["batch"], bucket["rows"]),), {"scale": 1, "rule": Rule()}

        def plain_example(bucket: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
            return (torch.ones(bucket["batch"]),), {}

        axes = {"batch": "batch", "rows": "rows"}
        variants = ({}, {"scale": 3}, {"rule": Rule(-1)})
        regions = [
            Region("scaled", "state", scaled, (self.total,), axes, example, variants),
            Region("doubled", "state", doubled, (self.total,), {"batch": "batch"}, plain_example),
            Region("negated", "state", negated, (), {"batch": "batch"}, plain_example),
        ]
        super().__init__(nn.Module(), regions, Sizes(batch=BATCHES))

    def clear_scratch(self) -> None:
        self.n_cleared += 1
        self.total.zero_()


N_SCALED, N_DOUBLED = 3 * len(BATCHES) * len(ROWS), len(BATCHES)
N_ALL = N_SCALED + 2 * N_DOUBLED


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    return replay_on_cpu(monkeypatch)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def n_replays(made: list[Replayed]) -> int:
    return sum(graph.n_replays for graph in made)


def test_every_bucket_and_variant_becomes_one_graph(made: list[Replayed]):
    table = Table()
    assert table.n_captured == 0
    assert table.capture() == N_ALL == table.n_captured == len(made)
    assert len({id(graph.pool) for graph in made}) == 1, "expected one pool for all"
    sizes = [tuple(graph.bucket.values()) for graph in made if graph.name == "scaled"]
    largest_first = sorted(product(BATCHES, ROWS), reverse=True)
    assert sizes == [size for size in largest_first for _ in range(3)], f"expected the largest first, got {sizes}"
    assert table.n_cleared == len(made) and not table.total, "expected examples to leave the state empty"
    assert n_replays(made) == table.n_skipped == 0


def test_call_replays_the_graph_of_its_shapes_and_settings(made: list[Replayed]):
    table = Table()
    table.capture()
    wanted = list(product(product(BATCHES, ROWS), ((1, Rule()), (3, Rule()), (1, Rule(-1)))))
    found = set()
    for shape, (scale, rule) in wanted:
        x = torch.randn(shape)
        got = table("scaled", x, scale=scale, rule=rule)
        assert torch.equal(got, rule.sign * scale * x), f"{shape} {scale} {rule}: expected the result of its own graph"
        (graph,) = (graph for graph in made if graph.outputs is got)
        assert (graph.name, tuple(graph.bucket.values())) == ("scaled", shape)
        found.add(id(graph))
    assert len(found) == len(wanted) == N_SCALED
    for name, factor in (("doubled", 2), ("negated", -1)):
        assert torch.equal(table(name, ones(2)), factor * ones(2)), f"{name}: expected its own graph's result"
    assert n_replays(made) == len(wanted) + 2 and table.n_skipped == 0


@pytest.mark.parametrize(
    "static",
    [
        {"rule": Rule(sign=1), "scale": 3},
        {"scale": np.int64(3), "rule": Rule()},
        {"scale": 3, "rule": Rule(np.int64(1))},
    ],
)
def test_equal_settings_find_the_same_graph(made: list[Replayed], static: dict[str, Any]):
    table = Table()
    table.capture()
    table("scaled", ones(2, 4), **static)
    assert (n_replays(made), table.n_skipped) == (1, 0)


def test_calls_of_captured_regions_without_a_graph_are_counted(made: list[Replayed]):
    """They run eagerly. Calls of regions that were not captured run eagerly and are not counted."""
    table = Table()
    assert table.capture(["scaled"]) == N_SCALED
    for n_skipped, (shape, scale) in enumerate((((3, 4), 1), ((1, 5), 1), ((2, 8), 2)), start=1):
        got = table("scaled", ones(*shape), scale=scale, rule=Rule())
        assert torch.equal(got, scale * ones(*shape))
        assert table.n_skipped == n_skipped, f"{shape} {scale}: expected {n_skipped} skipped, got {table.n_skipped}"
    for n in (1, 2, 3):
        assert torch.equal(table("doubled", ones(n)), 2 * ones(n))
    assert (n_replays(made), table.n_skipped) == (0, 3)
    table("scaled", ones(2, 8), scale=3, rule=Rule())
    assert (n_replays(made), table.n_skipped) == (1, 3)


def test_sealed_table_refuses_calls_without_a_graph(made: list[Replayed]):
    """The error names the region, the given sizes and the captured ones; nothing runs."""
    table = Table()
    table.capture(["scaled"])
    table.seal()
    before = table.total.clone()
    with pytest.raises(ShapeError) as caught:
        table("scaled", ones(3, 4), scale=2, rule=Rule())
    message = str(caught.value)
    for part in ("region scaled", "batch 1, 2; rows 4, 8", "(3, 4), scale=2, rule=Rule(sign=1)"):
        assert part in message, f"expected {part!r} in {message!r}"
    assert (table.n_skipped, n_replays(made)) == (1, 0) and torch.equal(table.total, before)
    assert torch.equal(table("scaled", ones(2, 8), scale=1, rule=Rule()), ones(2, 8))
    assert torch.equal(table("doubled", ones(7)), 2 * ones(7)), "expected a region without graphs to run as before"
    with pytest.raises(SettingsError, match="capture doubled: expected a table that is not sealed"):
        table.capture(["doubled"])


def test_dropping_all_graphs_unseals_the_table(made: list[Replayed]):
    table = Table()
    table.capture()
    table.seal()
    table.drop_graphs(["scaled"])
    assert table.is_sealed and torch.equal(table("scaled", ones(3, 4), scale=2, rule=Rule()), 2 * ones(3, 4))
    table.drop_graphs()
    assert not table.is_sealed and table.capture(["doubled"]) == N_DOUBLED


def test_each_stage_has_its_own_pool(made: list[Replayed]):
    table = Table()
    facts = table.capture_region("scaled", stage="text")
    for name in ("doubled", "negated"):
        table.capture_region(name, stage="sound", is_warm=True)
    pools = {graph.name: graph.pool for graph in made}
    assert pools["doubled"] is pools["negated"] and pools["doubled"] is not pools["scaled"]
    assert [graph.is_warm for graph in made] == [False] * N_SCALED + [True] * 2 * N_DOUBLED
    assert (facts.n_graphs, facts.n_retried) == (N_SCALED, 0) and facts.seconds > 0
    assert table.captured_sizes("scaled") == {"batch": [1, 2], "rows": [4, 8]} and table.captured_sizes("doubled")
    table.drop_graphs(["scaled"])
    assert table.captured_sizes("scaled") == {}


def test_skips_are_not_counted_before_capture():
    table = Table()
    table("scaled", ones(2, 4), scale=1, rule=Rule())
    table("doubled", ones(3))
    assert (table.n_captured, table.n_skipped) == (0, 0)


def test_captures_of_several_regions_add_up(made: list[Replayed]):
    table = Table()
    counts = [table.capture([name]) for name in ("doubled", "scaled")]
    assert counts == [N_DOUBLED, N_DOUBLED + N_SCALED]
    table("doubled", ones(2))
    table("scaled", ones(2, 4), scale=1, rule=Rule())
    assert (n_replays(made), table.n_skipped) == (2, 0)


def test_second_capture_replaces_the_graphs(made: list[Replayed]):
    """The region is captured, not a replay of its old graph."""
    table = Table()
    table.capture()
    first = list(made)
    assert table.capture(["scaled"]) == N_ALL == table.n_captured
    assert len(made) == len(first) + N_SCALED
    assert n_replays(first) == 0, "expected no replay of the old graphs"
    table("scaled", ones(1, 8), scale=1, rule=Rule())
    assert (n_replays(first), n_replays(made), table.n_skipped) == (0, 1, 0)


def test_refuses_unknown_region_before_any_capture(made: list[Replayed]):
    table = Table()
    with pytest.raises(SettingsError, match=r"region: expected one of \['doubled', 'negated', 'scaled'\], got halved"):
        table.capture(["scaled", "halved"])
    assert (table.n_captured, made) == (0, [])


def test_region_without_a_complete_capture_runs_eagerly(made: list[Replayed], monkeypatch: pytest.MonkeyPatch):
    table = Table()
    table.capture(["doubled"])

    def no_room() -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(table, "clear_scratch", no_room)
    with pytest.raises(torch.OutOfMemoryError):
        table.capture(["scaled"])
    table("scaled", ones(*made[-1].bucket.values()), scale=1, rule=Rule())
    assert (n_replays(made), table.n_skipped) == (0, 0)


@pytest.fixture
def runner(tiny_model: OmniModel) -> Runner:
    sets = TokenSets.build([TokenSet()], tiny_model.config.vocab_size)
    shapes = Shapes(
        batch=(1, 2),
        slices=(1,),
        patches=(16,),
        clip_frames=(40,),
        rows=(4, 16),
        kv=(32, 64),
        spoken=(4,),
        tokens=(4,),
        speech_kv=(32,),
    )
    return Runner(tiny_model, sets, n_slots=3, llm_len=64, tts_len=32, shapes=shapes)


def vocoder_regions() -> RegionTable:
    return make_vocoder().regions


def test_examples_contain_every_setting_of_their_region(runner: Runner):
    """Every call passes all settings, so that none takes a default that differs from its graph's."""
    for table in (runner.regions, vocoder_regions()):
        for name, region in table.table.items():
            bucket = next(region.buckets(table.shapes))
            tensors, static = region.example(bucket)
            names = list(signature(region.run).parameters.values())[len(region.bound) :]
            assert [p.name for p in names[len(tensors) :]] == list(static), f"{name}: expected these settings"
            assert [p.name for p in names if p.default is not Parameter.empty] == [], f"{name}: expected no defaults"
            for variant in region.variants:
                assert variant.keys() <= static.keys(), f"{name}: expected settings of {list(static)}, got {variant}"
                keys = {frozenset({**region.example(bucket)[1], **variant}.items()) for _ in range(2)}
                assert len(keys) == 1, f"{name}: expected equal settings to be equal, got {keys}"


def test_inputs_of_an_example_do_not_share_memory(runner: Runner):
    """A graph copies inputs into those of its example: two at one address would be the same input."""
    for table in (runner.regions, vocoder_regions()):
        for name, region in table.table.items():
            for bucket in region.buckets(table.shapes):
                tensors, _ = region.example(bucket)
                places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
                assert len(set(places)) == len(places), f"{name} {bucket}: expected different tensors, got {places}"


def test_captured_step_feeds_a_token_without_choosing_another(runner: Runner, made: list[Replayed]):
    """The last token of a unit: rows of one captured step differ in whether another token is chosen."""
    runner.regions.capture(["unit_step"])
    slots, on, zeros = torch.tensor([0, 1]), torch.tensor([True, True]), torch.zeros(2, dtype=torch.int64)
    runner.regions("unit_step", slots, torch.tensor([7, 8]), on, zeros, torch.tensor([True, False]), kv_len=32)
    assert runner.state.llm.lengths[:2].tolist() == [1, 1]
    assert runner.state.text.count[:2].tolist() == [1, 0]
    assert n_replays(made) == 1


def test_buckets_of_a_region_have_different_shapes(runner: Runner, made: list[Replayed]):
    for table, names in ((runner.regions, None), (vocoder_regions(), ("begin", "hift"))):
        chosen = [table.table[name] for name in names or table.table]
        n_graphs = sum(len(region.variants) for region in chosen for _ in region.buckets(table.shapes))
        assert table.capture(names) == n_graphs, f"expected {n_graphs} graphs, got {table.n_captured}"


def test_padded_calls_find_their_graphs(runner: Runner, made: list[Replayed]):
    """Every padded call of two slots finds its graph and equals the call without graphs."""
    ids, width = torch.arange(10) + 5, runner.model.config.hidden_size
    results = []
    for is_captured in (False, True):
        if is_captured:
            runner.regions.capture(["unit_prefill", "unit_step", "llm_evict"])
        steps = UnitSteps(runner, None)
        with steps.lease() as one, steps.lease() as two:
            rows = Rows.mixed(ids.tolist(), [(0, torch.ones(3, width))])
            chosen = [c.token for c in steps.feed([one, two], [rows, rows.cut(0, 7)], [True, True])]
            runner.evict([two], [1], [3])
            results.append([chosen])
            for _ in range(12):
                chosen = [c.token for c in steps.step([two, one], chosen, [None, None], [True, True])]
                results[-1].append(chosen)
    assert results[0] == results[1], f"expected {results[0]}, got {results[1]}"
    assert (n_replays(made), runner.regions.n_skipped) == (1 + 1 + 12, 0)
