"""A matrix product added to an accumulator, inside a Triton kernel. Requires Triton."""

import triton
import triton.language as tl


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
