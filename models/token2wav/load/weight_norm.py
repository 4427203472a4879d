"""Weight-normalized layers to plain ones, for both storage formats. Does not contain the layers."""

import re
from collections.abc import Mapping

from torch import Tensor

from models.errors import CheckpointError

# Pattern of a weight's length and suffix of its direction: as a parametrization, and in the older format.
_PAIRS = (
    (r"\.parametrizations\.weight\.original0$", ".parametrizations.weight.original1"),
    (r"\.weight_g$", ".weight_v"),
)


def fold_weight_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with every pair of length and direction replaced by the weight `X.weight` that it represents.

    The norm is computed in float64 over all dims but the first, including transposed convolutions, whose first dim is
    the input. The result has the type of the direction.
    Raises: CheckpointError if one tensor of a pair is missing or has a wrong shape, if a direction is zero or has fewer
        than two dims, or if the weight is also stored plainly.
    """
    folded = dict(tensors)
    for pattern, direction_suffix in _PAIRS:
        for name in [name for name in tensors if re.search(pattern, name)]:
            stem = re.sub(pattern, "", name)
            if stem + direction_suffix not in folded:
                raise CheckpointError(name, expected=f"its direction {stem + direction_suffix}", got="none")
            if f"{stem}.weight" in folded:
                raise CheckpointError(f"{stem}.weight", expected="stored once", got="plain and weight-normed")
            folded[f"{stem}.weight"] = _fold(stem, folded.pop(name), folded.pop(stem + direction_suffix))
    left = [name for name in folded if name.endswith(tuple(suffix for _, suffix in _PAIRS))]
    if left:
        raise CheckpointError(left[0], expected="its length beside it", got="none")
    return folded


def _fold(stem: str, length: Tensor, direction: Tensor) -> Tensor:
    if direction.ndim < 2:
        what = f"{stem}: direction of its weight"
        raise CheckpointError(what, expected="at least 2 dims", got=list(direction.shape))
    expected = (len(direction),) + (1,) * (direction.ndim - 1)
    if tuple(length.shape) != expected:
        raise CheckpointError(f"{stem}: length of its weight", expected=list(expected), got=list(length.shape))
    norm: Tensor = direction.double().flatten(1).norm(dim=1).view(expected)
    if not norm.all():
        raise CheckpointError(f"{stem}: direction of its weight", expected="no zero rows", got="a zero row")
    return (direction.double() * (length.double() / norm)).to(direction.dtype)
