"""A table of regions: which shapes each may be called with, and how it runs (eager, compiled, captured).

Knows buckets, examples, torch.compile and CUDA graphs. Does not know what the regions do nor who calls them; a caller
pads to a bucket with `ShapeTable.fit` and calls the table. After `warm_up` no call compiles anything.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from models.errors import SettingsError, ShapeError

Bucket = dict[str, int]


@dataclass(frozen=True)
class ShapeTable:
    """Allowed sizes per axis, ascending; every region's buckets are products of these. Subclasses name the axes."""

    batch: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        for field in fields(self):
            sizes = getattr(self, field.name)
            if not sizes or list(sizes) != sorted(set(sizes)) or min(sizes) < 1:
                raise SettingsError(f"shapes.{field.name}", expected="ascending positive sizes", got=sizes)

    def capped(self, **limits: int) -> Self:
        """The same with axes cut at a limit, which becomes the axis's largest size."""
        cut = {axis: (*(s for s in getattr(self, axis) if s < limit), limit) for axis, limit in limits.items()}
        return replace(self, **cut)

    def fit(self, region: str, axis: str, size: int) -> int:
        """The smallest allowed size that holds `size`. Raises: ShapeError naming region, axis and the sizes."""
        for allowed in getattr(self, axis):
            if size <= allowed:
                return allowed
        raise ShapeError(f"{region}: {axis}", expected=f"at most one of {getattr(self, axis)}", got=size)


@dataclass(frozen=True)
class Region:
    """One row of the table.

    run: plain function called as run(*bound, *tensors, **static). part: the compile target(s) it holds.
    axes: bucket axis -> name in the shapes. example: inputs of one bucket on scratch slots, as (tensors, static).
    variants: further settings of `static` that serving uses; each is a graph of its own.
    """

    name: str
    part: str
    run: Callable[..., Any]
    bound: tuple[Any, ...]
    axes: dict[str, str]
    example: Callable[[Bucket], tuple[tuple[Tensor, ...], dict[str, Any]]]
    variants: tuple[dict[str, Any], ...] = ({},)

    def buckets(self, shapes: ShapeTable) -> Iterator[Bucket]:
        for sizes in product(*(getattr(shapes, axis) for axis in self.axes.values())):
            yield dict(zip(self.axes, sizes, strict=True))


class Piece:
    """A plain function inside regions that compiles by itself where layers do: `table.compile(by_layer=True)`."""

    def __init__(self, function: Callable[..., Any]):
        self.function = self._run = function

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)

    def compile(self, **options: Any) -> None:
        self._run = torch.compile(self.function, **options)

    def uncompile(self) -> None:
        self._run = self.function


