"""Pictures of a half-duplex turn: which ones it gets, and where they stand."""

from typing import Any

import numpy as np

from models.inputs.audio_sizes import CLIP_SAMPLES
from models.inputs.image import EncodedImage
from worker.chat.turn_pictures import MAX_PICTURE_PIXELS, MAX_PICTURES, RecentPictures, SpokenTurn, joined

RATE, HALF = 16_000, 8_000


def image(name: str, side: int = 8) -> EncodedImage:
    return EncodedImage(name.encode(), (side, side))


def layout(turn: SpokenTurn) -> list[Any]:
    """Names of pictures and lengths of sounds, in s."""
    return [part.data.decode() if isinstance(part, EncodedImage) else len(part) / RATE for part in turn.parts()]


def pushed(recent: RecentPictures, n: int, first: int = 0, *, is_turn_open: bool = True) -> None:
    """Push half seconds with a picture each."""
    for i in range(first, first + n):
        recent.push([image(str(i))], HALF, is_turn_open=is_turn_open)


def test_a_turn_gets_one_picture_a_second_and_what_was_seen_before() -> None:
    recent = RecentPictures(1.0)
    pushed(recent, 4, is_turn_open=False)
    pushed(recent, 5, first=4)
    sound = np.zeros(round(2.3 * RATE), np.float32)
    turn = recent.turn(sound, end=round(4.2 * RATE))  # from 1.9 s on
    assert [one.at / RATE for one in turn.pictures] == [-0.9, 0.1, 1.1, 2.1]
    assert layout(turn) == ["2", "4", 1.0, "6", 1.0, "8", 0.3]
    assert layout(turn.without_oldest()) == ["4", 1.0, "6", 1.0, "8", 0.3]
    recent.reset()
    assert recent.turn(sound, end=len(sound)).pictures == () and recent.n_pixels == 0


def test_a_picture_at_the_end_leaves_enough_sound_behind_it() -> None:
    recent = RecentPictures(0.5)
    pushed(recent, 3)
    sound = np.zeros(RATE + 100, np.float32)
    assert layout(recent.turn(sound, end=len(sound))) == ["0", "1", "2", len(sound) / RATE]


def test_pictures_and_their_pixels_are_bounded() -> None:
    recent = RecentPictures(0.1)
    pushed(recent, 2 * MAX_PICTURES)
    held = recent.turn(np.zeros(MAX_PICTURES * RATE, np.float32), end=MAX_PICTURES * RATE).pictures
    assert [one.image.data for one in held] == [str(i).encode() for i in range(MAX_PICTURES, 2 * MAX_PICTURES)]
    side = round((MAX_PICTURE_PIXELS / 2) ** 0.5)
    for _ in range(4):
        recent.push([image("large", side)], HALF, is_turn_open=True)
    assert recent.n_pixels <= MAX_PICTURE_PIXELS


def test_joined_turns_keep_the_places_of_their_pictures() -> None:
    recent = RecentPictures(1.0)
    pushed(recent, 4)
    second = recent.turn(np.zeros(2 * RATE, np.float32), end=2 * RATE)
    assert layout(joined([second, second])) == ["0", 1.0, "2", 1.0, "0", 1.0, "2", 1.0]
    long = SpokenTurn(np.zeros(CLIP_SAMPLES - RATE, np.float32), second.pictures)
    assert layout(joined([long, second])) == ["2", (CLIP_SAMPLES - 2 * RATE) / RATE, "0", 1.0, "2", 1.0]
