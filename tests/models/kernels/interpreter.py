"""Triton's interpreter, mended where it does not go with newer versions of numpy."""

from typing import Any


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
