"""Scenes that the training device draws, and steps that learn to see them."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.training.batches import tiny_model
from tests.worker.loop.engines import TINY
from training.mind import forward
from training.mind import sight as sight_module
from training.mind.batches import collate
from training.mind.examples import Examples
from training.mind.learner import Learner, LearnPlan
from training.mind.sight import SightTrainer, WatchHeads
from training.mind.words.written import WRITTEN
from training.scenes.device_scenes import DeviceScenes, SceneDrawer
from training.scenes.labels import CLASSES, COLORS, N_WATCHED, OBJECTS, UNKNOWN
from training.timelines.layout import NOTHING

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drawer() -> SceneDrawer:
    return SceneDrawer(CPU, torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def scenes(drawer: SceneDrawer) -> DeviceScenes:
    return drawer.draw(24)


def test_patches_show_what_the_classes_say(scenes: DeviceScenes) -> None:
    assert scenes.pictures.shape == (24, 448, 448, 3) and scenes.pictures.dtype == torch.uint8
    for number, (shown, color, count, place) in enumerate(scenes.classes.tolist()):
        seen = set(scenes.objects[number].unique().tolist()) - {0}
        assert seen == ({shown} if count else set()), f"scene {number}: expected {shown}, got {seen}"
        colors = set(scenes.colors[number].unique().tolist()) - {UNKNOWN}
        assert colors == ({color} if count else set()), f"scene {number}: expected {color}, got {colors}"
        assert place == UNKNOWN or count == 1, f"scene {number}: expected no place of {count} objects, got {place}"
        if place == 0:  # on the left
            column = torch.nonzero(scenes.objects[number]).float().mean(0)[1]
            assert column < 14, f"scene {number}: expected the left half, got column {column:.1f}"


def test_colors_of_objects_are_near_their_names(scenes: DeviceScenes) -> None:
    """Light, noise and blur included, which the tolerance is for."""
    of_patches = scenes.pictures.float().unflatten(1, (32, 14)).unflatten(3, (32, 14)).amax((2, 4))
    names = list(COLORS)
    n_tested = 0
    for number, (shown, color, *_) in enumerate(scenes.classes.tolist()):
        if shown == 0 or OBJECTS[shown - 1][0] != "shape" or names[color - 1] not in ("red", "blue"):
            continue
        red, _, blue = of_patches[number][scenes.objects[number] > 0].mean(0).tolist()
        assert (red > blue) == (names[color - 1] == "red"), f"{names[color - 1]}: got red {red:.0f}, blue {blue:.0f}"
        n_tested += 1
    assert n_tested, "expected red or blue shapes among the scenes"


def test_steps_learn_to_see(drawer: SceneDrawer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawer.generator.manual_seed(1)
    monkeypatch.setattr(sight_module, "SceneDrawer", lambda *_: drawer)  # its objects are drawn already
    examples = Examples(TINY)
    mind = Learner(tiny_model(), examples.tokenizer.special, LearnPlan(tmp_path, CPU, plan_seconds=100))
    trainer = SightTrainer(mind.model, mind.sights, mind.precision, rate=3e-3, seed=0, n_pictures=4)
    unseen = trainer.drawer.draw(8)
    others = {name: one.detach().clone() for name, one in mind.weights.items() if name.startswith(("apm", "llm"))}
    logs: list[dict[str, float]] = []

    def loss() -> float:
        with torch.no_grad():
            return float(trainer.loss(unseen.pictures, unseen.classes, unseen.objects, unseen.colors)[0])

    before = loss()
    seconds = itertools.count()
    monkeypatch.setattr(sight_module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    trainer.train(4.0, logs.append)  # steps of a second, after a first one that does not count
    assert trainer.n_steps == 4 and logs[-1]["sight_steps"] == trainer.n_steps
    assert loss() < before, f"expected less than {before:.3f}, got {loss():.3f}"
    assert set(trainer.measure(unseen)) == {"object", "color", "count", "place", "patch"}
    changed = [name for name, one in others.items() if not torch.equal(one, mind.weights[name])]
    assert not changed, f"expected hearing and language as before, got changes of {changed[:3]}"


@pytest.mark.parametrize(("is_padded", "expected"), [(False, [2, 1]), (True, [2, 2])])
def test_pictures_are_padded_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_padded: bool, expected: list[int]
) -> None:
    sizes = []

    def encode(_: object, pictures: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
        sizes.append(len(pictures))
        return pictures.flatten(1, 2)

    monkeypatch.setattr(forward, "PICTURES_AT_ONCE", 2)
    monkeypatch.setattr(forward, "patch_places", lambda *_: (None, None))
    pictures = torch.rand(3, 2, 2, 3)
    rows = forward.encode_pictures(None, pictures, encode, is_padded=is_padded)  # type: ignore[arg-type]
    assert sizes == expected and torch.equal(rows, pictures.flatten(1, 2)), f"expected {expected}, got {sizes}"


def test_heads_read_the_picture_and_what_is_watched_for_at_rows_that_decide() -> None:
    examples = Examples(TINY, seconds=40.0)
    records = (examples.record(WRITTEN, number) for number in itertools.count())
    watching = (one for one in records if len(set(one.watched[one.watched != NOTHING].tolist())) > 1)
    drawn = list(itertools.islice(watching, 2))
    batch, classes = (
        collate(drawn),
        torch.from_numpy(np.concatenate([one.picture_classes for one in drawn]).astype("int64")),
    )
    n_decisions = int(batch.is_decision.sum())
    assert len(batch.watches) == n_decisions, f"expected {n_decisions} decisions, got {len(batch.watches)}"
    assert batch.look_pictures.tolist() == list(range(len(classes))), "expected each picture once, when it is new"
    # States that name the classes, and layers that read them.
    n_looks = sum(CLASSES)
    states = torch.zeros(batch.ids.numel(), n_looks + N_WATCHED)
    starts = list(itertools.accumulate(CLASSES, initial=0))
    for row, picture in zip(batch.looks.tolist(), batch.look_pictures.tolist(), strict=True):
        for start, one in zip(starts, classes[picture].tolist(), strict=False):
            states[row, start + max(one, 0)] = 50.0
    states[batch.watches, n_looks + batch.watch_classes] = 50.0
    heads = WatchHeads(n_looks + N_WATCHED)
    with torch.no_grad():
        heads.looks.weight[:, :n_looks] = torch.eye(n_looks)
        heads.watches.weight[:, n_looks:] = torch.eye(N_WATCHED)
    loss, measured = heads.loss(states.unflatten(0, batch.ids.shape), batch, classes)
    assert loss.item() < 1e-6, f"expected no loss, got {loss.item()}"
    assert [float(one) for one in measured.values()] == [0.0, 0.0], f"expected no errors, got {measured}"
    loss, measured = heads.loss(states.roll(1, 0).unflatten(0, batch.ids.shape), batch, classes)
    assert loss.item() > 1 and min(map(float, measured.values())) > 0, f"expected errors, got {measured}"
