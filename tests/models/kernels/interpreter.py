"""Patches of Triton's interpreter: support of newer NumPy versions, speed, and a product rounded as on a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np


def let_loops_end() -> None:
    """Allow loop bounds that a kernel computes.

    The interpreter represents a scalar as an array of one element, which NumPy 2.4 and later do not accept as an index.
    """
    from triton.runtime import interpreter  # Triton may be absent; imported after TRITON_INTERPRET is set

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


def patch_once() -> None:
    """Install the interpreter's operations once per launch.

    The original also installs them at each call of a device function, where they are installed already; searching what
    to replace takes longer than the computation.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    launches: list[Any] = []  # the running one
    patched: list[Any] = []  # modules of the language that it patches

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            launches.clear()
            patched.clear()
            super().restore()

    def patch_unpatched(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        if launches and all(part in patched for part in seen):
            return interpreter._LangPatchScope()
        changes = patch(function)._changes
        patched.extend(seen)
        if launches:  # reverted at the end of the launch
            launches[0]._changes += changes
            return interpreter._LangPatchScope()
        launches.append(Launch())
        launches[0]._changes = changes
        return launches[0]

    interpreter._patch_lang = patch_unpatched


def skip_unused_checks() -> None:
    """Leave out the search for overflows of whole numbers, whose result is discarded.

    Only a debugging interpreter reports what it finds. The search takes three operations for one.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug and hasattr(builder.options, "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=False)


def chained_dot(_: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """`create_dot` that adds as a GPU does in float32 without tensor cores: one product after the other.

    NumPy's product adds in another order.
    """
    from triton.runtime.interpreter import TensorHandle

    sums = total.data
    for left, right in zip(a.data.T.astype(np.float64), b.data.astype(np.float64), strict=True):
        sums = (np.outer(left, right) + sums).astype(np.float32)
    return TensorHandle(sums, total.dtype.scalar)
