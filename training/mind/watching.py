"""A help in training that no checkpoint has: what decides about a picture knows the picture and what is watched for.

Both are read from the language model's states after half of its layers, at the rows that decide, so that the later
layers can compare them.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from training.mind.batches import Batch
from training.mind.sight import class_loss
from training.scenes.labels import CLASSES, N_WATCHED


class WatchHeads(nn.Module):
    """Linear layers from a state to the classes of a picture and to what is watched for. size: of a state."""

    def __init__(self, size: int):
        super().__init__()
        self.looks, self.watches = nn.Linear(size, sum(CLASSES)), nn.Linear(size, N_WATCHED)
        for layer in (self.looks, self.watches):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def loss(self, middle: Tensor, batch: Batch, classes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of both losses, and the shares of wrong classes.

        Args:
            middle: [B, T, D] states. classes: [P, 4] of all pictures of the batch, see `class_loss`.
        """
        states = middle.flatten(0, 1)
        loss, errors = class_loss(self.looks, states[batch.looks], classes[batch.look_pictures])
        watched = self.watches(states[batch.watches]).float()
        each = F.cross_entropy(watched, batch.watch_classes, reduction="none")
        wrong = watched.argmax(-1) != batch.watch_classes
        measured = {"look_errors": errors.nanmean(), "watch_errors": wrong.float().mean()}
        return loss + each.sum() / max(1, len(each)), measured
