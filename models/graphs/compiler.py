"""Access to torch's compiler that does not import it: the import takes seconds.

A compiler that was never imported has compiled nothing, counted nothing and holds nothing.
"""

import sys
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext

import torch


def is_loaded() -> bool:
    """Whether the compiler is imported completely; another thread may be importing it now."""
    return hasattr(sys.modules.get("torch._dynamo"), "reset")  # defined after everything that the package imports


def counters() -> "defaultdict[str, Counter[str]]":
    """torch's own compile counters, by kind and name; all zero without a compiler."""
    return torch._dynamo.utils.counters if is_loaded() else defaultdict(Counter)


def force_eager() -> AbstractContextManager[object]:
    """A context in which compiled functions run eagerly and nothing is compiled."""
    return torch.compiler.set_stance("force_eager") if is_loaded() else nullcontext()


def reset_compiler() -> None:
    """Drop all compiled code, and the objects that it references."""
    if is_loaded():
        torch._dynamo.reset()


def cache_counts() -> tuple[int, int]:
    """Hits and misses of the cache of compiled graphs; a graph that cannot be cached is a miss."""
    inductor = counters()["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
