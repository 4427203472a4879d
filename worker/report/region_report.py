"""Measures the model's regions: each bucket eager, compiled and captured, from equal state.

Runs while no session is open, on free slots. The rows of one call have different slots, because with a shared slot the
result would depend on the order of writes. Afterwards the slots are empty again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from models.errors import SettingsError
from models.graphs.captured import Bucket
from models.graphs.region_graphs import Region, RegionTable
from models.stages.state import SlotState
from models.token2wav.stream.vocoder import Vocoder
from worker.assembly.backend_flags import resolve_compile
from worker.assembly.parts import EngineParts
from worker.compile.state import CompileResult, TargetPhase
from worker.compile.targets import COMPILE_TARGETS
from worker.config.session import EngineConfig
from worker.log import first_line
from worker.report import measures
from worker.report.compile_report import CompileReport, Determinism, Header, ReportError, Row, Scalar
from worker.report.compile_watch import CompileWatch, Happened

Buckets = Literal["smallest+largest", "all"]
MEASURED = tuple(dict.fromkeys(name for target in COMPILE_TARGETS.values() for name in target.all_regions))
REPEATS = 3  # runs that are compared
WARM_CALLS = 2
# Region -> the region to run before it, because on empty slots it has no work.
BEFORE = {
    "unit_step": "unit_prefill",
    "llm_evict": "unit_prefill",
    "speech_step": "speech_begin",
    "audio_overlap": "audio_unit",
    "begin": "flow",
    "mel_unit": "mel_unit",  # the first second has no complete unit of columns
}
COMPARED_SLOTS = 2  # the first and the last row's


class OmniSlots:
    """Slots of the omni model: those that a call writes, and their contents."""

    def __init__(self, state: SlotState):
        self._state, self.scratch = state, state.scratch

    def rows(self, tensors: Sequence[Tensor], at: int) -> Tensor | None:
        """Distinct slots for the call's input `at`, if that input has slots; else None."""
        given = tensors[at]
        is_slots = at == 0 and given.dtype == torch.int64 and given.ndim == 1 and bool((given == self.scratch).all())
        return torch.arange(len(given), device=given.device) if is_slots else None

    def empty(self, slots: Tensor) -> None:
        self._state.reset(slots)

    def contents(self, slots: Tensor) -> list[Tensor]:
        """Copies of the contents of these slots; of keys and values the valid rows."""
        speech = self._state.speech
        caches = [self._state.llm, self._state.apm, None if speech is None else speech.cache]
        found: list[Tensor] = []
        long: set[int] = set()
        for cache in filter(None, caches):
            for tensor in (*cache.k, *cache.v):
                long.add(id(tensor))
                found += [tensor[slot, :, : int(cache.lengths[slot])] for slot in slots.tolist()]
        return found + [tensor[slots] for tensor in self._state.tensors() if id(tensor) not in long]


class SoundSlots:
    """Slots of the vocoder: a call reads a session's first slot and writes its second one."""

    def __init__(self, vocoder: Vocoder):
        self._vocoder, self.scratch = vocoder, vocoder.sizes.scratch

    def rows(self, tensors: Sequence[Tensor], at: int) -> Tensor | None:
        """See `OmniSlots.rows`. The second input of `begin` has voices, for which any filled slots will do."""
        given = tensors[at]
        if at > 1 or given.dtype != torch.int64 or given.ndim != 1:
            return None
        return torch.arange(len(given), device=given.device) + at * self._vocoder.sizes.n_sessions

    def empty(self, slots: Tensor) -> None:
        """Empty both slots of the first `len(slots)` sessions."""
        table, n = self._vocoder.regions, len(slots)
        table.clear_scratch()
        for first in (0, self._vocoder.sizes.n_sessions):
            begun = torch.arange(n, device=slots.device) + first
            begin = table.table["begin"]
            begin.run(*begin.bound, begun, torch.full_like(begun, self.scratch))

    def contents(self, slots: Tensor) -> list[Tensor]:
        """Copies of the contents of both slots of the sessions."""
        targets = torch.cat((slots, slots + self._vocoder.sizes.n_sessions))
        state = self._vocoder.state
        held = [tensor[targets] for tensor in (*state.slot_tensors(), *self._vocoder.vocode_state.tensors())]
        pools = (
            (state.token_table, (state.token_rows,)),
            (state.mel_table, (state.mel_rows,)),
            (state.dit_table, state.dit_rows),
        )
        for table, rows in pools:
            held += [table.rows[targets], table.length[targets]]
            for slot in targets:
                seen = table.rows[slot, : int(table.length[slot])]
                held += [pool.index_select(pool.ndim - 3, seen) for pool in rows]
        return held


