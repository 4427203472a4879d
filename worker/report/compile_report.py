"""The compile report: what was compiled, its cost, its speed-up and its equality with eager mode. Torch-free.

Contains the report as JSON and as a table, and the rules for problems; measuring is in other modules. A value that was
not measured is None, and a dash in the table.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from models.atomic_file import write_atomically
from models.errors import ModelError
from worker.assembly.load_times import Loading

Scalar = str | int | float | bool | None
MAX_REASON = 240  # characters of a reason in the table's notes; JSON has the whole text
DASH = "-"


class ReportError(ModelError, ValueError):
    """There is no report, or the subject cannot be measured."""


class Fact(BaseModel):
    """A frozen model that ignores unknown keys, so that reports of newer workers can be read."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings", protected_namespaces=())


class GraphBreak(Fact):
    """A place that torch.compile cannot trace. where: file:line. count: occurrences while compiling."""

    where: str
    reason: str
    count: int = 1


class Recompile(Fact):
    """A function that was compiled again. guard: the check that failed, with the expected value."""

    function: str
    where: str
    guard: str
    seconds: float | None = None
    after_warm_up: bool = False


class Latency(Fact):
    """Milliseconds of one call over `n` of them."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    n: int

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> "Latency":
        """Percentiles of at least one sample."""
        if len(samples_ms) == 1:
            [only] = samples_ms
            return cls(p50_ms=only, p95_ms=only, p99_ms=only, n=1)
        cuts = statistics.quantiles(samples_ms, n=100, method="inclusive")
        return cls(p50_ms=cuts[49], p95_ms=cuts[94], p99_ms=cuts[98], n=len(samples_ms))


class Memory(Fact):
    """Bytes that calls use. kind: peak of allocated device memory, growth of resident memory, or CUDA graph pools."""

    kind: Literal["device peak", "resident growth", "graph pool"]
    eager_bytes: int | None = None
    compiled_bytes: int | None = None


class Equivalence(Fact):
    """Compiled outputs compared with eager ones.

    Attributes:
        mae, max_abs: mean and maximum absolute difference of floating-point values.
        relative: norm of the difference divided by the norm of the eager values.
        n_unequal: integers, booleans and other exact values that differ.
        note: values that cannot be compared.
    """

    is_equal: bool
    dtype: str | None = None
    mae: float | None = None
    max_abs: float | None = None
    relative: float | None = None
    n_unequal: int = 0
    note: str | None = None


Repeats = Literal["yes", "per seed", "no"]


class Determinism(Fact):
    """Whether `n` runs from equal state and inputs are bit-identical; `per seed`: with equal seeds only."""

    n: int
    eager: Repeats | None = None
    compiled: Repeats | None = None


class Row(Fact):
    """One region at one bucket, or one module at one set of inputs.

    Attributes:
        graph_breaks, recompiles: None if they were not observed.
        n_late: graphs compiled after warm-up.
        cuda_graphs: captured, used by Inductor, skipped, off, or not on this device.
        hits, misses: of the kernel cache.
        error: the failure.
    """

    name: str
    part: str | None = None
    bucket: dict[str, Scalar] = {}
    graph_breaks: list[GraphBreak] | None = None
    recompiles: list[Recompile] | None = None
    n_late: int | None = None
    cuda_graphs: str | None = None
    skips: list[str] = []
    n_graphs: int | None = None
    compile_s: float | None = None
    hits: int | None = None
    misses: int | None = None
    eager: Latency | None = None
    compiled: Latency | None = None
    captured: Latency | None = None
    memory: Memory | None = None
    equivalence: Equivalence | None = None
    determinism: Determinism | None = None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """Speed-up over eager by medians, of the captured graph if there is one."""
        best = self.captured or self.compiled
        return self.eager.p50_ms / best.p50_ms if self.eager and best and best.p50_ms else None

    @property
    def title(self) -> str:
        bucket = ", ".join(f"{key}={value}" for key, value in self.bucket.items())
        return f"{self.name} ({bucket})" if bucket else self.name

    def problems(self) -> list[str]:
        """One sentence for each problem."""
        found = [f"failed: {self.error}"] if self.error else []
        if self.graph_breaks:
            found.append(f"{sum(one.count for one in self.graph_breaks)} graph breaks")
        if self.n_late:
            found.append(f"{self.n_late} graphs compiled after warm-up")
        if self.skips:
            found.append("CUDA graphs skipped")
        if self.equivalence and not self.equivalence.is_equal:
            found.append("compiled is not equal to eager")
        if self.determinism and (kinds := self._unsteady(self.determinism)):
            found.append(f"runs differ: {kinds}")
        return found

    @staticmethod
    def _unsteady(runs: Determinism) -> str:
        pairs = {"eager": runs.eager, "compiled": runs.compiled}
        return ", ".join(f"{kind} repeats {how}" for kind, how in pairs.items() if how not in (None, "yes"))


class Header(Fact):
    """The subject, machine and settings of a report.

    Attributes:
        what: the worker, model or module.
        cache: description of the kernel cache.
        allocator: of GPU memory, with its environment variables.
        memory: kind -> bytes at the time of the report.
        loading: of weights that were read from files.
    """

    what: str
    date: str
    device: str
    python: str
    torch: str
    driver: str | None = None
    triton: str | None = None
    cuda: str | None = None
    settings: dict[str, Scalar] = {}
    cache: str | None = None
    allocator: str | None = None
    memory: dict[str, int] = {}
    loading: Loading | None = None


class Live(Fact):
    """A running worker's counters since its warm-up. last: the latest events, a sentence each."""

    compiles: int = 0
    recompiles: int = 0
    graph_breaks: int = 0
    graph_skips: int = 0
    failures: int = 0
    seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    last: list[str] = []

    def problems(self) -> list[str]:
        counted = {
            "compiles": self.compiles,
            "recompiles": self.recompiles,
            "graph breaks": self.graph_breaks,
            "CUDA graphs skipped": self.graph_skips,
            "failures": self.failures,
        }
        return [f"{n} {what} since warm-up" for what, n in counted.items() if n]


