"""The messages in which a client sends its sound."""

import asyncio

import numpy as np
import pytest

from clients.turn_wait import SpeechEnd
from clients.units import PIECE, SPOKEN_PIECE, ClientUnit, MessageLength, PieceSource
from models.inputs.audio_sizes import UNIT_SAMPLES


class Seconds:
    """A source of these units."""

    def __init__(self, *units: ClientUnit):
        self._units = iter(units)

    async def next(self) -> ClientUnit | None:
        return next(self._units, None)


def test_pieces_are_short_beside_speech_and_fill_each_second() -> None:
    sound = np.full(4 * UNIT_SAMPLES, 1e-4, np.float32)
    sound[UNIT_SAMPLES + 4000 : UNIT_SAMPLES + 8000] = 0.3  # a quarter of the second second
    units = [ClientUnit(part, (str(number).encode(),)) for number, part in enumerate(np.split(sound, 4))]
    speech = SpeechEnd()
    source, pieces = PieceSource(Seconds(*units), MessageLength(speech)), []

    async def read() -> None:
        while (piece := await source.next()) is not None:
            speech.push(piece.sound)
            pieces.append(piece)

    asyncio.run(read())
    assert np.array_equal(np.concatenate([piece.sound for piece in pieces]), sound), "expected the sound as it was"
    ends = np.cumsum([len(piece.sound) for piece in pieces])
    assert set(UNIT_SAMPLES * np.arange(1, 5)) <= set(ends), f"expected ends of seconds, got {ends}"
    for piece, end in zip(pieces, ends, strict=True):
        begin = end - len(piece.sound)
        is_beside = begin >= UNIT_SAMPLES + 6000 and end <= 2 * UNIT_SAMPLES
        is_far = end <= UNIT_SAMPLES + 4000 or begin >= 2 * UNIT_SAMPLES + 4000
        got = len(piece.sound)
        assert not is_beside or SPOKEN_PIECE <= got < 2 * SPOKEN_PIECE, f"beside speech at {begin}: got {got} samples"
        is_rest = end % UNIT_SAMPLES == 0 and SPOKEN_PIECE <= got < PIECE + SPOKEN_PIECE
        assert not is_far or got == PIECE or is_rest, f"far from speech at {begin}: got {got} samples"
        middle = begin // UNIT_SAMPLES * UNIT_SAMPLES + UNIT_SAMPLES // 2
        assert bool(piece.jpegs) == (begin <= middle < end), f"expected pictures at {middle} only, got some at {begin}"


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_message_ends_with_each_unit(is_beside: bool) -> None:
    """The first unit ends early, at the third message, when two more are sent; later ones end when they are full."""
    speech = SpeechEnd()
    if is_beside:
        speech.push(np.full(2 * UNIT_SAMPLES, 0.3, np.float32) * (np.arange(2 * UNIT_SAMPLES) > UNIT_SAMPLES))
    length, ends, answered = MessageLength(speech), [0], 0
    edges = []
    while len(edges) < 4:
        n = length.next()
        assert 0 < n < PIECE + SPOKEN_PIECE and (not is_beside or n < 2 * SPOKEN_PIECE), n
        length.sent(n)
        ends.append(ends[-1] + n)
        while answered < len(ends) - 3:  # two messages have no answer yet
            answered += 1
            is_end = answered == 3 or (edges and ends[answered] >= edges[-1] + UNIT_SAMPLES)
            length.answered(ends_unit=bool(is_end))
            edges += [ends[answered]] if is_end else []
    assert set(np.diff(edges)) == {UNIT_SAMPLES}, f"expected messages that end with units, got {edges}"


def test_late_answers_and_refusals_move_no_end_of_a_unit() -> None:
    """A unit that is full within a message ends there; sound that is refused is in no unit."""
    length, sent = MessageLength(SpeechEnd()), 0

    def send(n: int) -> None:
        nonlocal sent
        length.sent(n)
        sent += n

    # The first unit ends early with the first message, whose answer comes when the second unit is full, too.
    for n in (SPOKEN_PIECE, *9 * [PIECE], PIECE - SPOKEN_PIECE, PIECE):
        send(n)
    for number in range(12):
        length.answered(ends_unit=number in (0, 11))
    for end in (SPOKEN_PIECE + 2 * UNIT_SAMPLES, 2 * SPOKEN_PIECE + 3 * UNIT_SAMPLES):
        while sent < end:
            send(length.next())
            length.answered(ends_unit=sent >= end)
        assert sent == end, f"expected a message that ends at {end}, got {sent}"
        send(SPOKEN_PIECE)
        length.refused()


def test_messages_are_whole_units_without_early_units() -> None:
    length = MessageLength(None)
    assert length.is_whole and length.next() == UNIT_SAMPLES
