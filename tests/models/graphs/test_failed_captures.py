"""Captures that fail or that CUDA invalidates: the retry, the cleanup, and what keeps working.

`Cuda` behaves like torch 2.11, or like later versions, which clean up more themselves.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from models.errors import ShapeError
from models.graphs import captured
from models.graphs.captured import Bucket, Captured, StagePool
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable

BEFORE = "operation failed due to a previous error during capture"
NOW = "operation not permitted when stream is capturing"


class Cuda:
    """State of CUDA and torch that captures change.

    ends_in_any_case: as later versions of torch, `capture_end` ends a lost capture too.
    recording, recording_host: pools that the device's and the host's allocator record to.
    draws: whether random numbers can be drawn.
    lost: where each of the next captures fails: in the "run", at its "end" or "begin"; "" = it succeeds.
    """

    def __init__(self, ends_in_any_case: bool = False):
        self.ends_in_any_case, self.draws = ends_in_any_case, True
        self.recording: set[int] = set()
        self.recording_host: set[int] = set()
        self.graph: Graph | None = None
        self.lost: list[str] = []
        self.log: list[str] = []

    def end_pool(self, device: int, handle: int) -> None:
        if handle not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(handle)


class Graph:
    """A double of `torch.cuda.CUDAGraph`."""

    cuda: Cuda

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert not gc.isenabled() and capture_error_mode == "thread_local"
        cuda, self.pool = self.cuda, pool
        cuda.log.append("begin")
        self.how = cuda.lost.pop(0) if cuda.lost else ""
        cuda.draws = cuda.ends_in_any_case  # later versions: each graph has its own generator state
        for pools in (cuda.recording, cuda.recording_host):
            if pool in pools:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            pools.add(pool)
        if self.how == "begin":
            raise RuntimeError(NOW)
        cuda.graph = self

    def capture_end(self) -> None:
        cuda = self.cuda
        cuda.log.append("end")
        assert cuda.graph is self, "capture_end() called before capture_begin()"
        cuda.graph = None
        if self.how and not cuda.ends_in_any_case:
            raise RuntimeError(BEFORE)
        for pools in (cuda.recording, cuda.recording_host):
            pools.remove(self.pool)
        if self.how:
            raise RuntimeError(BEFORE)
        cuda.draws = True

    def replay(self) -> None:
        self.cuda.log.append("replay")


class Table(RegionTable):
    """Three regions of equal shapes that draw random numbers."""

    def __init__(self, device: str = "cpu", *, spoil: Callable[[Tensor], None] | None = None):
        """spoil: called in the second region."""
        self.weight = torch.full((4, 4), 0.5, device=device)
        self.layer = nn.Conv1d(4, 4, 3, padding=1, device=device)

        def example(bucket: Bucket) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
            return (torch.ones(bucket["batch"], 4, device=device),), {}

        def product(x: Tensor) -> Tensor:
            return (x @ self.weight + 0 * torch.rand_like(x)) @ self.weight

        def spoilt(x: Tensor) -> Tensor:
            y = product(x) + 1
            if spoil is not None:
                spoil(y)
            return y

        def convolved(x: Tensor) -> Tensor:
            return self.layer(x[:, :, None].repeat(1, 1, 40)).sum(2)

        runs = {"product": product, "spoilt": spoilt, "convolved": convolved}
        regions = [Region(name, "none", run, (), {"batch": "batch"}, example) for name, run in runs.items()]
        super().__init__(nn.Module(), regions, ShapeTable(batch=(1, 2)), device=torch.device(device))

    def clear_scratch(self) -> None:
        pass


def install(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> Cuda:
    """Replace the CUDA functions of torch by the double."""
    monkeypatch.setattr(Graph, "cuda", cuda, raising=False)
    handles, zeros = count(1), torch.zeros
    for name, double in {
        "CUDAGraph": Graph,
        "Stream": mock.MagicMock,
        "current_stream": mock.MagicMock,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: next(handles),
        "current_device": lambda: 0,
        "memory_reserved": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", cuda.end_pool, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None: zeros(*shape))
    monkeypatch.setattr(captured, "_ABANDONED", [])
    return cuda


@pytest.fixture(params=[False, True], ids=["2.11", "later"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return install(monkeypatch, Cuda(request.param))


def spoiling(cuda: Cuda) -> Callable[[Tensor], None]:
    """A function that fails in a capture that is to be lost in its run, and where numbers cannot be drawn."""

    def spoil(y: Tensor) -> None:
        cuda.log.append("run")
        if cuda.graph is None and not cuda.draws:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        if cuda.graph is not None and cuda.graph.how == "run":
            raise RuntimeError(NOW)

    return spoil


CLEANUP = ["begin", "end"]


@pytest.mark.parametrize(
    ("is_warm", "lost", "expected"),
    [
        (False, [], ["run", "run", "begin", "run", "end"]),
        (True, [], ["begin", "run", "end"]),
        (True, ["run"], ["begin", "run", "end", *CLEANUP, "run", "begin", "run", "end"]),
        (True, ["end"], ["begin", "run", "end", *CLEANUP, "run", "begin", "run", "end"]),
        (True, ["begin"], ["begin", *CLEANUP, "run", "begin", "run", "end"]),
    ],
)
def test_warm_region_is_captured_without_a_run_before(
    cuda: Cuda, is_warm: bool, lost: list[str], expected: list[str]
) -> None:
    """If the capture fails, it is repeated after one run."""
    pool, cuda.lost = StagePool(), list(lost)
    one = Captured(Table(spoil=spoiling(cuda)), "spoilt", {"batch": 2}, None, pool, is_warm)
    assert cuda.log == expected and one.was_retried == bool(lost) and gc.isenabled()
    assert (one.pool is pool) != bool(lost), "expected a new pool exactly after a lost capture"
    assert cuda.draws and not cuda.recording
    given = torch.full((2, 4), 5.0)
    assert one(given) is one.outputs and cuda.log[-1] == "replay"
    assert torch.equal(one.inputs[0], given)
    with pytest.raises(ShapeError, match="captured spoilt: input 0"):
        one(torch.ones(3))


@pytest.mark.parametrize("how", ["run", "end", "begin"])
def test_lost_capture_is_cleaned_up(cuda: Cuda, how: str) -> None:
    """Numbers can be drawn, the stage continues in another pool, and earlier graphs stay in the first."""
    table = Table(spoil=spoiling(cuda))
    table.capture_region("product", stage="one")
    [first] = {graph.pool for graph in table._captured.values()}
    cuda.lost = [how, "", how]  # the second is the cleanup capture
    with pytest.raises(RuntimeError, match=BEFORE if how == "end" else NOW):
        table.capture_region("spoilt", stage="one", is_warm=True)
    assert cuda.draws and not cuda.recording and cuda.graph is None and gc.isenabled()
    table.drop_graphs(["spoilt"])
    assert table.call_example("spoilt", {"batch": 2}, {}) is None
    facts = table.capture_region("spoilt", stage="one", is_warm=True)
    assert (facts.n_graphs, facts.n_retried) == (2, 0) and not cuda.recording
    pools = {name: {graph.pool for graph in table._captured.values() if graph.name == name} for name in table.captured}
    assert pools["product"] == {first} and len(pools["spoilt"]) == 1 and pools["spoilt"] != {first}
    assert len({pool.handle for some in pools.values() for pool in some}) == 2
    table("product", torch.ones(2, 4))
    assert cuda.log[-1] == "replay"


@pytest.mark.parametrize("how", ["run", "end"])
def test_lost_graph_is_kept_alive(cuda: Cuda, how: str) -> None:
    """The host allocator of torch 2.11 keeps calling it."""
    made: list[weakref.ref] = []
    begin = Graph.capture_begin

    def capture_begin(self: Graph, *given: Any, **more: Any) -> None:
        made.append(weakref.ref(self))
        begin(self, *given, **more)

    cuda.lost = [how]
    with mock.patch.object(Graph, "capture_begin", capture_begin), pytest.raises(RuntimeError):
        captured._recorded(lambda: spoiling(cuda)(torch.ones(1)), StagePool())
    gc.collect()
    assert [one() is not None for one in made] == [not cuda.ends_in_any_case, True]
    assert len(cuda.recording_host) == (not cuda.ends_in_any_case)


def test_error_of_the_region_itself_keeps_the_pool(cuda: Cuda) -> None:
    table, pool = Table(), StagePool()
    table._runners["spoilt"] = run = mock.Mock(side_effect=[ValueError("no such row"), torch.ones(2), torch.ones(2)])
    one = Captured(table, "spoilt", {"batch": 2}, None, pool, True)
    assert one.was_retried and one.pool is pool and not pool.is_broken and run.call_count == 3
    assert cuda.log == ["begin", "end", "begin", "end"] and not captured._ABANDONED


def test_failed_cleanup_is_noted_on_the_first_error(cuda: Cuda) -> None:
    cuda.lost = ["run", "end"]
    with pytest.raises(RuntimeError, match=NOW) as caught:
        captured._recorded(lambda: spoiling(cuda)(torch.ones(1)), StagePool())
    assert caught.value.__notes__ == [f"Cleaning up after the failed capture failed too: {BEFORE}"]


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def cudnn_benchmark() -> Iterator[None]:
    """Enable `cudnn.benchmark`."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = before


