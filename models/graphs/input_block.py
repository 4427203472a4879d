"""Inputs of regions on their way to the device: host arrays, the small ones packed into one block and one copy.

A NumPy array is on the host; a tensor is on the device of the region. Does not contain graphs.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from models.errors import ShapeError

Array = np.ndarray[Any, np.dtype[Any]]
Input = Tensor | Array

ALIGNED = 16  # bytes: Triton compiles one kernel for pointers with this alignment and another for all others
SMALL = (torch.int64, torch.bool)  # dtypes packed into the block: numbers per slot or token, which the host makes
# One allocation of pinned memory serves this many calls, or as many as fit this many bytes.
CALLS_AHEAD, BYTES_AHEAD = 16, 65_536
_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.from_numpy(np.empty(0, kind)).dtype: np.dtype(kind)
    for kind in (np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64)
}


class InputBlock:
    """One buffer on a device that holds several tensors, and host memory to fill it from.

    tensors: of the given shapes and types, in order; each starts at a multiple of 16 bytes.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device, *, n_ahead: int = CALLS_AHEAD):
        """
        Args:
            like: one or more tensors of types that NumPy has; only shapes and types are used.
            n_ahead: calls per allocation of host memory.
        """
        offsets, self._layout = record_layout(like)
        self._bytes = torch.empty(self._layout.itemsize, dtype=torch.uint8, device=device)
        storage = self._bytes.untyped_storage()
        self.tensors = [
            # `set_` instead of `view`: the compiler traces a view to its base, which must have the same dtype.
            torch.empty(0, dtype=own.dtype, device=device).set_(
                storage, offset // own.itemsize, own.shape, _contiguous_strides(own.shape)
            )
            for offset, own in zip(offsets, like, strict=True)
        ]
        self._n_ahead = max(1, min(n_ahead, BYTES_AHEAD // self._layout.itemsize))
        self._ahead: Tensor | None = None
        self._fields: list[Array] = []
        self._allocate()

    def write(self, arrays: Sequence[Array | None]) -> None:
        """Enqueue one copy of these to the tensors. The arrays may change when this returns.

        Args:
            arrays: of the tensors' shapes and types; None leaves the content of that tensor undefined.
        """
        if self._n_left == 0:
            self._allocate()
        assert self._ahead is not None
        self._n_left -= 1
        for field, array in zip(self._fields, arrays, strict=True):
            if array is not None:
                field[self._n_left] = array
        self._bytes.copy_(self._ahead[self._n_left], non_blocking=True)

    def _allocate(self) -> None:
        """Allocate host memory for the next calls, one row each. This does not wait for copies in flight: PyTorch does
        not reuse pinned memory before the copies from it are finished.
        """
        # Released before the allocation: usually no copy is in flight, and the same memory is returned.
        self._ahead, self._fields = None, []
        shape, is_gpu = (self._n_ahead, self._layout.itemsize), self._bytes.is_cuda
        self._ahead = torch.empty(shape, dtype=torch.uint8, pin_memory=is_gpu)
        records = self._ahead.numpy().reshape(-1).view(self._layout)
        self._fields, self._n_left = [records[name] for name in self._layout.names or ()], self._n_ahead


class StaticInputs:
    """The inputs of one graph, at the same addresses in each call.

    tensors: start with the example's values; small ones share a block.
    """

    def __init__(self, name: str, example: Sequence[Tensor]):
        """name: of the region, for errors."""
        self._name = name
        self._is_small = [tensor.dtype in SMALL for tensor in example]
        small = [tensor for tensor in example if tensor.dtype in SMALL]
        self._block = InputBlock(small, small[0].device) if small else None
        packed = iter(self._block.tensors if self._block is not None else ())
        self.tensors = [next(packed).copy_(one) if one.dtype in SMALL else one for one in example]
        self._shapes = [tensor.shape for tensor in example]
        self._types = [(tensor.dtype, _TYPES.get(tensor.dtype)) for tensor in example]

    def copy_in(self, given: Sequence[Input]) -> None:
        """Enqueue the copies of a call's inputs. Arrays may change when this returns.

        Raises: ShapeError for shapes or types other than the example's; nothing is copied then.
        """
        arrays: list[Array | None] = []
        own: list[Tensor] = []
        others: list[Tensor] = []
        writes = False
        kinds = zip(self._shapes, self._types, self._is_small, self.tensors, given, strict=True)
        for shape, types, is_small, tensor, one in kinds:
            is_array = isinstance(one, np.ndarray)
            if one.shape != shape or one.dtype != types[is_array]:
                raise self._mismatch(given)
            if is_small and isinstance(one, np.ndarray):
                arrays.append(one)
                writes = True
                continue
            if is_small:
                arrays.append(None)
            own.append(tensor)
            others.append(_pinned(one, tensor.device) if isinstance(one, np.ndarray) else one)
        if writes and self._block is not None:  # before the tensors: it leaves the content of theirs undefined
            self._block.write(arrays)
        if own:
            torch._foreach_copy_(own, others, non_blocking=True)  # a third of the host time of single copies

    def _mismatch(self, given: Sequence[Input]) -> ShapeError:
        pairs = [(static, torch.as_tensor(one)) for static, one in zip(self.tensors, given, strict=True)]
        numbers = [n for n, (own, one) in enumerate(pairs) if own.shape != one.shape or own.dtype != one.dtype]
        expected, got = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in pairs[numbers[0]])
        return ShapeError(f"captured {self._name}: input {numbers[0]}", expected=expected, got=got)


def inputs_to_device(device: torch.device, given: Sequence[Input]) -> Sequence[Tensor]:
    """Inputs as tensors on the device; the arrays go in one copy that does not block the host."""
    arrays = [one for one in given if isinstance(one, np.ndarray)]
    if not arrays:
        return cast("Sequence[Tensor]", given)
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":
        block = InputBlock(tensors, device, n_ahead=1)
        block.write(arrays)
        tensors = block.tensors
    copied = iter(tensors)
    return [next(copied) if isinstance(one, np.ndarray) else one for one in given]


def padded_array(values: Sequence[int] | Sequence[bool], size: int, fill: int | bool) -> Array:
    """Numbers or flags as an array of `size`, padded with `fill`."""
    return np.array([*values, *[fill] * (size - len(values))])


def record_layout(like: Sequence[Tensor]) -> tuple[list[int], np.dtype[Any]]:
    """Byte offsets of tensors packed one after the other, each at a multiple of 16, and the record type of them."""
    starts, end = [], 0
    for tensor in like:
        starts.append(end)
        end += -(-tensor.numel() * tensor.itemsize // ALIGNED) * ALIGNED
    formats = [(_TYPES[tensor.dtype], tuple(tensor.shape)) for tensor in like]
    names = [f"{number}" for number in range(len(like))]
    return starts, np.dtype({"names": names, "formats": formats, "offsets": starts, "itemsize": max(end, ALIGNED)})


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return strides[::-1]


def _pinned(array: Array, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
