"""Groups of workers in the command line: `--group NAME KEY=VALUE ...`."""

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from models.errors import SettingsError
from worker.config.service import load_config

NAME = re.compile(r"[a-z][a-z0-9_]*")
TAKEN = ("authority", "controller", "gateway")  # names of other actors
KEYS = "min, max, gpus, resource, model-path, max-sessions, set"


@dataclass(frozen=True)
class GroupOptions:
    """One kind of workers.

    name: of the group. n_min, n_max: limits of their number. n_gpus: of a worker. resources: of Ray, of which a worker
    takes one each. model_path, max_sessions: flags of a worker; None: not given. environ: its settings.
    """

    name: str
    n_min: int
    n_max: int
    n_gpus: float
    resources: tuple[str, ...]
    model_path: str | None
    max_sessions: int | None
    environ: tuple[tuple[str, str], ...] = ()


def groups_of(args: argparse.Namespace) -> list[GroupOptions]:
    """The groups of `up`. Raises: SettingsError."""
    shared = GroupOptions(
        "worker",
        args.min_workers,
        args.min_workers if args.max_workers is None else args.max_workers,
        args.gpus_per_worker,
        tuple(args.resource),
        args.model_path,
        args.max_sessions,
    )
    if shared.n_max < shared.n_min:
        raise SettingsError("--max-workers", expected=f"at least --min-workers, {shared.n_min}", got=shared.n_max)
    groups = [_read(shared, name, pairs, args.config) for name, *pairs in args.group] or [shared]
    if len({one.name for one in groups}) < len(groups):
        raise SettingsError("--group", expected="a name of its own for each", got="the same name twice")
    return groups


def _read(shared: GroupOptions, name: str, pairs: list[str], config: Path | None) -> GroupOptions:
    """A group with its own values of some options. config: settings file of all workers."""
    what = f"--group {name}"
    if not NAME.fullmatch(name) or name in TAKEN:
        raise SettingsError("--group", expected=f"a name of a-z, 0-9 and _, not {', '.join(TAKEN)}", got=name)
    given: dict[str, list[str]] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or key not in KEYS.split(", "):
            raise SettingsError(what, expected=f"KEY=VALUE with one of {KEYS}", got=pair)
        given.setdefault(key, []).append(value)

    def number(key: str, read: Callable[[str], float], least: float) -> float | None:
        if key not in given:
            return None
        try:
            found = read(given[key][-1])
        except ValueError:
            found = least - 1
        if not found >= least:
            raise SettingsError(f"{what} {key}", expected=f"a number from {least:g}", got=given[key][-1])
        return found

    n_min, n_max = number("min", int, 1), number("max", int, 1)
    n_gpus, max_sessions = number("gpus", float, 0), number("max-sessions", int, 1)
    least = shared.n_min if n_min is None else int(n_min)
    most = max(least, shared.n_max) if n_max is None else int(n_max)
    if most < least:
        raise SettingsError(f"{what} max", expected=f"at least min, {least}", got=most)
    return replace(
        shared,
        name=name,
        n_min=least,
        n_max=most,
        n_gpus=shared.n_gpus if n_gpus is None else n_gpus,
        resources=tuple(given.get("resource", shared.resources)),
        model_path=given["model-path"][-1] if "model-path" in given else shared.model_path,
        max_sessions=shared.max_sessions if max_sessions is None else int(max_sessions),
        environ=tuple(_environ(given.get("set", []), what, config).items()),
    )


def _environ(settings: list[str], what: str, config: Path | None) -> Mapping[str, str]:
    """Settings, SECTION.KEY=VALUE, as variables of a worker. Raises: SettingsError, also for invalid ones."""
    found: dict[str, str] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or "." not in name:
            raise SettingsError(f"{what} set", expected="SECTION.KEY=VALUE", got=setting)
        found[f"DUOLOGUE_{name.replace('.', '_').upper()}"] = value
    load_config(config, flags={}, environ={**os.environ, **found})
    return found
