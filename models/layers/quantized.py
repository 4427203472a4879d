"""Linear layers with quantised weights, in PyTorch operations.

A CPU multiplies int8 weights with PyTorch's own int8 kernel, which rounds each row of the input to 8 bits. All other
products dequantise the weights first; the GPU kernels that do not are in `models.kernels.quantized_gemm`.
"""

import itertools
import warnings
from typing import Any, Self, cast
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.quantized import VALUE_TYPES, QuantizedMatrix
from models.layers.transformer import Derived

Weight = Tensor | QuantizedMatrix
INT8_ENGINES = ("x86", "fbgemm")  # of PyTorch, whose products of int8 take one scale a row of the weight
_TINY = 1e-30


class QuantizedLinear(Derived):
    """A linear layer of a quantised matrix: parameters `values`, `scale`, `zeros` (int4) and `bias` (optional).

    On a CPU, `derive` packs an int8 matrix in the form of PyTorch's kernel, and the parameter `values` becomes None.
    """

    values: nn.Parameter | None
    scale: nn.Parameter
    zeros: nn.Parameter | None
    bias: nn.Parameter | None
    packed_key: Tensor

    def __init__(self, matrix: QuantizedMatrix, bias: nn.Parameter | None = None):
        super().__init__()
        assert len(matrix.shape) == 2, f"matrix: expected two dims, got {matrix.shape}"
        self.out_features, self.in_features = matrix.shape
        self.kind = matrix.kind
        for name, tensor in zip(("values", "scale", "zeros"), (matrix.values, matrix.scale, matrix.zeros), strict=True):
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)
        self._packed: _Packed | None = None
        self.register_buffer("packed_key", torch.tensor(-1), persistent=False)

    @classmethod
    def of(cls, layer: nn.Module, matrix: QuantizedMatrix) -> Self:
        """The layer that replaces a plain one; takes over its bias."""
        assert isinstance(layer, nn.Linear), f"layer: expected a linear one, got {type(layer).__name__}"
        return cls(matrix, layer.bias)

    @property
    def weight(self) -> QuantizedMatrix:
        values = self.values if self._packed is None else self._packed.values()
        assert values is not None
        return QuantizedMatrix(values, self.scale, self.zeros)

    def replace_weight(self, matrix: QuantizedMatrix) -> None:
        """Take the same weight in other memory, such as a view of a packed matrix."""
        for name, tensor in zip(("values", "scale", "zeros"), (matrix.values, matrix.scale, matrix.zeros), strict=True):
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self._packed = None

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        is_packable = torch.device(device).type == "cpu" and torch.backends.quantized.engine in INT8_ENGINES
        if self._packed is None and self.kind == "int8" and is_packable:
            self._packed = _Packed(self.weight)
            self.register_parameter("values", None)
        self.packed_key = torch.tensor(-1 if self._packed is None else self._packed.key)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return apply_weight(x, self.weight, self.bias)
        product = torch.ops.duologue.int8_linear(x, self.packed_key, self.out_features)
        return cast(Tensor, product) if self.bias is None else product + self.bias


def apply_weight(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times weight [N, K], which is dequantised to x's dtype, plus bias [N]. Returns: [..., N].

    int8 and fp8 multiply the sums by the scales, so that the weights are not rounded.
    """
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    if weight.zeros is not None:
        return F.linear(x, weight.dequantized(dtype=x.dtype), bias)
    product = (F.linear(x, weight.values.to(x.dtype)).float() * weight.scale).to(x.dtype)
    return product if bias is None else product + bias


class _Packed:
    """An int8 matrix in the form of PyTorch's kernel. Copies share it."""

    _keys = itertools.count()

    def __init__(self, matrix: QuantizedMatrix):
        assert matrix.values.dtype is VALUE_TYPES["int8"]
        scale, zeros = matrix.scale.detach().double(), torch.zeros(len(matrix), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantised tensors are deprecated, their kernels are not
            tensor = torch._make_per_channel_quantized_tensor(matrix.values.detach(), scale, zeros, 0)
            self.params: Any = torch.ops.quantized.linear_prepack(tensor, None)
        # The kernel has one scale and one zero for all rows of an input. With this row they are always the same, so
        # that no row depends on another.
        self.guard = torch.zeros(1, matrix.shape[1])
        self.guard[0, 0], self.guard[0, -1] = 1.0, -1.0
        self.key = next(self._keys)
        _PACKED[self.key] = self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def values(self) -> Tensor:
        return cast(Tensor, torch.ops.quantized.linear_unpack(self.params)[0].int_repr())


_PACKED: WeakValueDictionary[int, _Packed] = WeakValueDictionary()
# An operation of its own, because a compiled graph cannot contain the packed matrix.
_LIBRARY = torch.library.Library("duologue", "DEF")
_LIBRARY.define("int8_linear(Tensor x, Tensor key, int n_rows) -> Tensor")


def _int8_linear(x: Tensor, key: Tensor, n_rows: int) -> Tensor:
    """x [..., K] times the packed matrix [N, K]; each row of x is rounded to 8 bits. Returns: [..., N]."""
    packed = _PACKED[int(key)]
    rows = x.reshape(-1, x.shape[-1]).float()
    top = rows.abs().amax(1, keepdim=True).clamp_min(_TINY)
    # A row that is not finite stays so by `top`; its zeros here keep it from the others.
    even = torch.cat((torch.nan_to_num(rows / top, 0.0, 0.0, 0.0), packed.guard))
    # Without VNNI, sums of pairs are 16 bits wide, and inputs of 8 bits could exceed them.
    product = torch.ops.quantized.linear_dynamic(even, packed.params, not torch.cpu._is_vnni_supported())
    return (product[:-1] * top).to(x.dtype).view(*x.shape[:-1], n_rows)


def _int8_linear_shape(x: Tensor, key: Tensor, n_rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], n_rows)


_LIBRARY.impl("int8_linear", _int8_linear, "CPU")
torch.library.register_fake("duologue::int8_linear", _int8_linear_shape, lib=_LIBRARY)
