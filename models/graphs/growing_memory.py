"""Memory at fixed addresses that is taken step by step, for tensors whose addresses are in CUDA graphs.

Contains the block of bytes with its growth, and how much of a GPU's memory such blocks hold, which torch's figures do
not contain. Does not contain what the bytes are used for.

On a GPU the addresses of the whole block are reserved, and physical memory is mapped to its beginning through the
driver's virtual memory management. On a CPU the system takes a page with the first write to it. Everywhere else, and on
a GPU without virtual memory management, the whole block is allocated at once.
"""

import contextlib
import ctypes
import logging
import weakref
from functools import cache
from typing import Any

import numpy as np
import torch

LOG = logging.getLogger(__name__)
# Values of the driver's header, cuda.h.
_OUT_OF_MEMORY = 2
_HAS_VIRTUAL_MEMORY = 102  # a device's attribute
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
_SMALLEST_UNIT = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_address = _handle = _flags = ctypes.c_ulonglong
_size = ctypes.c_size_t
_ARGUMENTS = {
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_size), ctypes.POINTER(_Properties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_address), _size, _size, _address, _flags),
    "cuMemAddressFree": (_address, _size),
    "cuMemCreate": (ctypes.POINTER(_handle), _size, ctypes.POINTER(_Properties), _flags),
    "cuMemRelease": (_handle,),
    "cuMemMap": (_address, _size, _size, _handle, _flags),
    "cuMemUnmap": (_address, _size),
    "cuMemSetAccess": (_address, _size, ctypes.POINTER(_Access), _size),
}

_live: dict[int, "_Addresses"] = {}  # by first address


def mapped_bytes(device: torch.device) -> int:
    """Bytes that growing blocks of this process hold on a GPU and that torch's memory figures do not contain."""
    if device.type != "cuda" or not _live:
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(addresses.n_mapped for addresses in list(_live.values()) if addresses.device == index)


class GrowingMemory:
    """A block of bytes, zero at first, whose address never changes and whose memory is taken from its beginning on.

    The memory is given back with the last tensor of the block. Graphs that use it must be gone or never run again.

    tensor: [n_bytes] uint8, the whole block. Only the first `held_bytes` bytes may be read or written.
    """

    def __init__(self, n_bytes: int, held_bytes: int, device: torch.device):
        """
        Args:
            n_bytes: size of the block.
            held_bytes: bytes that it can hold from the start, 1 to `n_bytes`.
        Raises: as `grow`.
        """
        assert 1 <= held_bytes <= n_bytes, (held_bytes, n_bytes)
        self._addresses: _Addresses | None = None
        if device.type == "cpu":
            self.tensor = torch.from_numpy(np.zeros(n_bytes, np.uint8))  # torch.zeros writes, and so takes, every page
        elif device.type == "cuda" and (addresses := _reserved(n_bytes, torch.empty(0, device=device).get_device())):
            self._addresses = addresses
            block = _Block(addresses.first, n_bytes)
            # Not at exit: the driver frees everything with the process.
            weakref.finalize(block, addresses.free).atexit = False
            addresses.map(held_bytes)
            self.tensor = torch.as_tensor(block, device=torch.device("cuda", addresses.device))
            assert self.tensor.data_ptr() == addresses.first, "expected a tensor over the block, got a copy"
            self.tensor[: self.held_bytes].zero_()
        else:
            self.tensor = torch.zeros(n_bytes, dtype=torch.uint8, device=device)

    @property
    def held_bytes(self) -> int:
        """Bytes that the block holds: on a GPU whole units of the driver, which may be more than the block has."""
        return self.tensor.nbytes if self._addresses is None else self._addresses.n_mapped

    def grow(self, n_bytes: int) -> None:
        """Let the block hold at least its first `n_bytes` bytes. New ones are zero for work on the current stream.

        It never shrinks. Does not wait for the device, unless torch's free memory must be returned to the driver first.
        Raises: torch.OutOfMemoryError; RuntimeError for other errors of the driver. The block is unchanged then.
        """
        assert n_bytes <= self.tensor.nbytes, (n_bytes, self.tensor.nbytes)
        if n_bytes <= (first := self.held_bytes) or self._addresses is None:
            return
        self._addresses.map(n_bytes)
        self.tensor[first : self.held_bytes].zero_()


class _Block:
    """What torch makes a tensor of; the tensor keeps it alive."""

    def __init__(self, address: int, n_bytes: int):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (n_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 2,
        }


class _Addresses:
    """Reserved addresses of one GPU, the first `n_mapped` of which have memory."""

    def __init__(self, n_bytes: int, device: int):
        """device: number of the GPU in this process."""
        self.device, self.n_mapped = device, 0
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, _handle_of(device)))
        unit = _size()
        _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), _SMALLEST_UNIT)
        self._unit = unit.value
        self._n_reserved = self._whole_units(n_bytes)
        first = _address()
        _call("cuMemAddressReserve", ctypes.byref(first), self._n_reserved, 0, 0, 0)
        self.first = first.value
        _live[self.first] = self

    def map(self, n_bytes: int) -> None:
        """Map memory to the first `n_bytes` bytes, with undefined content. Raises: as `GrowingMemory.grow`."""
        end, n_more = self.first + self.n_mapped, self._whole_units(n_bytes) - self.n_mapped
        handle = self._take(n_more)
        try:
            _call("cuMemMap", end, n_more, 0, handle, 0)
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory
        access = _Access(self._properties.location, _READ_AND_WRITE)
        try:
            _call("cuMemSetAccess", end, n_more, ctypes.byref(access), 1)
        except BaseException:
            _call("cuMemUnmap", end, n_more)
            raise
        self.n_mapped += n_more

    def _take(self, n_bytes: int) -> ctypes.c_ulonglong:
        """A handle of memory of the GPU."""
        handle = _handle()
        arguments = ctypes.byref(handle), n_bytes, ctypes.byref(self._properties), 0
        try:
            _call("cuMemCreate", *arguments)
        except torch.OutOfMemoryError:
            with contextlib.suppress(RuntimeError):  # not possible beside a capture
                torch.cuda.empty_cache()
            _call("cuMemCreate", *arguments)
        return handle

    def free(self) -> None:
        """Wait for the device and give memory and addresses back; on an error of the device they stay taken."""
        try:
            torch.cuda.synchronize(self.device)
            if self.n_mapped:
                _call("cuMemUnmap", self.first, self.n_mapped)
            _call("cuMemAddressFree", self.first, self._n_reserved)
        except RuntimeError as error:
            LOG.warning("memory of voices: expected to give it back, got %s", error)
            return
        del _live[self.first]

    def _whole_units(self, n_bytes: int) -> int:
        return -(-n_bytes // self._unit) * self._unit


def _reserved(n_bytes: int, device: int) -> _Addresses | None:
    """Reserved addresses; None if the device or its driver does not support them."""
    try:
        return _Addresses(n_bytes, device) if _has_virtual_memory(device) else None
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        LOG.info("memory that grows: not supported, all is taken at once: %s", error)
        return None


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _ARGUMENTS.items():
        getattr(library, name).argtypes = types
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises: torch.OutOfMemoryError; RuntimeError for other errors."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        got = text.value.decode() if text.value else f"error {code}"
        error = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name}: expected CUDA_SUCCESS, got {got}")


def _handle_of(device: int) -> int:
    handle = ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(handle), device)
    return handle.value


@cache
def _has_virtual_memory(device: int) -> bool:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), _HAS_VIRTUAL_MEMORY, _handle_of(device))
    return bool(value.value)