@dataclass
class Trial:
    """One region at one bucket and variant, which can be called repeatedly from equal state."""

    table: RegionTable
    region: Region
    slots: OmniSlots | SoundSlots
    tensors: tuple[Tensor, ...]
    static: dict[str, Any]
    written: Tensor  # slots that the call writes; may be empty
    before: "Trial | None" = None

    @classmethod
    def of(
        cls,
        table: RegionTable,
        slots: OmniSlots | SoundSlots,
        region: Region,
        bucket: Bucket,
        variant: dict[str, Any],
        *,
        is_first: bool = False,
    ) -> "Trial":
        """A trial on example input. is_first: no region runs before it."""
        with measures.forked_draws():
            torch.manual_seed(measures.SEED)
            tensors, static = region.example(bucket)
        rows = [slots.rows(tensors, at) for at in range(len(tensors))]
        given = tuple(own if own is not None else tensor for own, tensor in zip(rows, tensors, strict=True))
        empty = torch.zeros(0, dtype=torch.int64, device=tensors[0].device)
        written = rows[0] if rows[0] is not None else empty
        before = None
        if not is_first and region.name in BEFORE:
            earlier = table.table[BEFORE[region.name]]
            sizes = next(iter(earlier.buckets(table.shapes)))
            sizes = {axis: bucket.get(axis, smallest) for axis, smallest in sizes.items()}
            before = cls.of(table, slots, earlier, sizes, variant if earlier is region else {}, is_first=True)
        return cls(table, region, slots, given, {**static, **variant}, written, before)

    def empty(self) -> None:
        if len(self.written):
            self.slots.empty(self.written)
        self.table.clear_scratch()

    def start(self) -> None:
        """Set the slots to the state before each call."""
        self.empty()
        if self.before is not None:
            self.before.eager()

    def eager(self) -> Any:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return self.region.run(*self.region.bound, *self.tensors, **self.static)

    def compiled(self) -> Any:
        return self.table.uncaptured(self.region.name, *self.tensors, **self.static)

    def served(self) -> Any:
        """Call it as serving does: through its graph, if there is one."""
        return self.table(self.region.name, *self.tensors, **self.static)

    @property
    def is_captured(self) -> bool:
        return self.table.has_graph(self.region.name, *self.tensors, **self.static)

    def observed(self, call: Callable[[], Any]) -> Any:
        """Copies of a call's outputs, and of the state of some slots after it."""
        self.start()
        outputs = measures.cloned(call())
        ends = self.written[:1], self.written[1:][-(COMPARED_SLOTS - 1) :]
        compared = torch.cat(ends)
        return outputs, measures.cloned(self.slots.contents(compared)) if len(compared) else None


def region_report(
    parts: EngineParts,
    config: EngineConfig,
    result: CompileResult | None = None,
    *,
    names: Sequence[str] | None = None,
    buckets: Buckets = "smallest+largest",
    runs: int = 20,
    cache: str | None = None,
) -> CompileReport:
    """Measure compiled regions; anything that still compiles is reported as late.

    Call it on the thread that compiled them, because another thread would compile again.

    Args:
        result: the states of the targets; None: all configured targets are compiled.
        names: of regions; None: all that serve.
        buckets: of each region.
        runs: timed calls in each mode.
        cache: see `measures.header`.

    Raises: SettingsError for an unknown name; ReportError while a session is open.
    """
    _check_no_session(parts)
    chosen, device = _chosen(parts, names), parts.model.device
    config = resolve_compile(config, device.type)
    rows = []
    with CompileWatch() as watch, measures.forked_draws():
        for table, slots, region in chosen:
            is_compiled = _is_compiled(region, config, result, device)
            for bucket, variant in product(_buckets(table, region, buckets), region.variants):
                trial = Trial.of(table, slots, region, bucket, variant)
                shown = {**bucket, **(variant if len(region.variants) > 1 else {})}
                rows.append(_row(trial, shown, watch, runs, device, is_compiled))
                trial.empty()
    return CompileReport(header=header(config, device, cache), rows=rows)


def header(config: EngineConfig, device: torch.device, cache: str | None = None) -> Header:
    """A report's header for an engine. cache: see `measures.header`."""
    return measures.header(str(config.model_path), device, settings(config), cache)


