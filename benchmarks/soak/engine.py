"""Fifteen minutes of conversations at full speed: growth of memory and of the time of a unit.

`python -m benchmarks.soak.engine --help` lists the options; README.md explains the table.
"""

import argparse
import gc
import queue
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.compile_options import add_arguments, compile_config
from models.errors import ModelError
from models.graphs.growing_memory import mapped_bytes
from models.graphs.region_graphs import compile_counters
from models.token2wav.voice.voice import Voice
from worker.assembly.parts import build
from worker.compile.compile_engine import compile_engine
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.engine import Engine
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Failure, UnitResult
from worker.loop.session_handle import SessionHandle

MINUTE = 60  # units
SPEAKING = (3, 4, 5, 6, 7)  # speaking units of every period; the turn ends with the last
PERIOD = 20
N_TEXT = 6
WINDOWS = (
    WindowConfig(mode="basic", high_tokens=400, low_tokens=300),
    WindowConfig(mode="context", max_units=8, previous_max_tokens=60),
)
HEADER = "minute   RSS MB  device MB  objects  graphs  listen ms  speak ms  rows"


class SoakScript(Observer):
    """Overrides the listen or speak decision of all sessions; the tokens are the model's own."""

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        ids, place, n = job.language.special, job.session.n_decided % PERIOD, len(job.decoder.all_ids)
        if place not in SPEAKING:
            return ids.listen
        if n <= N_TEXT:
            return token if n else ids.speak
        return ids.turn_eos if place == SPEAKING[-1] and n == N_TEXT + 1 else ids.chunk_eos


def parse(arguments: list[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.engine", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("assets/tiny"), help="checkpoint folder")
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sessions", type=int, default=4, help="number of sessions; half of them have a voice")
    parser.add_argument("--minutes", type=int, default=15, help="minutes of conversation, sixty units each")
    parser.add_argument("--warm", type=int, default=2, help="warm-up minutes that are not counted")
    parser.add_argument("--steps", type=int, default=10, help="Euler steps")
    add_arguments(parser)
    parser.add_argument("--json", type=Path, help="result file, rewritten after each minute")
    options = parser.parse_args(arguments)
    if not 0 < options.warm + 1 < options.minutes:
        parser.error(f"--minutes: expected at least two more than --warm, got {options.minutes}")
    return options


class EngineSoak:
    """One engine and its measurements by minute."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options = options
        self.config = EngineConfig(
            model_path=options.model,
            device=options.device,
            max_sessions=options.sessions,
            llm_len=1024,
            euler_steps=options.steps,
            compile=compile_config(options),
            session=SessionConfig(window=WINDOWS[0]),
        )
        parts = build(self.config)
        self.device = parts.model.device
        self.engine = Engine(parts, self.config, observer=SoakScript())
        self.engine.start()
        self.engine.submit(compile_engine, parts, self.config).result()
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.device),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "minutes": [],
        }
        self.sound = (0.1 * np.random.default_rng(0).standard_normal((64, 16_000))).astype(np.float32)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run(self) -> dict[str, Any]:
        print(HEADER)
        with self.engine:
            handles = [self._open(number) for number in range(self.options.sessions)]
            for minute in range(self.options.minutes):
                self._minute(minute, handles)
        counted = self.result["minutes"][self.options.warm :]
        self.result["slopes"] = {
            name: slope([one[name] for one in counted]) for name in ("rss_mb", "objects", "listen_ms", "speak_ms")
        }
        self._save()
        slopes = ", ".join(f"{name} {value:+.3f}" for name, value in self.result["slopes"].items())
        print(f"a minute more, after {self.options.warm} minutes: {slopes}")
        return self.result

    def _open(self, number: int) -> SessionHandle:
        config = SessionConfig(
            generate_audio=number % 2 == 0,
            window=WINDOWS[number // 2 % len(WINDOWS)],
            force_listen_count=0,
            max_new_speak_tokens_per_chunk=N_TEXT + 4,
            seed=number,
        )
        handle = self.engine.open(f"session {number}", config, self._events.put).result()
        handle.prepare(
            SystemPrompt.of("You are a helpful assistant.", self.sound[number], self._voice(number))
        ).result()
        return handle

    def _voice(self, seed: int) -> Voice | None:
        if not self.engine.has_vocoder:
            return None
        flow, generator = self.engine.parts.vocoder.parts.flow.config, torch.Generator().manual_seed(seed)
        speech_tokens = torch.randint(0, flow.vocab_size, (75,), generator=generator)
        mel = torch.randn(150, flow.n_mels, generator=generator) - 5
        return Voice(speech_tokens, mel, torch.randn(flow.speaker_dim, generator=generator))

    def _device_bytes(self) -> int:
        """GPU memory in tensors and in growing blocks of memory; 0 on a CPU."""
        is_gpu = self.device.type == "cuda"
        return torch.cuda.memory_allocated(self.device) + mapped_bytes(self.device) if is_gpu else 0

    def _minute(self, minute: int, handles: list[SessionHandle]) -> None:
        times: dict[bool, list[float]] = {False: [], True: []}
        results: list[UnitResult] = []
        for second in range(MINUTE):
            start = time.perf_counter()
            for number, handle in enumerate(handles):
                handle.send(self.sound[(second + 7 * number) % len(self.sound)])
            results = self._outcomes(len(handles))
            speaks = second % PERIOD in SPEAKING
            times[speaks].append(1000 * (time.perf_counter() - start))
        gc.collect()
        row = {
            "minute": minute + 1,
            "rss_mb": rss() / 2**20,
            "device_mb": self._device_bytes() / 2**20,
            "objects": len(gc.get_objects()),
            "graphs": compile_counters()["graphs"],
            "listen_ms": float(np.median(times[False])),
            "speak_ms": float(np.median(times[True])),
            "rows": max(result.context_len for result in results),
        }
        self.result["minutes"].append(row)
        self._save()
        print(
            f"{row['minute']:6}{row['rss_mb']:9.1f}{row['device_mb']:11.1f}{row['objects']:9}{row['graphs']:8}"
            f"{row['listen_ms']:11.1f}{row['speak_ms']:10.1f}{row['rows']:6}",
            flush=True,
        )

    def _outcomes(self, n: int) -> list[UnitResult]:
        done: list[UnitResult] = []
        while len(done) < n:
            event = self._events.get(timeout=600)
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, UnitResult):
                done.append(event)
        return done

    def _save(self) -> None:
        if self.options.json is not None:
            report.write_json(self.options.json, self.result)


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def slope(values: list[float]) -> float:
    """Slope of the least-squares line through the values, per step."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0])


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        EngineSoak(parse(arguments), ["python", "-m", "benchmarks.soak.engine", *arguments]).run()
    except ModelError as error:
        sys.exit(f"benchmarks.soak.engine: {error}")


if __name__ == "__main__":
    main()
