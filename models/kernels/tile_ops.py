"""Operations on tiles in Triton kernels: sums of products, stored values as numbers, gates. Requires Triton."""

import triton
import triton.language as tl

# 2 ** 120: between the exponents of a float that has the bits of an fp8 number, and of that number.
_FP8_STEP = tl.constexpr(1.329227995784916e36)


@triton.jit
def add_dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b in float32; with tensor cores, unless PRECISION is "ieee".

    Without tensor cores each number of the product is a chain of additions, each of them rounded. A chain that starts
    at `total` would continue the chains of earlier tiles and round large numbers; a chain that starts at zero and is
    added once rounds small ones.
    """
    if PRECISION == "ieee":
        # `fma` instead of `+`: Triton fuses a product and a sum into one long chain.
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, total)
    return tl.dot(a, b, total, input_precision=PRECISION)


# Instructions that convert types run at a quarter of the rate of others or less, and would take longer than reading the
# weights. For bfloat16, numbers are made of bits instead.
# Four fp8 numbers to bfloat16: each byte to the high half of 16 bits, exponent and mantissa four bits lower, and the
# product with 2 ** 120 (0x7b80).
_FP8_TO_BFLOAT16 = tl.constexpr("""{
.reg .b32 a, b, m, n;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 m, a, 4;
shr.u32 n, b, 4;
and.b32 m, m, 0x07f007f0;
and.b32 n, n, 0x07f007f0;
lop3.b32 a, a, 0x80008000, m, 0xea;
lop3.b32 b, b, 0x80008000, n, 0xea;
mov.b32 m, 0x7b807b80;
mov.b32 n, 0x80008000;
fma.rn.bf16x2 $0, a, m, n;
fma.rn.bf16x2 $1, b, m, n;
}""")


@triton.jit
def widened(raw, dtype: tl.constexpr):
    """Numbers of int8 values, or of fp8 values as bytes."""
    if raw.dtype == tl.uint8:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(_FP8_TO_BFLOAT16, "=r,=r,r", [raw], tl.bfloat16, is_pure=True, pack=4)
        bits = raw.to(tl.uint32)
        bits = (bits & 128) << 24 | (bits & 127) << 20
        return (bits.to(tl.float32, bitcast=True) * _FP8_STEP).to(dtype)
    return raw.to(dtype)


@triton.jit
def less_zero(nibbles, zero, dtype: tl.constexpr):
    """Values 0 to 15, uint8, less the zeros."""
    if dtype == tl.bfloat16:
        # 128 + value; the zero is subtracted with the 128, exactly.
        bits = nibbles.to(tl.uint16) | 0x4300
        return bits.to(tl.bfloat16, bitcast=True) - (zero + 128.0).to(tl.bfloat16)
    return (nibbles.to(tl.float32) - zero).to(dtype)


@triton.jit
def group_terms(scale, zeros, at, n):
    """Scales and zeros of int4 of the rows n of one group; at: 32-bit words before the group's first zero.

    Both are read as words, because narrower reads cannot be issued ahead.
    """
    pairs = tl.load(scale + at * 2 + n // 2)
    four = tl.load(zeros + at + n // 4)
    by = (pairs >> (n % 2 * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return by, (four >> (n % 4 * 8)) & 255


@triton.jit
def silu_product(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in float32, rounded as in `models.layers.transformer.GatedMLP`."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
