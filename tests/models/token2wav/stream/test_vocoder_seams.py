"""Chunks joined: no step and no louder spot where one ends, and the same measures find both where they are.

Sound here is the excitation alone, a hum with harmonics: smooth enough for a step in it to stand out. What comes out
of random convolutions is close to noise, in which even a hard cut is no larger a step than many others.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.stream.vocode import VocodeRules
from models.token2wav.stream.vocoder import Chunk, Vocoder
from tests.models.token2wav.stream.vocoders import FOLDER, cut, make_codes, make_vocoder, make_voice

HELD = 3840
NEAR = 480  # samples to either side that a step is measured against: 20 ms
COUNTS = [25, 25, 25, 7, 25, 12, 25, 25, 19, 25] * 3  # codes of a turn's chunks: a little over half a minute


@pytest.fixture(scope="module")
def humming() -> FlowAndHift:
    parts = load_flow_and_hift(FOLDER)
    parts.hift.decode = lambda mel, source, n_frames: 3 * source
    return parts


def spoken(parts: FlowAndHift, rules: VocodeRules, apart: bool = False) -> tuple[Tensor, list[int]]:
    """A turn, and where chunks end in its mel, in samples. With `apart` nothing joins them: a hard cut."""
    vocoder = make_vocoder(parts, steps=(1,))
    vocoder.rules = rules
    session = vocoder.open(make_voice())
    waves, ends = [], []
    for chunk in cut(session, make_codes(1, sum(COUNTS) + 20), COUNTS):
        waves.append(_alone(vocoder, chunk) if apart else vocoder.speak([chunk])[0])
        ends.append(sum(map(len, waves)) + (0 if apart or chunk.last else HELD))
    return torch.cat(waves), ends[:-1]


def _alone(vocoder: Vocoder, chunk: Chunk) -> Tensor:
    """All the chunk's sound, with nothing of the chunk before."""
    (wave,) = vocoder.speak([chunk])
    session = vocoder._sessions[chunk.session]
    held = vocoder.vocode_state.wave[session.slot, : 0 if chunk.last else HELD].clone()
    vocoder.vocode_state.reset(torch.tensor([session.slot]))
    vocoder._sessions[chunk.session] = replace(session, n_held=0)
    return torch.cat((wave, held))


def steps_at(wave: Tensor, places: list[int]) -> Tensor:
    """The step onto each of these samples, as a part of the largest one within 20 ms."""
    step = wave.diff().abs()
    near = [torch.cat((step[i - 1 - NEAR : i - 1], step[i : i + NEAR])).max() for i in places]
    return step[torch.tensor(places) - 1] / torch.stack(near)


def loudness(wave: Tensor, ends: list[int]) -> float:
    """Of the 160 ms before chunks' ends against the rest, in decibels."""
    near = torch.zeros(len(wave), dtype=torch.bool)
    for end in ends:
        near[end - HELD : end] = True
    return 10 * torch.log10(wave[near].square().mean() / wave[~near].square().mean()).item()


def test_joined_chunks_take_no_step(humming: FlowAndHift):
    """Neither where held-back sound begins to fade nor where the fade ends."""
    wave, ends = spoken(humming, VocodeRules())
    assert len(ends) == 30
    for what, shift in (("start", -HELD), ("end", 0)):
        steps = steps_at(wave, [end + shift for end in ends])
        assert steps.max() <= 1, f"{what} of the fade: expected no step beyond those near it, got {steps}"
    assert wave.abs().max() < 0.99 and wave.std() > 0.05


def test_passes_that_weaken_at_their_ends_still_take_no_step(humming: FlowAndHift, monkeypatch: pytest.MonkeyPatch):
    """Convolutions see zeros beyond a chunk, so either pass is unsure there; the fade is what joins them."""

    def decode(mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        sample = torch.arange(source.shape[1])
        inside = torch.minimum(sample, 480 * n_frames[:, None] - 1 - sample).clamp(min=0)
        return 3 * source * (0.2 + 0.8 * (inside / (4 * 480)).clamp(max=1))

    monkeypatch.setattr(humming.hift, "decode", decode)
    wave, ends = spoken(humming, VocodeRules())
    for what, shift in (("start", -HELD), ("end", 0)):
        steps = steps_at(wave, [end + shift for end in ends])
        assert steps.max() <= 1, f"{what} of the fade: expected no step beyond those near it, got {steps}"


def test_a_hard_cut_would_be_found(humming: FlowAndHift):
    wave, ends = spoken(humming, VocodeRules(), apart=True)
    steps = steps_at(wave, ends)
    assert (steps > 1).sum() >= 5, f"expected steps at several of the ends, got {steps}"


def test_restarted_phases_would_be_found(humming: FlowAndHift):
    """What the public implementation does: harmonics start anew with each chunk."""
    wave, ends = spoken(humming, VocodeRules(phase="restart"))
    steps = steps_at(wave, ends)
    assert (steps > 1).sum() >= 5, f"expected steps at several of the ends, got {steps}"


def test_seams_are_as_loud_as_the_rest(humming: FlowAndHift):
    """And 0.7 dB louder with the public implementation's fade, whose halves add up to 1.08."""
    even, reference = (loudness(*spoken(humming, VocodeRules(fade=fade))) for fade in ("even", "reference"))
    assert abs(even) < 0.3, f"expected as loud as the rest, got {even:.2f} dB"
    assert 0.6 < reference - even < 0.75, f"expected 20 log10(1.08) = 0.67 dB more, got {reference - even:.2f} dB"
