"""Times every region of the model beside its lower bound on the device.

`python -m benchmarks.model --help` lists the options; README.md explains the table.
"""

import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import report
from benchmarks.model.floors import floor, tensor_bytes, work_of
from benchmarks.model.occupied_slots import OccupiedSlots, is_possible
from benchmarks.model.settings import MODES, BenchSettings, parse
from benchmarks.timing import Ceilings, DeviceClock, Timing
from models.checkpoint.config import load_config
from models.errors import ModelError, SettingsError
from models.graphs.captured import Bucket, Captured
from models.graphs.region_graphs import compile_counters
from models.inputs.audio import LogMel
from models.load import load_model
from models.omni import OmniModel
from models.random_weights import random_model
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Regions, Shapes
from models.stages.state import SlotState

# The most important first, since a run may end before the last.
ORDER = (
    *("unit_step", "unit_prefill", "speech_step", "vision", "audio_unit", "mel_unit"),
    *("speech_begin", "spoken_rows", "audio_overlap", "clips", "llm_evict", "reset"),
)
# Regions that run a stack of layers. The others compile whole in both modes.
STACKED = frozenset(
    (
        *("vision", "clips", "audio_unit", "audio_overlap", "unit_prefill", "unit_step"),
        *("speech_begin", "speech_step"),
    )
)

LARGE_FROM = 1_000_000_000  # weights
SMALL_SHAPES = Shapes(
    batch=(1, 2),
    slices=(1,),
    patches=(1088,),
    clip_frames=(200,),
    rows=(16,),
    kv=(512,),
    spoken=(24,),
    tokens=(24,),
    speech_kv=(512,),
)
LARGE_SHAPES = Shapes(
    batch=(1, 8),
    slices=(1, 4),
    patches=(1088,),
    clip_frames=(1000,),
    rows=(16, 80, 512),
    kv=(2048,),
    spoken=(24,),
    tokens=(24,),
    speech_kv=(512,),
)
LARGE_LLM_LEN, SMALL_LLM_LEN, TTS_LEN = 4096, 1024, 1024


