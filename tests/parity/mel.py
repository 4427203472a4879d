"""Mel stages: whole clips (`mel_offline`) and sound in units (`mel_stream_*`)."""

import torch

from models.audio import LogMel, frame_count, mel_filters, placeholder_groups
from models.mel_stream import CONTEXT, MelStreamState, mel_step
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
    tensors, meta = golden.tensors(stem), golden.meta(stem)
    wave = _wave(golden, tensors, meta)
    infos = meta.get("infos")
    if wave is None or not infos:
        return
    redundancy = infos[0]["emitted_frames"] - (infos[0]["core_end"] - infos[0]["core_start"])
    mel, state, slots = LogMel(), MelStreamState.allocate(1), torch.tensor([0])
    emit, last = torch.tensor([True]), torch.tensor([False])
    end = 0
    for number, info in enumerate(infos):
        start, end = end, end + info["consumed"]
        push, n_new = wave[None, start:end], torch.tensor([info["consumed"]])
        got, lo, hi = mel_step(mel, state, slots, push, n_new, emit, last, redundancy=redundancy)
        case, first = f"{stem}.chunk{number}", CONTEXT - min(info["core_start"], redundancy)
        report.equal(case, "columns", [int(lo), int(hi)], [first, first + info["emitted_frames"]])
        if f"chunk{number}.mel" in tensors:
            report.close(case, "mel", got[:, :, int(lo) : int(hi)], tensors[f"chunk{number}.mel"])


def _wave(golden: GoldenDir, tensors: dict[str, torch.Tensor], meta: dict) -> torch.Tensor | None:
    """The wave of this file, or of the file that its manifest entry names as `stem.tensor`."""
    if "wave" in meta:
        stem, _, name = meta["wave"].partition(".")
        tensors = golden.tensors(stem) if stem in golden.stems() else {}
    else:
        name = "wave_q"
    return tensors[name].float() / WAVE_SCALE if name in tensors else None
