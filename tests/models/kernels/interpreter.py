"""Patches of Triton's interpreter: newer NumPy versions, bfloat16, speed, and a product rounded as on a GPU."""

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


def keep_types() -> None:
    """Make each type of a block once, and skip work whose result is known: most of the time of a kernel.

    The original computes shape, size and name anew for each operation, and unwraps what is not wrapped. The patches
    return what it returns and leave all other cases to it.
    """
    _keep_block_types()
    _unwrap_wrapped_only()
    _keep_numpy_types()
    _broadcast_unequal_only()
    _cast_unequal_only()
    _call_members_directly()


def _keep_block_types() -> None:
    from triton.language import core

    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    no_shape, one_element = core.tuple([]), core.constexpr(1)

    def block_of(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(one.value if type(one) is core.constexpr else one for one in shape)
        # Types of pointers are made at each launch and compared by content.
        if type(element_ty) is not core.dtype or not all(type(one) is int for one in sizes):
            make_block(self, element_ty, shape)
            return
        if (element_ty.name, sizes) not in kept:
            make_block(self, element_ty, shape)
            one = core.tensor.__new__(core.tensor)
            make_tensor(one, None, self)
            kept[element_ty.name, sizes] = {**vars(self), "shape_of_tensor": one.shape, "numel_of_tensor": one.numel}
        vars(self).update(kept[element_ty.name, sizes])

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = no_shape, one_element
        elif (shape := vars(type).get("shape_of_tensor")) is not None:
            self.handle, self.type, self.dtype = handle, type, type.element_ty
            self.shape, self.numel = shape, type.numel_of_tensor
        else:
            make_tensor(self, handle, type)

    core.block_type.__init__, core.tensor.__init__ = block_of, tensor_of


def _unwrap_wrapped_only() -> None:
    from triton.language import core

    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.tensor}

    def unwrap_wrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_wrapped


def _keep_numpy_types() -> None:
    from triton.language import core
    from triton.runtime import interpreter

    find, kept = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def find_once(given: Any) -> np.dtype[Any]:
        scalar = given.element_ty if type(given) is core.block_type else given
        if type(scalar) is not core.dtype:
            return find(given)
        if scalar.name not in kept:
            kept[scalar.name] = find(scalar)
        return kept[scalar.name]

    interpreter._get_np_dtype = find_once


def _broadcast_unequal_only() -> None:
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unequal(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if blocks == (True, True) and left.type.shape.values == right.type.shape.values:
            return left, right
        return (left, right) if blocks == (False, False) else broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_unequal


def _cast_unequal_only() -> None:
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    cast, choose = TritonSemantic.cast, TritonSemantic.computation_type_impl
    chosen: dict[tuple[Any, ...], Any] = {}

    def cast_unequal(self: Any, given: Any, to: Any, *rounding: Any) -> Any:
        if type(to) is type(given.dtype) is core.dtype and given.dtype.name == to.name:
            return given
        return cast(self, given, to, *rounding)

    def choose_once(self: Any, one: Any, one_is_scalar: bool, other: Any, other_is_scalar: bool, divides: bool) -> Any:
        key = one.name, one_is_scalar, other.name, other_is_scalar, divides
        if key not in chosen:
            chosen[key] = choose(self, one, one_is_scalar, other, other_is_scalar, divides)
        return chosen[key]

    TritonSemantic.cast, TritonSemantic.computation_type_impl = cast_unequal, choose_once


def _call_members_directly() -> None:
    from triton.runtime import interpreter

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return member(*given, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attribute


def multiply_bfloat16() -> None:
    """Let products take bfloat16, which the interpreter keeps as 16-bit whole numbers and would multiply as such."""
    from triton.language import core
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != core.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), core.float32)

    def dot_of_numbers(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, widened(a), widened(b), *others)

    interpreter.InterpreterBuilder.create_dot = dot_of_numbers


def chained_dot(_: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """`create_dot` that adds as a GPU does in float32 without tensor cores: one product after the other.

    NumPy's product adds in another order.
    """
    from triton.runtime.interpreter import TensorHandle

    sums = total.data
    for left, right in zip(a.data.T.astype(np.float64), b.data.astype(np.float64), strict=True):
        sums = (np.outer(left, right) + sums).astype(np.float32)
    return TensorHandle(sums, total.dtype.scalar)
