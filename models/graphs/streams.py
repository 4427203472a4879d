"""A second CUDA stream, and copies of small tensors between host and device that do not block.

On a CPU all work is done at once and nothing blocks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """A CUDA stream beside the caller's current stream.

    Work enqueued inside `work` starts when everything enqueued on the caller's stream before has finished, so it may
    read those results and reuse memory that was freed there. In the other direction, call `join` before the caller's
    stream reads or overwrites tensors of this stream. Neither blocks the host.
    """

    def __init__(self, device: torch.device, *, high_priority: bool = False):
        """high_priority: the GPU schedules its kernels first; for many small kernels beside a few large ones."""
        is_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1 if high_priority else 0) if is_gpu else None

    @property
    def is_async(self) -> bool:
        """Whether there is a stream: without one, work is finished when `work` exits."""
        return self._stream is not None

    @property
    def is_done(self) -> bool:
        """Whether everything enqueued here has finished. Failed work is done too: a later call raises its error."""
        try:
            return self._stream is None or bool(self._stream.query())
        except RuntimeError:
            return True

    @contextmanager
    def work(self) -> Iterator[None]:
        """Make this stream the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def record_use(self, *tensors: Tensor) -> None:
        """Keep the memory of the caller's tensors until work enqueued later in `work` has read them."""
        if self._stream is not None:
            for tensor in tensors:
                tensor.record_stream(self._stream)

    def join(self, *tensors: Tensor) -> None:
        """Let the caller's stream wait for everything enqueued here.

        Args:
            tensors: results made here that the caller's stream reads; they may be freed before it has read them.
        """
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(current)


class AsyncHostCopy:
    """A copy of a tensor to the host, enqueued on the current stream."""

    def __init__(self, tensor: Tensor):
        self._tensor, self._event = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_ready(self) -> bool:
        """Whether `result` returns without blocking. A failed copy is ready too: `result` raises its error."""
        try:
            return self._event is None or bool(self._event.query())
        except RuntimeError:
            return True

    def result(self) -> Tensor:
        """The tensor on the host; blocks until the copy is finished. Raises: any error of the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


def tensor_to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """A host tensor on the device. On a GPU the copy is from pinned memory, so that the host does not block."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
