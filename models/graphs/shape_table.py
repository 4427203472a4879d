"""Allowed sizes of regions' inputs, and the size or sizes that a number of entries is padded to."""

from dataclasses import dataclass, fields, replace
from typing import Self

from models.errors import SettingsError, ShapeError

UNSPLIT = 4  # entries of a call whose padding costs less than another call


@dataclass(frozen=True)
class ShapeTable:
    """Allowed sizes per axis, ascending. A region's buckets are products of these. Subclasses add axes."""

    batch: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        for field in fields(self):
            sizes = getattr(self, field.name)
            if not sizes or list(sizes) != sorted(set(sizes)) or min(sizes) < 1:
                raise SettingsError(f"shapes.{field.name}", expected="ascending positive sizes", got=sizes)

    def capped(self, **limits: int) -> Self:
        """A copy with axes cut at a limit, which becomes the axis's largest size."""
        cut = {axis: (*(s for s in getattr(self, axis) if s < limit), limit) for axis, limit in limits.items()}
        return replace(self, **cut)

    def fit(self, region: str, axis: str, size: int) -> int:
        """The smallest allowed size that holds `size`. Raises: ShapeError naming region, axis and the sizes."""
        sizes: tuple[int, ...] = getattr(self, axis)
        for allowed in sizes:
            if size <= allowed:
                return allowed
        raise ShapeError(f"{region}: {axis}", expected=f"at most one of {sizes}", got=size)

    def parts(self, axis: str, n: int, most: int) -> list[int]:
        """How many of n entries each call takes, at most `most`, which is a size.

        A call of more than four takes as long as its padding makes it: one that would be filled to three quarters or
        less is split into a full one and the rest.
        """
        sizes: tuple[int, ...] = getattr(self, axis)
        found: list[int] = []
        while n:
            size = next((size for size in sizes if size >= n), most)
            smaller = max((size for size in sizes if size < n), default=0)
            is_whole = n >= most or size <= UNSPLIT or not smaller or 4 * n > 3 * size
            found.append(min(n, most) if is_whole else smaller)
            n -= found[-1]
        return found
