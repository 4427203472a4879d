"""Typed messages: reading fields, describing them, writing them."""

from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field

from worker.describe import describe_type
from worker.protocol.codec import FieldGroup, Message, PictureField, Reader, SoundField, known_fields, write_message
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import Sound, WireError


class Inner(FieldGroup):
    depth: int = Field(0, le=9)


class Walk(Message):
    aliases: ClassVar = {"steps": ("paces", "strides")}
    left_out = frozenset({"goal"})

    type: Literal["walk"] = "walk"
    steps: list[float] | None = None
    goal: str | None = None
    inner: Annotated[Inner, known_fields(Inner)] = Inner()


class Song(Message):
    sound_field = "sound"
    sends_nulls = False

    type: Literal["song"] = "song"
    sound: SoundField | None = None
    words: str | None = None


READER = Reader(Annotated[Walk | Song, Field(discriminator="type")])


def refused(**given: Any) -> str:
    with pytest.raises(WireError) as caught:
        READER.read(given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "metadata", "words"),
    [
        (bool, [], "true or false"),
        (int, [Field(ge=1).metadata[0]], "a whole number, at least 1"),
        (float | None, [*Field(ge=0).metadata, *Field(le=1.5).metadata], "a number from 0 to 1.5"),
        (Literal["a", "b", 3], [], '"a" or "b" or 3'),
        (list[str], [], "a list, each text"),
        (list[int] | None, Field(max_length=3).metadata, "a list of at most 3, each a whole number"),
        (dict[str, Any], [], "an object"),
        (Annotated[Inner, known_fields(Inner)], [], "an object"),
        (int | list[int] | None, [], "a whole number or a list, each a whole number"),
        (ErrorCode | str, [], "text"),
        (SoundField | None, [], "base64 text"),
        (list[PictureField], [], "a list, each base64 text"),
    ],
)
def test_describes_allowed_values(annotation: Any, metadata: list[Any], words: str) -> None:
    assert describe_type(annotation, metadata) == words


def test_uses_first_alias_that_is_present() -> None:
    given = {"type": "walk", "strides": [1.0], "paces": [2.0], "steps": [3.0]}
    for name, expected in (("steps", 3.0), ("paces", 2.0), ("strides", 1.0)):
        assert READER.read(given).steps == [expected]
        given[name] = None
    assert READER.read(given).steps is None


def test_errors_use_the_name_that_was_given() -> None:
    assert refused(type="walk", paces=3) == "walk.paces: expected a list, each a number, got 3"
    assert refused(type="walk", strides=[1, "x"]) == "walk.strides[1]: expected a number, got 'x'"
    assert refused(type="walk", inner={"depth": 10}) == "walk.inner.depth: expected a whole number, at most 9, got 10"
    assert refused(type="walk", goal=1, paces=3) == "walk.paces: expected a list, each a number, got 3"


def test_nested_objects_ignore_unknown_keys_and_nulls() -> None:
    assert READER.read({"type": "walk", "inner": {"depth": None, "width": 3}}).inner == Inner()
    assert READER.read({"type": "walk", "inner": {"depth": 3}}).inner == Inner(depth=3)


def test_sends_nulls_unless_declared_otherwise() -> None:
    assert write_message(Walk(), "base64") == '{"type":"walk","steps":null,"inner":{"depth":0}}'
    assert write_message(Walk(goal="g"), "pcm16") == '{"type":"walk","steps":null,"goal":"g","inner":{"depth":0}}'
    assert write_message(Song(), "base64") == '{"type":"song","sound":null}'


def test_escapes_received_base64_text() -> None:
    text = write_message(Song(sound=Sound('"}\n')), "base64")
    assert text == '{"type":"song","sound":"\\"}\\n"}'
    assert READER.read_text(str(text)).sound.data == '"}\n'
    with pytest.raises(WireError, match="sound: expected base64"):
        write_message(Song(sound=Sound('"}\n')), "pcm16")


def test_writes_binary_frames_only_for_messages_with_sound() -> None:
    song = write_message(Song(sound=Sound(b"abcd", "pcm16"), words="la"), "pcm16")
    assert isinstance(song, bytes) and song.endswith(b'{"type":"song","words":"la","audio_bytes":4}abcd')
    got = READER.read_frame(song, "pcm16")
    assert (got.words, got.sound.data) == ("la", b"abcd")
    assert isinstance(write_message(Song(words="la"), "pcm16"), str)
