"""Presets: instructions and a voice for the start of a conversation, one file each in `presets/<mode>/`.

Those in `assets/presets` come with the server. Those in `<service.data_dir>/presets` are the user's own, and replace
presets with the same id. `preset_file` reads a file, `reference_sound` decodes the sounds.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from models.errors import ConfigError
from server.registry.preset_file import ASSETS, SUFFIXES, LoadedPreset, read_preset
from worker.voice_registry import INDEX, voice_folder

LOG = logging.getLogger(__name__)
FOLDER = ASSETS / "presets"
MODES = ("audio_duplex", "half_duplex_audio", "omni", "turnbased")
CHECK_S = 1.0  # between two looks at the files


class Presets:
    """Presets at one time. modes: mode -> its presets, in order. problems: a sentence for each file left out."""

    def __init__(self, modes: Mapping[str, Sequence[LoadedPreset]], problems: Sequence[str] = ()):
        self.modes = {mode: list(modes.get(mode, [])) for mode in MODES}
        self.problems = tuple(problems)

    @classmethod
    def load(cls, folder: Path = FOLDER) -> Self:
        """Read all presets of a folder. A mode without a folder has none.

        Raises: ConfigError with the file and the problem.
        """
        modes, problems = _read_folder(folder)
        if problems:
            raise problems[0]
        return cls(modes)

    @classmethod
    def load_available(cls, folders: Sequence[Path]) -> Self:
        """Read the presets of several folders, of which later ones replace earlier ones; bad files are left out."""
        modes: dict[str, dict[str, LoadedPreset]] = {mode: {} for mode in MODES}
        problems: list[str] = []
        for folder in folders:
            found, errors = _read_folder(folder)
            problems += map(str, errors)
            for mode, presets in found.items():
                modes[mode] |= {one.preset.id: one for one in presets}
        return cls({mode: _in_order(presets.values()) for mode, presets in modes.items()}, problems)

    def find(self, mode: str, preset_id: str) -> LoadedPreset | None:
        return next((one for one in self.modes.get(mode, []) if one.preset.id == preset_id), None)


class PresetFolders:
    """The presets of several folders, read again after their files changed. Safe to call from any thread.

    Args:
        folders: later ones replace presets of earlier ones.
    """

    def __init__(self, *folders: Path):
        self.folders = folders
        self._lock = threading.Lock()
        self._stamp: frozenset[tuple[Path, int, int]] | None = None
        self._checked_at = 0.0
        self._presets = NO_PRESETS

    def current(self) -> Presets:
        """The presets in the files now, at most a second old. Reads files: call on a thread."""
        with self._lock:
            if self._stamp is None or time.monotonic() - self._checked_at >= CHECK_S:
                self._check()
                self._checked_at = time.monotonic()
            return self._presets

    def _check(self) -> None:
        stamp = frozenset(_stamps(self.folders))
        if stamp == self._stamp:
            return
        before, self._stamp = self._presets.problems, stamp
        self._presets = Presets.load_available(self.folders)
        for problem in self._presets.problems:
            if problem not in before:
                LOG.warning("preset left out: %s", problem)


def _read_folder(folder: Path) -> tuple[dict[str, list[LoadedPreset]], list[ConfigError]]:
    """The presets of each mode, in order, and the problems of the other files."""
    modes: dict[str, list[LoadedPreset]] = {}
    problems: list[ConfigError] = []
    for inner in sorted(one for one in folder.glob("*") if one.is_dir()):
        if inner.name not in MODES:
            problems.append(ConfigError(str(inner), expected=f"a folder named {' or '.join(MODES)}", got=inner.name))
            continue
        found: dict[str, LoadedPreset] = {}
        for file in sorted(file for file in inner.iterdir() if file.suffix in SUFFIXES):
            try:
                loaded = read_preset(file)
                if loaded.preset.id in found:
                    expected = "an id that no other preset of its mode has"
                    raise ConfigError(str(file), expected=expected, got=loaded.preset.id)
            except ConfigError as error:
                problems.append(error)
            else:
                found[loaded.preset.id] = loaded
        modes[inner.name] = _in_order(found.values())
    return modes, problems


def _in_order(presets: Iterable[LoadedPreset]) -> list[LoadedPreset]:
    return sorted(presets, key=lambda one: (one.preset.order, one.preset.id))


def _stamps(folders: Sequence[Path]) -> Iterator[tuple[Path, int, int]]:
    """Path, modification time in ns and size of every file in the folders of modes, and of the registries of voices."""
    for folder in folders:
        for file in (*folder.glob("*/*"), voice_folder(folder.parent) / INDEX):
            with suppress(OSError):  # removed meanwhile
                found = file.stat()
                yield file, found.st_mtime_ns, found.st_size


NO_PRESETS = Presets({})
