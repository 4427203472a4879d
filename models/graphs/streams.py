"""Work beside the caller's own on a GPU, and small tensors on their way between host and device without a wait.

Knows order and memory. Does not know what runs. On a CPU everything is done where it is asked for and nothing waits.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A CUDA stream beside the caller's.

    What is enqueued inside `work` starts when everything that the caller's stream had been given before is done, so
    that it may read what that wrote, and reuse memory that was freed here meanwhile. The other way round whoever reads
    or overwrites what was touched here calls `join` first. Neither lets the host wait.
    """

    def __init__(self, device: torch.device, *, urgent: bool = False):
        """urgent: its kernels go first where both have some waiting; for many small ones beside a few large ones."""
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0) if is_gpu else None

    @property
    def is_beside(self) -> bool:
        """Whether there is a stream: without one, work is done when `work` ends."""
        return self._stream is not None

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is enqueued inside goes to this stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def lend(self, *tensors: Tensor) -> None:
        """The caller's tensors, which `work` is going to read, may be freed before it has."""
        for tensor in tensors if self._stream is not None else ():
            tensor.record_stream(self._stream)

    def join(self, *tensors: Tensor) -> None:
        """What the caller's stream is given next starts when everything here is done.

        tensors: those made here that it is going to read; they may be freed before it has.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)


class AsyncHostCopy:
    """A tensor on its way to the host, behind what the current stream has been given."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_here(self) -> bool:
        """Whether `take` would not wait. What went wrong on the way counts as here: `take` raises it."""
        try:
            return self._event is None or self._event.query()
        except RuntimeError:
            return True

    def take(self) -> Tensor:
        """The tensor on the host, waited for. Raises: whatever the device raised."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


def send_one(device: torch.device, tensor: Tensor) -> Tensor:
    """A host tensor to the device. From pinned memory the host need not wait for what the device is still at."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
