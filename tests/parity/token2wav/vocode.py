"""Vocoding by chunks (`e2e_*`): the reference's mel chunks in, its excitation and sound out."""

import numpy as np
import torch

from models.token2wav.settings import SAMPLES_PER_FRAME
from models.token2wav.vocode import REFERENCE_RULES, TAIL_FRAMES, VocodeState, vocode
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.hift import golden_hift

SOURCE_TOLERANCE = 5e-3  # float32 phase in the reference
SOUND_TOLERANCE = 2e-2
LEAST_SNR_DB = 30.0
N_HARMONICS = 9
SLOT, N_SLOTS = 1, 2


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("e2e_"):
        tensors, config = golden.tensors(stem), golden.config(stem)
        n_chunks = len(config["schedule"])
        if not report.has_inputs(stem, tensors, *(f"out.chunk{n}_mel" for n in range(n_chunks))):
            continue
        hift, seed = golden_hift(tensors, "w.hift."), config["config"]["seed"]
        state = VocodeState.allocate(N_SLOTS, tensors["out.chunk0_mel"].shape[1])
        slots = torch.tensor([SLOT])
        for n, (_, last) in enumerate(config["schedule"]):
            case, mel = f"{stem} {n}", tensors[f"out.chunk{n}_mel"]
            n_new, n_tail = mel.shape[2], TAIL_FRAMES * (n > 0)
            noise = hash_noise((1, (n_tail + n_new) * SAMPLES_PER_FRAME, N_HARMONICS), (1000 * seed + n) * 10 + 2)
            padded = torch.nn.functional.pad(noise, (0, 0, 0, (TAIL_FRAMES - n_tail) * SAMPLES_PER_FRAME))
            expected_source = tensors.get(f"out.chunk{n}_source")
            wave, n_samples = vocode(
                hift, state, slots, mel, torch.tensor([n_new]), torch.tensor([last == "last"]), REFERENCE_RULES, padded
            )
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
                report.equal(case, f"above {LEAST_SNR_DB:.0f} dB, got {snr:.1f}", bool(snr > LEAST_SNR_DB), True)


def hash_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Uniform noise of unit variance that any language can repeat: a hash of each element's number and the seed."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        z = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed) * step + step
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    uniform = (z >> np.uint64(40)).astype(np.float64) / 2**24
    return torch.from_numpy(((uniform - 0.5) * 12**0.5).astype(np.float32).reshape(shape))
