"""Training on pictures before conversations: `vpm` and `resampler` learn scenes that are drawn on the device.

Each patch learns its object and color, and the mean of a picture's rows the classes of the whole. The heads are
used in training only. Conversations alone teach this slowly: a reply says little of a picture.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.omni import OmniModel
from training.mind.batches import Batch
from training.mind.forward import patch_places, patch_states, resample
from training.scenes.device_scenes import DeviceScenes, SceneDrawer
from training.scenes.labels import CLASSES, COLORS, N_WATCHED, OBJECTS, UNKNOWN

PICTURES = 256  # of a step
PATCH_CLASSES = (len(OBJECTS) + 1, len(COLORS) + 1)  # of objects and colors
EMPTY_WEIGHT = 0.15  # of patches without an object: most of a picture
WARMUP_STEPS = 100
LAST_RATE = 0.05
LOG_S = 10.0
NAMES = ("object", "color", "count", "place")  # of CLASSES


class SightTrainer:
    """Trains `vpm`, `resampler` and the heads `sights` for some time."""

    def __init__(
        self,
        model: OmniModel,
        sights: nn.Linear,
        precision: Callable[[], AbstractContextManager[Any]],
        *,
        rate: float,
        seed: int,
        n_pictures: int = PICTURES,
        compiled: bool = False,
    ):
        device = sights.weight.device
        self.model, self.sights, self.precision = model, sights, precision
        self.rate, self.n_pictures = rate, n_pictures
        self.patches = nn.Linear(model.config.vision_config.hidden_size, sum(PATCH_CLASSES), device=device)
        nn.init.zeros_(self.patches.weight)
        self.drawer = SceneDrawer(device, torch.Generator(device).manual_seed(seed))
        self.numbers, self.coords = patch_places(model, device)
        parts: tuple[nn.Module, ...] = (model.vpm, model.resampler, sights, self.patches)
        self.weights = [weight for part in parts for weight in part.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.02, fused=True)
        self.n_steps = 0
        self._loss = torch.compile(self.loss, dynamic=False) if compiled else self.loss
        self._sums: list[Tensor] = []

    def train(self, seconds: float, log: Callable[[dict[str, float]], None]) -> None:
        """Steps for some time, over which the rate falls. The first one, which compiles, does not count."""
        self.step(0.0)
        begun = logged = time.monotonic()
        while (now := time.monotonic()) - begun < seconds:
            self.step((now - begun) / seconds)
            if now - logged > LOG_S:
                logged = now
                log(self.take_log())
        log(self.take_log())

    def step(self, progress: float) -> None:
        """One step on new pictures. progress: part of the time that is over."""
        cosine = LAST_RATE + (1 - LAST_RATE) * (0.5 + 0.5 * math.cos(math.pi * progress))
        self.optimizer.param_groups[0]["lr"] = self.rate * cosine * min(1.0, (self.n_steps + 1) / WARMUP_STEPS)
        scenes = self.drawer.draw(self.n_pictures)
        with self.precision():
            loss, errors = self._loss(scenes.pictures, scenes.classes, scenes.objects, scenes.colors)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._sums.append(torch.cat((loss.detach()[None], errors)))
        self.n_steps += 1

    def loss(self, pictures: Tensor, classes: Tensor, objects: Tensor, colors: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and shares [5] of what is wrong: classes, and objects of patches. Arguments as of `DeviceScenes`."""
        states = patch_states(self.model, pictures, self.numbers)
        seen = resample(self.model, states, self.coords)
        whole, errors = class_loss(self.sights, seen.mean(1), classes)
        guessed, color = self.patches(states).float().flatten(0, 1).split(PATCH_CLASSES, dim=1)
        objects, colors = objects.flatten(), colors.flatten()
        weight = torch.where(objects == 0, EMPTY_WEIGHT, 1.0)
        each = F.cross_entropy(guessed, objects, reduction="none")
        loss = whole + (each * weight).sum() / weight.sum()
        n_colors = (colors != UNKNOWN).sum().clamp_min(1)
        loss = loss + F.cross_entropy(color, colors, ignore_index=UNKNOWN, reduction="sum") / n_colors
        is_object = objects != 0
        wrong = ((guessed.argmax(-1) != objects) & is_object).sum() / is_object.sum().clamp_min(1)
        return loss, torch.cat((errors, wrong[None]))

    @torch.no_grad()
    def measure(self, scenes: DeviceScenes) -> dict[str, float]:
        """Shares of wrong classes of scenes, and of wrong patches."""
        with self.precision():
            errors = self.loss(scenes.pictures, scenes.classes, scenes.objects, scenes.colors)[1]
        return dict(zip((*NAMES, "patch"), (round(one, 4) for one in errors.tolist()), strict=True))

    def take_log(self) -> dict[str, float]:
        """Means since the last call. Waits for the device."""
        values = torch.stack(self._sums).nanmean(0).tolist() if self._sums else []
        self._sums = []
        named = zip(("sight_loss", *(f"{name}_errors" for name in (*NAMES, "patch"))), values, strict=False)
        return {"sight_steps": self.n_steps} | {name: round(value, 4) for name, value in named}


def class_loss(head: nn.Module, states: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of classes of pictures, and the shares of wrong ones [4].

    Args:
        head: from the state of a picture to all CLASSES.
        states: [P, D], such as the means of pictures' rows. classes: [P, 4], UNKNOWN where a picture does not show it.
    """
    guessed = head(states).float().split(CLASSES, dim=1)
    losses = [
        F.cross_entropy(one, right, ignore_index=UNKNOWN, reduction="sum")
        for one, right in zip(guessed, classes.unbind(1), strict=True)
    ]
    known = classes != UNKNOWN
    best = torch.stack([one.argmax(-1) for one in guessed], dim=1)
    wrong = ((best != classes) & known).sum(0) / known.sum(0)
    return torch.stack(losses).sum() / known.sum().clamp_min(1), wrong


class WatchHeads(nn.Module):
    """A help in training that no checkpoint has: rows that decide know the picture and what is watched for.

    Linear layers from a state after half of the language model's layers to the classes of a new picture, and to what
    the model watches for, so that the later layers can compare the two. size: of a state.
    """

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
