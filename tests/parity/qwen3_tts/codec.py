"""The codec of Qwen3-TTS: speech decoder offline and in chunks, speech encoder, speaker encoder."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.qwen3_tts.codec.config import FRAME_SAMPLES
from models.qwen3_tts.codec.decoder import SpeechDecoder
from models.qwen3_tts.codec.load import (
    SPEAKER_PREFIX,
    SPEAKER_SECTION,
    TOKENIZER_FOLDER,
    SpeechTokenizer,
    load_speaker_encoder,
    load_speech_tokenizer,
)
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from tests.parity.golden import WEIGHTS, GoldenDir, read_tensors
from tests.parity.report import Report

WAVE_SCALE = 20_000  # of 16-bit samples
WAVE_TOLERANCE = 2e-6
TOLERANCE = 1e-5
KIND = "tts_model_type"
RAMP = (1, 2, 4, 8)  # frames of the first chunks; the last size repeats
MEL_STEP = BLOCK_STEP = 8  # of the stored frames
PEAK = "unclamped_absmax"  # of the sound before it is clipped, stored beside the modules' outputs
MULTIPLE = 4  # of the encoder's stored columns


def run_decoder(golden: GoldenDir, report: Report) -> None:
    case, decoder = "speech_decoder", tokenizer_of(golden).decoder
    tensors = golden.tensors(case)
    if not report.has_inputs(case, tensors, "codes"):
        return
    codes = tensors["codes"][0].T.contiguous()
    n_known = tensors["offline"].shape[0] // FRAME_SAMPLES if "offline" in tensors else 0
    report.close_if(case, "sound", decoded(decoder, codes, [len(codes)]), tensors.get("offline"), WAVE_TOLERANCE)
    if n_known:
        report.close(
            case, "sound in chunks", decoded(decoder, codes, ramp(n_known)), tensors["offline"], WAVE_TOLERANCE
        )
    _intermediates(decoder, codes, tensors, report)
    if "long.codes" in tensors:
        codes = tensors["long.codes"][0].T.contiguous()
        part = slice(298 * FRAME_SAMPLES, 303 * FRAME_SAMPLES)
        wave = decoded(decoder, codes, ramp(len(codes)))[part]
        report.close_if(case, "long sound in chunks", wave, tensors.get("long.offline_298_303"), WAVE_TOLERANCE)
    if "padded.codes" in tensors:
        codes = tensors["padded.codes"][1]
        codes = codes[: int((codes[:, 0] >= 0).sum())]
        wave = decoded(decoder, codes, [len(codes)])
        report.close_if(case, "padded row of a batch", wave, tensors.get("padded.wav1"), WAVE_TOLERANCE)


def _intermediates(decoder: SpeechDecoder, codes: Tensor, tensors: dict[str, Tensor], report: Report) -> None:
    """Outputs of modules for the first 12 frames; a name's suffix `_everyN` says which columns are stored."""
    modules = {name: name.removeprefix("n12.").partition("_every") for name in tensors if name.startswith("n12.")}
    stored = {name: (module, int(step or 1)) for name, (module, _, step) in modules.items() if module != PEAK}
    seen: dict[str, Tensor] = {}
    hooks = [
        decoder.get_submodule({"quantized": "quantizer"}.get(module, module)).register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.__setitem__(name, output)
        )
        for name, (module, _) in stored.items()
    ]
    decoded(decoder, codes[:12], [12])
    for hook in hooks:
        hook.remove()
    for name, (module, step) in stored.items():
        got = seen[name].transpose(1, 2) if module == "quantized" else seen[name]
        got = got[..., ::step]
        report.close("speech_decoder", module, got, tensors[name], TOLERANCE)


def run_encoder(golden: GoldenDir, report: Report) -> None:
    """Each sound alone, and all in a batch whose row is longer than any of them."""
    case, encoder = "speech_encoder", tokenizer_of(golden).encoder
    tensors = golden.tensors(case)
    codes = {"w0": "w0.codes", "w1": "w1.codes", "batch": "batch.codes1_alone"}
    waves = {"w0": "w0.wave_q", "w1": "w1.wave_q", "batch": "batch.wave_q1"}
    if not report.has_inputs(case, tensors, *waves.values()):
        return
    sounds = [tensors[name].float() / WAVE_SCALE for name in waves.values()]
    n_samples = torch.tensor([len(sound) for sound in sounds])
    batch = torch.full((len(sounds), int(n_samples.max()) + 777), 0.5)
    for row, sound in enumerate(sounds):
        batch[row, : len(sound)] = sound
    together = encoder(batch, n_samples)
    for row, (name, sound) in enumerate(zip(waves, sounds, strict=True)):
        expected, n = tensors.get(codes[name]), n_samples[row : row + 1]
        alone = encoder(sound[None], n)[0]
        report.equal_if(case, f"{name}: codes", alone, expected)
        report.equal_if(case, f"{name}: codes, in a batch", together[row, : len(alone)], expected)
        if f"{name}.downsample" not in tensors:
            continue
        x, n = encoder.encoder(sound[None, None], n)
        report.close(case, f"{name}: vectors", x[:, :, ::MULTIPLE], tensors[f"{name}.seanet_every4"])
        x = encoder.encoder_transformer(x)
        report.close(case, f"{name}: transformer", x[:, :, ::MULTIPLE], tensors[f"{name}.transformer_every4"])
        report.close(case, f"{name}: frames", encoder.downsample(x, n)[0], tensors[f"{name}.downsample"])


