"""Refused calls: a typed error with the expected value, unchanged state, and no effect on other sessions."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import AudioError, ModelError, SettingsError, ShapeError, SlotError, TokenError
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from tests.models.compare import assert_same
from tests.models.token2wav.stream.vocoders import (
    copies,
    make_tokens,
    make_vocoder,
    make_voice,
    slot_of,
    speak_turn,
    tensors,
)

SPEECH_TOKENS = make_tokens(0, 28)


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    """Sessions 0 and 1 in the middle of a turn, session 2 closed."""
    vocoder = make_vocoder()
    for seed in (0, 1, 0):
        vocoder.open(make_voice(seed))
    vocoder.close(2)
    vocoder.speak([Chunk(0, SPEECH_TOKENS), Chunk(1, SPEECH_TOKENS)])
    return vocoder


@contextmanager
def refused(vocoder: Vocoder, kind: type[ModelError], message: str) -> Iterator[None]:
    """The call inside raises, and no tensor, session, voice or free slot changes."""
    before, host = copies(vocoder), repr((vocoder._sessions, vocoder._free, vars(vocoder.voices)))
    with pytest.raises(kind, match=message):
        yield
    for tensor, expected in zip(tensors(vocoder), before, strict=True):
        assert_same(tensor, expected, "state after a refused call")
    assert repr((vocoder._sessions, vocoder._free, vars(vocoder.voices))) == host


def with_token(token: Any) -> list[Any]:
    return [*SPEECH_TOKENS[:5], token, *SPEECH_TOKENS[5:27]]


WRONG_TOKENS = {
    "too large": (with_token(6561), "speech tokens of session 1: expected whole numbers from 0 to 6560, got 6561"),
    "negative": (with_token(-1), "from 0 to 6560, got -1"),
    "true": (with_token(True), "expected whole numbers .* got True"),
    "half": (with_token(7.5), "got 7.5"),
    "whole float": (with_token(7.0), "got 7.0"),
    "NaN": (with_token(math.nan), "got nan"),
    "numpy float": (with_token(np.float32(3)), "got 3.0"),
    "numpy bool": (with_token(np.True_), "got True"),
    "nothing": (with_token(None), "got None"),
    "text": (with_token("7"), "got 7"),
    "array of floats": (np.array(SPEECH_TOKENS, dtype=np.float64), "got "),
}


@pytest.mark.parametrize(("speech_tokens", "message"), WRONG_TOKENS.values(), ids=WRONG_TOKENS)
def test_refuses_invalid_tokens(vocoder: Vocoder, speech_tokens: Any, message: str):
    """In the second of two chunks: the session of the first chunk does not move either."""
    with refused(vocoder, TokenError, message):
        vocoder.speak([Chunk(0, SPEECH_TOKENS), Chunk(1, speech_tokens)])


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint16])
@pytest.mark.parametrize("in_array", [True, False])
def test_accepts_numpy_integers(kind: type, in_array: bool):
    waves = []
    for speech_tokens in (
        SPEECH_TOKENS,
        np.array(SPEECH_TOKENS, dtype=kind) if in_array else [kind(token) for token in SPEECH_TOKENS],
    ):
        vocoder = make_vocoder()
        waves.append(vocoder.speak([Chunk(vocoder.open(make_voice()), speech_tokens)])[0])
    assert_same(waves[1], waves[0])


@pytest.mark.parametrize(
    ("speech_tokens", "last", "kind", "message"),
    [
        ([], False, TokenError, "speech tokens of session 1: expected at least 4, got 0"),
        (SPEECH_TOKENS[:3], False, TokenError, "expected at least 4, got 3"),
        ([], True, TokenError, "expected at least 1, got 0"),
        ([*SPEECH_TOKENS, 1], True, ShapeError, "speech tokens of session 1: speech_tokens: expected .*28.* got 29"),
        ([*SPEECH_TOKENS, 1, 2, 3, 4], False, ShapeError, "got 29"),
    ],
    ids=["none", "lookahead only", "none at the end", "too many at the end", "too many"],
)
def test_refuses_too_few_and_too_many_tokens(
    vocoder: Vocoder, speech_tokens: list[int], last: bool, kind: type, message: str
):
    with refused(vocoder, kind, message):
        vocoder.speak([Chunk(0, SPEECH_TOKENS), Chunk(1, speech_tokens, last)])


def test_accepts_the_largest_number_of_tokens():
    vocoder = make_vocoder()
    session = vocoder.open(make_voice())
    assert len(vocoder.speak([Chunk(session, [*SPEECH_TOKENS, 1, 2, 3])])[0]) == 960 * 28 - 3840
    assert len(vocoder.speak([Chunk(session, SPEECH_TOKENS, last=True)])[0]) == 960 * 28 + 3840


@pytest.mark.parametrize("wrong", [[2], [0, 0], [0, 2], [5], [-1], [99], []], ids=str)
@pytest.mark.parametrize("verb", ["speak", "begin_turn"])
def test_refuses_sessions_not_open_or_given_twice(vocoder: Vocoder, wrong: list[int], verb: str):
    with refused(vocoder, SlotError, r"vocoder sessions: expected different ones of \[0, 1\], got"):
        if verb == "speak":
            vocoder.speak([Chunk(session, SPEECH_TOKENS) for session in wrong])
        else:
            vocoder.begin_turn(*wrong)


def test_refuses_to_close_twice(vocoder: Vocoder):
    with refused(vocoder, SlotError, r"expected different ones of \[0, 1\], got \[2\]"):
        vocoder.close(2)


VOICE = make_voice(7)
WRONG_VOICES = {
    "short mel": replace(VOICE, mel=VOICE.mel[1:]),
    "other bins": make_voice(7, n_mels=79),
    "other speaker": make_voice(7, speaker_dim=25),
    "NaN": replace(VOICE, mel=VOICE.mel * math.nan),
    "no prompt": make_voice(7, 0),
    "token out of range": replace(VOICE, speech_tokens=VOICE.speech_tokens + 6561),
}


@pytest.mark.parametrize("voice", WRONG_VOICES.values(), ids=WRONG_VOICES)
@pytest.mark.parametrize("verb", ["open", "prepare", "offline"])
def test_refuses_voices_that_do_not_match_the_flow(vocoder: Vocoder, voice: Any, verb: str):
    call: Callable = {"open": vocoder.open, "prepare": vocoder.prepare}.get(
        verb, lambda v: vocoder.offline(SPEECH_TOKENS, v)
    )
    with refused(vocoder, AudioError, "voice: .* expected .* got"):
        call(voice)


def test_refuses_a_voice_too_long_to_stream(vocoder: Vocoder):
    """A whole utterance needs no slot, so it accepts the voice."""
    with refused(vocoder, AudioError, "voice: mel frames: expected at most 120, got 122"):
        vocoder.open(make_voice(7, 61))
    assert len(vocoder.offline(SPEECH_TOKENS[:2], make_voice(7, 61))) == 1920


@pytest.mark.parametrize("n_steps", [0, 3, -1, 1.5])
def test_refuses_unprepared_numbers_of_steps(vocoder: Vocoder, n_steps: float):
    for call in (vocoder.open, vocoder.prepare, lambda voice, n: vocoder.offline(SPEECH_TOKENS, voice, n)):
        with refused(vocoder, SettingsError, rf"euler steps: expected one of \(2, 1\), got {n_steps}"):
            call(make_voice(), n_steps)


def test_whole_utterances_refuse_invalid_tokens(vocoder: Vocoder):
    for speech_tokens, message in (
        ([], "speech tokens: expected at least 1, got 0"),
        ([3, 6561], "got 6561"),
        ([3.0], "got 3.0"),
    ):
        with refused(vocoder, TokenError, message):
            vocoder.offline(speech_tokens, make_voice())


def test_refuses_open_without_a_free_slot():
    vocoder = make_vocoder(sizes=FlowSizes(1, 2, 2, max_prompt=60, voice_frames=120))
    vocoder.open(make_voice())
    with refused(vocoder, SlotError, "vocoder session: expected a free slot, got all 1 leased"):
        vocoder.open(make_voice(1))


def test_refuses_a_voice_without_room():
    """An unused voice is not evicted if that would not make enough room."""
    vocoder = make_vocoder(sizes=FlowSizes(3, 3, 2, max_prompt=120, voice_frames=160))
    session = vocoder.open(make_voice(0, 30))
    vocoder.prepare(make_voice(1, 10))
    for call in (vocoder.open, vocoder.prepare):
        with refused(
            vocoder, SlotError, "voices: expected a slot and 120 of 160 frames in one piece, got 1 voices in use"
        ):
            call(make_voice(2, 60))
    assert vocoder.n_free == 2
    assert vocoder.voices.find((make_voice(1, 10).digest, 2)) is not None
    assert speak_turn(vocoder, session, SPEECH_TOKENS, [])[0].isfinite().all()


def test_refused_calls_do_not_change_other_sounds(vocoder: Vocoder):
    """After all tests above on the same vocoder."""
    other = make_vocoder()
    for seed in (0, 1):
        other.open(make_voice(seed))
    other.speak([Chunk(0, SPEECH_TOKENS), Chunk(1, SPEECH_TOKENS)])
    for chunks in (
        [Chunk(0, SPEECH_TOKENS), Chunk(1, SPEECH_TOKENS)],
        [Chunk(1, SPEECH_TOKENS[:9], True), Chunk(0, SPEECH_TOKENS[:4])],
    ):
        for bad in (
            [Chunk(0, SPEECH_TOKENS), Chunk(1, [])],
            [Chunk(0, SPEECH_TOKENS), Chunk(3, SPEECH_TOKENS)],
            [Chunk(0, [-1] * 9)],
        ):
            with pytest.raises(ModelError):
                vocoder.speak(bad)
        for got, expected in zip(vocoder.speak(chunks), other.speak(chunks), strict=True):
            assert_same(got, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": ()}, r"euler steps: expected one or more whole numbers from 1 to 2, got \(\)"),
        ({"steps": (), "sizes": None}, r"euler steps: .* got \(\)"),
        ({"steps": (2, 0)}, r"euler steps: .* got \(2, 0\)"),
        ({"steps": (3,)}, r"euler steps: .* from 1 to 2, got \(3,\)"),
        ({"sizes": FlowSizes(1, 1, 2, max_prompt=3942)}, "max_prompt: expected at most 3940, got 3942"),
        (
            {"kernels": "fused"},
            r"fused kernels: expected a CUDA device with Triton and heads of .* got cpu, heads of \(8, 16\)",
        ),
    ],
)
def test_refuses_invalid_settings(options: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        make_vocoder(**options)


def test_largest_columns_equal_what_a_session_can_attend_to():
    """For any shapes, so that no chunk of an open session is refused."""
    for columns in ((160,), (256, 512, 4096)):
        sizes = FlowSizes(1, 1, 2, max_prompt=600, voice_frames=600)
        vocoder = make_vocoder(sizes=sizes, shapes=VocoderShapes(columns=columns))
        assert vocoder.shapes.columns[-1] == 768  # 600 + 100 + 2 * 28, a multiple of 16
        session = vocoder.open(make_voice(0, 300))
        for _ in range(4):
            assert vocoder.speak([Chunk(session, [*SPEECH_TOKENS, 1, 2, 3])])[0].isfinite().all()
    with torch.no_grad():
        assert vocoder.state.dit_table.length[slot_of(vocoder, session)] == 700
