"""Times whole units of the duplex engine: listening and speaking, per stage, for one session and for many.

`python -m benchmarks.duplex --help` lists the options; README.md says how to read the table.
"""

import argparse
import queue
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import report
from benchmarks.compile_options import add_arguments, compile_config
from benchmarks.duplex_floor import unit_floor
from benchmarks.timing import Clock
from models.config import load_config, load_preprocessor_config
from models.errors import ModelError
from models.graphs import compile_counters
from models.load import load_model
from models.random_weights import random_model
from models.region_table import Shapes
from models.token2wav.load import FlowAndHift, load_flow_and_hift
from models.token2wav.random_weights import random_parts
from models.token2wav.region_table import VocoderShapes
from models.token2wav.settings import FlowConfig
from models.token2wav.voice import Voice
from models.tokens import Tokenizer
from worker.building import assemble
from worker.config import EngineConfig, SessionConfig, WindowConfig
from worker.engine import Engine, Handle
from worker.observer import Observer
from worker.results import Failure, StageTimes, UnitResult
from worker.sessions import Prompt
from worker.tuning import tune

TINY, REAL = Path("assets/tiny"), Path("tests/data/released_config.json")
STAGES = [one.name for one in fields(StageTimes)]
TEXT_TOKENS = 8
PROMPT_CODES = 75  # three seconds of a voice's prompt
LISTEN, SPEAK = "LISTEN", "SPEAK"


class Script(Observer):
    """Decides instead of the model: every unit listens, or speaks a fixed number of tokens. Its sampler still works."""

    def __init__(self, engine_tokens: Any, n_text: int):
        self.mode, self._ids, self._n_text = LISTEN, engine_tokens, n_text

    def token(self, session: str, job: Any, token: int) -> int:
        n_chosen = len(job.talk.all_ids)
        if self.mode == LISTEN:
            return self._ids.listen
        if n_chosen == 0:
            return self._ids.speak
        return self._ids.chunk_eos if n_chosen > self._n_text else ord("a") + n_chosen


