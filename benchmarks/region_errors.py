"""How far every region is from the same region in float32, eager, on the same inputs and the same slots.

While a conversation runs, each call of a region is made twice: as served, and by a twin engine that was given the
served one's slots just before. So errors do not add up from call to call, and whatever a unit calls is compared,
without knowing it by name.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.graphs import RegionTable
from worker.building import Parts


@dataclass
class Errors:
    """Of one region over its calls; reference is the twin. relative: norm of the difference over the reference's norm,
    the largest of all calls. mean, largest: absolute difference. integers: values that are not equal, of n_integers.
    alike_...: over the n_alike calls whose integers are equal, returned and kept in slots: after another choice the
    rest of a call works on other tokens. alike_relative: the larger of what is returned and what is kept.
    """

    n: int = 0
    n_alike: int = 0
    relative: float = 0.0
    state_relative: float = 0.0
    mean: float = 0.0
    largest: float = 0.0
    integers: int = 0
    n_integers: int = 0
    alike_relative: float = 0.0
    alike_mean: float = 0.0
    alike_largest: float = 0.0
    error: str = ""


class _Doubled:
    """Stands in a runner's or vocoder's place of regions."""

    def __init__(self, served: RegionTable, twin: RegionTable, states: tuple[list[Tensor], list[Tensor]]):
        self._served, self._twin, (self._own, self._others) = served, twin, states
        self.errors: dict[str, Errors] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    def __call__(self, name: str, *tensors: Tensor, **static: Any) -> Any:
        before = [tensor.to(other.dtype, copy=True) for tensor, other in zip(self._own, self._others, strict=True)]
        for other, tensor in zip(self._others, before, strict=True):
            other.copy_(tensor)
        inputs = [self._given(tensor) for tensor in tensors]
        out = self._served(name, *tensors, **static)
        errors = self.errors.setdefault(name, Errors())
        errors.n += 1
        try:
            with exact():
                expected = self._twin.uncaptured(name, *inputs, **static)
            self._compare(errors, out, expected, before)
        except Exception as error:  # one region that cannot be doubled must not cost the others
            errors.error = f"{type(error).__name__}: {error}"[:300]
        return out

    def _given(self, tensor: Tensor) -> Tensor:
        """A copy on the twin's device and in its type: the served call may overwrite what it was given."""
        device = self._others[0].device
        narrow = tensor.dtype in (torch.bfloat16, torch.float16)
        return tensor.to(device, torch.float32 if narrow else tensor.dtype, copy=True)

    def _compare(self, errors: Errors, out: Any, expected: Any, before: list[Tensor]) -> None:
        returned, n_other = _Difference(), 0
        for own, other in zip(_flat(out), _flat(expected), strict=True):
            if own.is_floating_point():
                returned.add(own.to(other.dtype), other)
            else:
                n_other += int((own != other).sum())
                errors.n_integers += own.numel()
        errors.integers += n_other
        kept = _Difference()
        for own, other, old in zip(self._own, self._others, before, strict=True):
            if not own.is_floating_point():
                n_other += int((own != other).sum())
                continue
            changed = other != old
            if bool(changed.any()):
                kept.add(own.to(other.dtype)[changed], other[changed])
        errors.relative = _larger(errors.relative, returned.relative)
        errors.state_relative = _larger(errors.state_relative, kept.relative)
        for one in (returned, kept):
            errors.mean, errors.largest = _larger(errors.mean, one.mean), _larger(errors.largest, one.largest)
        if n_other == 0:
            errors.n_alike += 1
            for one in (returned, kept):
                errors.alike_relative = _larger(errors.alike_relative, one.relative)
                errors.alike_mean = _larger(errors.alike_mean, one.mean)
                errors.alike_largest = _larger(errors.alike_largest, one.largest)


class _Difference:
    """Of several tensors together."""

    def __init__(self) -> None:
        self._square = self._norm = self._sum = self.largest = 0.0
        self._n = 0

    def add(self, own: Tensor, reference: Tensor) -> None:
        # Logits hold minus infinity where a token is forbidden; what is not finite must be so on both sides.
        known = torch.isfinite(reference)
        if bool((torch.isfinite(own) != known).any()):
            self.largest = math.inf
        own, reference = own[known].double(), reference[known].double()
        if own.numel():
            difference = own - reference
            self._square += float(difference.square().sum())
            self._norm += float(reference.square().sum())
            self._sum += float(difference.abs().sum())
            self._n += own.numel()
            self.largest = _larger(self.largest, float(difference.abs().max()))

    @property
    def relative(self) -> float:
        return math.sqrt(self._square / self._norm) if self._norm else math.sqrt(self._square)

    @property
    def mean(self) -> float:
        return self._sum / self._n if self._n else 0.0


@contextmanager
def doubled(served: Parts, twin: Parts) -> Iterator[dict[str, dict[str, Errors]]]:
    """Inside, every call of a region is compared. Gives: errors by table and region, complete behind the block.

    Raises: AssertionError if the engines' slots differ in shape.
    """
    runner, vocoder = served.duplex.runner, served.vocoder
    tables = {"omni": _Doubled(runner.regions, twin.duplex.runner.regions, _states(_omni(served), _omni(twin)))}
    runner.regions = tables["omni"]
    if vocoder is not None:
        states = _states(_vocoder(served), _vocoder(twin))
        tables["vocoder"] = _Doubled(vocoder.regions, twin.vocoder.regions, states)
        vocoder.regions = tables["vocoder"]
    try:
        yield {name: table.errors for name, table in tables.items()}
    finally:
        runner.regions = tables["omni"]._served
        if vocoder is not None:
            vocoder.regions = tables["vocoder"]._served


def _omni(parts: Parts) -> list[Tensor]:
    """Without the scratch slot, where rows of padding overwrite each other in any order."""
    return [tensor[: parts.n_slots] for tensor in parts.duplex.state.tensors()]


def _vocoder(parts: Parts) -> list[Tensor]:
    return [*parts.vocoder.state.tensors(), *parts.vocoder.vocode_state.tensors()]


def _states(own: list[Tensor], others: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    assert [t.shape for t in own] == [t.shape for t in others], "expected slots of the same shapes in both engines"
    return own, others


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)] if isinstance(value, tuple | list) else []


def _larger(a: float, b: float) -> float:
    """A NaN stays."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@contextmanager
def exact() -> Iterator[None]:
    """float32 products in float32; what is compiled for another setting does not notice, it runs outside."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
