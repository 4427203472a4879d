"""Chunks on their way through the vocoder: the same sounds, and who stands where when they arrive, or never do."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from models.errors import SlotError
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from tests.models.token2wav.stream.vocoders import SIZES, cut, make_codes, make_vocoder, make_voice

ONE_SIZE = VocoderShapes(batch=(2,), speech_tokens=(28,), columns=(288,), prompt=(60,))
OTHER_ORDER = 1e-4  # the same sums where another voice lies
SPEECH_TOKENS = make_codes(1, 40)


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
    """What a turn of two chunks sounds like."""
    vocoder = make_vocoder(shapes=ONE_SIZE)
    return [vocoder.speak([chunk])[0].numpy() for chunk in turn(vocoder.open(make_voice()))]


def turn(session: int) -> list[Chunk]:
    return list(cut(session, SPEECH_TOKENS, [25]))


def heard(vocoder: Vocoder, *chunks: Chunk) -> list[np.ndarray]:
    return vocoder.finish(vocoder.start(chunks))


def test_the_sounds_are_those_of_a_call(vocoder: Vocoder, expected: list[np.ndarray]) -> None:
    one, other = (vocoder.open(make_voice()) for _ in range(2))
    for first, second, sound in zip(turn(one), turn(other), expected, strict=True):
        launch = vocoder.start([second, first])
        assert launch.is_here, "on a CPU: expected the sounds to be there at once"
        for got in vocoder.finish(launch):
            assert np.array_equal(got, sound)


def test_what_nobody_finishes_has_not_happened(vocoder: Vocoder, expected: list[np.ndarray]) -> None:
    first, second = turn(vocoder.open(make_voice()))
    for chunk, sound in ((first, expected[0]), (second, expected[1])):
        vocoder.start([chunk])
        (got,) = heard(vocoder, chunk)
        assert np.array_equal(got, sound)


@pytest.mark.parametrize("n_before", [0, 1])
def test_a_turn_that_begins_meanwhile_begins(vocoder: Vocoder, expected: list[np.ndarray], n_before: int) -> None:
    session = vocoder.open(make_voice())
    chunks = turn(session)
    for chunk in chunks[:n_before]:
        heard(vocoder, chunk)
    launch = vocoder.start([chunks[n_before]])
    vocoder.begin_turn(session)
    assert np.array_equal(vocoder.finish(launch)[0], expected[n_before]), "expected the old turn's sound"
    assert np.array_equal(heard(vocoder, chunks[0])[0], expected[0]), "expected a new turn"
    assert np.array_equal(heard(vocoder, chunks[1])[0], expected[1]), "expected the new turn to go on"


def test_a_session_closed_meanwhile_leaves_nothing_to_the_next(expected: list[np.ndarray]) -> None:
    vocoder = make_vocoder(shapes=ONE_SIZE, sizes=replace(SIZES, n_sessions=1))
    old = vocoder.open(make_voice(1))
    launch = vocoder.start([turn(old)[0]])
    vocoder.close(old)
    new = vocoder.open(make_voice())
    assert new == old, "expected the same slot"
    vocoder.finish(launch)
    got = [sound for chunk in turn(new) for sound in heard(vocoder, chunk)]
    for one, sound in zip(got, expected, strict=True):
        assert np.allclose(one, sound, atol=OTHER_ORDER), (
            f"expected the next one's sound, off by {abs(one - sound).max()}"
        )


def test_what_is_refused_changes_nothing(vocoder: Vocoder, expected: list[np.ndarray]) -> None:
    session = vocoder.open(make_voice())
    with pytest.raises(SlotError):
        vocoder.start([turn(session)[0], turn(99)[0]])
    assert np.array_equal(heard(vocoder, turn(session)[0])[0], expected[0])
