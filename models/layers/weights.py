"""Assignment of tensors to a module tree: expected names and shapes, differences, and the assignment itself.

Does not contain file formats.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.checkpoint.quantized import QuantizedMatrix
from models.errors import CheckpointError
from models.layers.quantized import QuantizedLinear
from models.layers.transformer import Derived

Tree = TypeVar("Tree", bound=nn.Module)


class Mismatch:
    """Collects the differences between a checkpoint and a module tree, to raise them as one error."""

    def __init__(self, what: str, expected: str):
        self.what, self.expected = what, expected
        self.sections: dict[str, list[str]] = {}

    def add(self, section: str, lines: Iterable[str]) -> None:
        self.sections.setdefault(section, []).extend(lines)

    def raise_if_any(self) -> None:
        """Raises: CheckpointError with every line under the heading of its section."""
        text = ""
        for section, lines in self.sections.items():
            if not lines:
                continue
            text += f"\n{section} ({len(lines)}):" + "".join(f"\n  {line}" for line in lines)
        if text:
            raise CheckpointError(self.what, expected=self.expected, got=f"these differences:{text}")


class _SkipInit(TorchFunctionMode):
    """Turns the functions of `torch.nn.init` into no-ops."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """A context in which modules are built with names and shapes, but without data.

    Initialization is skipped: on the meta device a normal distribution imports torch's compiler, which takes seconds.
    """
    with torch.device("meta"), _SkipInit():
        yield


def tensor_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the tree's state dict."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def assign_weights(
    model: Tree, tensors: Mapping[str, Tensor | QuantizedMatrix], device: torch.device | str, dtype: torch.dtype
) -> Tree:
    """Assign all tensors, by their final names, to a tree built on the meta device, and make it ready to run.

    A linear layer whose weight is a quantised matrix becomes a `QuantizedLinear`.
    """
    return assign_each(model, tensors.items(), device, dtype)


def assign_each(
    model: Tree, weights: Iterable[tuple[str, Tensor | QuantizedMatrix]], device: torch.device | str, dtype: torch.dtype
) -> Tree:
    """As `assign_weights`, of weights that are made one after another.

    A layer that replaces its matrix by a form of its own does so before the next weight is made, and frees the matrix.
    """
    plain: dict[str, Tensor] = {}
    for name, weight in weights:
        if isinstance(weight, QuantizedMatrix):
            place = name.removesuffix(".weight")
            layer = QuantizedLinear.of(model.get_submodule(place), weight)
            del weight
            with torch.no_grad():
                layer.derive(device, dtype)
            model.set_submodule(place, layer)
            plain |= {f"{place}.{part}": one.data for part, one in layer.named_parameters() if part != "bias"}
        else:
            plain[name] = weight
    model.load_state_dict(plain, strict=True, assign=True)
    plain.clear()
    model.requires_grad_(False).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Derived):
                module.derive(device, dtype)
    missing = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    assert not missing, f"expected data for every tensor, got none for {missing}"
    return model
