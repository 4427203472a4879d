"""Typed messages: how they are declared, read and written, and what a field may be in words. Torch-free.

Knows strict types, other names for a field, null for nothing, which payloads may travel as bytes. Does not know which
messages there are.
"""

import json
import types
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter, ValidationError

from worker.protocol.wire import (
    ErrorCode,
    Form,
    Sound,
    WireError,
    cut,
    json_text,
    pack_frame,
    picture_bytes,
    picture_text,
    read_header,
    read_object,
    shown,
    unpack_frame,
)

SOUND_BEGINS = ',"audio_data":"'  # inside a JSON text its quotes would be escaped


class Words(NamedTuple):
    """What a field may be, where its type does not say so."""

    words: str


SoundField = Annotated[Sound, BeforeValidator(Sound.of), PlainSerializer(Sound.base64), Words("base64 text")]
# Bytes: as it came in a binary frame.
PictureField = Annotated[str | bytes, PlainSerializer(picture_text), Words("base64 text")]


class FieldGroup(BaseModel):
    """Frozen and strictly typed. Made by our code it takes no field it does not have; from a client it passes over."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )


class Message(FieldGroup):
    """One kind of message; its `type` field says which.

    aliases: other names under which a field may come. sound_field: the one whose sound may travel as bytes.
    pictures_field: the one whose pictures may. left_out: fields that are not sent while they are null. sends_nulls: the
    others are.
    """

    aliases: ClassVar[dict[str, tuple[str, ...]]] = {}
    sound_field: ClassVar[str | None] = None
    pictures_field: ClassVar[str | None] = None
    left_out: ClassVar[frozenset[str]] = frozenset()
    sends_nulls: ClassVar[bool] = True

    type: str

    @classmethod
    def kind(cls) -> str:
        """What `type` says."""
        return cls.model_fields["type"].default

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """What came in, brought into the fields of this kind. Raises: WireError."""
        return given


def known(record: type[FieldGroup]) -> BeforeValidator:
    """For an object inside a message: keys it does not have and nulls are passed over."""

    def pick(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: value[key] for key in record.model_fields if value.get(key) is not None}

    return BeforeValidator(pick)


class Reader:
    """Makes messages of one direction from JSON objects; the union's classes are told apart by `type`."""

    def __init__(self, union: Any):
        self._adapter: TypeAdapter[Any] = TypeAdapter(union)
        self.classes: dict[str, type[Message]] = {cls.kind(): cls for cls in get_args(get_args(union)[0])}

    def kind(self, given: dict[str, Any]) -> type[Message]:
        """Raises: WireError unknown_type, or bad_message if there is no type."""
        name = given.get("type")
        if not isinstance(name, str):
            got = "nothing" if name is None else shown(name)
            raise WireError(ErrorCode.BAD_MESSAGE, "message.type", expected="text", got=got)
        if name not in self.classes:
            text = f"Unknown message type: {cut(name)}"
            expected = " or ".join(self.classes)
            raise WireError(ErrorCode.UNKNOWN_TYPE, "message.type", expected=expected, got=cut(name), text=text)
        return self.classes[name]

    def read_text(self, text: str) -> Any:
        """Raises: WireError as `read_object` and `read`."""
        return self.read(read_object(text))

    def read_frame(self, data: bytes, form: Form) -> Any:
        """A binary frame with sound in the form agreed. Raises: WireError as `unpack_frame` and `read`."""
        if form == "base64":
            expected = "text, as base64 is what was agreed on"
            raise WireError(ErrorCode.BINARY_NOT_AGREED, "message", expected=expected, got="a binary frame")
        header, sound, pictures = unpack_frame(data)
        cls = self.kind(header)
        if cls.sound_field is None:
            expected = " or ".join(name for name, one in self.classes.items() if one.sound_field)
            raise WireError(ErrorCode.BAD_MESSAGE, "binary frame's type", expected=expected, got=header["type"])
        header[cls.sound_field] = Sound(sound, form) if sound else None
        if pictures and cls.pictures_field is None:
            raise WireError(ErrorCode.BAD_MESSAGE, "frame_bytes", expected="none", got=len(pictures))
        if pictures:
            header[cls.pictures_field] = pictures
        return self.read(header)

    def read(self, given: dict[str, Any]) -> Any:
        """Fields that a message does not have are passed over, null is as good as absent, the first name given counts.

        Raises: WireError naming the field as it was given, what it may be and what it is.
        """
        cls = self.kind(given)
        given = cls.adapted(given)
        fields, names = {}, {}
        for name in cls.model_fields:
            for key in (name, *cls.aliases.get(name, ())):
                if given.get(key) is not None:
                    fields[name], names[name] = given[key], key
                    break
        if cls.model_config.get("extra") == "allow":
            fields = {**given, **fields}
        try:
            return self._adapter.validate_python(fields)
        except ValidationError as error:
            raise _wire_error(cls, names, error) from None


