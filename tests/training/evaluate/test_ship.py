"""The steps that ship the talker: their order, what a dry run leaves alone, and the default of programs."""

import shutil
from pathlib import Path

import pytest

from models.checkpoint.embedded import DEFAULT, TINY
from models.errors import ModelError
from training.assemble import ship
from training.assemble.ship import SWITCHES, TALKER, Places, make_default


def copy_of_switched_files(root: Path) -> None:
    for file in SWITCHES:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / file)


@pytest.mark.skipif(DEFAULT != TINY, reason="the talker is shipped")
def test_the_default_is_changed_in_code_and_documentation(tmp_path: Path) -> None:
    copy_of_switched_files(tmp_path)
    make_default(tmp_path)
    texts = [(tmp_path / file).read_text() for file in SWITCHES]
    assert f'DEFAULT = Path("{TALKER}")' in texts[0] and f'| `model.model_path` | `"{TALKER}"` |' in texts[1]
    make_default(tmp_path)
    assert [(tmp_path / file).read_text() for file in SWITCHES] == texts, "expected no second change"


def test_a_file_that_names_another_checkpoint_changes_nothing(tmp_path: Path) -> None:
    copy_of_switched_files(tmp_path)
    code, other = (tmp_path / file for file in SWITCHES)
    other.write_text("nothing")
    before = code.read_text()
    with pytest.raises(ModelError, match=r"configuration\.md"):
        make_default(tmp_path)
    assert code.read_text() == before


def test_a_step_that_fails_leaves_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    monkeypatch.setattr(ship.export, "main", lambda _: steps.append("export"))
    monkeypatch.setattr(ship.assemble, "main", lambda _: steps.append("assemble") or 0)
    monkeypatch.setattr(ship.evaluate, "main", lambda _: steps.append("evaluate") or 1)
    monkeypatch.setattr(ship, "make_default", lambda _: steps.append("default"))
    places = Places.of(tmp_path, tmp_path / "work", is_dry=False)
    places.talker.mkdir(parents=True)
    (places.talker / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="speech_weights"):
        ship.ship(tmp_path, tmp_path, places, size=["--quick"], is_dry=False)
    (tmp_path / "speech_weights.pt").touch()
    with pytest.raises(ModelError, match="evaluate"):
        ship.ship(tmp_path, tmp_path, places, size=["--quick"], is_dry=False)
    assert steps == ["export", "assemble", "evaluate"]
