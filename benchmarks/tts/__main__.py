"""Times both speech systems, Qwen3-TTS and S3Gen, and their engine settings one by one.

`python -m benchmarks.tts --label NAME` writes benchmarks/results/tts/NAME.json after every row. Weights are random. The
figures that are compared between versions come first, and each part has its own share of the budget.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.timing import DeviceClock
from benchmarks.tts import models, s3gen, streams_load
from benchmarks.tts.frames import frame_timing
from benchmarks.tts.streams_load import Sizes
from benchmarks.tts.toggles import S3GEN_SERVED, SERVED, TOGGLES, Toggle, in_force
from models.graphs.region_graphs import compile_counters
from models.qwen3_tts.streams import SpeechStreams
from models.token2wav.s3gen.region_table import S3Shapes

RESULTS = Path(__file__).parents[1] / "results" / "tts"
PARTS = ("streams", "s3gen", "equivalence", "toggles_s3gen", "toggles_qwen3_tts")
FRAME_ROWS = 300  # of each slot before timed frames
TOGGLE_TOKENS = 200  # of the utterance of a toggle: 8 s
# Shares of the budget. A part may use what earlier parts left, and nothing of the shares of later ones.
SHARES = {"streams": 0.45, "s3gen": 0.3, "equivalence": 0.08, "toggles_s3gen": 0.08, "toggles_qwen3_tts": 0.09}
# What a step of a part is expected to take at most, seconds on one H200; one that does not fit is skipped.
EXPECTED_S = {"streams": 40.0, "s3gen": 20.0, "equivalence": 50.0, "toggles_s3gen": 12.0, "toggles_qwen3_tts": 12.0}
COMPILED_S = {"s3gen": 50.0, "toggles_s3gen": 35.0, "toggles_qwen3_tts": 35.0}  # those that compile; S3Gen by bucket


def parse(arguments: list[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tts", description=__doc__)
    parser.add_argument("--label", required=True, help="name of the result file")
    parser.add_argument("--size", choices=("1b7", "0b6", "tiny"), default="1b7", help="of the networks")
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--parts", type=_names, default=PARTS, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--toggles", type=_names, help=f"some of {','.join(TOGGLES)}")
    parser.add_argument("--rates", type=_floats, default=(1.0, 10.0, 20.0), help="requests a second")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a rate")
    parser.add_argument("--requests", type=int, default=25, help="of a rate at least, whatever the seconds")
    parser.add_argument("--frames", type=int, default=62, help="of an answer; 12.5 are a second")
    parser.add_argument("--batch", type=_numbers, help="buckets of slots")
    parser.add_argument("--tokens", type=_numbers, default=(50, 100, 200, 500), help="S3Gen's buckets")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--budget-s", type=float, default=1200.0, help="of all parts; no step begins that would end later"
    )
    parser.add_argument("--json", type=Path, help="result file in place of that of the label")
    parser.add_argument("--summary", type=Path, help="file of the figures that are compared between versions")
    options = parser.parse_args(arguments)
    is_cuda = options.device == "cuda"
    known = tuple(name for name, toggle in TOGGLES.items() if is_cuda or not toggle.needs_gpu)
    options.toggles = options.toggles or known
    options.batch = options.batch or ((1, 4, 8, 16, 32) if is_cuda else (1, 2))
    options.json = options.json or RESULTS / f"{options.label}.json"
    wrong = {*options.parts} - {*PARTS} | {*options.toggles} - {*known}
    sizes = (*options.rates, *options.batch, *options.tokens, options.seconds, options.frames, options.repeats)
    if wrong or (is_cuda and not has_cuda) or min(sizes) <= 0:
        expected = f"parts of {PARTS}, toggles of {known}, a device that exists and positive sizes"
        parser.error(f"expected {expected}, got {vars(options)}")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in _names(text)))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in _names(text))


class TtsBench:
    """Both systems on one device."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.device = options, torch.device(options.device)
        self.is_cuda = self.device.type == "cuda"
        self.clock, self._began = DeviceClock(self.device), time.monotonic()
        self._deadline_s = options.budget_s  # of the part that runs
        self.served = SERVED if self.is_cuda else TOGGLES["eager"]
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.device),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "figures": {},
            "parts": {},
        }

    def run(self) -> dict[str, Any]:
        steps: dict[str, Callable[[dict[str, Any]], None]] = {
            "streams": self._streams,
            "s3gen": self._s3gen,
            "equivalence": self._equivalence,
            "toggles_s3gen": self._toggles_s3gen,
            "toggles_qwen3_tts": self._toggles_qwen3_tts,
        }
        for name in PARTS:
            if name not in self.options.parts:
                continue
            part: dict[str, Any] = {}
            self.result["parts"][name] = part
            self._deadline_s = self._deadline_of(name)
            if not self._fits(EXPECTED_S[name]):
                part["skipped"] = self._skipped
            else:
                self._guarded(part, lambda step=steps[name], part=part: step(part))
            part["ended_s"] = self._elapsed
            self._save()
        return self.result

    # --- Qwen3-TTS -----------------------------------------------------------------------------

    def _streams(self, part: dict[str, Any]) -> None:
        """Frames, first sounds under load, and full slots, in the form that serves."""
        sizes = self._sizes(self.options.batch)
        with in_force(self.served, self.device):
            networks = models.qwen3_tts(self.options.size, self.device, self.served.dtype)
            rows = () if not self._has_room(sizes) else (FRAME_ROWS,)
            start_s, streams = self.clock.seconds(
                lambda: streams_load.built_streams(*networks, sizes, self.served, rows)
            )
            part["start_s"] = start_s
            figures = self.result["figures"]
            for batch in sorted({1, sizes.n_slots}):
                n_rows = FRAME_ROWS if rows else sizes.prompt_rows
                timing = frame_timing(self.clock, streams.runner, batch, rows=n_rows, repeats=self.options.repeats)
                part[f"frame_{batch}"] = asdict(timing)
                figures[f"frame_ms_{batch}"] = round(timing.p50_ms, 3)
                self._say(f"frame of {batch} slots: {timing.p50_ms:.2f}/{timing.p95_ms:.2f} ms")
            streams_load.real_time_factor(streams, sizes)  # library handles are created here
            before = compile_counters()
            row = streams_load.full_slots(streams, sizes, n=sizes.n_slots, seconds=min(8.0, self.options.seconds))
            part["full_slots"] = row
            figures["audio_s_per_s"] = round(row["audio_s_per_s"], 1)
            self._say(f"{row['slots']} slots: {row['audio_s_per_s']:.0f} s of sound a second, {row['late_parts']} late")
            self._save()
            part["loads"] = []
            for rate in self.options.rates:
                seconds = max(self.options.seconds, self.options.requests / rate)
                if not self._fits(seconds):
                    part["skipped_rates"] = self._skipped
                    break
                row = streams_load.first_sounds(streams, sizes, rate=rate, seconds=seconds)
                part["loads"].append(row)
                figures[f"first_audio_p95_ms_{rate:g}rps"] = round(row["first_audio"]["p95_ms"], 2)
                waits = row["first_audio"]
                self._say(f"{rate:g} requests a second: first sound {waits['p50_ms']:.1f}/{waits['p95_ms']:.1f} ms")
                self._save()
            part |= {"peak_memory": report.peak_memory(self.device), "late": self._late(streams, before)}
            streams_load.drop(streams)

    def _late(self, streams: SpeechStreams, before: dict[str, int]) -> dict[str, int]:
        """What compiled or broke since `before`, and calls without a graph since the warm-up."""
        now, skipped = compile_counters(), streams.runner.table.n_skipped + streams.codec.regions.n_skipped
        return {**{name: now[name] - before[name] for name in now}, "skipped_graphs": skipped}

    def _sizes(self, batch: tuple[int, ...]) -> Sizes:
        return Sizes(batch, frames=self.options.frames)

    def _has_room(self, sizes: Sizes) -> bool:
        return FRAME_ROWS + self.options.repeats + 8 <= sizes.max_len and self.is_cuda

    # --- S3Gen ---------------------------------------------------------------------------------

    def _s3gen(self, part: dict[str, Any]) -> None:
        """Components and whole utterances, of the ten steps and of the mean flow, eager against the served form."""
        batch = (1, 4) if self.is_cuda else (1,)
        forms = {"eager": Toggle(bf16=True, tf32=True), "served": S3GEN_SERVED if self.is_cuda else Toggle(bf16=True)}
        for variant in ("ten_steps", "mean_flow"):
            # The mean flow's components are those of the other variant, but for its solve: one bucket suffices.
            tokens = self.options.tokens if variant == "ten_steps" else self.options.tokens[-1:]
            shapes = self._s3_shapes(batch if variant == "ten_steps" else (1,), tokens)
            for form, toggle in forms.items():
                if not self._fits(COMPILED_S["s3gen"] * len(tokens) if toggle.compiled else EXPECTED_S["s3gen"]):
                    part["skipped_forms"] = f"{variant} {form}: {self._skipped}"
                    return
                with in_force(toggle, self.device):
                    model = models.s3gen(self.options.size, self.device, toggle.dtype, meanflow=variant == "mean_flow")
                    start_s, synthesizer = self.clock.seconds(
                        lambda model=model, shapes=shapes, toggle=toggle: s3gen.built(model, shapes, toggle)
                    )
                    rows = s3gen.component_rows(self.clock, synthesizer, self.options.repeats)
                    spoken = s3gen.utterance_rows(self.clock, synthesizer, self.options.repeats)
                    part[f"{variant}_{form}"] = {"start_s": start_s, "components": rows, "utterances": spoken}
                    s3gen.drop(synthesizer)
                self._save()
            speedups = self._speedups(part[f"{variant}_eager"], part[f"{variant}_served"])
            part[f"{variant}_speedup"] = speedups
            if variant == "ten_steps":
                alone = [row["speedup"] for row in speedups["utterances"] if row["batch"] == 1]
                self.result["figures"]["s3gen_speedup"] = min(alone)

    def _speedups(self, eager: dict[str, Any], served: dict[str, Any]) -> dict[str, Any]:
        """Speedup of every row of the two forms."""
        table: dict[str, Any] = {}
        for kind in ("components", "utterances"):
            table[kind] = []
            for before, after in zip(eager[kind], served[kind], strict=True):
                what = {key: before[key] for key in ("component", "bucket", "tokens", "batch") if key in before}
                times = {"eager_ms": before["p50_ms"], "served_ms": after["p50_ms"]}
                row = {**what, **times, "speedup": round(before["p50_ms"] / after["p50_ms"], 2)}
                table[kind].append(row)
                self._say(", ".join(f"{key} {value}" for key, value in row.items()))
        return table

    def _equivalence(self, part: dict[str, Any]) -> None:
        """The waveform of the form that serves, on a GPU with kernels, against eager in float32 without TF32."""
        n_tokens = self.options.tokens[0]
        shapes = self._s3_shapes((1,), (n_tokens,))
        exact = Toggle(compiled=True, graphs=self.is_cuda, kernels=self.is_cuda)
        with in_force(exact, self.device):
            model = models.s3gen(self.options.size, self.device, exact.dtype)
            plain = s3gen.built(model, shapes, Toggle())
            expected = plain.speak(s3gen.utterances(model, shapes, n_tokens, 1))
            synthesizer = s3gen.built(model, shapes, exact)
            part["max_abs"] = s3gen.difference(synthesizer, expected, n_tokens)
            self._say(f"S3Gen as served against eager, float32: at most {part['max_abs']:.1e} apart")
            s3gen.drop(synthesizer)

    def _s3_shapes(self, batch: tuple[int, ...], tokens: tuple[int, ...]) -> S3Shapes:
        if self.options.size == "tiny":
            return S3Shapes(batch=batch, speech_tokens=tokens, prompt=(12,), sound=(60,))
        return S3Shapes(batch=batch, speech_tokens=tokens)

    # --- toggles -------------------------------------------------------------------------------

    def _toggles_s3gen(self, part: dict[str, Any]) -> None:
        n_tokens = min(TOGGLE_TOKENS, self.options.tokens[-1])
        shapes = self._s3_shapes((1,), (n_tokens,))

        def measured(toggle: Toggle) -> dict[str, Any]:
            model = models.s3gen(self.options.size, self.device, toggle.dtype)
            start_s, synthesizer = self.clock.seconds(lambda: s3gen.built(model, shapes, toggle))
            (row,) = s3gen.utterance_rows(self.clock, synthesizer, self.options.repeats)
            s3gen.drop(synthesizer)
            return {"latency_ms": row["p50_ms"], "rtf": row["rtf"], "late": row["late"], "start_s": start_s}

        # HiFT alone has kernels. They are chosen where the other components compile, so that a toggle with kernels and
        # without compilation would measure the same as `graphs`.
        toggles = {name: TOGGLES[name] for name in self.options.toggles}
        names = [name for name, toggle in toggles.items() if toggle.compiled or not toggle.kernels]
        self._toggle_rows("S3Gen", names, part, measured)

    def _toggles_qwen3_tts(self, part: dict[str, Any]) -> None:
        sizes = self._sizes((1,))

        def measured(toggle: Toggle) -> dict[str, Any]:
            networks = models.qwen3_tts(self.options.size, self.device, toggle.dtype)
            start_s, streams = self.clock.seconds(lambda: streams_load.built_streams(*networks, sizes, toggle))
            streams_load.real_time_factor(streams, sizes)  # library handles are created here
            before = compile_counters()
            row: dict[str, Any] = streams_load.real_time_factor(streams, sizes)
            late = self._late(streams, before)
            streams_load.drop(streams)
            return {**row, "late": late, "start_s": start_s}

        self._toggle_rows("Qwen3-TTS", self.options.toggles, part, measured)

    def _toggle_rows(
        self,
        system: str,
        names: Sequence[str],
        part: dict[str, Any],
        measured: Callable[[Toggle], dict[str, Any]],
    ) -> None:
        """A row for every toggle; one that fails has the error there."""
        for name in names:
            row: dict[str, Any] = {}
            part[name] = row
            if not self._fits((COMPILED_S if TOGGLES[name].compiled else EXPECTED_S)["toggles_s3gen"]):
                row["skipped"] = self._skipped
                continue
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            with self._catching(row), in_force(TOGGLES[name], self.device):
                row |= measured(TOGGLES[name])
                self._say(f"{system} {name:16} RTF {row['rtf']:.4f}, latency {row['latency_ms']:.1f} ms")
            row["peak_memory"] = report.peak_memory(self.device)
            self._save()
        self._print_toggles(system, part)

    def _print_toggles(self, system: str, part: dict[str, Any]) -> None:
        """The rows side by side."""
        print(f"{system:16} {'RTF':>8} {'latency':>11} {'memory':>10} {'start':>8}")
        for name, row in part.items():
            if "rtf" not in row:
                print(f"{name:16} {row.get('skipped') or row['error'].splitlines()[0]}")
                continue
            memory = row["peak_memory"]
            gigabytes = memory.get("allocated_bytes", memory["host_bytes"]) / 1e9
            times = f"{row['rtf']:8.4f} {row['latency_ms']:8.1f} ms"
            print(f"{name:16} {times} {gigabytes:7.2f} GB {row['start_s']:6.1f} s", flush=True)

    # --- of all parts --------------------------------------------------------------------------

    @property
    def _elapsed(self) -> float:
        return round(time.monotonic() - self._began, 1)

    def _fits(self, seconds: float) -> bool:
        return self._elapsed + seconds <= self._deadline_s

    @property
    def _skipped(self) -> str:
        return f"budget of {self._deadline_s:.0f} s"

    def _deadline_of(self, part: str) -> float:
        """When a part has to end, so that all later ones have their shares of the budget."""
        shares = {name: SHARES[name] for name in PARTS if name in self.options.parts}
        until = sum(share for name, share in shares.items() if PARTS.index(name) <= PARTS.index(part))
        return float(self.options.budget_s * until / sum(shares.values()))

    def _guarded(self, part: dict[str, Any], step: Callable[[], None]) -> None:
        with self._catching(part):
            step()

    @contextmanager
    def _catching(self, row: dict[str, Any]) -> Iterator[None]:
        """An error becomes part of the result, so that the rest of the run still counts."""
        try:
            yield
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()

    def _say(self, text: str) -> None:
        print(f"{self._elapsed:7.1f} s  {text}", flush=True)

    def _save(self) -> None:
        """Write all files, after every row: a run that is ended early leaves what it has measured."""
        report.write_json(self.options.json, self.result)
        if (summary := self.options.summary) is None:
            return
        # The figures of other parts may be of other commands.
        figures = json.loads(summary.read_text("utf-8")) if summary.exists() else {}
        facts = self.result["environment"]
        figures |= {**self.result["figures"], "torch": facts["torch"], "gpu": facts["gpu"]}
        for part in {"streams", "s3gen"} & self.result["parts"].keys():
            figures |= {f"command_{part}": " ".join(self.result["command"]), f"date_{part}": facts["date"]}
        report.write_json(summary, figures)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    result = TtsBench(parse(arguments), ["python", "-m", "benchmarks.tts", *arguments]).run()
    parts = result["parts"].values()
    rows = [row for part in parts for row in part.values() if isinstance(row, dict)]
    return 1 if any("error" in row for row in (*parts, *rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
