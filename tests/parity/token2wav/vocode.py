"""Vocoding by chunks (`e2e_*`): the reference's mel chunks as input, its excitation and sound as expected output."""

import torch

from models.token2wav.settings import SAMPLES_PER_FRAME
from models.token2wav.stream.vocode import REFERENCE_RULES, TAIL_FRAMES, MelChunk, VocodeState, vocode
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.hift import N_HARMONICS, golden_hift
from tests.parity.token2wav.noise import sine_noise

SOURCE_TOLERANCE = 5e-3  # float32 phase in the reference
SOUND_TOLERANCE = 2e-2
MIN_SNR_DB = 30.0
SLOT, N_SLOTS = 1, 2


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("e2e_"):
        tensors, config = golden.tensors(stem), golden.config(stem)
        if "out.chunk0_mel" not in tensors:
            continue
        hift, seed = golden_hift(tensors, "w.hift."), config["config"]["seed"]
        state = VocodeState.allocate(N_SLOTS, tensors["out.chunk0_mel"].shape[1])
        slots = torch.tensor([SLOT])
        for n, (_, last) in enumerate(config["schedule"]):
            if (mel := tensors.get(f"out.chunk{n}_mel")) is None:
                break  # later chunks depend on this one
            case = f"{stem} {n}"
            n_new, n_tail = mel.shape[2], TAIL_FRAMES * (n > 0)
            noise = sine_noise((1, (n_tail + n_new) * SAMPLES_PER_FRAME, N_HARMONICS), 1000 * seed + n)
            padded = torch.nn.functional.pad(noise, (0, 0, 0, (TAIL_FRAMES - n_tail) * SAMPLES_PER_FRAME))
            expected_source = tensors.get(f"out.chunk{n}_source")
            chunk = MelChunk(mel, torch.tensor([n_new]), torch.tensor([last == "last"]), padded)
            wave, n_samples = vocode(hift, state, slots, chunk, REFERENCE_RULES)
            if expected_source is not None and last != "last":
                tail = state.source.shape[1]
                report.close(
                    case, "tail of the source", state.source[slots], expected_source[0, :, -tail:], SOURCE_TOLERANCE
                )
            if (expected := tensors.get(f"out.chunk{n}_wav")) is None:
                continue
            wave = wave[:, : int(n_samples)]
            report.close(case, "sound", wave, expected, SOUND_TOLERANCE)
            if wave.shape == expected.shape:
                snr = 10 * torch.log10(expected.square().sum() / (wave - expected).square().sum().clamp(min=1e-20))
                report.equal(case, f"above {MIN_SNR_DB:.0f} dB, got {snr:.1f}", bool(snr > MIN_SNR_DB), True)
