"""Times the vocoder: one second of sound for many sessions, from speech tokens on the host to samples on the device.

`python -m benchmarks.token2wav --help` lists the options; README.md explains the table.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.timing import Ceilings, DeviceClock, Timing, float32_precision
from benchmarks.token2wav.work import chunk_work
from models.checkpoint.precision import FlowWeights, Precision
from models.checkpoint.quantized import quantize
from models.graphs.region_graphs import compile_counters
from models.layers.quantized import Weight
from models.layers.weights import assign_weights, on_meta
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.hift import hift as hift_room
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.load.random_weights import random_parts
from models.token2wav.prompt.features import prompt_mel
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.stream.region_table import VocoderShapes, columns_for
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.stream.windows import CHUNK_TOKENS
from models.token2wav.voice.voice import Voice

TINY = Path(__file__).parents[2] / "assets" / "tiny" / "assets" / "token2wav"
PRECISIONS = ("bfloat16", "tf32", "float32")
FLOW_WEIGHTS: tuple[FlowWeights, ...] = get_args(FlowWeights)
# Ways to run a chunk: kernels, compilation, capture of both regions. With kernels, a worker compiles nothing of the
# vocoder.
WAYS = {
    "eager": ("plain", False, False),
    "compiled": ("plain", True, False),
    "fused": ("fused", False, False),
    "compiled_graph": ("plain", True, True),
    "graph": ("fused", False, True),
}
MODES = tuple(WAYS)
PROMPT_TOKENS = 150  # a voice of six seconds
SETTLED_AFTER = 4  # chunks until a turn's attention window is full
HEADER = (
    f"{'precision':13} {'steps':>5} {'batch':>5} {'mode':14} {'chunk p50/p95 ms':>17} {'flow':>8} {'hift':>8} "
    f"{'kernels':>8} {'busy ms':>8} {'floor':>7} {'p50/floor':>9} {'first s':>8} {'voice ms':>9}"
)


def parse(arguments: list[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token2wav", description=__doc__)
    parser.add_argument("--config", default="tiny", help="tiny, a vocoder folder, or `real` for random weights")
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", type=_names, help=f"some of {','.join(PRECISIONS)}")
    parser.add_argument(
        "--weights",
        type=_names,
        default=("bf16",),
        help=f"weights of the flow's layers, some of {','.join(FLOW_WEIGHTS)}; bf16: not quantised, in --precision",
    )
    parser.add_argument("--modes", type=_names, help=f"some of {','.join(MODES)}")
    parser.add_argument("--steps", type=_numbers, default=(10, 5), help="numbers of Euler steps")
    parser.add_argument("--batch", type=_numbers, help="batch sizes")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no measurement after this many seconds"
    )
    parser.add_argument("--whole", action="store_true", help="compile the whole flow instead of one step")
    parser.add_argument("--json", type=Path, help="result file, rewritten after each row")
    options = parser.parse_args(arguments)
    is_cuda = options.device == "cuda"
    options.precision = options.precision or (PRECISIONS if is_cuda else ("float32",))
    options.modes = options.modes or (MODES if is_cuda else ("eager",))
    options.batch = options.batch or ((1, 8, 32) if is_cuda else (1,))
    wrong = [*set(options.precision) - set(PRECISIONS), *set(options.modes) - set(MODES)]
    wrong += set(options.weights) - set(FLOW_WEIGHTS)
    if (
        wrong
        or (is_cuda and not has_cuda)
        or (not is_cuda and set(options.modes) - {"eager", "compiled"})
        or options.repeats < 1
    ):
        parser.error(
            f"expected known precisions, weights and modes, a device that exists and a count, got {vars(options)}"
        )
    return options


def _named(precision: str, weights: FlowWeights) -> str:
    """The name of a row's precision: `bfloat16`, or `bfloat16 int8` with quantised layers."""
    return precision if weights == "bf16" else f"{precision} {weights}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _names(text))


