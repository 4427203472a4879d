"""Scenes drawn on the training device, thousands in a second, with what each patch shows.

They resemble those of `render`, without JPEG: objects of a bank of sprites, on backgrounds, under light. Each picture
is drawn once. They train the vision encoder; conversations train what is said of a picture.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.scenes.drawing import JITTER, draw_object, draw_thing, has_things, text_fonts
from training.scenes.labels import COLORS, MAX_COUNT, OBJECTS, PLACES, UNCOUNTED, UNKNOWN, Kind, Shown
from training.scenes.random_scenes import KINDS, MANY_SHARE
from training.scenes.render import CENTERS, FRAME_SIDE, MIN_CONTRAST

SPRITE_SIDE = 128
SHAPE_SPRITES = 8  # of each shape: some are outlines
PATCH = 14
EMPTY_SHARE, ANYWHERE_SHARE = 0.06, 0.3  # of pictures: without an object; with one object at no named place
COVERED = 0.2  # of a patch, from which on it shows an object
RECTANGLES = 6  # of a cluttered background


@dataclass(frozen=True)
class DeviceScenes:
    """Pictures and their labels.

    Args:
        pictures: [P, 448, 448, 3] uint8.
        classes: [P, 4] as `picture_classes`.
        objects: [P, 32, 32] object of each patch, 0 without one. colors: the same of its color, UNKNOWN without one.
    """

    pictures: Tensor
    classes: Tensor
    objects: Tensor
    colors: Tensor


class SceneDrawer:
    """Draws scenes from a bank of sprites.

    Args:
        generator: of `device`.
    """

    def __init__(self, device: torch.device, generator: torch.Generator):
        self.device, self.generator = device, generator
        sprites, owners = list[np.ndarray](), list[int]()
        rng = random.Random(0)
        for number, (kind, name) in enumerate(OBJECTS):
            for sprite in _sprites(kind, name, rng):
                sprites.append(sprite)
                owners.append(number)
        bank = torch.from_numpy(np.stack(sprites)).to(device).permute(0, 3, 1, 2).float() / 255
        self.bank = bank  # [N, 4, SPRITE_SIDE, SPRITE_SIDE]
        counts = torch.bincount(torch.tensor(owners), minlength=len(OBJECTS))
        self.n_sprites = counts.to(device)
        self.first = (counts.cumsum(0) - counts).to(device)
        self.colors = torch.tensor(list(COLORS.values()), dtype=torch.float32, device=device)
        things = has_things()
        kinds = [kind for kind in KINDS if things or kind != "thing"]
        n_of_kind = {kind: sum(one == kind for one, _ in OBJECTS) for kind in kinds}
        weights = [kinds.count(kind) / n_of_kind[kind] if kind in n_of_kind else 0.0 for kind, _ in OBJECTS]
        self.weights = torch.tensor(weights, device=device)
        counted = [kind in ("shape", "thing") and name not in UNCOUNTED for kind, name in OBJECTS]
        self.is_counted = torch.tensor(counted, device=device)
        self.is_thing = torch.tensor([kind == "thing" for kind, _ in OBJECTS], device=device)
        self.centers = torch.tensor([CENTERS[place] for place in PLACES], device=device)

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, device=self.device)

    def _integers(self, low: int, high: int, n: int) -> Tensor:
        """Integers [n] from low to high, both included."""
        return torch.randint(low, high + 1, (n,), generator=self.generator, device=self.device)

    @torch.no_grad()
    def draw(self, n: int) -> DeviceScenes:
        """n scenes."""
        shown = torch.multinomial(self.weights, n, replacement=True, generator=self.generator)
        is_empty = self._uniform(0, 1, n) < EMPTY_SHARE
        is_many = self.is_counted[shown] & (self._uniform(0, 1, n) < MANY_SHARE)
        count = torch.where(is_many, self._integers(2, MAX_COUNT, n), 1) * ~is_empty
        named = self._integers(0, len(COLORS) - 1, n)
        place = self._integers(0, len(PLACES) - 1, n)
        is_placed = (count == 1) & (self._uniform(0, 1, n) >= ANYWHERE_SHARE)
        in_middle = is_placed & (place == PLACES.index("in the middle"))
        color = (self.colors[named] + self._uniform(-JITTER, JITTER, n, 3)).clamp(0, 255)
        pictures = self._backgrounds(n, torch.where(self.is_thing[shown][:, None], math.nan, color))
        size = torch.where(count > 1, self._uniform(0.19, 0.27, n), self._uniform(0.26, 0.43, n))
        size = torch.where(in_middle, self._uniform(0.26, 0.85, n), size)
        turn, sprite = 8 * self._normal(n), self.first[shown] + self._sprite_numbers(shown)
        own = self.is_thing[shown]
        objects = torch.zeros(n, FRAME_SIDE // PATCH, FRAME_SIDE // PATCH, dtype=torch.int64, device=self.device)
        for number, centers in enumerate(self._places(n, count, place, is_placed).unbind(1)):
            at = torch.nonzero(count > number)[:, 0]
            if not len(at):
                break
            rgba = self._placed(sprite[at], centers[at], size[at], turn[at] + 3 * self._normal(len(at)))
            alpha = rgba[:, 3:]
            paint = torch.where(own[at][:, None, None, None], 255 * rgba[:, :3], color[at][:, :, None, None])
            pictures[at] = torch.lerp(pictures[at], paint, alpha)
            covered = F.avg_pool2d(alpha, PATCH)[:, 0] > COVERED
            objects[at] = torch.where(covered, 1 + shown[at][:, None, None], objects[at])
        colors = torch.where(own, 0, 1 + named)
        classes = torch.stack(
            (
                torch.where(is_empty, 0, 1 + shown),
                torch.where(is_empty, UNKNOWN, colors),
                count,
                torch.where(is_placed, place, UNKNOWN),
            ),
            dim=1,
        )
        of_patch = torch.where(objects > 0, colors[:, None, None], UNKNOWN)
        return DeviceScenes(self._camera(pictures), classes, objects, of_patch)

    def _normal(self, n: int) -> Tensor:
        return torch.randn(n, generator=self.generator, device=self.device)

    def _sprite_numbers(self, shown: Tensor) -> Tensor:
        return (self._uniform(0, 1, len(shown)) * self.n_sprites[shown]).long()

    def _places(self, n: int, count: Tensor, place: Tensor, is_placed: Tensor) -> Tensor:
        """Centers [n, MAX_COUNT, 2] from the middle, in shares of the side."""
        cell = torch.rand(n, 9, generator=self.generator, device=self.device).argsort(1)[:, :MAX_COUNT]
        spread = 0.3 * torch.stack((cell % 3 - 1, cell // 3 - 1), dim=-1) + self._uniform(-0.03, 0.03, n, MAX_COUNT, 2)
        anywhere = self._uniform(-0.3, 0.3, n, 2)
        single = torch.where(is_placed[:, None], self.centers[place] + self._uniform(-0.05, 0.05, n, 2), anywhere)
        return torch.where((count == 1)[:, None, None], single[:, None], spread)

    def _placed(self, sprite: Tensor, center: Tensor, size: Tensor, degrees: Tensor) -> Tensor:
        """Sprites [P, 4, 448, 448] at their places, transparent elsewhere."""
        angle = degrees * math.pi / 180
        cos, sin = angle.cos() / size, angle.sin() / size
        x, y = 2 * center.unbind(1)[0], 2 * center.unbind(1)[1]
        rows = (torch.stack((cos, sin, -(cos * x + sin * y)), 1), torch.stack((-sin, cos, sin * x - cos * y), 1))
        grid = F.affine_grid(torch.stack(rows, 1), [len(sprite), 4, FRAME_SIDE, FRAME_SIDE], align_corners=False)
        return F.grid_sample(self.bank[sprite], grid, align_corners=False)

    def _backgrounds(self, n: int, color: Tensor) -> Tensor:
        """Backgrounds [n, 3, 448, 448] levels that differ from an object's color [n, 3], where it is a number."""
        tries = torch.where(
            self._uniform(0, 1, n, 8, 1) < 0.5,
            self._uniform(20, 235, n, 8, 1) + self._uniform(-18, 18, n, 8, 3),
            self._uniform(20, 235, n, 8, 3),
        ).clamp(0, 255)
        fits = ~((tries - color[:, None]).abs().amax(2) < MIN_CONTRAST)
        base = tries[torch.arange(n, device=self.device), fits.float().argmax(1)][:, :, None, None]
        side = torch.linspace(-0.5, 0.5, FRAME_SIDE, device=self.device)
        y, x = side[:, None], side[None]
        angle, step, slope = (self._uniform(*one, n, 1, 1) for one in ((0, 2 * math.pi), (0.07, 0.2), (-0.4, 0.4)))
        ramp = angle.cos() * x + angle.sin() * y
        stripes = torch.remainder((x + slope * y) / step, 2) < 1
        near = base + self._uniform(-22, 22, n, 3, 1, 1)
        texture = self._integers(0, 3, n)[:, None, None, None]
        pictures = base.expand(-1, -1, FRAME_SIDE, FRAME_SIDE)
        pictures = torch.where(texture == 1, base + 60 * ramp[:, None], pictures)
        pictures = torch.where((texture == 2) & stripes[:, None], near, pictures)
        for _ in range(RECTANGLES):
            left, top = self._uniform(-0.6, 0.5, n, 1, 1), self._uniform(-0.6, 0.5, n, 1, 1)
            wide, high = self._uniform(0.1, 0.5, n, 1, 1), self._uniform(0.1, 0.5, n, 1, 1)
            inside = (x >= left) & (x < left + wide) & (y >= top) & (y < top + high)
            paint = base + self._uniform(-22, 22, n, 3, 1, 1)
            pictures = torch.where((texture == 3) & inside[:, None], paint, pictures)
        return pictures.clamp(0, 255)

    def _camera(self, pictures: Tensor) -> Tensor:
        """Pictures [n, 448, 448, 3] uint8 after light, lens and sensor."""
        n = len(pictures)
        levels = pictures * self._uniform(0.68, 1.22, n, 1, 1, 1)
        mean = levels.mean((1, 2, 3), keepdim=True)
        levels = mean + (levels - mean) * self._uniform(0.75, 1.15, n, 1, 1, 1)
        warmth = self._uniform(-0.1, 0.1, n, 1, 1)
        levels = levels * torch.stack((1 + warmth, torch.ones_like(warmth), 1 - warmth), dim=1)
        blurred = F.avg_pool2d(levels, 5, stride=1, padding=2, count_include_pad=False)
        levels = torch.lerp(levels, blurred, self._uniform(0, 1, n, 1, 1, 1))
        noise = torch.randn(levels.shape, generator=self.generator, device=self.device)
        levels = levels + self._uniform(0, 9, n, 1, 1, 1) * noise
        return levels.clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _sprites(kind: Kind, name: str, rng: random.Random) -> list[np.ndarray]:
    """Pictures [SPRITE_SIDE, SPRITE_SIDE, 4] uint8 of an object, those without a color of its own in white."""
    if kind == "thing":
        drawn = [draw_thing(name)] if has_things() else []
    else:
        n = SHAPE_SPRITES if kind == "shape" else 3 * len(text_fonts())
        drawn = [draw_object(Shown(kind, name, "white"), (255, 255, 255), rng) for _ in range(n)]
    return [np.asarray(one.resize((SPRITE_SIDE, SPRITE_SIDE))) for one in drawn]
