"""Seams between chunks: no steps and no change of level; the same measures detect both where they exist.

The sound is the excitation alone, a tone with harmonics, which is smooth enough to detect a step. The output of random
convolutions is close to noise, in which a hard cut is no larger than other steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.stream.vocode import VocodeRules
from models.token2wav.stream.vocoder import Chunk, Vocoder
from tests.models.token2wav.stream.vocoders import FOLDER, chunks_of_turn, make_tokens, make_vocoder, make_voice

HELD_BACK = 3840
NEAR = 480  # samples on both sides for comparison with a step: 20 ms
COUNTS = [25, 25, 25, 7, 25, 12, 25, 25, 19, 25] * 3  # tokens of the chunks of a turn of about half a minute
RAMPS = [(8, 17), (5, 20), (9, 8, 8)]  # pieces of a unit
N_UNITS = 5


@pytest.fixture(scope="module")
def tonal_parts() -> FlowAndHift:
    parts = load_flow_and_hift(FOLDER)
    parts.hift.decode = lambda mel, source, n_frames: 3 * source
    return parts


def turn_with_ends(
    parts: FlowAndHift, rules: VocodeRules, apart: bool = False, counts: Sequence[int] = COUNTS
) -> tuple[Tensor, list[int]]:
    """The sound of a turn, and the ends of its chunks in samples. With `apart` the chunks are not joined."""
    vocoder = make_vocoder(parts, steps=(1,))
    vocoder.rules = rules
    vocoder.use_plain()  # regions with these rules
    session = vocoder.open(make_voice())
    waves, ends = [], []
    for chunk in chunks_of_turn(session, make_tokens(1, sum(counts) + 20), counts):
        waves.append(_alone(vocoder, chunk) if apart else vocoder.speak([chunk])[0])
        ends.append(sum(map(len, waves)) + (0 if apart or chunk.last else HELD_BACK))
    return torch.cat(waves), ends[:-1]


def _alone(vocoder: Vocoder, chunk: Chunk) -> Tensor:
    """The whole sound of a chunk without the tail of the previous one."""
    (wave,) = vocoder.speak([chunk])
    session = vocoder._sessions[chunk.session]
    held_back = vocoder.vocode_state.wave[session.slot, : 0 if chunk.last else HELD_BACK].clone()
    vocoder.vocode_state.reset(torch.tensor([session.slot]))
    vocoder._sessions[chunk.session] = replace(session, n_held_back=0)
    return torch.cat((wave, held_back))


def steps_at(wave: Tensor, places: list[int]) -> Tensor:
    """The step to each of these samples, divided by the largest step within 20 ms."""
    step = wave.diff().abs()
    near = [torch.cat((step[i - 1 - NEAR : i - 1], step[i : i + NEAR])).max() for i in places]
    return step[torch.tensor(places) - 1] / torch.stack(near)


def loudness(wave: Tensor, ends: list[int]) -> float:
    """Level of the 160 ms before the ends of chunks relative to the rest, in decibels."""
    near = torch.zeros(len(wave), dtype=torch.bool)
    for end in ends:
        near[end - HELD_BACK : end] = True
    return 10 * torch.log10(wave[near].square().mean() / wave[~near].square().mean()).item()


def test_joined_chunks_have_no_step(tonal_parts: FlowAndHift):
    """At the start and at the end of the cross-fade."""
    wave, ends = turn_with_ends(tonal_parts, VocodeRules())
    assert len(ends) == 30
    for what, shift in (("start", -HELD_BACK), ("end", 0)):
        steps = steps_at(wave, [end + shift for end in ends])
        assert steps.max() <= 1, f"{what} of the fade: expected no step beyond those near it, got {steps}"
    assert wave.abs().max() < 0.99 and wave.std() > 0.05


@pytest.mark.parametrize("ramp", RAMPS)
def test_no_ramp_leaves_a_step_or_another_level_at_its_seams(tonal_parts: FlowAndHift, ramp: tuple[int, ...]):
    """Nor changes the number of samples or the level of the whole turn."""
    counts = [*ramp] * N_UNITS
    wave, ends = turn_with_ends(tonal_parts, VocodeRules(), counts=counts)
    assert len(ends) == len(counts) and len(wave) == 960 * (sum(counts) + 20)
    for what, shift in (("start", -HELD_BACK), ("end", 0)):
        steps = steps_at(wave, [end + shift for end in ends if end + shift > NEAR])
        assert steps.max() <= 1, f"{what} of the fade: expected no step beyond those near it, got {steps}"
    whole, _ = turn_with_ends(tonal_parts, VocodeRules(), counts=[25] * N_UNITS)
    level = 10 * torch.log10(wave.square().mean() / whole.square().mean()).item()
    assert abs(level) < 0.5, f"level: expected that of whole seconds, got {level:.2f} dB more"


def test_passes_attenuated_at_their_ends_have_no_step(tonal_parts: FlowAndHift, monkeypatch: pytest.MonkeyPatch):
    """Convolutions read zeros beyond a chunk, so both passes are inaccurate there; the cross-fade joins them."""

    def decode(mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        sample = torch.arange(source.shape[1])
        inside = torch.minimum(sample, 480 * n_frames[:, None] - 1 - sample).clamp(min=0)
        return 3 * source * (0.2 + 0.8 * (inside / (4 * 480)).clamp(max=1))

    monkeypatch.setattr(tonal_parts.hift, "decode", decode)
    wave, ends = turn_with_ends(tonal_parts, VocodeRules())
    for what, shift in (("start", -HELD_BACK), ("end", 0)):
        steps = steps_at(wave, [end + shift for end in ends])
        assert steps.max() <= 1, f"{what} of the fade: expected no step beyond those near it, got {steps}"


def test_a_hard_cut_is_detected(tonal_parts: FlowAndHift):
    wave, ends = turn_with_ends(tonal_parts, VocodeRules(), apart=True)
    steps = steps_at(wave, ends)
    assert (steps > 1).sum() >= 5, f"expected steps at several of the ends, got {steps}"


def test_restarted_phases_are_detected(tonal_parts: FlowAndHift):
    """As in the public implementation, harmonics start at the same phase in each chunk."""
    wave, ends = turn_with_ends(tonal_parts, VocodeRules(phase="restart"))
    steps = steps_at(wave, ends)
    assert (steps > 1).sum() >= 5, f"expected steps at several of the ends, got {steps}"


def test_seams_have_the_level_of_the_rest(tonal_parts: FlowAndHift):
    """They are 0.7 dB louder with the public implementation's fade, whose weights add up to 1.08."""
    even, reference = (loudness(*turn_with_ends(tonal_parts, VocodeRules(fade=fade))) for fade in ("even", "reference"))
    assert abs(even) < 0.3, f"expected as loud as the rest, got {even:.2f} dB"
    assert 0.6 < reference - even < 0.75, f"expected 20 log10(1.08) = 0.67 dB more, got {reference - even:.2f} dB"
