"""A table of regions: the shapes each may be called with, and how it runs (eager, compiled, captured).

A caller pads its inputs to a bucket with `ShapeTable.fit` and calls the table. After `warm_up` no call compiles
anything. In a sealed table a captured region runs only as its graphs. Does not contain the regions' functions.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from models.errors import SettingsError, ShapeError
from models.graphs.captured import Bucket, Captured, Example, Outputs, StagePool, StaticSettings
from models.graphs.compiler import counters
from models.graphs.input_block import Input, inputs_to_device
from models.graphs.kernel_support import LoadedKernels
from models.graphs.shape_table import ShapeTable
from models.graphs.shared_function import SharedFunction

CPU = torch.device("cpu")
Output = TypeVar("Output")


@dataclass(frozen=True)
class Region:
    """One row of the table.

    run: plain function, called as run(*bound, *tensors, **static).
    part: the compile target(s) that the region contains, separated by ", ".
    axes: bucket axis -> field of the shapes.
    example: bucket -> inputs on scratch slots, as (tensors, static).
    variants: settings of `static` that serving uses; each is a graph of its own.
    has: whether the bucket exists; no caller uses sizes that are large along two axes at once.
    """

    name: str
    part: str
    run: Callable[..., Outputs]
    bound: tuple[object, ...]
    axes: dict[str, str]
    example: Callable[[Bucket], Example]
    variants: tuple[StaticSettings, ...] = ({},)
    has: Callable[[Bucket], bool] = lambda bucket: True

    def buckets(self, shapes: ShapeTable) -> Iterator[Bucket]:
        for sizes in product(*(getattr(shapes, axis) for axis in self.axes.values())):
            if self.has(bucket := dict(zip(self.axes, sizes, strict=True))):
                yield bucket


@dataclass(frozen=True)
class CaptureFacts:
    """Cost of capturing one region.

    n_bytes: growth of the device's reserved memory.
    n_retried: graphs whose first capture failed and whose second, after one more eager run, succeeded.
    """

    n_graphs: int
    seconds: float
    n_bytes: int
    n_retried: int


class RegionTable:
    """All regions of one model and its slots.

    Call one by its function, `table.run(regions.unit_step, slots, ...)`, or by its name, `table("unit_step", slots)`.
    """

    # Compile target -> module classes that repeat inside it, and their methods, which are compiled in its place.
    stacks: ClassVar[dict[str, tuple[tuple[type[nn.Module], tuple[str, ...]], ...]]] = {}

    def __init__(
        self,
        root: nn.Module,
        table: Iterable[Region],
        shapes: ShapeTable,
        shared_functions: dict[str, SharedFunction[..., Tensor]] | None = None,
        *,
        device: torch.device = CPU,
    ):
        """
        Args:
            root: module that contains the layers of `stacks`.
            shared_functions: parts that compile on their own, beside the layers of `stacks`.
            device: where the regions run.
        """
        self.root, self.shapes, self._device = root, shapes, device
        self._shared_functions = shared_functions or {}
        self.table = {region.name: region for region in table}
        self._runners = {name: region.run for name, region in self.table.items()}
        self._names: dict[Callable[..., object], str] = {region.run: name for name, region in self.table.items()}
        self._captured: dict[Hashable, Captured] = {}
        self._captured_names: set[str] = set()
        self._pools: dict[str, StagePool] = {}
        # Inference mode keeps no record of views and changes, which takes a tenth of the time of a unit on a CPU. A
        # function that is compiled for other tensors would compile again for its tensors.
        self.without_gradients = torch.inference_mode if device.type == "cpu" else torch.no_grad
        self.is_sealed = False
        self.n_skipped = 0  # calls of captured regions at shapes without a graph
        self.marks_steps = False  # torch.compile captures graphs itself: every region's call is one of their steps

    def run(self, function: Callable[..., Output], *given: Input, **static: Hashable) -> Output:
        """Run the region of this function, as a call by name.

        Args:
            function: `Region.run` of the region.
            given, static: the function's arguments after the bound ones.
        Returns: what the function returns.
        Raises: as a call by name.
        """
        return cast(Output, self(self._names[function], *given, **static))

    def name_of(self, function: Callable[..., object]) -> str:
        """Name of the region of this function."""
        return self._names[function]

    def __call__(self, name: str, *given: Input, **static: Hashable) -> Outputs:
        """Run a region: its captured graph if there is one for these shapes and settings, else compiled or eager.

        The next call of any captured region of the same stage may overwrite the outputs of a graph.

        Args:
            given: host arrays, which are copied to the device, and tensors on the device.
            static: settings.
        Raises: ShapeError in a sealed table if the region has graphs, but none for these.
        """
        if name in self._captured_names:
            if (graph := self._captured.get(_shape_key(name, given, static))) is not None:
                return graph(*given)
            self.n_skipped += 1
            if self.is_sealed:
                expected = f"what was captured: {_format_sizes(self.captured_sizes(name))}"
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
                settings = "".join(f", {key}={value}" for key, value in static.items())
                raise ShapeError(f"region {name}: sizes", expected=expected, got=f"{shapes}{settings}")
        return self.uncaptured(name, *given, **static)

    def has_graph(self, name: str, *given: Input, **static: Hashable) -> bool:
        """Whether a call of the region with these inputs replays a captured graph."""
        return name in self._captured_names and _shape_key(name, given, static) in self._captured

    def uncaptured(self, name: str, *given: Input, **static: Hashable) -> Outputs:
        """The same call without captured graphs: compiled or eager."""
        tensors = inputs_to_device(self._device, given)
        # Strides are part of a compiled graph's key: a transposed input would trigger a recompile.
        assert all(tensor.is_contiguous() for tensor in tensors), f"{name}: inputs must be contiguous"
        if self.marks_steps:
            torch.compiler.cudagraph_mark_step_begin()
        with self.without_gradients():
            return self._runners[name](*self.table[name].bound, *tensors, **static)

    def compile(self, names: Sequence[str] | None = None, *, by_layer: bool = False, **options: Any) -> None:
        """Wrap regions with torch.compile, one graph per bucket; compilation happens in `warm_up`.

        Args:
            names: regions; None = all.
            by_layer: compile one transformer layer, which all layers of a stack share; this keeps start-up short at
                full size. Code between the layers stays eager.
            options: for torch.compile (mode, backend, ...).
        Raises: SettingsError for an unknown name, or if no chosen region has layers to compile.
        """
        chosen = self._chosen(names)
        if by_layer:
            parts = {part for region in chosen for part in region.part.split(", ")} & self._known_parts()
            if not parts:
                expected = f"a region of {sorted(self._known_parts())}"
                raise SettingsError("compile by layer", expected=expected, got=[region.name for region in chosen])
            self.compile_parts(sorted(parts), **options)
            return
        options = self._prepare_compiling(options, 1)
        for region in chosen:
            self._runners[region.name] = torch.compile(region.run, **options)

    def compile_parts(self, parts: Sequence[str], **options: Any) -> None:
        """Wrap the layers of `stacks` and the shared functions with these names, for all regions that use them.

        The inputs of a shared function vary in the batch size alone. With `dynamic` true they are traced with automatic
        dynamic shapes, which takes half the time of tracing every size as dynamic.

        Args:
            parts: names of stacks or shared functions.
            options: as for `compile`.
        Raises: SettingsError for an unknown name.
        """
        if not parts:  # avoids the import of the compiler
            return
        for part in parts:
            if part not in self._known_parts():
                raise SettingsError("part", expected=f"one of {sorted(self._known_parts())}", got=part)
        options = self._prepare_compiling(options, self._n_widths(parts))
        dynamic = options.pop("dynamic")
        for part in parts:
            self._uncompile_part(part)  # start from the plain methods again
            if part in self._shared_functions:
                self._shared_functions[part].compile(**options, dynamic=automatic_dynamic(dynamic))
                continue
            for layer, method in self._methods(part):
                setattr(layer, method, torch.compile(getattr(layer, method), **options, dynamic=dynamic))

    def _known_parts(self) -> set[str]:
        return self.stacks.keys() | self._shared_functions.keys()

    def _n_widths(self, parts: Sequence[str]) -> int:
        """The largest number of sizes that layers of one class have, such as activations of narrowing convolutions."""
        sizes: dict[type[nn.Module], set[tuple[torch.Size, ...]]] = {}
        for part in parts:
            for layer, _ in self._methods(part) if part in self.stacks and self._has(part) else ():
                sizes.setdefault(type(layer), set()).add(tuple(weight.shape for weight in layer.parameters()))
        return max((len(found) for found in sizes.values()), default=1)

    def _prepare_compiling(self, options: dict[str, Any], n_widths: int) -> dict[str, Any]:
        """Leave inference mode and raise Dynamo's limits. Returns: all options for torch.compile."""
        self.without_gradients = torch.no_grad
        # Each bucket is one more graph of the same code, several regions share a layer's code, and so do layers of
        # other widths, some of them in two graphs: the default limits are too low.
        n_graphs = sum(len(region.variants) for region in self.table.values() for _ in region.buckets(self.shapes))
        if n_widths > 1:
            n_graphs *= 2 * n_widths
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, n_graphs)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 4 * n_graphs)
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
        """Run these regions, and the layers and shared functions of these parts, eagerly again.

        Both None = all of them.
        """
        everything = names is None and parts is None
        for region in self._chosen(None if everything else names or ()):
            self._runners[region.name] = region.run
        for part in self._known_parts() if everything else parts or ():
            self._uncompile_part(part)

    def _uncompile_part(self, part: str) -> None:
        if part in self._shared_functions:
            self._shared_functions[part].uncompile()
        elif self._has(part):
            for layer, method in self._methods(part):
                layer.__dict__.pop(method, None)

    def _has(self, part: str) -> bool:
        """Whether the model has this stack: a checkpoint may lack audio, vision or speech."""
        try:
            self.root.get_submodule(part)
        except AttributeError:
            return False
        return True

    def warm_up(self, names: Sequence[str] | None = None) -> None:
        """Run every bucket of every region once on scratch slots; the slots of sessions are not changed."""
        for region in self._chosen(names):
            for bucket, variant in self.calls(region.name):
                self.call_example(region.name, bucket, variant)

    def calls(self, name: str) -> list[tuple[Bucket, StaticSettings]]:
        """Every bucket and variant of a region."""
        region = self.table[name]
        return list(product(region.buckets(self.shapes), region.variants))

    def example(self, name: str, bucket: Bucket) -> Example:
        """Inputs of one bucket of a region on scratch slots, as (tensors, static)."""
        return self.table[name].example(bucket)

    def call_example(self, name: str, bucket: Bucket, variant: StaticSettings) -> None:
        """Run a region once on scratch slots with the inputs of this bucket."""
        tensors, static = self.example(name, bucket)
        self(name, *tensors, **{**static, **variant})
        self.clear_scratch()

    @property
    def n_captured(self) -> int:
        """Number of graphs of all regions."""
        return len(self._captured)

    @property
    def captured(self) -> set[str]:
        """Regions that have graphs."""
        return set(self._captured_names)

    def captured_sizes(self, name: str) -> dict[str, list[int]]:
        """Sizes by axis at which a region was captured, ascending; empty if it has no graphs."""
        buckets = [graph.bucket for graph in self._captured.values() if graph.name == name]
        return {axis: sorted({bucket[axis] for bucket in buckets}) for axis in self.table[name].axes if buckets}

    def capture(self, names: Sequence[str] | None = None) -> int:
        """Capture every bucket and variant of regions with `capture_region`, in one pool.

        Args:
            names: regions; None = all.
        Returns: the number of graphs, including earlier ones.
        Raises: SettingsError for an unknown name, and for a sealed table.
        """
        for region in self._chosen(names):
            self.capture_region(region.name)
        return len(self._captured)

    def capture_region(self, name: str, *, stage: str = "", is_warm: bool = False) -> CaptureFacts:
        """Capture every bucket and variant of a region as CUDA graphs, largest first.

        Call it after `compile` and before a session opens. Compiling later does not change a captured graph.

        Args:
            stage: regions of one stage share a memory pool, so no two of their graphs may run at the same time.
            is_warm: the region has run at every bucket in its present form, so nothing is created on first use.
        Raises: SettingsError for an unknown name, and for a sealed table.
        """
        (region,) = self._chosen([name])
        if self.is_sealed:
            raise SettingsError(f"capture {name}", expected="a table that is not sealed", got="a sealed one")
        self.drop_graphs([name])  # a graph is captured from the region, not from an older graph
        pool = self._pools.get(stage)
        if pool is None or pool.is_broken or all(graph.pool is not pool for graph in self._captured.values()):
            pool = self._pools[stage] = StagePool()  # a pool's memory is freed with its last graph
        start, reserved, made = time.perf_counter(), torch.cuda.memory_reserved(), []
        buckets = sorted(region.buckets(self.shapes), key=lambda b: tuple(b.values()), reverse=True)
        for bucket, variant in product(buckets, region.variants):
            graph = Captured(self, name, bucket, variant, pool, is_warm)
            pool = self._pools[stage] = graph.pool  # a new one if a failed capture made the first unusable
            self._captured[_shape_key(name, graph.inputs, graph.static)] = graph
            made.append(graph)
            if not is_warm or graph.was_retried:  # only then has anything run
                self.clear_scratch()
        if is_warm:  # earlier calls may have failed half-way
            self.clear_scratch()
        self._captured_names.add(name)
        n_bytes, n_retried = torch.cuda.memory_reserved() - reserved, sum(graph.was_retried for graph in made)
        return CaptureFacts(len(made), time.perf_counter() - start, n_bytes, n_retried)

    def seal(self) -> None:
        """Allow captured regions to run only as graphs; other regions run as before. `drop_graphs()` undoes it."""
        self.is_sealed = True

    def drop_graphs(self, names: Sequence[str] | None = None) -> None:
        """Delete the CUDA graphs of these regions, which then run compiled or eager. names: None = all."""
        dropped = {region.name for region in self._chosen(names)}
        self._captured = {key: graph for key, graph in self._captured.items() if graph.name not in dropped}
        self._captured_names -= dropped
        if names is None:
            self._pools.clear()
            self.is_sealed = False

    def clear_scratch(self) -> None:
        """Empty the scratch slot: a run of an example advances its counters like those of a session."""
        raise NotImplementedError(f"{type(self).__name__}.clear_scratch")


def automatic_dynamic(dynamic: bool | None) -> bool | None:
    """The `dynamic` setting of torch.compile for code in which one size varies: automatic instead of fully dynamic."""
    return None if dynamic else dynamic


def _format_sizes(sizes: dict[str, list[int]]) -> str:
    return "; ".join(f"{axis} {', '.join(map(str, some))}" for axis, some in sizes.items())


def _shape_key(name: str, given: Sequence[Input], static: StaticSettings) -> Hashable:
    return name, tuple([one.shape for one in given]), frozenset(static.items())


def compile_counters() -> dict[str, int]:
    """Graph breaks, and graphs and kernels created so far in this process; compare before and after."""
    now = counters()
    return {
        "graph_breaks": sum(now["graph_break"].values()),
        "graphs": now["stats"]["unique_graphs"] + LoadedKernels.n,
        "frames": now["frames"]["total"],
    }
