"""Times the language models of Qwen3-TTS: a frame of many slots, and a prompt with its first frame.

`python -m benchmarks.tts.frames --help` lists the options.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.timing import DeviceClock, Timing
from models.graphs.compiler import reset_compiler
from models.graphs.region_graphs import compile_counters
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.prompt import PromptText, SpeechPrompt, SpeechVoice, lay_out
from models.qwen3_tts.random_weights import WIDTHS, random_qwen3_tts, released_config
from models.qwen3_tts.region_table import TalkerShapes
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.settings import FrameSampling

WAYS = {  # kernels, compiled layers, graphs
    "eager": (False, False, False),
    "compiled_graph": (False, True, True),
    "kernels_graph": (True, False, True),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FRAME_MS = 80  # of sound
HEADER = (
    f"{'mode':15} {'slots':>5} {'frame p50/p95 ms':>17} {'audio s/s':>9} {'first codes p50/p95 ms':>23} {'start s':>8}"
)


def parse(arguments: list[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tts.frames", description=__doc__)
    parser.add_argument("--config", default="1b7", help="a CustomVoice folder, or 0b6 or 1b7 for random weights")
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if has_cuda else "float32")
    parser.add_argument("--modes", type=_names, help=f"some of {','.join(WAYS)}")
    parser.add_argument("--batch", type=_numbers, help="slots at once")
    parser.add_argument("--rows", type=int, default=300, help="rows of each slot before the timed frames")
    parser.add_argument("--first-rows", type=int, default=30, help="rows of the prompt before the first codes")
    parser.add_argument("--max-len", type=int, default=1024, help="rows of a slot")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="result file, rewritten after each row")
    options = parser.parse_args(arguments)
    is_cuda = options.device == "cuda"
    options.modes = options.modes or (tuple(WAYS) if is_cuda else ("eager",))
    options.batch = options.batch or ((1, 8, 32) if is_cuda else (1,))
    wrong = set(options.modes) - set(WAYS)
    needs_gpu = any(mode != "eager" for mode in options.modes)
    too_long = options.rows + options.repeats + 8 > options.max_len
    if wrong or too_long or (is_cuda and not has_cuda) or (needs_gpu and not is_cuda) or options.repeats < 1:
        parser.error(f"expected known modes, a device that exists and rows that fit, got {vars(options)}")
    return options


def random_prompt(model: Qwen3TTS, n_rows: int) -> SpeechPrompt:
    """A prompt of this many rows."""
    config = model.config
    voice = SpeechVoice(name=next(iter(config.speakers)))

    def laid_out(n_text: int) -> SpeechPrompt:
        texts = PromptText(role=(config.im_start_token_id, config.assistant_token_id, 1), text=(1,) * n_text)
        return lay_out(config, texts, voice)

    return laid_out(1 + n_rows - len(laid_out(1)))


def frame_timing(clock: DeviceClock, runner: TalkerRunner, batch: int, *, rows: int, repeats: int) -> Timing:
    """A frame of `batch` slots that have `rows` rows before the first of these frames."""
    slots, prompt = list(range(batch)), random_prompt(runner.model, rows)
    for slot in slots:
        runner.open(slot, FrameSampling(), seed=slot, max_frames=runner.max_len)
        runner.feed({slot: prompt})
        runner.frame([slot])
    clock.measure(lambda: runner.frame(slots), lambda: None, 2)
    timing = clock.measure(lambda: runner.frame(slots), lambda: None, repeats)
    for slot in slots:
        runner.close(slot)
    return timing


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in _names(text)))


class FramesBench:
    """One set of weights in every mode."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.device = options, torch.device(options.device)
        self.clock = DeviceClock(self.device)
        dtype = DTYPES[options.dtype]
        if options.config in WIDTHS:
            config = released_config(options.config)
            self.model: Qwen3TTS = random_qwen3_tts(config, device=self.device, dtype=dtype, seed=1)
        else:
            self.model = load_qwen3_tts(options.config, device=self.device, dtype=dtype)
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.device),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "rows": [],
        }

    def run(self) -> dict[str, Any]:
        print(HEADER, flush=True)
        for mode in self.options.modes:
            self._mode(mode)
        return self.result

    def _mode(self, mode: str) -> None:
        options, (kernels, is_compiled, is_captured) = self.options, WAYS[mode]
        reset_compiler()
        if kernels:
            self.model.use_kernels(True)
        # Only the sizes that are timed: every size is one graph of a thousand operations.
        longest = options.rows + options.repeats + 8
        shapes = TalkerShapes(batch=options.batch, rows=(options.first_rows,), kv=(longest,), text=(16,))
        runner = TalkerRunner(self.model, n_slots=options.batch[-1], max_len=options.max_len, shapes=shapes)
        if is_compiled:
            runner.table.compile(by_layer=True)
        start_s, _ = self.clock.seconds(runner.table.capture if is_captured else runner.table.warm_up)
        before = compile_counters()["graphs"]
        for batch in options.batch:
            row = {"mode": mode, "batch": batch, "start_s": start_s, **self._timed(runner, batch)}
            row["audio_s_per_s"] = batch * FRAME_MS / row["frame"]["p50_ms"]
            row["peak_memory"] = report.peak_memory(self.device)
            self.result["rows"].append(row)
            self._print(row)
        self.result["rows"][-1]["compiled_after_warm_up"] = compile_counters()["graphs"] - before
        self.result["rows"][-1]["skipped_graphs"] = runner.table.n_skipped
        runner.table.drop_graphs()
        runner.table.uncompile()
        if kernels:
            self.model.use_kernels(False)
        if options.json is not None:
            report.write_json(options.json, self.result)

    def _timed(self, runner: TalkerRunner, batch: int) -> dict[str, Any]:
        """A prompt with its first frame for one slot, then frames of `batch` slots."""
        repeats = self.options.repeats
        first = random_prompt(self.model, self.options.first_rows)

        def first_codes() -> None:
            runner.feed({0: first})
            runner.frame([0])

        def again() -> None:
            if 0 not in runner.free_slots:
                runner.close(0)
            runner.open(0, FrameSampling(), seed=0, max_frames=2)

        begun = self._measure(first_codes, again, repeats)
        runner.close(0)
        frame = asdict(frame_timing(self.clock, runner, batch, rows=self.options.rows, repeats=repeats))
        return {"frame": frame, "first_codes": begun}

    def _measure(self, call: Callable[[], Any], before: Callable[[], None], repeats: int) -> dict[str, Any]:
        self.clock.measure(call, before, 2)
        return asdict(self.clock.measure(call, before, repeats))

    def _print(self, row: dict[str, Any]) -> None:
        pairs = [f"{row[name]['p50_ms']:.2f}/{row[name]['p95_ms']:.2f}" for name in ("frame", "first_codes")]
        print(
            f"{row['mode']:15} {row['batch']:5} {pairs[0]:>17} {row['audio_s_per_s']:9.1f} {pairs[1]:>23} "
            f"{row['start_s']:8.1f}",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    began = time.monotonic()
    FramesBench(parse(arguments), ["python", "-m", "benchmarks.tts.frames", *arguments]).run()
    print(f"[{time.monotonic() - began:.0f} s]", file=sys.stderr)


if __name__ == "__main__":
    main()
