"""Training in several processes, one a device: each draws batches of its own, and all take the same steps.

Started by `torchrun`; a process that is started without it is a group of one, which exchanges nothing.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(minutes=10)  # the first step of a process may compile for minutes while others wait


@dataclass(frozen=True)
class Group:
    """The processes of one training.

    Args:
        rank: of this process. size: number of processes.
        host: through which numbers of the host are exchanged; None in a group of one.
    """

    rank: int = 0
    size: int = 1
    host: dist.ProcessGroup | None = None

    @classmethod
    def of_environment(cls, device: torch.device) -> "tuple[Group, torch.device]":
        """The group that `torchrun` started, and the device of this process."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(), device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        return cls(dist.get_rank(), size, dist.new_group(backend="gloo", timeout=TIMEOUT)), device

    @property
    def is_first(self) -> bool:
        """Whether this process decides and saves."""
        return self.rank == 0

    def agreed(self, *numbers: float) -> tuple[float, ...]:
        """The numbers of the first process, for which the others wait."""
        if self.host is None:
            return numbers
        shared = torch.tensor(numbers, dtype=torch.float64)
        dist.broadcast(shared, 0, group=self.host)
        return tuple(shared.tolist())

    @torch.no_grad()
    def mean_gradients(self, weights: Mapping[str, Tensor]) -> None:
        """Replace gradients by their means. Where only some processes have one, the others count as zero; a weight for
        which no process has one keeps None."""
        if self.host is None:
            return
        used = torch.tensor([one.grad is not None for one in weights.values()], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.host)
        found = [one for one, is_used in zip(weights.values(), used.tolist(), strict=True) if is_used]
        if not found:
            return
        parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in found]
        flat = torch.cat([part.flatten() for part in parts]) / self.size
        dist.all_reduce(flat)
        for one, part in zip(found, flat.split([one.numel() for one in found]), strict=True):
            one.grad = part.view_as(one)

    @torch.no_grad()
    def share_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Give all processes the weights of the first one."""
        if self.host is not None:
            for one in weights.values():
                dist.broadcast(one, 0)

    def leave(self) -> None:
        """End the communication."""
        if self.host is not None:
            dist.destroy_process_group()