def write_message(message: Message, form: Form) -> str | bytes:
    """Strict JSON, or a binary frame if the message carries sound and `form` is not base64.

    Raises: WireError for sound or pictures that are held as text or bytes and broken.
    """
    field = message.sound_field
    sound: Sound | None = getattr(message, field) if field else None
    if not sound or form == "base64":
        text = json_text(_fields(message, field))
        # The sound is put in as text of its own: looking through it for characters to escape takes longest of all.
        return f'{text[:-1]},"{field}":{sound.json_text() if sound else "null"}}}' if field else text
    pictures_field = message.pictures_field
    pictures = getattr(message, pictures_field) if pictures_field else []
    header = _fields(message, field, pictures_field)
    return pack_frame(header, sound.packed(form), [picture_bytes(one, str(pictures_field)) for one in pictures])


def peek_header(data: str | bytes) -> dict[str, Any]:
    """What a server's message says beside its sound, for whoever passes it on. {} for anything that is no message.

    The sound, which `write_message` puts last, is not looked at.
    """
    try:
        if isinstance(data, bytes):
            return read_header(data)
        before_sound = data.find(SOUND_BEGINS)
        return read_object(data if before_sound < 0 else f"{data[:before_sound]}}}")
    except WireError:
        return {}


def _fields(message: Message, *payloads: str | None) -> dict[str, Any]:
    """What is sent beside the payloads."""
    left_out = {name for name in message.left_out if getattr(message, name) is None}
    return message.model_dump(exclude=left_out | set(filter(None, payloads)), exclude_none=not message.sends_nulls)


def _wire_error(cls: type[Message], names: dict[str, str], error: ValidationError) -> WireError:
    entries = error.errors(include_url=False, include_context=False)
    [tag, field] = entries[0]["loc"][:2]
    # Of the members of a union the one that was gone into furthest was meant.
    entry = max((one for one in entries if one["loc"][1] == field), key=lambda one: len(one["loc"]))
    info = cls.model_fields[str(field)]
    what, annotation, metadata = f"{tag}.{names.get(str(field), field)}", info.annotation, info.metadata
    for step in entry["loc"][2:]:  # names of a union's members are steps too
        if isinstance(step, int):
            what, [annotation], metadata = f"{what}[{step}]", _inside(annotation, list), []
        elif (records := _inside(annotation, FieldGroup)) and step in records[0].model_fields:
            info = records[0].model_fields[step]
            what, annotation, metadata = f"{what}.{step}", info.annotation, info.metadata
    got = "nothing" if entry["type"] == "missing" else shown(entry["input"])
    return WireError(ErrorCode.BAD_MESSAGE, what, expected=allowed(annotation, metadata), got=got)


def _inside(annotation: Any, kind: type) -> list[Any]:
    """Records that an annotation allows, or what its lists hold."""
    if get_origin(annotation) in (types.UnionType, Union, Annotated):
        return [found for one in get_args(annotation) for found in _inside(one, kind)]
    if kind is list:
        return list(get_args(annotation)) if get_origin(annotation) is list else []
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, kind) else []


PLAIN_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    ErrorCode: "text",
    Any: "any value",
}


def allowed(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """What a field may be, in words, as errors and documentation say it: `a whole number, at least 1`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allowed(inner[0], [*inner[1:], *metadata])
    if given := next((one for one in metadata if isinstance(one, Words)), None):
        return given.words
    if origin in (types.UnionType, Union):
        words = " or ".join(dict.fromkeys(allowed(one) for one in inner if one is not types.NoneType))
    elif origin is Literal:
        words = " or ".join(json.dumps(one) for one in inner)
    elif origin is list:
        words = f"a list, each {allowed(inner[0])}"
    elif origin is dict or _inside(annotation, FieldGroup):
        words = "an object"
    else:
        words = PLAIN_WORDS[annotation]
    for bound, says in (("ge", "at least"), ("le", "at most")):
        words += "".join(f", {says} {getattr(one, bound):g}" for one in metadata if hasattr(one, bound))
    return words
