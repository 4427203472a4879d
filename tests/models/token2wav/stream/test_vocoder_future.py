"""Pending calls of the vocoder: equal sounds, and the sessions' positions after a finished or unfinished call."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from models.errors import SlotError
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from tests.models.token2wav.stream.vocoders import SIZES, chunks_of_turn, make_tokens, make_vocoder, make_voice

ONE_SIZE = VocoderShapes(batch=(2,), speech_tokens=(28,), columns=(288,), prompt=(60,))
OTHER_ORDER = 1e-4  # sums in a different order, because the voice is in another slot
SPEECH_TOKENS = make_tokens(1, 40)


@pytest.fixture(scope="module")
def built() -> Vocoder:
    return make_vocoder(shapes=ONE_SIZE)


@pytest.fixture
def vocoder(built: Vocoder) -> Iterator[Vocoder]:
    yield built
    for session in list(built._sessions):
        built.close(session)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """The sounds of a turn of two chunks."""
    vocoder = make_vocoder(shapes=ONE_SIZE)
    return [vocoder.speak([chunk])[0].numpy() for chunk in turn(vocoder.open(make_voice()))]


def turn(session: int) -> list[Chunk]:
    return list(chunks_of_turn(session, SPEECH_TOKENS, [25]))


def synthesize(vocoder: Vocoder, *chunks: Chunk) -> list[np.ndarray]:
    return vocoder.finish(vocoder.start(chunks))


def test_pending_call_returns_the_sounds_of_speak(vocoder: Vocoder, expected: list[np.ndarray]) -> None:
    one, other = (vocoder.open(make_voice()) for _ in range(2))
    for first, second, sound in zip(turn(one), turn(other), expected, strict=True):
        future = vocoder.start([second, first])
        assert future.is_here, "on a CPU: expected the sounds immediately"
        for got in vocoder.finish(future):
            assert np.array_equal(got, sound)


def test_unfinished_call_has_no_effect(vocoder: Vocoder, expected: list[np.ndarray]) -> None:
    first, second = turn(vocoder.open(make_voice()))
    for chunk, sound in ((first, expected[0]), (second, expected[1])):
        vocoder.start([chunk])
        (got,) = synthesize(vocoder, chunk)
        assert np.array_equal(got, sound)


@pytest.mark.parametrize("n_before", [0, 1])
def test_turn_begun_during_a_pending_call_starts_anew(
    vocoder: Vocoder, expected: list[np.ndarray], n_before: int
) -> None:
    session = vocoder.open(make_voice())
    chunks = turn(session)
    for chunk in chunks[:n_before]:
        synthesize(vocoder, chunk)
    future = vocoder.start([chunks[n_before]])
    vocoder.begin_turn(session)
    assert np.array_equal(vocoder.finish(future)[0], expected[n_before]), "expected the old turn's sound"
    assert np.array_equal(synthesize(vocoder, chunks[0])[0], expected[0]), "expected a new turn"
    assert np.array_equal(synthesize(vocoder, chunks[1])[0], expected[1]), "expected the new turn to continue"


def test_session_closed_during_a_pending_call_does_not_affect_the_next(expected: list[np.ndarray]) -> None:
    vocoder = make_vocoder(shapes=ONE_SIZE, sizes=replace(SIZES, n_sessions=1))
    old = vocoder.open(make_voice(1))
    future = vocoder.start([turn(old)[0]])
    vocoder.close(old)
    new = vocoder.open(make_voice())
    assert new == old, "expected the same slot"
    vocoder.finish(future)
    got = [sound for chunk in turn(new) for sound in synthesize(vocoder, chunk)]
    for one, sound in zip(got, expected, strict=True):
        assert np.allclose(one, sound, atol=OTHER_ORDER), (
            f"expected the next session's sound, off by {abs(one - sound).max()}"
        )


def test_refused_start_has_no_effect(vocoder: Vocoder, expected: list[np.ndarray]) -> None:
    session = vocoder.open(make_voice())
    with pytest.raises(SlotError):
        vocoder.start([turn(session)[0], turn(99)[0]])
    assert np.array_equal(synthesize(vocoder, turn(session)[0])[0], expected[0])
