"""Triton's interpreter, mended where it does not go with newer versions of numpy, and where most of its time went.

And a product that is rounded as on a GPU.
"""

from typing import Any

import numpy as np


def let_loops_end() -> None:
    """Let loops of kernels run to numbers that the kernel computed.

    The interpreter keeps a scalar as an array of one element, and from numpy 2.4 on such an array is no integer.
    """
    from triton.runtime import interpreter  # not everywhere, and only after the choice to interpret

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def patch_once() -> None:
    """Put the interpreter's operations in place of the language's once a launch, instead of at each call of a function
    by a kernel too: there they are in place, and looking for what to replace takes longer than computing.
    """
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    launches: list[Any] = []  # the one that runs
    patched: list[Any] = []  # modules of the language, during it

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            launches.clear()
            patched.clear()
            super().restore()

    def patch_what_is_not(function: Any) -> Any:
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        if launches and all(part in patched for part in seen):
            return interpreter._LangPatchScope()
        changes = patch(function)._changes
        patched.extend(seen)
        if launches:  # until its end
            launches[0]._changes += changes
            return interpreter._LangPatchScope()
        launches.append(Launch())
        launches[0]._changes = changes
        return launches[0]

    interpreter._patch_lang = patch_what_is_not


def chained_dot(_: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """The interpreter's `create_dot` as a GPU multiplies in float32 without tensor cores: one addition after another.

    NumPy's product adds in an order of its own, which is none of a GPU's.
    """
    from triton.runtime.interpreter import TensorHandle

    sums = total.data
    for left, right in zip(a.data.T.astype(np.float64), b.data.astype(np.float64), strict=True):
        sums = (np.outer(left, right) + sums).astype(np.float32)
    return TensorHandle(sums, total.dtype.scalar)
