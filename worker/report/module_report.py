"""Measures any `nn.Module` eager and compiled: breaks, recompiles, latency, memory, equality, repeatability.

Works on copies, and restores the process afterwards: the compiler's counters and caches, random state, logging.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo.convert_frame
import torch._dynamo.pgo
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.utils import counters

from worker.log import first_line
from worker.report import measures
from worker.report.compile_report import CompileReport, Determinism, Latency, ReportError, Row
from worker.report.compile_watch import CompileWatch, Happened

ROUNDS = 3  # of warm-up over all inputs: varying sizes become symbols in the second; the third compiles nothing
REPEATS = 4  # runs that are compared
GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Inputs:
    """One set of inputs of the module."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def sets(cls, given: Any) -> list["Inputs"]:
        """Sets from a tuple of positional inputs, a dict of keyword inputs, or a list of those. Raises: ReportError."""
        several = given if isinstance(given, list) else [given]
        sets = []
        for one in several:
            if isinstance(one, tuple):
                sets.append(cls(one, {}))
            elif isinstance(one, Mapping) and all(isinstance(key, str) for key in one):
                sets.append(cls((), dict(one)))
            else:
                expected = "a tuple of inputs, a dict of them by name, or a list of such"
                raise ReportError("inputs", expected=expected, got=type(one).__name__)
        if not sets:
            raise ReportError("inputs", expected="at least one set", got="an empty list")
        return sets

    def copy(self, device: torch.device | None = None) -> "Inputs":
        return Inputs(measures.cloned(self.positional, device), measures.cloned(self.keywords, device))

    def shapes(self, module: nn.Module) -> dict[str, Any]:
        """Each input's shape, by name or, without a matching signature, by position."""
        names: Mapping[Any, Any]
        try:
            names = inspect.signature(module.forward).bind(*self.positional, **self.keywords).arguments
        except (TypeError, ValueError):
            names = dict(enumerate(self.positional)) | self.keywords
        return measures.shapes(leaf for name, value in names.items() for leaf in measures.leaves(value, str(name)))


class Subject:
    """One copy of the module, its compiled form if there is one, and its initial state."""

    def __init__(self, module: nn.Module, wrap: Callable[[nn.Module], Callable[..., Any]] | None = None):
        self.module = copy.deepcopy(module)
        if wrap:
            _own_forwards(self.module)
        self._tensors = [(holder, dict(holder), measures.cloned(dict(holder))) for holder in self._holders()]
        self._plain = [(one, _plain_attributes(one)) for one in self.module.modules()]
        self._kept = [copy.deepcopy(plain) for _, plain in self._plain]
        self._call = wrap(self.module) if wrap else self.module

    def _holders(self) -> Iterator[dict[str, Any]]:
        for one in self.module.modules():
            yield from (one._parameters, one._buffers)

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> Any:
        return self._call(*inputs.positional, **inputs.keywords)

    def new_step(self) -> None:
        """Allow Inductor's CUDA graphs to overwrite the outputs of the latest call."""
        if self._call is not self.module and torch.cuda.is_available():
            torch.compiler.cudagraph_mark_step_begin()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore parameters, buffers and plain attributes to the initial state."""
        for holder, own, values in self._tensors:
            holder.clear()
            holder.update(own)
            for name, tensor in own.items():
                if tensor is not None:
                    tensor.copy_(values[name])
        for (one, _), kept in zip(self._plain, self._kept, strict=True):
            for name in _plain_attributes(one).keys() - kept.keys():
                del one.__dict__[name]
            one.__dict__.update(copy.deepcopy(kept))

    def observed(self, inputs: Inputs, n_calls: int = 1) -> Any:
        """Copies of outputs, inputs and buffers after `n_calls` from the initial state."""
        self.restore()
        observed = []
        for _ in range(n_calls):
            given = inputs.copy()
            self.new_step()
            observed.append(measures.cloned((self(given), given.positional, given.keywords)))
        return observed, measures.cloned(dict(self.module.named_buffers()))


def _own_forwards(module: nn.Module) -> None:
    """Give a copy code objects of its own: compiled code belongs to a code object, which all instances share."""
    for one in module.modules():
        forward = type(one).forward
        if isinstance(forward, FunctionType) and "forward" not in vars(one) and not _is_torchs(forward):
            code = forward.__code__.replace()
            own = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
            own.__kwdefaults__ = forward.__kwdefaults__
            one.forward = MethodType(own, one)


def _is_torchs(function: FunctionType) -> bool:
    return function.__module__ is not None and function.__module__.partition(".")[0] == "torch"


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that a forward may change, such as lists, numbers and tensors in lists; not those of `nn.Module`."""
    own = nn.Module().__dict__.keys()
    kinds = (list, dict, set, int, float, str, bool, type(None), Tensor)
    return {name: value for name, value in module.__dict__.items() if name not in own and isinstance(value, kinds)}


