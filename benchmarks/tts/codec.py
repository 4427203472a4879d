"""Times the codec of Qwen3-TTS: chunks of frames for many streams, from codes on the host to samples on the device, and
reference sounds.

`python -m benchmarks.tts.codec --help` lists the options.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.timing import DeviceClock, float32_precision
from models.graphs.compiler import reset_compiler
from models.graphs.region_graphs import compile_counters
from models.layers.weights import assign_weights, on_meta
from models.qwen3_tts.codec.codec import CodeChunk, SpeechCodec
from models.qwen3_tts.codec.config import CODE_GROUPS, FRAME_SAMPLES, SAMPLE_RATE
from models.qwen3_tts.codec.load import SpeechTokenizer, load_speech_tokenizer, weight_dtype
from models.qwen3_tts.codec.random_weights import random_codec
from models.qwen3_tts.codec.region_table import CodecShapes

PRECISIONS = ("bfloat16", "tf32", "float32")
WAYS = {"eager": (False, False), "compiled": (True, False), "graph": (False, True), "compiled_graph": (True, True)}
SETTLED_FRAMES = 72  # until a stream's attention window is full
HEADER = (
    f"{'precision':9} {'mode':14} {'streams':>7} {'frames':>6} {'chunk p50/p95 ms':>17} {'ms/frame':>9} "
    f"{'audio s/s':>9} {'first s':>8}"
)


def parse(arguments: list[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tts.codec", description=__doc__)
    parser.add_argument("--config", default="real", help="a `speech_tokenizer` folder, or `real` for random weights")
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", type=_names, help=f"some of {','.join(PRECISIONS)}")
    parser.add_argument("--modes", type=_names, help=f"some of {','.join(WAYS)}")
    parser.add_argument("--batch", type=_numbers, help="streams decoded at once")
    parser.add_argument("--frames", type=_numbers, default=(1, 2, 4, 8), help="frames of a chunk")
    parser.add_argument("--seconds", type=_numbers, default=(10,), help="durations of reference sounds")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="result file, rewritten after each row")
    options = parser.parse_args(arguments)
    is_cuda = options.device == "cuda"
    options.precision = options.precision or (PRECISIONS if is_cuda else ("float32",))
    options.modes = options.modes or (tuple(WAYS) if is_cuda else ("eager",))
    options.batch = options.batch or ((1, 8, 32) if is_cuda else (1,))
    wrong = [*set(options.precision) - set(PRECISIONS), *set(options.modes) - set(WAYS)]
    captures = any(WAYS[mode][1] for mode in options.modes if mode in WAYS)
    if wrong or (is_cuda and not has_cuda) or (captures and not is_cuda) or options.repeats < 1:
        parser.error(f"expected known precisions and modes, a device that exists and a count, got {vars(options)}")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted(int(part) for part in _names(text)))


class CodecBench:
    """One set of weights, in every precision and mode."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.device = options, torch.device(options.device)
        self.clock = DeviceClock(self.device)
        if options.config == "real":
            self.plain, _ = random_codec(device=self.device, seed=1)
        else:
            self.plain = load_speech_tokenizer(options.config, device=self.device)
        self.waves: dict[str, Tensor] = {}
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.device),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "rows": [],
            "references": [],
            "difference": {},
        }

    def run(self) -> dict[str, Any]:
        print(HEADER, flush=True)
        for precision in self.options.precision:
            with float32_precision(precision):
                tokenizer = self._cast(precision)
                for mode in self.options.modes:
                    self._mode(precision, mode, tokenizer)
        self._differences()
        self._save()
        return self.result

    def _mode(self, precision: str, mode: str, tokenizer: SpeechTokenizer) -> None:
        is_compiled, is_captured = WAYS[mode]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        reset_compiler()
        most = self.options.batch[-1]
        frames = tuple(sorted({1, *self.options.frames}))
        sounds = tuple(-(-seconds * SAMPLE_RATE // FRAME_SAMPLES) for seconds in self.options.seconds)
        shapes = CodecShapes(batch=self.options.batch, frames=frames, sound_frames=sounds)
        codec = SpeechCodec(tokenizer, n_slots=most, shapes=shapes)
        names = list(codec.regions.table)
        if is_compiled:
            codec.regions.compile(names)
        first_s, _ = self.clock.seconds(codec.regions.capture if is_captured else codec.regions.warm_up)
        before = compile_counters()
        for batch in self.options.batch:
            for n_frames in self.options.frames:
                self._row(codec, {"precision": precision, "mode": mode, "first_call_s": first_s}, batch, n_frames)
        for seconds in self.options.seconds:
            sound = 0.1 * np.random.default_rng(0).standard_normal(seconds * SAMPLE_RATE).astype(np.float32)
            timing = self._timed(lambda sound=sound: codec.encode(sound, silence=0))
            row = {"precision": precision, "mode": mode, "seconds": seconds, **timing}
            self.result["references"].append(row)
            print(f"{precision:9} {mode:14} codes of {seconds} s: {row['p50_ms']:.2f} ms", flush=True)
        now = compile_counters()
        self.result["rows"][-1]["compiled_after_warm_up"] = now["graphs"] - before["graphs"]
        self.waves.setdefault(precision, self._stream(codec))
        self._save()

    def _row(self, codec: SpeechCodec, row: dict[str, Any], batch: int, n_frames: int) -> None:
        codec.begin(range(batch))
        chunks = [CodeChunk(slot, self._codes(codec, n_frames, slot)) for slot in range(batch)]
        for _ in range(-(-SETTLED_FRAMES // n_frames)):
            codec.decode(chunks)
        row |= {"batch": batch, "frames": n_frames, **self._timed(lambda: codec.decode(chunks))}
        row["ms_per_frame"] = row["p50_ms"] / n_frames
        row["audio_s_per_s"] = batch * n_frames * FRAME_SAMPLES / SAMPLE_RATE / (row["p50_ms"] / 1e3)
        row |= {"state_bytes": codec.state.n_bytes, "peak_memory": report.peak_memory(self.device)}
        self.result["rows"].append(row)
        pair = f"{row['p50_ms']:.2f}/{row['p95_ms']:.2f}"
        print(
            f"{row['precision']:9} {row['mode']:14} {batch:7} {n_frames:6} {pair:>17} {row['ms_per_frame']:9.3f} "
            f"{row['audio_s_per_s']:9.1f} {row['first_call_s']:8.1f}",
            flush=True,
        )

    def _timed(self, call: Callable[[], Any]) -> dict[str, Any]:
        self.clock.measure(call, lambda: None, 2)
        return asdict(self.clock.measure(call, lambda: None, self.options.repeats))

    def _stream(self, codec: SpeechCodec) -> Tensor:
        """The sound of 24 frames of one stream in single frames."""
        codec.begin([0])
        codes = self._codes(codec, 24, 0)
        return torch.cat([codec.decode([CodeChunk(0, frame[None])])[0] for frame in codes]).cpu()

    def _codes(self, codec: SpeechCodec, n_frames: int, seed: int) -> np.ndarray:
        size = self.plain.decoder.config.codebook_size
        return np.random.default_rng(seed).integers(0, size, (n_frames, CODE_GROUPS))

    def _differences(self) -> None:
        """Signal-to-noise ratio of each precision's sound against float32."""
        exact = self.waves.get("float32")
        for precision, wave in self.waves.items():
            if exact is None or precision == "float32":
                continue
            snr_db = float(10 * torch.log10(exact.square().mean() / (wave - exact).square().mean()))
            self.result["difference"][precision] = {"snr_db": snr_db}
            print(f"{precision} against float32: SNR {snr_db:.1f} dB")

    def _cast(self, precision: str) -> SpeechTokenizer:
        """The same weights in another precision; bfloat16 weights are rounded copies."""
        if precision != "bfloat16":
            return self.plain
        with on_meta():
            copy = SpeechTokenizer(self.plain.config)
        dtype = torch.bfloat16
        weights = {name: tensor.to(weight_dtype(name, dtype)) for name, tensor in self.plain.state_dict().items()}
        return assign_weights(copy, weights, self.device, dtype)

    def _save(self) -> None:
        if self.options.json is not None:
            report.write_json(self.options.json, self.result)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    began = time.monotonic()
    bench = CodecBench(parse(arguments), ["python", "-m", "benchmarks.tts.codec", *arguments])
    bench.run()
    print(f"[{time.monotonic() - began:.0f} s]", file=sys.stderr)


if __name__ == "__main__":
    main()
