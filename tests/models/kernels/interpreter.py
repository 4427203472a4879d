"""Triton's interpreter, mended where it does not go with newer versions of numpy, and where most of its time went."""

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
