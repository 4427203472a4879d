"""What identifies a voice, and which are refused."""

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
    """The usual voice with one number of one part replaced."""
    voice = make_voice()
    tensor = getattr(voice, part).clone()
    tensor[index] = value
    return replace(voice, **{part: tensor})


def test_equal_content_is_one_voice():
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
def test_any_difference_is_another_voice(other: Voice):
    assert other.digest != make_voice().digest


def test_a_part_moved_to_its_neighbour_is_another_voice():
    """The same bytes in a row, divided otherwise."""
    mel = torch.arange(8.0)
    first = Voice(torch.zeros(1, dtype=torch.int64), mel[:6].view(2, 3), mel[6:])
    other = Voice(torch.zeros(1, dtype=torch.int64), mel[:4].view(2, 2), mel[4:])
    assert first.digest != other.digest


VOICE = make_voice()
WRONG = {
    "no codes": (
        Voice(VOICE.speech_tokens[:0], VOICE.mel[:0], VOICE.speaker),
        r"speech_tokens: expected .*at least one code, got .* \(0,",
    ),
    "codes in rows": (replace(VOICE, speech_tokens=VOICE.speech_tokens[None]), "speech_tokens: expected"),
    "mel too short": (replace(VOICE, mel=VOICE.mel[:59]), r"mel: expected .* \(60, 80\).*got .* \(59, 80\)"),
    "mel turned": (replace(VOICE, mel=VOICE.mel.T), r"mel: expected .* \(60, 80\).*got .* \(80, 60\)"),
    "mel in a batch": (replace(VOICE, mel=VOICE.mel[None]), r"got .* \(1, 60, 80\)"),
    "other speaker": (replace(VOICE, speaker=VOICE.speaker[1:]), r"speaker: expected .* \(24,\).*got .* \(23,\)"),
    "speaker in a batch": (replace(VOICE, speaker=VOICE.speaker[None]), r"got .* \(1, 24\)"),
    "NaN in mel": (changed("mel", (3, 5), NAN), "mel: expected finite numbers, got NaN or infinity"),
    "infinite mel": (changed("mel", (0, 0), -INF), "mel: expected finite"),
    "NaN in speaker": (changed("speaker", (23,), NAN), "speaker: expected finite"),
    "negative code": (changed("speech_tokens", (0,), -1), r"codes: expected 0 to 6560, got \(-1,"),
    "code too large": (changed("speech_tokens", (29,), 6561), r"codes: expected 0 to 6560, got \(\d+, 6561\)"),
}


@pytest.mark.parametrize(("voice", "message"), WRONG.values(), ids=WRONG)
def test_unfit_voices_are_refused(voice: Voice, message: str):
    with pytest.raises(AudioError, match=message):
        voice.check(CONFIG)


def test_least_and_largest_code_are_fine():
    changed("speech_tokens", (0,), 0).check(CONFIG)
    changed("speech_tokens", (0,), 6560).check(CONFIG)
