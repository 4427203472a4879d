"""Inputs of regions: their place in the block, and the values that a graph reads after a call."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from models.errors import ShapeError
from models.graphs.captured import Bucket, Captured
from models.graphs.input_block import (
    ALIGNED,
    CALLS_AHEAD,
    InputBlock,
    StaticInputs,
    inputs_to_device,
    padded_array,
    record_layout,
)
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable

CPU = torch.device("cpu")
BUSY = 200_000_000  # cycles: some 100 ms
TYPES = (np.int64, np.bool_, np.uint8, np.float32)
N_CALLS = 1000


@st.composite
def arrays(draw: st.DrawFn, types: tuple[type, ...] = TYPES) -> list[np.ndarray]:
    """Some small arrays of any shape, including empty ones and scalars."""
    kinds = st.tuples(st.sampled_from(types), st.lists(st.integers(0, 5), max_size=3))
    luck = np.random.default_rng(draw(st.integers(0, 99)))
    return [luck.integers(0, 100, shape).astype(kind) for kind, shape in draw(st.lists(kinds, min_size=1, max_size=7))]


def like(some: list[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(np.zeros_like(array)) for array in some]


def assert_same(got: Tensor, expected: np.ndarray) -> None:
    assert got.is_contiguous() and np.array_equal(got.cpu().numpy(), expected), f"expected {expected}, got {got}"
    assert got.cpu().numpy().dtype == expected.dtype, f"expected {expected.dtype}, got {got.dtype}"


@given(arrays())
def test_tensors_hold_the_written_arrays(some: list[np.ndarray]) -> None:
    """For all shapes and types, over more calls than one allocation serves."""
    block = InputBlock(like(some), CPU)
    for number in range(2 * CALLS_AHEAD + 2):
        now = [np.roll(array, number) for array in some]
        block.write(now)
        for tensor, array in zip(block.tensors, now, strict=True):
            assert_same(tensor, array)


@given(arrays())
def test_tensors_start_at_multiples_of_sixteen_bytes(some: list[np.ndarray]) -> None:
    (_, record), end = record_layout(like(some)), 0
    for name, array in zip(record.names, some, strict=True):
        (kind, start) = record.fields[name]
        assert start == end and start % ALIGNED == 0 and kind.itemsize == array.nbytes
        end = start + -(-array.nbytes // ALIGNED) * ALIGNED
    assert record.itemsize == max(end, ALIGNED), f"expected {end} bytes, got {record.itemsize}"


@given(arrays(), st.randoms())
def test_static_inputs_hold_the_copied_inputs(some: list[np.ndarray], luck: object) -> None:
    """For any mixture of arrays and tensors; the static tensors keep their addresses."""
    example = [torch.from_numpy(array.copy()) for array in some]
    inputs = StaticInputs("some", example)
    places = [tensor.data_ptr() for tensor in inputs.tensors]
    for tensor, array in zip(inputs.tensors, some, strict=True):
        assert_same(tensor, array)
    for number in range(1, 4):
        now = [np.roll(array, number) for array in some]
        inputs.copy_in([array if luck.random() < 0.6 else torch.from_numpy(array) for array in now])
        for tensor, array in zip(inputs.tensors, now, strict=True):
            assert_same(tensor, array)
    assert [tensor.data_ptr() for tensor in inputs.tensors] == places


@pytest.mark.parametrize("as_array", [True, False])
def test_refuses_other_shapes_and_types(as_array: bool) -> None:
    """Nothing is copied, not even inputs that match."""
    inputs = StaticInputs("some", [torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), torch.zeros(2)])
    good = [np.full(2, 7), np.zeros(2, np.bool_), np.ones(2, np.float32)]
    for place, bad in ((0, np.zeros(3, np.int64)), (0, np.zeros(2, np.float32)), (1, np.zeros(2, np.int64))):
        wrong = [*good[:place], bad, *good[place + 1 :]]
        with pytest.raises(ShapeError, match=rf"captured some: input {place}: expected \(2,\) torch.(int64|bool), got"):
            inputs.copy_in(wrong if as_array else list(map(torch.from_numpy, wrong)))
    assert [tensor.tolist() for tensor in inputs.tensors] == [[0, 0], [True, True], [0.0, 0.0]]


@settings(max_examples=20)
@given(arrays())
def test_tensors_are_passed_through(some: list[np.ndarray]) -> None:
    """A tensor is returned as the same object."""
    there = torch.zeros(2)
    first, *tensors = inputs_to_device(CPU, [there, *some])
    assert first is there
    for tensor, array in zip(tensors, some, strict=True):
        assert_same(tensor, array)


def test_array_is_padded() -> None:
    assert padded_array([3, 4], 4, 9).tolist() == [3, 4, 9, 9] and padded_array([3], 1, 9).dtype == np.int64
    assert (
        padded_array([True], 3, False).tolist() == [True, False, False]
        and padded_array([True], 1, False).dtype == np.bool_
    )


# --- on a GPU ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes(ShapeTable):
    rows: tuple[int, ...] = (3,)


class Table(RegionTable):
    """One region that stores the inputs of every call."""

    def __init__(self, n_calls: int) -> None:
        self.log = torch.zeros(n_calls, 4, dtype=torch.int64, device="cuda")

        def example(bucket: Bucket) -> tuple[tuple[Tensor, ...], dict[str, bool]]:
            n, rows = bucket["batch"], bucket["rows"]
            numbers = [torch.zeros(size, dtype=torch.int64, device="cuda") for size in ((n,), (n, rows))]
            floats = torch.zeros(n, rows, device="cuda")
            return (*numbers, torch.zeros(n, dtype=torch.bool, device="cuda"), floats), {}

        region = Region("keep", "state", keep, (self.log,), {"batch": "batch", "rows": "rows"}, example)
        super().__init__(nn.Module(), [region], Sizes(batch=(1, 64)), device=torch.device("cuda"))

    def clear_scratch(self) -> None:
        self.log.zero_()


def keep(log: Tensor, places: Tensor, numbers: Tensor, flags: Tensor, floats: Tensor) -> Tensor:
    sums = (numbers.sum(1), flags.long(), floats.sum(1).long(), torch.ones_like(places))
    log.index_add_(0, places, torch.stack(sums, 1))
    return numbers + flags[:, None]


def call_inputs(number: int, n: int) -> list[np.ndarray]:
    """Inputs of one call of `keep`, which writes to row `number`; they differ from call to call."""
    numbers = np.arange(3 * n).reshape(n, 3) + number
    return [np.full(n, number), numbers, (np.arange(n) + number) % 3 == 0, np.full((n, 3), number, np.float32)]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 64])
def test_calls_without_synchronization_keep_their_own_inputs(n: int) -> None:
    """The host runs ahead; the inputs of a call are kept until the device has read them."""
    table, done = Table(N_CALLS), torch.cuda.Event()
    graph = Captured(table, "keep", {"batch": n, "rows": 3})
    calls = [call_inputs(number, n) for number in range(N_CALLS)]
    graph(*calls[0])
    torch.cuda.synchronize()
    table.clear_scratch()
    torch.cuda._sleep(BUSY)
    done.record()
    for number, (places, numbers, flags, floats) in enumerate(calls):
        is_late = number == 40
        given = [places, torch.from_numpy(numbers).cuda() if is_late else numbers, flags, floats]
        graph(*given)
        if number == 20:
            assert not done.query(), "expected the host to be ahead"
        for array in (places, numbers, flags, floats):
            array[...] = 0  # the caller may change them
    expected = torch.tensor(
        [[int(part.sum()) for part in (*call_inputs(number, n)[1:], np.ones(n))] for number in range(N_CALLS)]
    )
    assert torch.equal(table.log.cpu(), expected), "expected each call's own inputs"


@pytest.mark.gpu
def test_call_without_a_graph_receives_the_same_inputs() -> None:
    table = Table(9)
    graph = Captured(table, "keep", {"batch": 64, "rows": 3})
    given = call_inputs(5, 64)
    torch.cuda._sleep(BUSY)
    plain, captured = table("keep", *given), graph(*given)
    expected = torch.from_numpy(given[1] + given[2][:, None])
    assert torch.equal(plain.cpu(), expected) and torch.equal(captured.cpu(), expected)
    assert all(tensor.data_ptr() % ALIGNED == 0 and tensor.is_cuda for tensor in inputs_to_device(table._device, given))


@pytest.mark.gpu
def test_copies_do_not_block_the_host() -> None:
    """Copies are enqueued while the device is busy; their host memory is not reused before they are finished."""
    device, done = torch.device("cuda"), torch.cuda.Event()
    inputs_to_device(device, [np.arange(3)])  # the first call allocates memory
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY)
    done.record()
    arrived = [inputs_to_device(device, [np.full(64, number), np.array([number % 2 == 0])]) for number in range(50)]
    assert not done.query(), "expected the host to be ahead"
    for number, (table, flag) in enumerate(arrived):
        assert (table.tolist(), flag.tolist()) == ([number] * 64, [number % 2 == 0])
