"""Sound of many conversations on the training device: degradations, and log-mel of units as serving computes it."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from models.inputs.audio import HALF_WINDOW, N_FFT, N_MELS, RAW_FLOOR, TOP_HZ, LogMel, mirror
from models.inputs.audio_sizes import FIRST_UNIT_SAMPLES, HOP, UNIT_SAMPLES
from models.inputs.mel_stream import DYNAMIC_FROM, stable_count, window_start
from training.mind.records import LEAD, UNIT_END
from training.timelines.speech import RATE

ROOM_SHARE, BAND_SHARE, CLEAN_SHARE = 0.4, 0.25, 0.15  # of conversations
NOISE_DB = (5.0, 25.0)  # of speech over noise
GAIN_DB = (-12.0, 12.0)
ROOM_SAMPLES = 5600  # of the longest echo
WARP_SHARE, WARPS = 0.6, (0.87, 1.15)  # of sequences; factor on all frequencies of a voice
HIDDEN_BAND_SHARE, HIDDEN_BINS = 0.3, 9  # of sequences; widest band of the log-mel that is hidden
HIDDEN_TIME_SHARE, HIDDEN_COLUMNS = 0.2, 6  # of units; longest span of columns that is hidden
FRAMES_AT_ONCE = 100_000  # of all rows; bounds memory
# Slaney's scale of frequencies: even steps of 200 / 3 Hz up to 1 kHz, then even ratios.
STEPS_PER_E = 27 / math.log(6.4)
TOP_STEPS = 15 + STEPS_PER_E * math.log(TOP_HZ / 1000)


def degrade_all(sound: Tensor, generator: torch.Generator) -> Tensor:
    """Sound [B, N] as microphones give it: echo of a room, a band, noise, a level. Echo and band apply to some rows."""
    rows, n, device = len(sound), sound.shape[1], sound.device

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, 1, generator=generator, device=device)

    size = _fast_size(n + ROOM_SAMPLES)
    hz = torch.fft.rfftfreq(size, 1 / RATE, device=device)
    spectrum = torch.fft.rfft(sound, size)
    spectrum = spectrum * (1 + torch.fft.rfft(_echoes(uniform, generator, device), size))
    low, high = uniform(80, 320), uniform(3200, 6500)
    band = 1 / (1 + (low / hz.clamp_min(1)) ** 4) / (1 + (hz / high) ** 8)
    spectrum = spectrum * torch.where(uniform(0, 1) < BAND_SHARE, band, 1.0)
    heard = torch.fft.irfft(spectrum, size)[:, :n]
    loud = (heard.abs() > 1e-3).sum(1, keepdim=True).clamp_min(1)
    level = (heard.square().sum(1, keepdim=True) / loud).sqrt()
    level = torch.where(level > 1e-4, level, 0.05)
    noise = torch.fft.rfft(torch.randn(rows, n, generator=generator, device=device), size)
    noise = torch.fft.irfft(noise / hz.clamp_min(50) ** uniform(0, 1), size)[:, :n]
    noise = noise / noise.square().mean(1, keepdim=True).sqrt()
    decibels = torch.where(uniform(0, 1) < CLEAN_SHARE, 45.0, uniform(*NOISE_DB))
    noisy = heard + noise * level * 10 ** (-decibels / 20)
    louder: Tensor = noisy * 10 ** (uniform(*GAIN_DB) / 20)
    return louder.clamp(-1, 1)


def unit_mels(log_mel: LogMel, sound: Tensor) -> Tensor:
    """Log-mel [B, U, 80, 104] of all units, as `mel_step` emits it for sound [B, 16 000 U] that begins a session."""
    rows, n_units, device = len(sound), sound.shape[1] // RATE, sound.device
    padded = torch.nn.functional.pad(sound, (LEAD, 0))
    ends = FIRST_UNIT_SAMPLES + UNIT_SAMPLES * torch.arange(n_units, device=device)  # samples pushed before each unit
    starts, stable = window_start(ends), stable_count(ends)
    n_frames = int(FIRST_UNIT_SAMPLES + UNIT_SAMPLES * (n_units - 1)) // HOP
    raw = _raw(log_mel, padded, torch.arange(n_frames, device=device), 0, padded.shape[1])
    # Loudest bins: of stable frames in the window, of its first two frames, mirrored at its start, and of its last one.
    frame = torch.arange(n_frames, device=device)
    oldest = torch.where(starts > 0, starts // HOP + 2, 0)
    in_window = (frame >= oldest[:, None]) & (frame < stable[:, None])
    loudest = torch.where(in_window, raw.amax(2)[:, None], -math.inf).amax(2)
    last = _raw(log_mel, padded, ends // HOP - 1, 0, ends)
    loudest = torch.maximum(loudest, last.amax(2))
    first_two = (starts // HOP)[:, None] + torch.arange(2, device=device)
    edges = _raw(log_mel, padded, first_two.flatten(), starts.repeat_interleave(2), padded.shape[1])
    edges = edges.amax(2).view(rows, n_units, 2).amax(2)
    loudest = torch.where(starts > 0, torch.maximum(loudest, edges), loudest)
    wanted = 100 * torch.arange(n_units, device=device)[:, None] - 2 + torch.arange(UNIT_END, device=device)
    units = raw[:, wanted.clamp(0, n_frames - 1)]  # [B, U, 104, 80]
    dynamic = log_mel.clip(units, "dynamic", loudest[:, :, None, None])
    is_dynamic = (ends - starts >= DYNAMIC_FROM)[:, None, None]
    units = torch.where(is_dynamic, dynamic, log_mel.clip(units, "fixed"))
    columns: Tensor = torch.where((wanted >= 0)[..., None], units, 0)
    return columns.transpose(2, 3)


def degrade_mels(mel: Tensor, generator: torch.Generator) -> Tensor:
    """Log-mel [B, ..., 80, F] as of other voices: frequencies times a factor, and some bins and columns hidden."""
    rows, device = len(mel), mel.device
    units = (rows, *mel.shape[1:-2])

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def per_row(values: Tensor) -> Tensor:
        return values.view(rows, *[1] * (mel.ndim - 3), -1, 1)

    factor = WARPS[0] + (WARPS[1] - WARPS[0]) * uniform(rows, 1)
    factor = torch.where(uniform(rows, 1) < WARP_SHARE, factor, 1.0)
    source = _bins(_hertz(torch.arange(N_MELS, device=device)) / factor).clamp(0, N_MELS - 1)
    low = source.floor()
    below, above = (per_row(one.long()).expand(mel.shape) for one in (low, (low + 1).clamp_max(N_MELS - 1)))
    warped = torch.lerp(mel.gather(-2, below), mel.gather(-2, above), per_row(source - low))
    quiet = mel.mean((-2, -1), keepdim=True)
    width = HIDDEN_BINS * uniform(rows, 1) * (uniform(rows, 1) < HIDDEN_BAND_SHARE)
    first = (N_MELS - HIDDEN_BINS) * uniform(rows, 1)
    at = torch.arange(N_MELS, device=device)
    band = per_row((at >= first) & (at < first + width))
    length = HIDDEN_COLUMNS * uniform(*units, 1, 1) * (uniform(*units, 1, 1) < HIDDEN_TIME_SHARE)
    begin = (mel.shape[-1] - HIDDEN_COLUMNS) * uniform(*units, 1, 1)
    column = torch.arange(mel.shape[-1], device=device)
    return torch.where(band | ((column >= begin) & (column < begin + length)), quiet, warped)


def _hertz(bins: Tensor) -> Tensor:
    """Frequencies of bins of the log-mel."""
    steps = (bins + 1) * (TOP_STEPS / (N_MELS + 1))
    return torch.where(steps < 15, steps * 200 / 3, 1000 * torch.exp((steps - 15) / STEPS_PER_E))


def _bins(hertz: Tensor) -> Tensor:
    return _steps(hertz) * (N_MELS + 1) / TOP_STEPS - 1


def _steps(hertz: Tensor) -> Tensor:
    high = 15 + STEPS_PER_E * torch.log(hertz.clamp_min(1) / 1000)
    return torch.where(hertz < 1000, hertz * 3 / 200, high)


def _raw(log_mel: LogMel, padded: Tensor, frame: Tensor, begin: Tensor | int, end: Tensor | int) -> Tensor:
    """Log power [B, F, 80] of frames [F], each mirrored at its own `begin` and `end`, [F] or one for all."""

    def column(bound: Tensor | int) -> Tensor | int:
        return bound[:, None] if isinstance(bound, Tensor) else bound

    offset = torch.arange(N_FFT, device=padded.device) - HALF_WINDOW
    index = mirror(frame[:, None] * HOP + offset, column(begin), column(end)).clamp(0, padded.shape[1] - 1)
    at_once = max(1, FRAMES_AT_ONCE // len(padded))
    parts = [log_mel.raw(padded[:, part]) for part in index.split(at_once)]
    return torch.cat(parts, dim=1).clamp_min(RAW_FLOOR)


def _echoes(uniform: Callable[[float, float], Tensor], generator: torch.Generator, device: torch.device) -> Tensor:
    """Echoes [B, ROOM_SAMPLES] of rooms; those of rows without a room are zero."""
    length = (uniform(0.08, 0.35) * RATE).round()
    at = torch.arange(ROOM_SAMPLES, device=device)
    tail = torch.randn(len(length), ROOM_SAMPLES, generator=generator, device=device) * torch.exp(-6.9 * at / length)
    tail = torch.where(at < length, tail, 0)
    tail = tail * uniform(0.1, 0.5) / tail.square().sum(1, keepdim=True).sqrt()
    return torch.where(uniform(0, 1) < ROOM_SHARE, tail, 0)


def _fast_size(n: int) -> int:
    """The smallest length of at least n whose transform is fast: 2, 3, 5 or 9 times a power of two."""
    return min(odd << max(0, (-(-n // odd) - 1).bit_length()) for odd in (1, 3, 5, 9))
