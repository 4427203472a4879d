"""Features of prompt sound (`features_*`): three transforms and two filter banks."""

from models.inputs.audio import N_FFT, mel_filters
from models.token2wav.prompt.features import MEL_WINDOW, RATE_16K, fbank, log_mel_128, prompt_mel, remove_mean
from models.token2wav.settings import SAMPLE_RATE
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

# The reference computes fbank in float32, which loses digits of a quiet bin next to a loud one.
FBANK_TOLERANCE = 2e-3
MEL_TOLERANCE = 1e-5
# A quiet bin next to a loud one contains the rounding of a float32 transform, which differs by 2.5e-5 between
# processors.
QUIET_TOLERANCE = 1e-4
FILTER_TOLERANCE = 1e-6


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("features_"):
        tensors = golden.tensors(stem)
        if not report.has_inputs(stem, tensors, "in.audio16k", "in.audio24k"):
            continue
        audio_16k, audio_24k = tensors["in.audio16k"], tensors["in.audio24k"]
        energies = fbank(audio_16k)
        results = {
            "fbank80": (energies, FBANK_TOLERANCE),
            "fbank80_cmn": (remove_mean(energies), FBANK_TOLERANCE),
            "logmel128_16k": (log_mel_128(audio_16k), QUIET_TOLERANCE),
            "prompt_mel24k": (prompt_mel(audio_24k).T[None], MEL_TOLERANCE),
            "mel_filter_16k_128x201": (mel_filters(128, N_FFT, RATE_16K).T, FILTER_TOLERANCE),
            "mel_filter_24k_80x961": (mel_filters(80, MEL_WINDOW, SAMPLE_RATE).T, FILTER_TOLERANCE),
        }
        for name, (got, tolerance) in results.items():
            report.close_if(stem, name, got, tensors.get(f"out.{name}"), tolerance)