class CompileReport(Fact):
    """A whole report. live: of a running worker only."""

    header: Header
    rows: list[Row]
    live: Live | None = None

    def problems(self) -> list[str]:
        """One sentence for each problem of all rows and of the running worker."""
        found = [f"{row.title}: {problem}" for row in self.rows for problem in row.problems()]
        return found + (self.live.problems() if self.live else [])

    def followed_by(self, other: "CompileReport") -> "CompileReport":
        """This report with the rows of another one appended."""
        return self.model_copy(update={"rows": [*self.rows, *other.rows]})

    def with_live(self, live: Live) -> "CompileReport":
        """This report with a running worker's counters."""
        return self.model_copy(update={"live": live})

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "CompileReport":
        """The report of a JSON document. Raises: ReportError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "document"
            raise ReportError(f"compile report: {where}", expected="a compile report", got=first["msg"]) from None

    def table(self) -> str:
        """Text for a terminal: header, one line for each row, and notes with reasons."""
        return "\n".join([*_header_lines(self.header), *_row_lines(self.rows), *self._notes()])

    def _notes(self) -> list[str]:
        lines = [line for row in self.rows for line in _notes(row)]
        if self.live is not None:
            live = self.live
            lines.append(
                f"since warm-up: {live.compiles} compiles ({live.recompiles} recompiles), {live.graph_breaks} graph "
                f"breaks, {live.graph_skips} CUDA graphs skipped, {live.failures} failures, {live.seconds:.1f} s"
            )
            lines += [f"  {_cut(one)}" for one in live.last]
        problems = self.problems()
        lines.append(f"problems: {len(problems)}" if problems else "no problems")
        return lines + [f"  {_cut(problem)}" for problem in problems]


def write_report(report: CompileReport, path: Path) -> None:
    """Write the report as a JSON file, atomically. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, report.to_json().encode())


# --- the table ---------------------------------------------------------------------------------

COLUMNS = (
    *("region", "part", "bucket", "eager ms", "compiled ms", "captured ms", "ratio", "breaks", "recomp", "late"),
    *("CUDA graphs", "compile s", "hit/miss", "peak MB", "max diff", "equal", "repeats"),
)


