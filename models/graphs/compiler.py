"""torch's compiler as long as nobody has needed it: importing it takes seconds, so nothing here imports it.

What was never imported has compiled nothing, counted nothing and keeps nothing. Does not know what is compiled.
"""

import sys
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext

import torch


def is_loaded() -> bool:
    """Whether the compiler is there, all of it: another thread may be importing it just now."""
    return hasattr(sys.modules.get("torch._dynamo"), "reset")  # defined behind everything that it imports


def counters() -> "defaultdict[str, Counter[str]]":
    """torch's own counters of compiling, by kind and name; all zero before there is a compiler."""
    return torch._dynamo.utils.counters if is_loaded() else defaultdict(Counter)


def as_written() -> AbstractContextManager[object]:
    """A stretch of calls in which what is compiled runs as it is written, and nothing new compiles."""
    return torch.compiler.set_stance("force_eager") if is_loaded() else nullcontext()


def forget() -> None:
    """Let go of everything compiled, and of what it holds on to."""
    if is_loaded():
        torch._dynamo.reset()


def cache_counts() -> tuple[int, int]:
    """Hits and misses of the cache of compiled graphs; what may not be cached is a miss."""
    inductor = counters()["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
