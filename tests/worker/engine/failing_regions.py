"""Injects failures into regions: for one slot, before or after the real call, or as NaN in the output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from models.graphs.region_graphs import RegionTable

When = Literal["before", "after", "once"]
Touches = Callable[[tuple[Tensor, ...]], bool]  # whether a call's tensors concern the session under test


class Broken(RuntimeError):
    """Raised by a broken region."""


@contextmanager
def broken(table: RegionTable, name: str, touches: Touches, when: When) -> Iterator[list[int]]:
    """Make a region raise in every call that `touches` selects; `once`: in the first one only, before the real call.

    Yields: a list with the number of failures.
    """
    count = [0]

    def fail(run: Callable[..., Any], bound: tuple[Any, ...], tensors: tuple[Tensor, ...], static: Any) -> Any:
        if not touches(tensors) or (when == "once" and count[0]):
            return run(*bound, *tensors, **static)
        count[0] += 1
        if when == "after":
            run(*bound, *tensors, **static)
        raise Broken(f"{name} {when}")

    with instead(table, name, fail):
        yield count


@contextmanager
def poisoned(table: RegionTable, name: str, row: Callable[[tuple[Tensor, ...]], int | None]) -> Iterator[None]:
    """Set one row of a region's output to NaN, if `row` returns one."""

    def spoil(run: Callable[..., Any], bound: tuple[Any, ...], tensors: tuple[Tensor, ...], static: Any) -> Any:
        out = run(*bound, *tensors, **static)
        number = row(tensors)
        if number is not None:
            (out if isinstance(out, Tensor) else out[0])[number] = torch.nan
        return out

    with instead(table, name, spoil):
        yield


@contextmanager
def counted(table: RegionTable) -> Iterator[dict[str, int]]:
    """Count the calls of each region."""
    counts = dict.fromkeys(table.table, 0)
    before = dict(table._runners)

    def counting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **static: Any) -> Any:
            counts[name] += 1
            return run(*arguments, **static)

        return call

    table._runners = {name: counting(name, run) for name, run in before.items()}
    try:
        yield counts
    finally:
        table._runners = before


def of_slot(slot: int) -> Touches:
    """Select calls with a slot in their batch: the first tensor holds the slots."""
    return lambda tensors: slot in tensors[0].tolist()


@contextmanager
def instead(table: RegionTable, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Replace a region by `call`, which receives the region, its bound arguments, tensors and static arguments."""
    run, n_bound = table._runners[name], len(table.table[name].bound)

    def called(*arguments: Any, **static: Any) -> Any:
        return call(run, arguments[:n_bound], arguments[n_bound:], static)

    table._runners[name] = called
    try:
        yield
    finally:
        table._runners[name] = run