class RegionTable:
    """All regions of one model and its slots. Call one by name: `table("llm_decode", slots, ids, ...)`."""

    # Compile target -> module classes repeated inside it, and their methods that compile in its place.
    stacks: ClassVar[dict[str, tuple[tuple[type[nn.Module], tuple[str, ...]], ...]]] = {}

    def __init__(
        self, root: nn.Module, table: Iterable[Region], shapes: ShapeTable, pieces: dict[str, Piece] | None = None
    ):
        """pieces: further parts to compile by, beside the layers of `stacks`."""
        self.root, self.shapes, self._pieces = root, shapes, pieces or {}
        self.table = {region.name: region for region in table}
        self._runners = {name: region.run for name, region in self.table.items()}
        self._captured: dict[Hashable, Captured] = {}
        self._captured_names: set[str] = set()
        self.n_skipped = 0  # calls of captured regions at shapes without a graph
        self.marks_steps = False  # graphs that torch.compile captures itself: each region's call is one step of them

    def __call__(self, name: str, *tensors: Tensor, **static: Any) -> Any:
        """Run a region: its captured graph if there is one for these shapes and static settings, otherwise as compiled,
        or as it is. What a graph returns may be overwritten by the next call of any captured region.
        """
        if name in self._captured_names:
            if (graph := self._captured.get(_shape_key(name, tensors, static))) is not None:
                return graph(*tensors)
            self.n_skipped += 1
        return self.uncaptured(name, *tensors, **static)

    def has_graph(self, name: str, *tensors: Tensor, **static: Any) -> bool:
        """Whether calling the region with these would replay a captured graph."""
        return name in self._captured_names and _shape_key(name, tensors, static) in self._captured

    def uncaptured(self, name: str, *tensors: Tensor, **static: Any) -> Any:
        """The same call without captured graphs: as compiled, or as it is."""
        # Strides are part of a compiled graph's key: a transposed input would compile once more.
        assert all(tensor.is_contiguous() for tensor in tensors), f"{name}: inputs must be contiguous"
        if self.marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return self._runners[name](*self.table[name].bound, *tensors, **static)

    def compile(self, names: Sequence[str] | None = None, *, by_layer: bool = False, **options: Any) -> None:
        """Wrap regions with torch.compile, one graph per bucket; nothing compiles before `warm_up`.

        Args:
            names: which regions; None = all.
            by_layer: compile one transformer layer and let all layers of a stack share it, which is what makes
                start-up short at full size; what stands between layers stays eager.
            options: for torch.compile (mode, backend, ...).
        Raises: SettingsError for an unknown name, or if no chosen region has layers to compile by.
        """
        chosen = self._chosen(names)
        if by_layer:
            parts = {part for region in chosen for part in region.part.split(", ")} & self._known_parts()
            if not parts:
                expected = f"a region of {sorted(self._known_parts())}"
                raise SettingsError("compile by layer", expected=expected, got=[region.name for region in chosen])
            self.compile_parts(sorted(parts), **options)
            return
        options = self._compile_options(options)
        for region in chosen:
            self._runners[region.name] = torch.compile(region.run, **options)

    def compile_parts(self, parts: Sequence[str], **options: Any) -> None:
        """Wrap the layers of `stacks` and the pieces by these names, wherever they are used; else as `compile`.

        Raises: SettingsError for a name that is neither.
        """
        options = self._compile_options(options)
        for part in parts:
            if part not in self._known_parts():
                raise SettingsError("part", expected=f"one of {sorted(self._known_parts())}", got=part)
            self._uncompile_part(part)  # compiled before: start from the plain methods again
            if part in self._pieces:
                self._pieces[part].compile(**options)
                continue
            for layer, method in self._methods(part):
                setattr(layer, method, torch.compile(getattr(layer, method), **options))

    def _known_parts(self) -> set[str]:
        return self.stacks.keys() | self._pieces.keys()

    def _compile_options(self, options: dict[str, Any]) -> dict[str, Any]:
        # Each bucket is one more graph of the same code, and a layer's code serves several regions; the default
        # limit would refuse late ones.
        most = sum(len(region.variants) for region in self.table.values() for _ in region.buckets(self.shapes))
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, most)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4 * most)
        return {"fullgraph": True, "dynamic": False, **options}

    def _chosen(self, names: Sequence[str] | None) -> list[Region]:
        for name in names or ():
            if name not in self.table:
                raise SettingsError("region", expected=f"one of {sorted(self.table)}", got=name)
        return list(self.table.values()) if names is None else [self.table[name] for name in names]

    def _methods(self, part: str) -> Iterator[tuple[nn.Module, str]]:
        for layer in self.root.get_submodule(part).modules():
            for kind, methods in self.stacks[part]:
                if isinstance(layer, kind):
                    yield from ((layer, method) for method in methods)

    def uncompile(self, names: Sequence[str] | None = None, parts: Sequence[str] | None = None) -> None:
        """Back to eager for these regions and the layers and pieces of these parts; None and None = for all."""
        everything = names is None and parts is None
        for region in self._chosen(None if everything else names or ()):
            self._runners[region.name] = region.run
        for part in self._known_parts() if everything else parts or ():
            self._uncompile_part(part)

    def _uncompile_part(self, part: str) -> None:
        if part in self._pieces:
            self._pieces[part].uncompile()
        elif self._has(part):
            for layer, method in self._methods(part):
                layer.__dict__.pop(method, None)

    def _has(self, part: str) -> bool:
        """Whether the model has this stack: a checkpoint may lack an ear, an eye or a voice."""
        try:
            self.root.get_submodule(part)
        except AttributeError:
            return False
        return True

    def warm_up(self, names: Sequence[str] | None = None) -> None:
        """Run every bucket of every region once, on scratch slots; sessions' slots stay as they are."""
        for region in self._chosen(names):
            for bucket, variant in self.calls(region.name):
                self.call_example(region.name, bucket, variant)

    def calls(self, name: str) -> list[tuple[Bucket, dict[str, Any]]]:
        """Every bucket and variant of a region."""
        region = self.table[name]
        return list(product(region.buckets(self.shapes), region.variants))

    def call_example(self, name: str, bucket: Bucket, variant: dict[str, Any]) -> None:
        """Run a region once on scratch slots, as serving would at this bucket."""
        tensors, static = self.table[name].example(bucket)
        self(name, *tensors, **{**static, **variant})
        self.clear_scratch()

    @property
    def n_captured(self) -> int:
        """Graphs of all regions together."""
        return len(self._captured)

    @property
    def captured(self) -> set[str]:
        """Regions that have graphs."""
        return set(self._captured_names)

    def capture(self, names: Sequence[str] | None = None) -> int:
        """Capture every bucket and variant of regions as CUDA graphs, largest first, in one pool.

        To be called after `compile` and before any session is open. What was captured stays as it was then, whatever
        is compiled later, until it is captured again.
        Args: names: which regions; None = all.
        Returns: how many graphs there are, earlier ones counted.
        Raises: SettingsError for an unknown name.
        """
        pool = torch.cuda.graph_pool_handle()
        for region in self._chosen(names):
            self.drop_graphs([region.name])  # a graph is captured from the region, not from an older graph
            buckets = sorted(region.buckets(self.shapes), key=lambda b: tuple(b.values()), reverse=True)
            for bucket, variant in product(buckets, region.variants):
                graph = Captured(self, region.name, bucket, variant, pool)
                self._captured[_shape_key(region.name, graph.inputs, graph.static)] = graph
                self.clear_scratch()
            self._captured_names.add(region.name)
        return len(self._captured)

    def drop_graphs(self, names: Sequence[str] | None = None) -> None:
        """Forget the CUDA graphs of these regions, which then run as compiled or as they are. names: None = all."""
        gone = {region.name for region in self._chosen(names)}
        self._captured = {key: graph for key, graph in self._captured.items() if graph.name not in gone}
        self._captured_names -= gone

    def clear_scratch(self) -> None:
        """Empty the scratch slot: an example advances its counters like any session's."""
        raise NotImplementedError(f"{type(self).__name__}.clear_scratch")