class VocoderBench:
    """One set of weights, in every precision and mode."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.device = options, torch.device(options.device)
        self._began = time.monotonic()
        self.clock = DeviceClock(self.device)
        torch.manual_seed(0)
        self.plain = self._plain_parts()
        self.speech_tokens = torch.randint(
            0, self.plain.flow.config.vocab_size, (64, self.plain.flow.encoder.lookahead + CHUNK_TOKENS)
        ).tolist()
        self.waves: dict[str, Tensor] = {}
        self.result: dict[str, Any] = {
            "command": command,
            "environment": report.environment(self.device),
            "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "prompt_codes": PROMPT_TOKENS,
            "rows": [],
            "ceilings": {},
            "difference": {},
            "left_out": [],
        }

    def run(self) -> dict[str, Any]:
        print(HEADER, flush=True)
        for precision in self.options.precision:
            with float32_precision(precision):
                dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
                ceilings = self.clock.ceilings(dtype)
                self.result["ceilings"][precision] = asdict(ceilings)
                for weights in self.options.weights:
                    parts = self._cast(precision, weights)
                    for batch in self.options.batch:
                        self._batch(_named(precision, weights), parts, batch, ceilings)
        self._differences()
        self._save()
        return self.result

    def _batch(self, precision: str, parts: FlowAndHift, batch: int, ceilings: Ceilings) -> None:
        """Rows of one batch size. precision: as `_named` returns it."""
        if time.monotonic() - self._began > self.options.budget_s:
            self.result["left_out"].append(f"{precision} batch {batch}")
            return
        for mode in self.options.modes:
            left = [n for n in self.options.steps if time.monotonic() - self._began > self.options.budget_s]
            if left:
                self.result["left_out"] += [f"{precision} batch {batch} steps {n} {mode}" for n in left]
                continue
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
            torch.compiler.reset()
            kernels, is_compiled, is_captured = WAYS[mode]
            vocoder = self._vocoder(parts, batch, kernels)
            vocoder.regions.uncompile()
            if is_compiled:
                vocoder.regions.compile(["flow"], by_layer=not self.options.whole)
                vocoder.regions.compile(["hift", "begin"])
            capture_s = self.clock.seconds(vocoder.regions.capture)[0] if is_captured else 0.0
            for n_steps in self.options.steps:
                self._row(precision, vocoder, batch, n_steps, mode, ceilings, capture_s)

    def _row(
        self,
        precision: str,
        vocoder: Vocoder,
        batch: int,
        n_steps: int,
        mode: str,
        ceilings: Ceilings,
        capture_s: float,
    ) -> None:
        before = compile_counters()
        vocoder.prepare(self._voice(vocoder, 0), n_steps)
        voice_s, _ = self.clock.seconds(lambda: vocoder.prepare(self._voice(vocoder, 1), n_steps))
        sessions = [vocoder.open(self._voice(vocoder, n), n_steps) for n in range(batch)]
        chunks = [Chunk(session, self.speech_tokens[n]) for n, session in enumerate(sessions)]
        seconds, _ = self.clock.seconds(lambda: vocoder.speak(chunks))
        first_s = capture_s + seconds
        for _ in range(SETTLED_AFTER):
            vocoder.speak(chunks)
        warm = compile_counters()
        self.clock.measure(lambda: vocoder.speak(chunks), lambda: None, 2)
        timing = self.clock.measure(lambda: vocoder.speak(chunks), lambda: None, self.options.repeats)
        parts = self._part_times(vocoder, chunks)
        n_frames = FRAMES_PER_TOKEN * CHUNK_TOKENS
        work = chunk_work(vocoder.parts, batch, n_steps, n_frames, FRAMES_PER_TOKEN * PROMPT_TOKENS + HISTORY_FRAMES)
        floor_ms = work.floor_ms(ceilings, "bfloat16" if precision.startswith("bfloat16") else "float32")
        kernels, busy_ms = self._kernels(lambda: vocoder.speak(chunks))
        now = compile_counters()
        row = {
            "precision": precision,
            "n_steps": n_steps,
            "batch": batch,
            "mode": mode,
            **asdict(timing),
            "flow_p50_ms": parts["flow"].p50_ms,
            "hift_p50_ms": parts["hift"].p50_ms,
            "kernels": kernels,
            "busy_ms": busy_ms,
            "floor_ms": floor_ms,
            "work": asdict(work),
            "first_call_s": first_s,
            "voice_s": voice_s,
            "graph_breaks": now["graph_breaks"] - before["graph_breaks"],
            "recompiles_after_warm_up": now["graphs"] - warm["graphs"],
            "state_bytes": vocoder.held_bytes,
            "peak_memory": report.peak_memory(self.device),
        }
        self.result["rows"].append(row)
        pair = f"{timing.p50_ms:.2f}/{timing.p95_ms:.2f}"
        print(
            f"{precision:13} {n_steps:5} {batch:5} {mode:14} {pair:>17} {row['flow_p50_ms']:8.2f} "
            f"{row['hift_p50_ms']:8.2f} {kernels or '-':>8} {busy_ms or 0:8.2f} {floor_ms:7.2f} "
            f"{timing.p50_ms / floor_ms:9.1f} {first_s:8.1f} {1e3 * voice_s:9.1f}",
            flush=True,
        )
        if mode == self.options.modes[-1] and batch == min(self.options.batch):
            self.waves[f"{precision} {n_steps}"] = self._stream(vocoder, sessions[0])
        for session in sessions:
            vocoder.close(session)
        self._save()

    def _part_times(self, vocoder: Vocoder, chunks: list[Chunk]) -> dict[str, Timing]:
        """The two regions of a chunk, each timed inside whole chunks."""
        samples: dict[str, list[float]] = {"flow": [], "hift": []}
        plain = vocoder.regions

        class Timed:
            def run(inner, function: Callable[..., Any], *arguments: Any, **static: Any) -> Any:
                return inner(plain.name_of(function), *arguments, **static)

            def __call__(inner, name: str, *arguments: Any, **static: Any) -> Any:
                result: list[Any] = []
                call = lambda: result.append(plain(name, *arguments, **static))  # noqa: E731
                samples[name].append(self.clock.sample(call, lambda: None))
                return result[0]

        vocoder.regions = Timed()
        for _ in range(self.options.repeats):
            vocoder.speak(chunks)
        vocoder.regions = plain
        return {name: Timing.of(values) for name, values in samples.items()}

    def _kernels(self, call: Any) -> tuple[int | None, float | None]:
        """Number of device kernels of one call, and their busy time."""
        if self.device.type != "cuda":
            return None, None
        from torch.profiler import ProfilerActivity, profile

        self.clock.wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call()
            self.clock.wait()
        events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return len(events), sum(e.device_time for e in events) / 1e3

    def _stream(self, vocoder: Vocoder, session: int) -> Tensor:
        """Four seconds of one session from the start of a turn."""
        vocoder.begin_turn(session)
        return torch.cat([vocoder.speak([Chunk(session, self.speech_tokens[n])])[0] for n in range(4)]).cpu()

    def _differences(self) -> None:
        """Signal-to-noise ratio and log-mel distance of each sound from that in float32.

        If float32 was not measured, sound of quantised layers is compared with that of the same precision without them.
        """
        for key, wave in self.waves.items():
            precision, n_steps = key.rsplit(maxsplit=1)
            names = ("float32", precision.split()[0])
            against = next((name for name in names if name != precision and f"{name} {n_steps}" in self.waves), None)
            if against is None or precision == "float32":
                continue
            plain = self.waves[f"{against} {n_steps}"]
            error = (wave - plain).square().mean()
            snr_db = float(10 * torch.log10(plain.square().mean() / error))
            mels = [prompt_mel(w) for w in (wave, plain)]
            mel_l1 = float((mels[0] - mels[1]).abs().mean())
            self.result["difference"][key] = {"against": against, "snr_db": snr_db, "log_mel_l1": mel_l1}
            print(f"{precision} against {against}, {n_steps} steps: SNR {snr_db:.1f} dB, log-mel L1 {mel_l1:.4f}")

    def _plain_parts(self) -> FlowAndHift:
        if self.options.config == "real":
            return random_parts(device=self.device, seed=1)
        folder = TINY if self.options.config == "tiny" else Path(self.options.config)
        return load_flow_and_hift(folder, device=self.device)

    def _cast(self, precision: str, weights: FlowWeights) -> FlowAndHift:
        """The same weights in another precision. In bfloat16 or with quantised layers they are rounded copies."""
        if precision != "bfloat16" and weights == "bf16":
            return self.plain
        flow, hift = self.plain.flow, self.plain.hift
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        kinds = Precision(flow=None if weights == "bf16" else weights)
        with on_meta():
            copies = Flow(flow.config), Hift(hift.config)

        def flow_weight(name: str, weight: Tensor) -> Weight:
            kind = kinds.flow_kind_of(name, tuple(weight.shape))
            return weight.to(dtype) if kind is None else quantize(weight, kind)

        return FlowAndHift(
            assign_weights(copies[0], {n: flow_weight(n, t) for n, t in flow.state_dict().items()}, self.device, dtype),
            assign_weights(
                copies[1],
                {n: t.to(hift_room.weight_dtype(n, dtype)) for n, t in hift.state_dict().items()},
                self.device,
                dtype,
            ),
        )

    def _vocoder(self, parts: FlowAndHift, batch: int, kernels: str) -> Vocoder:
        frames = FRAMES_PER_TOKEN * PROMPT_TOKENS
        columns = columns_for(frames, CHUNK_TOKENS)
        sizes = FlowSizes(
            n_sessions=batch,
            n_voices=2 * len(self.options.steps),
            max_steps=max(self.options.steps),
            max_chunk=CHUNK_TOKENS,
            max_prompt=frames,
            voice_frames=2 * len(self.options.steps) * frames,
        )
        shapes = VocoderShapes(batch=(batch,), speech_tokens=(CHUNK_TOKENS,), columns=(columns,), prompt=(frames,))
        return Vocoder(parts.flow, parts.hift, sizes=sizes, shapes=shapes, steps=self.options.steps, kernels=kernels)

    def _voice(self, vocoder: Vocoder, n: int) -> Voice:
        """One of two voices, so that a batch mixes both."""
        config = vocoder.parts.flow.config
        generator = torch.Generator().manual_seed(n % 2)
        return Voice(
            torch.randint(0, config.vocab_size, (PROMPT_TOKENS,), generator=generator),
            torch.randn(FRAMES_PER_TOKEN * PROMPT_TOKENS, config.n_mels, generator=generator),
            torch.randn(config.speaker_dim, generator=generator),
        )

    def _save(self) -> None:
        self.result["wall_s"] = time.monotonic() - self._began
        if self.options.json is not None:
            report.write_json(self.options.json, self.result)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    VocoderBench(parse(arguments), ["python", "-m", "benchmarks.token2wav", *arguments]).run()


if __name__ == "__main__":
    main()