def _header_lines(header: Header) -> Iterable[str]:
    yield f"compile report of {header.what}, {header.date}"
    stack = {"torch": header.torch, "triton": header.triton, "CUDA": header.cuda, "driver": header.driver}
    known = [f"{name} {value or DASH}" for name, value in stack.items()]
    yield f"{header.device}; {', '.join(known)}, Python {header.python}"
    if header.settings:
        yield "settings: " + ", ".join(f"{key}={_plain(value)}" for key, value in header.settings.items())
    yield f"kernel cache: {(header.cache or DASH).removeprefix('compile cache: ')}"
    if header.loading:
        yield str(header.loading)
    if header.allocator:
        sizes = ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in header.memory.items())
        yield f"GPU memory: {sizes or DASH}; allocator {header.allocator}"
    yield "(ms: p50/p95/p99; late: compiled after warm-up; peak: eager/compiled; repeats: eager/compiled)"


def _row_lines(rows: Sequence[Row]) -> list[str]:
    cells = [COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _cells(row: Row) -> tuple[str, ...]:
    equal, runs = row.equivalence, row.determinism
    breaks = None if row.graph_breaks is None else sum(one.count for one in row.graph_breaks)
    return (
        row.name,
        row.part or DASH,
        " ".join(f"{key}={value}" for key, value in row.bucket.items()) or DASH,
        _times(row.eager),
        "failed" if row.error and row.compiled is None else _times(row.compiled),
        _times(row.captured),
        DASH if row.ratio is None else f"{row.ratio:.2f}",
        _count(breaks),
        _count(None if row.recompiles is None else len(row.recompiles)),
        _count(row.n_late),
        row.cuda_graphs or DASH,
        DASH if row.compile_s is None else f"{row.compile_s:.2f}",
        f"{_count(row.hits)}/{_count(row.misses)}",
        _megabytes(row.memory),
        DASH if equal is None or equal.max_abs is None else f"{equal.max_abs:.1e}",
        DASH if equal is None else "yes" if equal.is_equal else "NO",
        DASH if runs is None else f"{runs.eager or DASH}/{runs.compiled or DASH}",
    )


def _times(latency: Latency | None) -> str:
    if latency is None:
        return DASH
    return "/".join(f"{value:.3f}" for value in (latency.p50_ms, latency.p95_ms, latency.p99_ms))


def _count(n: int | None) -> str:
    return DASH if n is None else str(n)


def _megabytes(memory: Memory | None) -> str:
    if memory is None:
        return DASH
    if memory.kind == "graph pool":
        return f"{(memory.compiled_bytes or 0) / 1e6:.1f}"
    sizes = (memory.eager_bytes, memory.compiled_bytes)
    text = "/".join(DASH if size is None else f"{size / 1e6:.1f}" for size in sizes)
    return text if memory.kind == "device peak" else f"+{text}"  # growth, not the total


def _notes(row: Row) -> Iterable[str]:
    for one in row.graph_breaks or ():
        times = f", {one.count} times" if one.count > 1 else ""
        yield f"{row.title}: graph break at {one.where}{times}: {_cut(one.reason)}"
    for again in row.recompiles or ():
        late = " after warm-up" if again.after_warm_up else ""
        yield f"{row.title}: recompiled {again.function}{late} ({again.where}): {_cut(again.guard)}"
    for reason in row.skips:
        yield f"{row.title}: CUDA graphs skipped: {_cut(reason)}"
    if (equal := row.equivalence) is not None and not equal.is_equal:
        figures = ", ".join(
            f"{name} {value:.3g}"
            for name, value in (("mae", equal.mae), ("max", equal.max_abs), ("relative", equal.relative))
            if value is not None
        )
        parts = [figures, f"{equal.n_unequal} exact values differ" if equal.n_unequal else "", equal.note or ""]
        yield f"{row.title}: not equal to eager: {'; '.join(filter(None, parts))}"


def _plain(value: Any) -> str:
    return DASH if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
