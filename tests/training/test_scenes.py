"""Rendered scenes: seeded, in the camera's size, showing their label's colors, places and movements."""

import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from training.scenes.drawing import has_things
from training.scenes.labels import COLORS, THINGS, Shown
from training.scenes.random_scenes import Movement, draw_movement, draw_shown
from training.scenes.render import FRAME_SIDE, Look, draw_look, render
from training.timelines.timeline import View

CLEAR = {
    "texture": "plain",
    "brightness": 1.0,
    "contrast": 1.0,
    "warmth": 0.0,
    "blur": 0.0,
    "noise": 0.0,
    "quality": 90,
}


FILLED = 1  # a seed whose shapes have no hole


def clear_look(shown: Shown, background: tuple[int, int, int] = (240, 240, 240)) -> Look:
    return replace(draw_look(shown, random.Random(0)), background=background, size=0.35, seed=FILLED, **CLEAR)


def center(picture: Image.Image, background: tuple[int, int, int] = (240, 240, 240)) -> tuple[float, float]:
    """Center of everything that differs from the background, as shares of the side."""
    y, x = np.nonzero(np.abs(np.asarray(picture, int) - background).max(axis=2) > 60)
    return float(x.mean() / FRAME_SIDE), float(y.mean() / FRAME_SIDE)


def test_the_same_seed_gives_the_same_picture() -> None:
    pictures = []
    for _ in range(2):
        rng = random.Random(5)
        shown = draw_shown(rng, things=False)
        pictures.append(render(shown, draw_look(shown, rng), 3))
    assert pictures[0].size == (FRAME_SIDE, FRAME_SIDE)
    assert pictures[0].tobytes() == pictures[1].tobytes()


def test_every_label_draws_something() -> None:
    rng = random.Random(6)
    for _ in range(12):
        shown = draw_shown(rng, has_things())
        look = draw_look(shown, rng)
        with_it, without = (np.asarray(render(one, look), int) for one in (shown, None))
        changed = (np.abs(with_it - without).max(axis=2) > 40).mean()
        assert changed > 0.005, f"{shown.words}: expected it to be seen, {changed:.2%} of the pixels differ"


@pytest.mark.parametrize("color", ["red", "green", "blue", "yellow", "black"])
def test_objects_have_the_color_of_their_label(color: str) -> None:
    shown = Shown("shape", "square", color)
    middle = np.asarray(render(shown, clear_look(shown)), int)[200:248, 200:248].mean(axis=(0, 1))
    nearest = min(COLORS, key=lambda name: np.abs(middle - COLORS[name]).sum())
    assert nearest == color, f"expected {color}, got {middle.round()}, which is nearest to {nearest}"


def test_objects_are_where_their_label_says() -> None:
    for place, axis, side in (
        ("on the left", 0, -1),
        ("on the right", 0, 1),
        ("at the top", 1, -1),
        ("at the bottom", 1, 1),
    ):
        shown = Shown("shape", "circle", "blue", 1, place)
        at = center(render(shown, clear_look(shown)))
        assert side * (at[axis] - 0.5) > 0.15 and abs(at[1 - axis] - 0.5) < 0.1, f"{place}: got {at}"


def test_objects_move_as_their_label_says() -> None:
    for motion, axis, sign in (("to the left", 0, -1), ("to the right", 0, 1), ("up", 1, -1), ("down", 1, 1)):
        movement = Movement(Shown("shape", "circle", "blue"), motion, 4)
        view = View(movement.shown, clear_look(movement.shown), 0, movement)
        path = [center(view.picture(unit).render())[axis] for unit in range(movement.n_units)]
        steps = sign * np.diff(path)
        assert (steps > 0.1).all(), f"{motion}: expected steps in its direction, got {path}"
    assert draw_movement(random.Random(1), 5, things=False).shown.count == 1


def test_counts_are_separate_objects() -> None:
    shown = Shown("shape", "circle", "black", 4)
    look = replace(clear_look(shown), size=0.2)
    dark = (np.abs(np.asarray(render(shown, look), int) - 240).max(axis=2) > 60).mean()
    single = replace(shown, count=1)
    assert dark == pytest.approx(
        4 * (np.abs(np.asarray(render(single, look), int) - 240).max(axis=2) > 60).mean(), rel=0.1
    )


@pytest.mark.skipif(not has_things(), reason="needs fonts-noto-color-emoji")
def test_things_are_different_pictures() -> None:
    drawn = {
        name: render(Shown("thing", name, None), clear_look(Shown("thing", name, None))).tobytes() for name in THINGS
    }
    assert len(set(drawn.values())) == len(THINGS)


def test_labels_are_checked() -> None:
    with pytest.raises(ValueError, match="count: expected 1 to 6, got 7"):
        Shown("shape", "circle", "red", 7)
    with pytest.raises(ValueError, match="color of a thing"):
        Shown("thing", "cat", "red")
    assert Shown("shape", "circle", "orange").words == "an orange circle"
    assert Shown("digit", "eight", "red").words == "an eight"
    assert Shown("digit", "one", "red").words == "a one"
    assert Shown("thing", "bus", None, 2).words == "two buses"