def parse(arguments: list[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.duplex", description="Times whole duplex units.")
    parser.add_argument(
        "--config", choices=("tiny", "real"), default="tiny", help="real: released size, random weights"
    )
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sessions", type=_numbers, default=(1, 2, 4), help="numbers of sessions at once")
    parser.add_argument("--units", type=int, default=10, help="units timed in a conversation")
    parser.add_argument("--rounds", type=int, default=3, help="conversations for each row")
    parser.add_argument("--context", type=int, default=1000, help="context rows a conversation starts with")
    parser.add_argument("--llm-len", type=int, default=2048, help="context rows of a slot")
    parser.add_argument("--steps", type=int, default=10, help="Euler steps")
    parser.add_argument("--frames", type=int, choices=(0, 1), default=1, help="pictures in each unit")
    add_arguments(parser)
    parser.add_argument("--late-sound", action="store_true", help="one piece of sound a unit, as late as the unit")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no row after so many seconds")
    parser.add_argument("--json", type=Path, help="write all results here, anew after each row")
    options = parser.parse_args(arguments)
    if options.graphs and options.device != "cuda":
        parser.error("--graphs: expected --device cuda, got cpu")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


class Bench:
    """One engine and what has been measured of it."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.device = options, torch.device(options.device)
        self._began = time.monotonic()
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.clock = Clock(self.device)
        self.ceilings = self.clock.ceilings(dtype)
        torch.set_float32_matmul_precision("high")
        self.config = EngineConfig(
            max_sessions=options.sessions[-1],
            llm_len=options.llm_len,
            euler_steps=options.steps,
            compile=compile_config(options),
            session=SessionConfig(
                window=WindowConfig(mode="off"), force_listen_count=0, early_sound=not options.late_sound, seed=1
            ),
        )
        tokenizer = Tokenizer.load(TINY)
        model, flow = self._weights(dtype)
        batch, n_frames = options.sessions, 1
        parts = assemble(
            model,
            tokenizer,
            load_preprocessor_config(TINY),
            flow,
            self.config,
            shapes=Shapes(
                batch=batch,
                slices=batch,
                patches=(1088,),
                rows=(16, 96),
                kv=(options.llm_len,),
                spoken=(24,),
                tokens=(24,),
                speech_kv=(512,),
            ),
            vocoder_shapes=VocoderShapes(batch=batch, codes=(10, 25, 28), columns=(512,)),
        )
        self.script = Script(parts.language.talk_ids, TEXT_TOKENS)
        self.engine = Engine(parts, self.config, observer=self.script)
        start = time.perf_counter()
        self.engine.start()
        self.tuned = self.engine.submit(tune, parts, self.config).result()
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.device),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "dtype": str(dtype),
            "n_weights": sum(p.numel() for p in model.parameters()),
            "slot_bytes": parts.duplex.state.nbytes(),
            "vocoder_slot_bytes": parts.vocoder.n_bytes,
            "tuning_s": time.perf_counter() - start,
            "tuning": asdict(self.tuned),
            "ceilings": {"copy_bytes_per_s": self.ceilings.copy, "matmul_flop_per_s": self.ceilings.matmul},
            "rows": [],
            "left_out": [],
        }
        generator = np.random.default_rng(0)
        self.sound = (0.1 * generator.standard_normal((64, 16000))).astype(np.float32)
        pixels = generator.integers(0, 256, (448, 448, 3), dtype=np.uint8)
        self.picture = [Image.fromarray(pixels)] * (n_frames if options.frames else 0)
        self.voice = self._voice(parts.vocoder.parts.flow.config)

    def _weights(self, dtype: torch.dtype) -> tuple[Any, FlowAndHift]:
        if self.options.config == "tiny":
            flow = load_flow_and_hift(TINY / "assets/token2wav", device=self.device, dtype=dtype, hift_dtype=dtype)
            return load_model(TINY, device=self.device, dtype=dtype), flow
        flow = random_parts(device=self.device, dtype=dtype, hift_dtype=dtype)
        return random_model(load_config(REAL), device=self.device, dtype=dtype), flow

    def _voice(self, config: FlowConfig) -> Voice:
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(0, config.vocab_size, (PROMPT_CODES,), generator=generator)
        mel = torch.randn(2 * PROMPT_CODES, config.n_mels, generator=generator)
        return Voice(codes, mel, torch.randn(config.speaker_dim, generator=generator))

    def run(self) -> dict[str, Any]:
        columns = f"{'mode':7}{'sessions':>9}{'total p50':>11}{'p95':>9}{'p99':>9}{'first sound p95':>17}{'floor':>8}"
        print(f"{columns}  stages p50, all in ms")
        with self.engine:
            for n_sessions in self.options.sessions:
                for mode in (LISTEN, SPEAK):
                    label = f"{mode} {n_sessions}"
                    if time.monotonic() - self._began > self.options.budget_s:
                        self.result["left_out"].append(label)
                        continue
                    self._row(mode, n_sessions)
        self._save()
        print(
            f"graphs captured {self.tuned.n_graphs}, tuning {self.result['tuning_s']:.1f} s, after warm-up: "
            f"{sum(row['recompiles'] for row in self.result['rows'])} recompiles, "
            f"{sum(row['graph_breaks'] for row in self.result['rows'])} graph breaks, "
            f"{sum(row['graph_skips'] for row in self.result['rows'])} calls without a graph"
        )
        return self.result

    def _row(self, mode: str, n_sessions: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._conversation(mode, n_sessions, 3)  # what is made on first use is made here
        counted, skipped = compile_counters(), self._skips()
        results: list[UnitResult] = []
        walls: list[float] = []
        for _ in range(self.options.rounds):
            some, wall = self._conversation(mode, n_sessions, self.options.units)
            results += some
            walls += wall
        now = compile_counters()
        times = {stage: [getattr(one.times, stage) for one in results] for stage in STAGES}
        row = {
            "mode": mode,
            "sessions": n_sessions,
            "n": len(results),
            "wall_ms": _percentiles(walls),
            "stages_ms": {stage: _percentiles([v for v in values if v is not None]) for stage, values in times.items()},
            "floor_ms": unit_floor(self.engine.parts, self.ceilings, mode == SPEAK, n_sessions, self.options),
            "llm_rows": [min(r.llm_rows for r in results), max(r.llm_rows for r in results)],
            "n_codes": sorted({r.n_codes for r in results}),
            "n_tokens": sorted({r.n_tokens for r in results}),
            "recompiles": now["graphs"] - counted["graphs"],
            "graph_breaks": now["graph_breaks"] - counted["graph_breaks"],
            "graph_skips": self._skips() - skipped,
            "peak_memory": report.peak_memory(self.device),
        }
        self.result["rows"].append(row)
        self._save()
        total, first = row["stages_ms"]["total"], row["stages_ms"]["first_sound"]
        stages = " ".join(
            f"{stage} {row['stages_ms'][stage]['p50']:.1f}"
            for stage in STAGES
            if stage not in ("total", "first_sound") and row["stages_ms"][stage]["p50"] >= 0.05
        )
        sound = f"{first['p95']:.1f}" if first else "-"
        print(
            f"{mode:7}{n_sessions:9}{total['p50']:11.1f}{total['p95']:9.1f}{total['p99']:9.1f}{sound:>17}"
            f"{row['floor_ms']:8.2f}  {stages}",
            flush=True,
        )

    def _skips(self) -> int:
        tables = [self.engine.parts.duplex.runner.regions, self.engine.parts.vocoder.regions]
        return sum(table.n_skipped for table in tables)

    def _conversation(self, mode: str, n_sessions: int, n_units: int) -> tuple[list[UnitResult], list[float]]:
        """Units of all sessions at once, the first two of them not counted."""
        events: queue.Queue[Any] = queue.Queue()
        handles: list[Handle] = []
        prompt = Prompt("a" * self.options.context, "", None, self.voice)
        for number in range(n_sessions):
            handle = self.engine.open(f"{mode}-{number}", None, events.put).result()
            handle.prepare(prompt).result()
            handles.append(handle)
        self.script.mode = mode
        results: list[UnitResult] = []
        walls: list[float] = []
        for unit in range(n_units + 2):
            start = time.perf_counter()
            for number, handle in enumerate(handles):
                handle.send(self.sound[(unit + 7 * number) % len(self.sound)], self.picture)
            done = _collect(events, n_sessions)
            if unit >= 2:
                walls.append(1e3 * (time.perf_counter() - start))
                results += done
        for handle in handles:
            handle.close().result()
        return results, walls

    def _save(self) -> None:
        self.result["wall_s"] = time.monotonic() - self._began
        if self.options.json is not None:
            report.write_json(self.options.json, self.result)


def _collect(events: Any, n_sessions: int) -> list[UnitResult]:
    done: list[UnitResult] = []
    while len(done) < n_sessions:
        event = events.get(timeout=600)
        if isinstance(event, Failure):
            raise event.error
        if isinstance(event, UnitResult):
            done.append(event)
    return done


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99)}


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        Bench(parse(arguments), ["python", "-m", "benchmarks.duplex", *arguments]).run()
    except ModelError as error:
        sys.exit(f"benchmarks.duplex: {error}")


if __name__ == "__main__":
    main()