def module_report(
    module: nn.Module,
    inputs: Any,
    *,
    name: str | None = None,
    mode: str = "default",
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    runs: int = 50,
    device: torch.device | str | None = None,
) -> CompileReport:
    """Measure a module on one or more sets of inputs, a row each.

    The module's copy is compiled once and called with all sets in turn, which shows recompiles between them. State that
    its calls change is kept from call to call, as in use.

    Args:
        inputs: see `Inputs.sets`.
        mode, dynamic, backend: for torch.compile; `mode` has an effect with Inductor only.
        runs: timed calls of each set.
        device: for module and inputs; None: unchanged.

    Raises: ReportError for inputs of another form and for a module that cannot be copied.
    """
    sets = Inputs.sets(inputs)
    try:
        plain = Subject(module)
    except Exception as error:
        raise ReportError("module", expected="one that can be copied", got=first_line(error)) from error
    if device is not None:
        device = torch.device(device)
        plain = Subject(plain.module.to(device))
    device = device or _device(module, sets)
    sets = [one.copy(device) for one in sets]
    options: dict[str, Any] = {"dynamic": dynamic, "backend": backend}
    if backend == "inductor":
        options["mode"] = mode
    backend_name = backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)
    settings = {"mode": mode, "dynamic": "auto" if dynamic is None else dynamic, "backend": backend_name, "runs": runs}
    header = measures.header(name or type(module).__name__, device, settings)
    with as_before(), measures.forked_draws():
        try:
            compiled = Subject(plain.module, lambda copied: torch.compile(copied, **options))
        except Exception as error:  # an unknown backend or mode; compiling itself happens later
            raise ReportError("torch.compile", expected="settings that it accepts", got=first_line(error)) from error
        graphs = backend == "inductor" and mode in GRAPH_MODES
        rows = _Bench(name or type(module).__name__, plain, compiled, sets, runs, device, graphs).rows()
    return CompileReport(header=header, rows=rows)


def _device(module: nn.Module, sets: list[Inputs]) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [leaf for one in sets for _, leaf in measures.leaves((one.positional, one.keywords))]
    return next((one.device for one in tensors if isinstance(one, Tensor)), torch.device("cpu"))


