"""Times S3Gen: each component, and whole utterances, eager, compiled and captured."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import DeviceClock
from benchmarks.tts.toggles import Toggle
from models.graphs.region_graphs import compile_counters
from models.token2wav.backends import Kernels
from models.token2wav.s3gen.components import COMPONENTS, PLAN, S3Modes, compile_components
from models.token2wav.s3gen.model import S3Gen, S3Voice
from models.token2wav.s3gen.region_table import S3Shapes
from models.token2wav.s3gen.synthesizer import S3Synthesizer, Utterance
from models.token2wav.settings import FRAMES_PER_TOKEN, SAMPLE_RATE

REGIONS = tuple(dict.fromkeys(PLAN[name].region for name in COMPONENTS))


def built(model: S3Gen, shapes: S3Shapes, toggle: Toggle) -> S3Synthesizer:
    """A synthesizer that is compiled, captured and warmed up as the toggle says."""
    synthesizer = S3Synthesizer(model, shapes)
    if toggle.compiled:
        kernels: Kernels = "fused" if toggle.kernels else "plain"
        compile_components(synthesizer.regions, S3Modes.all(toggle.mode), captures=toggle.graphs, kernels=kernels)
    if toggle.graphs:
        synthesizer.regions.capture()
    else:
        synthesizer.regions.warm_up()
    return synthesizer


def drop(synthesizer: S3Synthesizer) -> None:
    """Delete graphs and compiled code, which refer to the networks."""
    synthesizer.regions.drop_graphs()
    synthesizer.regions.uncompile()


def utterances(model: S3Gen, shapes: S3Shapes, n_tokens: int, batch: int) -> list[Utterance]:
    """Utterances of random tokens, one voice and several seeds."""
    flow, numbers = model.config.flow, torch.Generator().manual_seed(0)
    n_prompt = shapes.prompt[-1]
    prompt, speech = (torch.randint(flow.vocab_size, (n,), generator=numbers) for n in (n_prompt, n_tokens))
    mel = torch.randn(FRAMES_PER_TOKEN * n_prompt, flow.n_mels, generator=numbers).to(model.device)
    speaker = torch.randn(flow.speaker_dim, generator=numbers).to(model.device)
    voice = S3Voice(prompt.to(model.device), mel, speaker)
    return [Utterance(speech, voice, seed) for seed in range(batch)]


def component_rows(clock: DeviceClock, synthesizer: S3Synthesizer, repeats: int) -> list[dict[str, Any]]:
    """A row for every region and bucket of one sound or utterance."""
    rows, table = [], synthesizer.regions
    for name in REGIONS:
        for bucket, variant in table.calls(name):
            if bucket["batch"] > 1:
                continue
            tensors, static = table.example(name, bucket)
            settings = {**static, **variant}

            def call(name: str = name, tensors: tuple[Tensor, ...] = tensors, settings: Any = settings) -> None:
                table(name, *tensors, **settings)

            clock.measure(call, lambda: None, 2)
            rows.append({"component": name, "bucket": bucket, **asdict(clock.measure(call, lambda: None, repeats))})
    return rows


def utterance_rows(clock: DeviceClock, synthesizer: S3Synthesizer, repeats: int) -> list[dict[str, Any]]:
    """A row for every size of bucket and batch: from tokens on the host to samples on the device."""
    rows, shapes = [], synthesizer.shapes
    for n_tokens in shapes.speech_tokens:
        for batch in shapes.batch:
            spoken = utterances(synthesizer.model, shapes, n_tokens, batch)
            synthesizer.speak(spoken)
            before = compile_counters()
            timing = clock.measure(lambda spoken=spoken: synthesizer.speak(spoken), lambda: None, repeats)
            sound_s = batch * len(synthesizer.speak(spoken)[0]) / SAMPLE_RATE
            now = compile_counters()
            rows.append(
                {
                    "tokens": n_tokens,
                    "batch": batch,
                    **asdict(timing),
                    "rtf": timing.p50_ms / 1e3 / sound_s,
                    "audio_s_per_s": sound_s / (timing.p50_ms / 1e3),
                    "late": {name: now[name] - before[name] for name in now},
                    "skipped_graphs": synthesizer.regions.n_skipped,
                }
            )
    return rows


def difference(synthesizer: S3Synthesizer, expected: list[Tensor], n_tokens: int) -> float:
    """Largest absolute difference of the samples of one utterance from the expected ones."""
    spoken = utterances(synthesizer.model, synthesizer.shapes, n_tokens, len(expected))
    pairs = zip(synthesizer.speak(spoken), expected, strict=True)
    return max(float((got - want).abs().max()) for got, want in pairs)
