"""A matrix product added to what is there, inside a Triton kernel. Import only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def add_dot(a, b, total, PRECISION: tl.constexpr):
    """total + a b in float32, by tensor cores or, if PRECISION is "ieee", without them.

    Without them each number of the product is a chain of additions that round one by one. A chain that begins at
    `total` would go on with the chains before; begun at zero and added at its end, it rounds numbers that are small.
    """
    if PRECISION == "ieee":
        # Not by a plus: out of a product and a plus Triton makes the one long chain.
        return tl.fma(tl.dot(a, b, input_precision=PRECISION), 1.0, total)
    return tl.dot(a, b, total, input_precision=PRECISION)
