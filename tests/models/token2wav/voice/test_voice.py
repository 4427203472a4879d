"""The digest of a voice, and refused voices."""

from dataclasses import replace

import pytest
import torch

from models.errors import AudioError
from models.token2wav.settings import FlowConfig
from models.token2wav.voice.voice import Voice
from tests.models.token2wav.stream.vocoders import make_voice

CONFIG = FlowConfig(speaker_dim=24)
NAN, INF = float("nan"), float("inf")


def changed(part: str, index: tuple[int, ...], value: float) -> Voice:
    """The default voice with one replaced value."""
    voice = make_voice()
    tensor = getattr(voice, part).clone()
    tensor[index] = value
    return replace(voice, **{part: tensor})


def test_equal_content_has_an_equal_digest():
    voice, again = make_voice(), make_voice()
    assert voice.digest == again.digest
    strided = Voice(voice.speech_tokens.repeat_interleave(2)[::2], voice.mel.T.contiguous().T, voice.speaker.double())
    assert strided.digest == voice.digest
    assert Voice(voice.speech_tokens.int(), voice.mel, voice.speaker).digest == voice.digest
    assert voice.n_frames == 60
    voice.check(CONFIG)


@pytest.mark.parametrize(
    "other",
    [
        make_voice(1),
        make_voice(n_speech_tokens=29),
        changed("speech_tokens", (3,), 17),
        changed("mel", (59, 79), 0.5),
        changed("speaker", (0,), 0.5),
    ],
    ids=["another", "shorter", "speech_tokens", "mel", "speaker"],
)
def test_different_content_has_a_different_digest(other: Voice):
    assert other.digest != make_voice().digest


def test_digest_depends_on_the_division_into_parts():
    """Equal bytes with a different division."""
    mel = torch.arange(8.0)
    first = Voice(torch.zeros(1, dtype=torch.int64), mel[:6].view(2, 3), mel[6:])
    other = Voice(torch.zeros(1, dtype=torch.int64), mel[:4].view(2, 2), mel[4:])
    assert first.digest != other.digest


VOICE = make_voice()
WRONG = {
    "no tokens": (
        Voice(VOICE.speech_tokens[:0], VOICE.mel[:0], VOICE.speaker),
        r"speech_tokens: expected .*at least one speech token, got .* \(0,",
    ),
    "tokens in rows": (replace(VOICE, speech_tokens=VOICE.speech_tokens[None]), "speech_tokens: expected"),
    "mel too short": (replace(VOICE, mel=VOICE.mel[:59]), r"mel: expected .* \(60, 80\).*got .* \(59, 80\)"),
    "mel turned": (replace(VOICE, mel=VOICE.mel.T), r"mel: expected .* \(60, 80\).*got .* \(80, 60\)"),
    "mel in a batch": (replace(VOICE, mel=VOICE.mel[None]), r"got .* \(1, 60, 80\)"),
    "other speaker": (replace(VOICE, speaker=VOICE.speaker[1:]), r"speaker: expected .* \(24,\).*got .* \(23,\)"),
    "speaker in a batch": (replace(VOICE, speaker=VOICE.speaker[None]), r"got .* \(1, 24\)"),
    "NaN in mel": (changed("mel", (3, 5), NAN), "mel: expected finite numbers, got NaN or infinity"),
    "infinite mel": (changed("mel", (0, 0), -INF), "mel: expected finite"),
    "NaN in speaker": (changed("speaker", (23,), NAN), "speaker: expected finite"),
    "negative token": (changed("speech_tokens", (0,), -1), r"speech_tokens: expected 0 to 6560, got \(-1,"),
    "token too large": (changed("speech_tokens", (29,), 6561), r"speech_tokens: expected 0 to 6560, got \(\d+, 6561\)"),
}


@pytest.mark.parametrize(("voice", "message"), WRONG.values(), ids=WRONG)
def test_refuses_voices_that_do_not_match_the_flow(voice: Voice, message: str):
    with pytest.raises(AudioError, match=message):
        voice.check(CONFIG)


def test_accepts_the_smallest_and_the_largest_token():
    changed("speech_tokens", (0,), 0).check(CONFIG)
    changed("speech_tokens", (0,), 6560).check(CONFIG)
