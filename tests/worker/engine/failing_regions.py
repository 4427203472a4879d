"""Regions that fail on purpose: for one slot, before or after the real one ran, or with numbers that are none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from models.graphs.region_graphs import RegionTable

When = Literal["before", "after", "once"]
Touches = Callable[[tuple[Tensor, ...]], bool]  # whether a call's tensors are of somebody


class Broken(RuntimeError):
    """What a broken region raises."""


@contextmanager
def broken(table: RegionTable, name: str, touches: Touches, when: When) -> Iterator[list[int]]:
    """Let a region fail wherever it `touches` somebody; `once`: only the first time, as if nothing had happened.

    Gives: how many times it has failed, a list of one.
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
    """Let a region's output be NaN in one row of the batch, if any."""

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
    """How often each region is called."""
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
    """Calls that have a slot in their batch: the first tensor names the slots."""
    return lambda tensors: slot in tensors[0].tolist()


@contextmanager
def instead(table: RegionTable, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Have `call` in a region's place; it gets the region, what is bound to it, tensors and settings."""
    run, n_bound = table._runners[name], len(table.table[name].bound)

    def called(*arguments: Any, **static: Any) -> Any:
        return call(run, arguments[:n_bound], arguments[n_bound:], static)

    table._runners[name] = called
    try:
        yield
    finally:
        table._runners[name] = run