class _Bench:
    """One module's rows: eager, then compiled."""

    def __init__(
        self,
        name: str,
        plain: Subject,
        compiled: Subject,
        sets: list[Inputs],
        runs: int,
        device: torch.device,
        wants_graphs: bool,
    ):
        self.plain, self.compiled, self.sets, self.runs, self.device = plain, compiled, sets, runs, device
        self.wants_graphs = wants_graphs
        self.memory = measures.PeakMemory(device)
        self.facts: list[dict[str, Any]] = [{"name": name, "bucket": one.shapes(plain.module)} for one in sets]
        self.peaks: list[list[int | None]] = [[None, None] for _ in sets]
        self.repeats: list[dict[str, Any]] = [{} for _ in sets]
        self.happened = [Happened() for _ in sets]

    def rows(self) -> list[Row]:
        works = [self._try("eager", self._eager, at) for at in range(len(self.sets))]
        with CompileWatch() as watch:
            for _ in range(ROUNDS):
                for at in range(len(self.sets)):
                    works[at] = works[at] and self._try("compiled", self._first_calls, at, watch)
            for at, happened in enumerate(self.happened):
                self._compiled_facts(at, happened)
            for at, goes in enumerate(works):
                if goes and self._try("compiled", self._timed, at, watch):
                    self._try("compared", self._compared, at)
        return [self._row(at) for at in range(len(self.sets))]

    def _try(self, what: str, step: Callable[..., None], at: int, *given: Any) -> bool:
        try:
            step(at, *given)
        except Exception as error:  # of any module
            self.facts[at].setdefault("error", f"{what}: {first_line(error)}")
            return False
        return True

    def _eager(self, at: int) -> None:
        inputs = self.sets[at]
        self.plain(inputs.copy())
        self.peaks[at][0], self.facts[at]["eager"] = self._time(self.plain, inputs)
        self.repeats[at]["eager"] = measures.repeats(lambda: self.plain.observed(inputs), REPEATS)

    def _first_calls(self, at: int, watch: CompileWatch) -> None:
        try:
            self.compiled.new_step()
            self.compiled(self.sets[at].copy())
            measures.finish(self.device)
        finally:
            self.happened[at].add(watch.take())

    def _compiled_facts(self, at: int, happened: Happened) -> None:
        self.facts[at] |= {
            "compile_s": happened.seconds,
            "n_graphs": happened.n_compiled,
            "hits": happened.hits,
            "misses": happened.misses,
        }

    def _timed(self, at: int, watch: CompileWatch) -> None:
        try:
            self.peaks[at][1], self.facts[at]["compiled"] = self._time(self.compiled, self.sets[at])
        finally:
            late = watch.take()
            late.recompiles = [one.model_copy(update={"after_warm_up": True}) for one in late.recompiles]
            self.happened[at].add(late)
            self.facts[at]["n_late"] = late.n_compiled

    def _time(self, subject: Subject, inputs: Inputs) -> tuple[int | None, Latency]:
        taken: list[Latency] = []

        def prepare() -> measures.Call:
            given = inputs.copy()
            subject.new_step()
            return lambda: subject(given)

        bytes_ = self.memory.of(lambda: taken.append(measures.latency(prepare, self.runs, self.device)))
        return bytes_, taken[0]

    def _compared(self, at: int) -> None:
        inputs = self.sets[at]
        eager, compiled = (
            measures.seeded(partial(one.observed, inputs, n_calls=2)) for one in (self.plain, self.compiled)
        )
        self.facts[at]["equivalence"] = measures.compare(eager, compiled)
        self.repeats[at]["compiled"] = measures.repeats(lambda: self.compiled.observed(inputs), REPEATS)

    def _row(self, at: int) -> Row:
        happened, facts = self.happened[at], self.facts[at]
        if happened.failures and "error" not in facts:
            facts["error"] = f"stays eager: {happened.failures[0]}"
        return Row(
            **facts,
            graph_breaks=happened.graph_breaks,
            recompiles=happened.recompiles,
            skips=happened.skips,
            cuda_graphs=self._cuda_graphs(happened),
            memory=self.memory.both(*self.peaks[at]),
            determinism=Determinism(n=REPEATS, **self.repeats[at]),
        )

    def _cuda_graphs(self, happened: Happened) -> str:
        if self.device.type != "cuda":
            return "not on this device"
        if not self.wants_graphs:
            return "off"
        return "skipped" if happened.skips else "used by Inductor"


@contextmanager
def as_before() -> Iterator[None]:
    """Drop what the block compiles, and restore the compiler's counters."""
    trackers = torch._dynamo.convert_frame.input_codes, torch._dynamo.convert_frame.output_codes
    seen = [[code for reference in tracker.seen if (code := reference()) is not None] for tracker in trackers]
    counted = {key: Counter(values) for key, values in counters.items()}
    try:
        with _sizes_unknown():
            yield
    finally:
        for tracker, before in zip(trackers, seen, strict=True):
            _forget(tracker, before)
        for key in list(counters):
            counters[key].clear()
            counters[key].update(counted.get(key, {}))


def _forget(tracker: Any, before: list[Any]) -> None:
    """Drop compiled code of code objects that a torch tracker did not have before."""
    known = {id(code) for code in before}
    new = [(at, code) for at, one in enumerate(tracker.seen) if (code := one()) is not None and id(code) not in known]
    for at, code in reversed(new):
        reset_code(code)
        tracker.seen_ids.discard(id(code))
        del tracker.seen[at]  # or the next report would count the code as compiled before


@contextmanager
def _sizes_unknown() -> Iterator[None]:
    """Hide torch's record of varying sizes from the block, and drop what the block adds to it."""
    pgo = torch._dynamo.pgo
    kept = {name: getattr(pgo, name) for name in ("_CODE_STATE", "_INIT_CODE_STATE") if hasattr(pgo, name)}
    for name in kept:
        setattr(pgo, name, None)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(pgo, name, value)
