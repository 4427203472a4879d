"""Collects comparisons and prints one line per case, with expected and found values on a miss."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch

from tests.parity.checksum import allowed, checksum

ATOL = 1e-4  # float32 on CPU against the public implementation's float32
FEW = 8  # numbers that a miss lists individually


@dataclass
class Check:
    case: str
    name: str
    ok: bool
    detail: str


@dataclass
class Report:
    """All checks of one run. `close` is for floats, `equal` for ids and other exact values."""

    checks: list[Check] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)  # stages without a comparison

    def close(self, case: str, name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float = ATOL) -> None:
        """|got - expected| <= tolerance * (1 + |expected|) everywhere; shapes must match and all be finite."""
        self.within(case, name, got, expected, tolerance * (1 + expected.double().abs()))

    def within(
        self, case: str, name: str, got: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor | float
    ) -> None:
        """|got - expected| <= allowed everywhere; shapes must match and all be finite."""
        if tuple(got.shape) != tuple(expected.shape):
            self._add(case, name, False, f"expected shape {tuple(expected.shape)}, got {tuple(got.shape)}")
            return
        got, expected = got.detach().cpu().double(), expected.double()
        if got.numel() == 0:
            self._add(case, name, True, "empty")
            return
        delta = (got - expected).abs()
        relative = (delta / expected.abs().clamp_min(1e-12)).max().item()
        ok = bool((delta <= allowed).all())  # False for NaN
        detail = f"max abs {delta.max().item():.3g}  max rel {relative:.3g}  ({got.numel()} values)"
        if not ok and got.numel() <= FEW:
            detail += f"  expected {_numbers(expected)}, got {_numbers(got)}"
        self._add(case, name, ok, detail)

    def sums_if(self, case: str, name: str, got: torch.Tensor, expected: Sequence[float] | None) -> None:
        """The checksum of `got` equals the expected one (`tests.parity.checksum`), if that is not None."""
        if expected is not None:
            sums = (torch.tensor(sums, dtype=torch.float64) for sums in (checksum(got), expected))
            self.within(case, name, *sums, allowed(expected))

    def equal(self, case: str, name: str, got: object, expected: object) -> None:
        got, expected = _plain(got), _plain(expected)
        ok = got == expected
        self._add(case, name, ok, f"{_short(got)}" if ok else f"expected {_short(expected)}, got {_short(got)}")

    def close_if(
        self, case: str, name: str, got: torch.Tensor, expected: torch.Tensor | None, tolerance: float = ATOL
    ) -> None:
        """`close`, unless the expected tensor was trimmed from the directory."""
        if expected is not None:
            self.close(case, name, got, expected, tolerance)

    def equal_if(self, case: str, name: str, got: object, expected: object | None) -> None:
        """`equal`, unless the expected value was trimmed from the directory."""
        if expected is not None:
            self.equal(case, name, got, expected)

    def has_inputs(self, case: str, held: Container[str], *names: str) -> bool:
        """Whether all inputs of a case exist; missing ones are reported as a miss by name."""
        absent = [name for name in names if name not in held]
        if absent:
            self.fail(case, "input", f"missing: {', '.join(absent)}")
        return not absent

    def fail(self, case: str, name: str, why: str) -> None:
        self._add(case, name, False, why)

    def _add(self, case: str, name: str, ok: bool, detail: str) -> None:
        self.checks.append(Check(case, name, ok, detail))

    @property
    def misses(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def __str__(self) -> str:
        lines = [f"{'ok  ' if c.ok else 'MISS'} {c.case:<28} {c.name:<34} {c.detail}" for c in self.checks]
        if self.empty:
            lines.append(f"nothing to compare in: {', '.join(self.empty)}")
        return "\n".join([*lines, f"{len(self.checks) - len(self.misses)} passed, {len(self.misses)} failed"])


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _numbers(values: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values.flatten().tolist()) + "]"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 160 else f"{text[:120]}… ({len(text)} chars)"