def run_speaker(golden: GoldenDir, report: Report) -> None:
    """A sound alone and in a batch."""
    case = "speaker_encoder"
    tensors = golden.tensors(case)
    if not report.has_inputs(case, tensors, "w0.wave_q"):
        return
    encoder = speaker_of(golden)
    sound = tensors["w0.wave_q"].float() / WAVE_SCALE
    n_samples = torch.tensor([len(sound)])
    mel, _ = encoder.log_mel(sound[None], n_samples)
    report.close_if(case, "log-mel", mel[:, ::MEL_STEP], tensors.get("w0.mel_every8"), TOLERANCE)
    report.close_if(case, "whole log-mel", mel, tensors.get("w0.mel"), TOLERANCE)
    seen: dict[str, Tensor] = {}
    names = {f"blocks.{n}": f"w0.block{n}" for n in range(4)} | {"mfa": "w0.mfa_every8"}
    hooks = [
        encoder.get_submodule(module).register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.__setitem__(name, output)
        )
        for module, name in names.items()
    ]
    vector = encoder(sound[None], n_samples)
    for hook in hooks:
        hook.remove()
    for module, name in names.items():
        report.close_if(case, module, seen[name][:, :, ::BLOCK_STEP], tensors.get(name), TOLERANCE)
    report.close_if(case, "vector", vector[0], tensors.get("w0.embedding"), TOLERANCE)
    batch = torch.full((2, 60_000), 0.5)
    batch[1, : len(sound)] = sound
    together = encoder(batch, torch.tensor([50_001, len(sound)]))
    report.close_if(case, "vector, in a batch", together[1], tensors.get("w0.embedding"), TOLERANCE)


def ramp(n_frames: int) -> list[int]:
    """Sizes of the chunks of a stream of `n_frames`."""
    sizes: list[int] = []
    while (left := n_frames - sum(sizes)) > 0:
        sizes.append(min(RAMP[min(len(sizes), len(RAMP) - 1)], left))
    return sizes


def decoded(decoder: SpeechDecoder, codes: Tensor, sizes: list[int]) -> Tensor:
    """Sound [1920 * sum(sizes)] of the first codes of codes [n, 16], in chunks of these sizes."""
    state = decoder.new_state(1, max(sizes))
    parts = torch.split(codes[: sum(sizes)], sizes)
    slots = torch.tensor([0])
    return torch.cat([decoder(state, slots, part[None], torch.tensor([len(part)]))[0] for part in parts])


def tokenizer_of(golden: GoldenDir) -> SpeechTokenizer:
    """The speech tokenizer of a golden directory, through its loader."""
    folder = golden.path / TOKENIZER_FOLDER
    tensors, _ = read_tensors(folder, WEIGHTS)
    with checkpoint(tensors, json.loads((folder / "config.json").read_text())) as full:
        return load_speech_tokenizer(full)


def speaker_of(golden: GoldenDir) -> SpeakerEncoder:
    """The speaker encoder whose weights are in the golden file or in a Base checkpoint, through its loader."""
    tensors = golden.tensors("speaker_encoder")
    if not any(name.startswith("w.") for name in tensors):
        folders = sorted(file.parent for file in golden.path.glob("*/config.json"))
        (base,) = (one.name for one in folders if json.loads((one / "config.json").read_text()).get(KIND) == "base")
        return load_speaker_encoder(golden.model(base))
    weights = {SPEAKER_PREFIX + name[2:]: tensor for name, tensor in tensors.items() if name.startswith("w.")}
    with checkpoint(weights, {SPEAKER_SECTION: golden.config("speaker_encoder")}) as full:
        return load_speaker_encoder(full)


@contextmanager
def checkpoint(tensors: dict[str, Tensor], config: dict[str, object]) -> Iterator[Path]:
    """A folder with these weights and this config, until the context ends."""
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / f"{WEIGHTS}.safetensors")
        yield folder