class Captured:
    """One region at one bucket as a CUDA graph: static inputs, replay, static outputs."""

    def __init__(
        self, regions: RegionTable, name: str, bucket: Bucket, variant: dict[str, Any] | None = None, pool: Any = None
    ):
        """
        Args:
            variant: settings that differ from the example's. pool: memory pool to share with graphs that never run at
                the same time as this one (`torch.cuda.graph_pool_handle`); None = one of its own.
        """
        self.name = name
        self.inputs, static = regions.table[name].example(bucket)
        self.static = {**static, **(variant or {})}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile, then settle lazily created handles before the capture
                regions(name, *self.inputs, **self.static)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outputs = regions(name, *self.inputs, **self.static)

    def __call__(self, *tensors: Tensor) -> Any:
        """Copy inputs in, from the host or the device, and replay. Returns: the static outputs, overwritten by the next
        call.
        """
        for index, (given, static) in enumerate(zip(tensors, self.inputs, strict=True)):
            if given.shape != static.shape or given.dtype != static.dtype:
                expected, got = (f"{tuple(t.shape)} {t.dtype}" for t in (static, given))
                raise ShapeError(f"captured {self.name}: input {index}", expected=expected, got=got)
            static.copy_(given)
        self.graph.replay()
        return self.outputs


def _shape_key(name: str, tensors: Sequence[Tensor], static: dict[str, Any]) -> Hashable:
    return name, tuple(tensor.shape for tensor in tensors), frozenset(static.items())


def compile_counters() -> dict[str, int]:
    """Graph breaks and graphs compiled so far in this process; compare before and after."""
    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "frames": counters["frames"]["total"],
    }