class ModelBench:
    """One model on one device, and its measurements so far."""

    def __init__(self, settings: BenchSettings, command: list[str]):
        self.settings, self.device = settings, settings.device
        self._began = time.monotonic()
        self.clock = DeviceClock(self.device)
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high" if settings.tf32 else "highest")
        self.dtype = str(settings.dtype).removeprefix("torch.")
        self.ceilings: Ceilings = self.clock.ceilings(settings.dtype)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

        model = _model(settings)
        model.use_kernels(settings.kernels)
        n_weights = sum(p.numel() for p in model.parameters())
        is_large = n_weights >= LARGE_FROM
        default = LARGE_SHAPES if is_large else SMALL_SHAPES
        shapes = Shapes(**{**asdict(default), **settings.sizes})
        llm_len = max(LARGE_LLM_LEN if is_large else SMALL_LLM_LEN, shapes.kv[-1])
        tts_len = max(TTS_LEN, shapes.speech_kv[-1])
        state = SlotState.allocate(model, n_slots=shapes.batch[-1], llm_len=llm_len, tts_len=tts_len)
        sets = TokenSets.build([TokenSet()], model.config.vocab_size, self.device)
        log_mel = LogMel(self.device, model.config.audio_config.num_mel_bins)
        self.regions = Regions(model, state, log_mel, sets, shapes)
        self.names = self._choose()
        by_layer = is_large and self.device.type == "cuda"
        graph = ("graph",) if self.device.type == "cuda" else ()
        self.modes = settings.modes or ("eager", "by_layer" if by_layer else "compiled", *graph)
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.device),
            "settings": {
                "config": str(settings.config),
                "weights": "random" if settings.config.is_file() else "checkpoint",
                "n_weights": n_weights,
                "device": str(self.device),
                "dtype": self.dtype,
                "tf32": settings.tf32,
                "kernels": settings.kernels,
                "backend": settings.backend,
                "modes": self.modes,
                "repeats": settings.repeats,
                "budget_s": settings.budget_s if settings.budget_s < float("inf") else None,
                "shapes": asdict(shapes),
                "n_slots": state.n_slots,
                "llm_len": llm_len,
                "tts_len": tts_len,
                "state_bytes": state.nbytes(),
            },
            "ceilings": {"copy_bytes_per_s": self.ceilings.copy, "matmul_flop_per_s": self.ceilings.matmul},
            "rows": [],
            "compile_s": {},
            "graph_breaks": 0,
            "recompiles_after_warm_up": 0,
            "left_out": [],
        }

    def _choose(self) -> list[str]:
        table = self.regions.table
        chosen = self.settings.regions or [*(name for name in ORDER if name in table), *(table.keys() - {*ORDER})]
        for name in chosen:
            if name not in table:
                raise SettingsError("--regions", expected=f"some of {', '.join(table)}", got=name)
        return list(chosen)

    def run(self) -> dict[str, Any]:
        """Measure all regions. Prints the rows of each region when it is finished, and saves after each timing."""
        rates = ", ".join(f"{name} {rate / 1e12:.2f} TFLOP/s" for name, rate in self.ceilings.matmul.items())
        print(f"copy {self.ceilings.copy / 1e12:.4f} TB/s, {rates}")
        print(report.HEADER, flush=True)
        for name in self.names:
            buckets = self.regions.table[name].buckets(self.regions.shapes)
            rows = [self._row(name, bucket) for bucket in buckets if is_possible(name, bucket)]
            for way in self._ways(name):
                self._pass(name, way, rows)
            for row in rows:
                if row["modes"]:
                    print(report.line(row), flush=True)
        self._save()
        print(
            f"graph breaks {self.result['graph_breaks']}, recompiles after warm-up "
            f"{self.result['recompiles_after_warm_up']}, compile {sum(self._compile_seconds()):.1f} s, "
            f"total {self.result['wall_s']:.1f} s"
        )
        if self.result["left_out"]:
            print(f"left out after {self.settings.budget_s:g} s: {', '.join(self.result['left_out'])}")
        return self.result

    def _compile_seconds(self) -> list[float]:
        return [seconds for ways in self.result["compile_s"].values() for seconds in ways.values()]

    def _ways(self, name: str) -> list[str]:
        """Ways to run a region, with one pass over its buckets each; graphs are captured in the last pass."""
        ways = [mode for mode in MODES if mode in self.modes and mode != "graph"]
        if name not in STACKED:
            ways = list(dict.fromkeys("compiled" if way == "by_layer" else way for way in ways))
        return ways or ["eager"]

    def _row(self, name: str, bucket: Bucket) -> report.Row:
        return {
            "region": name,
            "bucket": bucket,
            "bytes": None,
            "flops": None,
            "floor_ms": None,
            "floor_bound": None,
            "best_over_floor": None,
            "modes": {},
        }

    def _pass(self, name: str, way: str, rows: list[report.Row]) -> None:
        # Each region starts with empty compile caches, so that no limit on recompiles is shared between them.
        torch.compiler.reset()
        self.regions.uncompile()
        if way != "eager":
            self.regions.compile([name], by_layer=way == "by_layer", backend=self.settings.backend)
        for row in rows:
            modes = [mode for mode in (way, "graph") if self._is_wanted(name, way, mode)]
            if time.monotonic() - self._began > self.settings.budget_s:
                self.result["left_out"] += [_label(row, mode) for mode in modes]
                continue
            occupied = OccupiedSlots(self.regions, name, row["bucket"])
            for mode in modes:
                self._mode(row, mode, way, occupied)
                if "error" in row["modes"][mode]:
                    break
        self.regions.uncompile()

    def _is_wanted(self, name: str, way: str, mode: str) -> bool:
        if mode == "graph":
            return mode in self.modes and way == self._ways(name)[-1]
        return mode in self.modes or mode == "compiled"  # which replaces by_layer for a region without layers

    def _mode(self, row: report.Row, mode: str, way: str, occupied: OccupiedSlots) -> None:
        """One timing of one bucket. A failure is recorded as a result, and the run continues."""
        before = compile_counters()
        try:
            timed = self._graph(row, way, occupied) if mode == "graph" else self._plain(row, way, occupied)
        except RuntimeError as error:  # errors of torch, including Dynamo's and out of memory
            timed = {"error": f"{type(error).__name__}: {error}"[:2000]}
        if not row["modes"]:
            self.result["rows"].append(row)
        row["modes"][mode] = timed | _since(before)
        self.result["graph_breaks"] += row["modes"][mode]["graph_breaks"]
        best = report.best_ms(row)
        if best and row["floor_ms"]:
            row["best_over_floor"] = best / row["floor_ms"]
        self._save()
        outcome = timed.get("error") or f"{timed['p50_ms']:.3f} ms"
        print(f"[{self.result['wall_s']:6.1f} s] {_label(row, mode)}: {outcome}", file=sys.stderr, flush=True)

    def _plain(self, row: report.Row, way: str, occupied: OccupiedSlots) -> dict[str, Any]:
        def call() -> Any:
            return self.regions(row["region"], *occupied.tensors, **occupied.static)

        occupied.restore()
        first_s, outputs = self.clock.seconds(call)
        self._find_floor(row, occupied, outputs)
        del outputs
        if way != "eager":
            spent = self.result["compile_s"].setdefault(row["region"], {})
            spent[way] = spent.get(way, 0.0) + first_s
        return {"first_call_s": first_s} | self._timed(call, occupied)

    def _graph(self, row: report.Row, way: str, occupied: OccupiedSlots) -> dict[str, Any]:
        start_s = time.perf_counter()
        captured = Captured(self.regions, row["region"], row["bucket"])
        self.clock.wait()
        self._find_floor(row, occupied, captured.outputs)
        result = {"over": way, "capture_s": time.perf_counter() - start_s}
        result |= self._timed(lambda: captured(*occupied.tensors), occupied)
        alone = self.clock.measure(captured.graph.replay, occupied.restore, self.settings.repeats, head_start=True)
        return result | {"device_p50_ms": alone.p50_ms, "device_p95_ms": alone.p95_ms}

    def _timed(self, call: Any, occupied: OccupiedSlots) -> dict[str, Any]:
        for _ in range(3 if self.device.type == "cuda" else 1):
            self.clock.sample(call, occupied.restore)
        before = compile_counters()
        timing: Timing = self.clock.measure(call, occupied.restore, self.settings.repeats)
        recompiles = _since(before)["graphs"]
        self.result["recompiles_after_warm_up"] += recompiles
        return asdict(timing) | {"recompiles": recompiles}

    def _find_floor(self, row: report.Row, occupied: OccupiedSlots, outputs: object) -> None:
        work = work_of(self.regions, row["region"], row["bucket"])
        if work is None:
            return
        io_bytes = tensor_bytes(occupied.tensors) + tensor_bytes(outputs)
        parts = {"weights": work.weights, "state": work.state, "io": io_bytes}
        least = floor(work, io_bytes, self.ceilings, self.dtype)
        row |= {
            "bytes": {**parts, "total": sum(parts.values())},
            "flops": work.flops,
            "floor_ms": least.ms,
            "floor_bound": least.bound,
        }

    def _save(self) -> None:
        self.result["wall_s"] = time.monotonic() - self._began
        self.result["peak_memory"] = report.peak_memory(self.device)
        if self.settings.json is not None:
            report.write_json(self.settings.json, self.result)


def _since(before: dict[str, int]) -> dict[str, int]:
    """Graphs and graph breaks since `before`."""
    now = compile_counters()
    return {key: now[key] - before[key] for key in ("graphs", "graph_breaks")}


def _label(row: report.Row, mode: str) -> str:
    return " ".join([row["region"], *(f"{axis}={size}" for axis, size in row["bucket"].items()), mode])


def _model(settings: BenchSettings) -> OmniModel:
    if settings.config.is_file():
        return random_model(load_config(settings.config), device=settings.device, dtype=settings.dtype)
    return load_model(settings.config, device=settings.device, dtype=settings.dtype)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        ModelBench(parse(arguments), ["python", "-m", "benchmarks.model", *arguments]).run()
    except ModelError as error:
        sys.exit(f"benchmarks.model: {error}")


if __name__ == "__main__":
    main()
