"""Regions of the vocoder as CUDA graphs, captured once at start and sealed. Without them, the regions as they are.

Knows buckets and memory pools. Does not know sessions.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from models.graphs import Bucket, Captured
from models.token2wav.region_table import VocoderRegions


class GraphCache:
    """Calls a region by its captured graph where there is one."""

    def __init__(self, regions: VocoderRegions):
        self._regions = regions
        self._graphs: dict[Hashable, Captured] = {}

    @property
    def n_graphs(self) -> int:
        return len(self._graphs)

    def capture(self, names: Sequence[str] = ("begin", "flow", "hift")) -> int:
        """Capture every bucket and variant of these regions, largest first, in one pool.

        Returns: how many graphs there are. To be called once, after `compile` and before any session is open.
        """
        pool = torch.cuda.graph_pool_handle()
        for name in names:
            region = self._regions.table[name]
            buckets = sorted(region.buckets(self._regions.shapes), key=lambda b: tuple(b.values()), reverse=True)
            for bucket in buckets:
                for variant in region.variants:
                    graph = Captured(self._regions, name, bucket, variant, pool)
                    self._graphs[_key(name, bucket, graph.static)] = graph
                    self._regions.clear_scratch()
        return len(self._graphs)

    def __call__(self, name: str, bucket: Bucket, *tensors: Tensor, **static: Any) -> Any:
        """Run a region at a bucket. What a graph returns is overwritten by the next call at the same bucket."""
        if (graph := self._graphs.get(_key(name, bucket, static))) is not None:
            return graph(*tensors)
        return self._regions(name, *tensors, **static)


def _key(name: str, bucket: Bucket, static: dict[str, Any]) -> Hashable:
    return name, frozenset(bucket.items()), frozenset(static.items())