def _is_compiled(region: Region, config: EngineConfig, result: CompileResult | None, device: torch.device) -> bool:
    """Whether any part of the region runs compiled."""
    if not config.compile.enabled:
        return False
    for target in config.compile.targets:
        spec, state = COMPILE_TARGETS[target], None if result is None else result.targets.get(target)
        is_gpu, by_kernels = device.type == "cuda", state is not None and state.phase is TargetPhase.KERNELS
        is_target = region.name in (*spec.regions, *spec.whole_regions(is_gpu, by_kernels))
        # A region that does not compile as a whole may have parts that do.
        parts = set(region.part.split(", ")) & set(spec.parts(is_gpu, by_kernels))
        is_target |= region.name in spec.whole and bool(parts)
        if is_target and (state is None or state.phase.is_active):
            return True
    return False


def settings(config: EngineConfig) -> dict[str, Scalar]:
    """The compile settings in a report's header."""
    known = config.compile.model_dump(mode="json")
    for name in ("targets", "speech_targets"):
        known[name] = " ".join(known[name])
    return {**known, "dtype": config.dtype, "weights": str(config.precision)}


def _check_no_session(parts: EngineParts) -> None:
    unit_steps, vocoder = parts.unit_steps, parts.vocoder
    n_open = unit_steps.n_slots - unit_steps.n_free
    n_open += vocoder.sizes.n_sessions - vocoder.n_free if vocoder else 0
    if n_open:
        raise ReportError("report of regions", expected="no session", got=f"{n_open} slots in use")


def _chosen(
    parts: EngineParts, names: Sequence[str] | None
) -> list[tuple[RegionTable, OmniSlots | SoundSlots, Region]]:
    unit_steps = parts.unit_steps
    tables: list[tuple[RegionTable, Any]] = [(unit_steps.regions, OmniSlots(unit_steps.state))]
    if parts.vocoder is not None:
        tables.append((parts.vocoder.regions, SoundSlots(parts.vocoder)))
    known = {name: (table, slots, table.table[name]) for table, slots in tables for name in table.table}
    known.pop("voice", None)  # always eager, and writes to voices
    for name in names or ():
        if name not in known:
            raise SettingsError("region", expected=f"one of {sorted(known)}", got=name)
    return [known[name] for name in (names or MEASURED) if name in known]


def _buckets(table: RegionTable, region: Region, wanted: Buckets) -> Iterable[Bucket]:
    every = list(region.buckets(table.shapes))
    if wanted == "all":
        return every
    return [every[0]] if len(every) == 1 else [every[0], every[-1]]


def _row(
    trial: Trial, bucket: dict[str, Any], watch: CompileWatch, runs: int, device: torch.device, is_compiled: bool
) -> Row:
    facts: dict[str, Any] = {}
    watch.take()
    try:
        _measure(trial, facts, runs, device, is_compiled)
    except RuntimeError as error:  # of the compiler or the device
        facts["error"] = first_line(error)
    late: Happened = watch.take()
    return Row(
        name=trial.region.name,
        part=trial.region.part,
        bucket=bucket,
        graph_breaks=late.graph_breaks,
        recompiles=[one.model_copy(update={"after_warm_up": True}) for one in late.recompiles],
        n_late=late.n_compiled,
        skips=late.skips,
        **facts,
    )


def _measure(trial: Trial, facts: dict[str, Any], runs: int, device: torch.device, is_compiled: bool) -> None:
    memory = measures.PeakMemory(device)
    is_captured = trial.is_captured
    facts["cuda_graphs"] = _graphs(device, is_captured)
    ways: dict[str, Callable[[], Any]] = {"eager": trial.eager}
    if is_compiled:
        ways["compiled"] = trial.compiled
    if is_captured:
        ways["captured"] = trial.served
    peaks: dict[str, int | None] = {}

    def prepare(call: Callable[[], Any]) -> Callable[[], Any]:
        trial.start()
        return call

    def time(way: str, call: Callable[[], Any]) -> None:
        facts[way] = measures.latency(lambda: prepare(call), runs, device)

    for way, call in ways.items():
        for _ in range(WARM_CALLS):
            prepare(call)()
        peaks[way] = memory.of(partial(time, way, call))
    best = trial.served if is_captured else trial.compiled
    compiled = peaks.get("captured", peaks.get("compiled"))
    facts["memory"] = memory.both(peaks["eager"], compiled)
    repeats = {"eager": measures.repeats(lambda: trial.observed(trial.eager), REPEATS)}
    if is_compiled or is_captured:
        facts["equivalence"] = measures.compare(trial.observed(trial.eager), trial.observed(best))
        repeats["compiled"] = measures.repeats(lambda: trial.observed(best), REPEATS)
    facts["determinism"] = Determinism(n=REPEATS, **repeats)


def _graphs(device: torch.device, is_captured: bool) -> str:
    if device.type != "cuda":
        return "captured" if is_captured else "not on this device"
    return "captured" if is_captured else "off"
