"""Mel stages: whole clips (`mel_offline`) and sound in units (`mel_stream_*`)."""

from typing import Any, NamedTuple

import torch

from models.inputs.audio import LogMel, frame_count, mel_filters, placeholder_groups
from models.inputs.mel_stream import CONTEXT, MelStreamState, mel_step
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

MODES = {"mel": ("dynamic", True), "mel_fixed_floor": ("fixed", True), "mel_nopad_fixed": ("fixed", False)}
WAVE_SCALE = 20_000.0  # int16 steps per 1.0 in `wave_q`


def run(golden: GoldenDir, report: Report) -> None:
    if "mel_offline" in golden.stems():
        _offline(golden, report)
    for stem in golden.stems("mel_stream_"):
        _stream(golden, report, stem)


def _offline(golden: GoldenDir, report: Report) -> None:
    tensors, meta = golden.tensors("mel_offline"), golden.meta("mel_offline")
    if "mel_filters" in tensors:
        report.close("mel_offline", "mel_filters", mel_filters(), tensors["mel_filters"])
    mel = LogMel()
    for case in sorted(name.removesuffix(".wave") for name in tensors if name.endswith(".wave")):
        wave, expected = tensors[f"{case}.wave"], meta.get(case, {})
        n_samples = torch.tensor([wave.shape[0]])
        for name, (mode, padded) in MODES.items():
            if f"{case}.{name}" in tensors:
                stored = tensors[f"{case}.{name}"]  # long cases keep the newest frames only
                got = mel.log_mel(wave[None], n_samples, mode, padded)[0, :, -stored.shape[-1] :]
                report.close(f"mel_offline.{case}", name, got, stored)
        counts = {
            "frames": frame_count(wave.shape[0]),
            "placeholder_tokens": sum(placeholder_groups(wave.shape[0], chunked=False)),
            "placeholder_chunked": placeholder_groups(wave.shape[0], chunked=True),
        }
        for name, got in counts.items():
            if name in expected:
                report.equal(f"mel_offline.{case}", name, got, expected[name])


def _stream(golden: GoldenDir, report: Report, stem: str) -> None:
    sound, tensors = sound_in_units(golden, stem), golden.tensors(stem)
    if sound is None:
        return
    mel, state, slots = LogMel(), MelStreamState.allocate(1), torch.tensor([0])
    emit, last = torch.tensor([True]), torch.tensor([False])
    for number, (info, push, n_new) in enumerate(sound.pushes):
        got, lo, hi = mel_step(mel, state, slots, push, n_new, emit, last, redundancy=sound.redundancy)
        case, first = f"{stem}.chunk{number}", CONTEXT - min(info["core_start"], sound.redundancy)
        report.equal(case, "columns", [int(lo), int(hi)], [first, first + info["emitted_frames"]])
        report.close_if(case, "mel", got[:, :, int(lo) : int(hi)], tensors.get(f"chunk{number}.mel"))


class SoundUnits(NamedTuple):
    """A recorded sound as it was pushed.

    redundancy: frames emitted on each side of a unit's own.
    pushes: per unit its entry in the manifest, samples [1, N] padded to the longest push, and [1] how many are valid.
    """

    redundancy: int
    pushes: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]]


def sound_in_units(golden: GoldenDir, stem: str) -> SoundUnits | None:
    """The pushes of a `mel_stream_*` file as far as its wave reaches; None without its wave or manifest entry."""
    meta = golden.meta(stem)
    infos, wave = meta.get("infos"), _wave(golden, stem)
    if wave is None or not infos:
        return None
    first, longest = infos[0], max(info["consumed"] for info in infos)
    pushes, end = [], 0
    for info in infos:
        start, end = end, end + info["consumed"]
        if end > len(wave):
            break
        samples = torch.nn.functional.pad(wave[start:end], (0, longest - info["consumed"]))
        pushes.append((info, samples[None], torch.tensor([info["consumed"]])))
    return SoundUnits(first["emitted_frames"] - (first["core_end"] - first["core_start"]), pushes)


def _wave(golden: GoldenDir, stem: str) -> torch.Tensor | None:
    """The wave of this file, or of the file that its manifest entry names as `stem.tensor`."""
    stem, _, name = golden.meta(stem).get("wave", f"{stem}.wave_q").partition(".")
    tensors = golden.tensors(stem)
    if name not in tensors:
        return None
    wave, silent = tensors[name], tensors.get(f"{name}.silent")
    for start, end in [] if silent is None else silent.tolist():  # samples left out
        wave = torch.cat((wave[:start], wave.new_zeros(end - start), wave[start:]))
    return wave.float() / WAVE_SCALE
