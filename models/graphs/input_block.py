"""Inputs on their way to a region: arrays of the host, the small ones in one block of bytes that is sent at once.

An array is on the host, a tensor is where the region runs. Knows shapes, types, places in bytes and memory. Does not
know graphs, nor what the inputs mean.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.errors import ShapeError

Input = Tensor | np.ndarray

ALIGNED = 16  # bytes: kernels are made once for what begins there, and once more for the rest
SMALL = (torch.int64, torch.bool)  # numbers per slot or token: what hosts make; the rest comes from other regions
# Pinned memory is asked for once for so many calls, or as many as find room in so many bytes.
CALLS_AHEAD, BYTES_AHEAD = 16, 65_536
_TYPES = {
    torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind)
    for kind in (np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64)
}


class InputBlock:
    """Bytes on a device, cut into tensors, and memory to write them from.

    tensors: like those given, in order; each begins at a multiple of 16 bytes.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device, *, n_ahead: int = CALLS_AHEAD):
        """like: one or more, of types that numpy has; shapes and types count. n_ahead: calls to take memory for."""
        self._layout = layout(like)
        self._bytes = torch.empty(self._layout.itemsize, dtype=torch.uint8, device=device)
        self.tensors = [
            # Not by `view`: a compiler wants to see what a view was cut from, and knows no other types of the same.
            torch.empty(0, dtype=own.dtype, device=device).set_(
                self._bytes.untyped_storage(), self._layout.fields[name][1] // own.itemsize, own.shape
            )
            for name, own in zip(self._layout.names, like, strict=True)
        ]
        self._n_ahead = max(1, min(n_ahead, BYTES_AHEAD // self._layout.itemsize))
        self._take_memory()

    def write(self, arrays: Sequence[np.ndarray | None]) -> None:
        """Send these in one copy, behind what the current stream has been given. They may change at once.

        arrays: of the tensors' shapes and types. None: what its tensor holds afterwards is left open.
        """
        if self._n_left == 0:
            self._take_memory()
        self._n_left -= 1
        for field, array in zip(self._fields, arrays, strict=True):
            if array is not None:
                field[self._n_left] = array
        self._bytes.copy_(self._ahead[self._n_left], non_blocking=True)

    def _take_memory(self) -> None:
        """A row for each of the next calls. Nobody waits for copies: memory that is given back with copies on their way
        is not handed out before they are over.
        """
        # Given back before more is asked for: mostly no copy is on its way, and the same memory comes again.
        self._ahead, self._fields = None, []
        shape, is_gpu = (self._n_ahead, self._layout.itemsize), self._bytes.is_cuda
        self._ahead = torch.empty(shape, dtype=torch.uint8, pin_memory=is_gpu)
        records = self._ahead.numpy().reshape(-1).view(self._layout)
        self._fields, self._n_left = [records[name] for name in self._layout.names], self._n_ahead


class StaticInputs:
    """The inputs of one graph, in the same place at each call.

    tensors: like the example's, which they start from; small ones share a block.
    """

    def __init__(self, name: str, example: Sequence[Tensor]):
        """name: of the region, for errors."""
        self._name = name
        self._is_small = [tensor.dtype in SMALL for tensor in example]
        small = [tensor for tensor in example if tensor.dtype in SMALL]
        self._block = InputBlock(small, small[0].device) if small else None
        cut = iter(self._block.tensors if self._block is not None else ())
        self.tensors = [next(cut).copy_(one) if one.dtype in SMALL else one for one in example]
        self._shapes = [tensor.shape for tensor in example]
        self._types = [(tensor.dtype, _TYPES.get(tensor.dtype)) for tensor in example]

    def put(self, given: Sequence[Input]) -> None:
        """Copy a call's inputs in, behind what the current stream has been given; arrays may change at once.

        Raises: ShapeError for other shapes or types than the example's, with nothing copied.
        """
        arrays: list[np.ndarray | None] = []
        own: list[Tensor] = []
        others: list[Tensor] = []
        writes = False
        kinds = zip(self._shapes, self._types, self._is_small, self.tensors, given, strict=True)
        for shape, types, is_small, tensor, one in kinds:
            is_array = isinstance(one, np.ndarray)
            if one.shape != shape or one.dtype != types[is_array]:
                raise self._mismatch(given)
            if is_small and is_array:
                arrays.append(one)
                writes = True
                continue
            if is_small:
                arrays.append(None)
            own.append(tensor)
            others.append(_pinned(one, tensor.device) if is_array else one)
        if writes:  # before the others: what it leaves open is theirs
            self._block.write(arrays)
        if own:
            torch._foreach_copy_(own, others, non_blocking=True)  # at a third of what one by one takes the host

    def _mismatch(self, given: Sequence[Input]) -> ShapeError:
        pairs = [(static, torch.as_tensor(one)) for static, one in zip(self.tensors, given, strict=True)]
        numbers = [n for n, (own, one) in enumerate(pairs) if own.shape != one.shape or own.dtype != one.dtype]
        expected, got = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in pairs[numbers[0]])
        return ShapeError(f"captured {self._name}: input {numbers[0]}", expected=expected, got=got)


def sent(device: torch.device, given: Sequence[Input]) -> Sequence[Tensor]:
    """Inputs as tensors of the device, arrays among them in one copy that the host does not wait for."""
    arrays = [one for one in given if isinstance(one, np.ndarray)]
    if not arrays:
        return given
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":
        block = InputBlock(tensors, device, n_ahead=1)
        block.write(arrays)
        tensors = block.tensors
    there = iter(tensors)
    return [next(there) if isinstance(one, np.ndarray) else one for one in given]


def column(values: Sequence[int] | Sequence[bool], size: int, fill: int | bool) -> np.ndarray:
    """Numbers or flags as an array of `size`, with `fill` behind them."""
    return np.array([*values, *[fill] * (size - len(values))])


def layout(like: Sequence[Tensor]) -> np.dtype:
    """Tensors one after the other as the fields of a record, each from a multiple of 16 bytes on."""
    starts, end = [], 0
    for tensor in like:
        starts.append(end)
        end += -(-tensor.numel() * tensor.itemsize // ALIGNED) * ALIGNED
    formats = [(_TYPES[tensor.dtype], tuple(tensor.shape)) for tensor in like]
    names = [f"{number}" for number in range(len(like))]
    return np.dtype({"names": names, "formats": formats, "offsets": starts, "itemsize": max(end, ALIGNED)})


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
