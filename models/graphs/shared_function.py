"""A function that several regions call, eager or compiled. Does not contain the regions (`region_graphs`)."""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Output = TypeVar("Output")


class SharedFunction(Generic[Arguments, Output]):
    """A function that several regions call and that compiles on its own: `table.compile(by_layer=True)`."""

    def __init__(self, function: Callable[Arguments, Output]):
        self.function = self._run = function

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Output:
        return self._run(*args, **kwargs)

    def compile(self, **options: Any) -> None:
        self._run = torch.compile(self.function, **options)

    def uncompile(self) -> None:
        self._run = self.function