def assert_right(table: Table, name: str, batch: int) -> None:
    x = torch.rand(batch, 4, device="cuda")
    assert table.has_graph(name, x)
    got, expected = table(name, x).clone(), table.uncaptured(name, x)
    assert torch.allclose(got, expected, rtol=1e-2, atol=1e-2), f"{name} {batch}: expected {expected}, got {got}"


def assert_alive(table: Table, names: list[str]) -> None:
    """Numbers can be drawn, memory is released, and all graphs replay in any order."""
    assert torch.randint(0, 9, (1000,), device="cuda").unique().numel() == 9
    torch.cuda.empty_cache()
    for batch in (1, 2):
        for name in (*names, *reversed(names)):
            assert_right(table, name, batch)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("spoil", [lambda y: torch.cuda.synchronize(), lambda y: y.sum().item()], ids=["wait", "read"])
def test_capture_invalidated_by_a_synchronization_is_cleaned_up(spoil: Callable[[Tensor], None]) -> None:
    is_on = False
    table = Table("cuda", spoil=lambda y: spoil(y) if is_on else None)
    table.warm_up()
    table.capture_region("product", stage="one", is_warm=True)
    is_on = True
    with pytest.raises(RuntimeError, match="captur") as caught:
        table.capture_region("spoilt", stage="one", is_warm=True)
    assert "previous error" not in str(caught.value) and not hasattr(caught.value, "__notes__"), caught.value
    assert_alive(table, ["product"])
    is_on = False
    facts = table.capture_region("spoilt", stage="one", is_warm=True)
    assert (facts.n_graphs, facts.n_retried) == (2, 0)
    table.capture_region("convolved", stage="two")
    assert_alive(table, ["product", "spoilt", "convolved"])


@pytest.mark.gpu
@pytest.mark.usefixtures("cudnn_benchmark")
@pytest.mark.parametrize("is_warm", [True, False])
def test_convolutions_benchmarked_during_capture_succeed_on_retry(is_warm: bool) -> None:
    """After a retry if cuDNN cannot benchmark in a capture; at once if the regions have run before."""
    table = Table("cuda")
    table.capture_region("product", stage="one")
    facts = table.capture_region("convolved", stage="one", is_warm=is_warm)
    assert facts.n_graphs == 2 and (is_warm or not facts.n_retried)
    table.capture_region("spoilt", stage="one")
    assert_alive(table, ["product", "convolved", "spoilt"])
