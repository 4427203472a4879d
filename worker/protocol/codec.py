"""Typed messages: their declaration, reading and writing. Torch-free.

Contains strict types, field aliases, optional nulls and the choice between text and binary frames; does not define
any message.
"""

import types
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from worker.describe import TypeWords, cut, describe_type, shown
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import (
    Form,
    Sound,
    WireError,
    json_text,
    pack_frame,
    picture_bytes,
    picture_text,
    read_header,
    read_object,
    unpack_frame,
)

SOUND_BEGINS = ',"audio_data":"'  # cannot occur inside a JSON string, which escapes the quotes

SoundField = Annotated[Sound, BeforeValidator(Sound.of), PlainSerializer(Sound.base64), TypeWords("base64 text")]
# Base64 text, or the bytes from a binary frame.
PictureField = Annotated[str | bytes, PlainSerializer(picture_text), TypeWords("base64 text")]
OneDecimal = Annotated[float, AfterValidator(lambda value: round(value, 1))]
Ms = Annotated[float, AfterValidator(lambda value: round(value, 3))]


class FieldGroup(BaseModel):
    """Frozen, strictly typed fields.

    The constructor refuses unknown fields; `Reader` and `known_fields` ignore them in what a peer sends.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )


class Message(FieldGroup):
    """One kind of message, identified by its `type` field.

    Attributes:
        aliases: field -> further names that are accepted for it.
        sound_field: the field whose sound a binary frame carries as bytes.
        pictures_field: the field whose pictures a binary frame carries as bytes.
        left_out: fields that are not sent while they are null.
        sends_nulls: whether all other fields are sent while they are null.
    """

    aliases: ClassVar[dict[str, tuple[str, ...]]] = {}
    sound_field: ClassVar[str | None] = None
    pictures_field: ClassVar[str | None] = None
    left_out: ClassVar[frozenset[str]] = frozenset()
    sends_nulls: ClassVar[bool] = True

    type: str

    @classmethod
    def kind(cls) -> str:
        """The value of `type`."""
        return str(cls.model_fields["type"].default)

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A received object converted to the fields of this kind. Raises: WireError."""
        return given


class FromClient(Message):
    """A message from the client to the gateway, or from the gateway to the worker."""

    sends_nulls = False


class FromServer(Message):
    """A message from the worker to the gateway, or from the gateway to the client."""


AnyMessage = TypeVar("AnyMessage", bound=Message, covariant=True)


def known_fields(group: type[FieldGroup]) -> BeforeValidator:
    """A validator for an object inside a message: drops unknown keys and nulls."""

    def pick(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: value[key] for key in group.model_fields if value.get(key) is not None}

    return BeforeValidator(pick)


class Reader(Generic[AnyMessage]):
    """Decodes the messages of one direction.

    Attributes:
        classes: the value of `type` -> the message's class.
    """

    def __init__(self, union: Any, unknown: str = "Unknown message type"):
        """
        Args:
            union: the message classes as `Annotated[A | B, Field(discriminator="type")]`, or a single class.
            unknown: the error's text for another `type`, which clients match.
        """
        self._unknown = unknown
        self._adapter: TypeAdapter[AnyMessage] = TypeAdapter(union)
        classes = get_args(get_args(union)[0]) if get_origin(union) is Annotated else (union,)
        self.classes: dict[str, type[Message]] = {cls.kind(): cls for cls in classes}

    def kind(self, given: dict[str, Any]) -> type[Message]:
        """The class for an object's `type`. Raises: WireError unknown_type; bad_message if `type` is no text."""
        name = given.get("type")
        if not isinstance(name, str):
            got = "nothing" if name is None else shown(name)
            raise WireError(ErrorCode.BAD_MESSAGE, "message.type", expected="text", got=got)
        if name not in self.classes:
            text = f"{self._unknown}: {cut(name)}"
            expected = " or ".join(self.classes)
            raise WireError(ErrorCode.UNKNOWN_TYPE, "message.type", expected=expected, got=cut(name), text=text)
        return self.classes[name]

    def read_text(self, text: str) -> AnyMessage:
        """The message in a text frame. Raises: WireError as `read_object` and `read`."""
        return self.read(read_object(text))

    def read_frame(self, data: bytes, form: Form) -> AnyMessage:
        """The message in a binary frame.

        Args:
            data: the frame.
            form: the agreed encoding of its sound.
        Raises:
            WireError: binary_not_agreed if `form` is base64; otherwise as `unpack_frame` and `read`.
        """
        if form == "base64":
            expected = "a text frame, since base64 is agreed on"
            raise WireError(ErrorCode.BINARY_NOT_AGREED, "message", expected=expected, got="a binary frame")
        header, sound, pictures = unpack_frame(data)
        cls = self.kind(header)
        if cls.sound_field is None:
            expected = " or ".join(name for name, one in self.classes.items() if one.sound_field)
            raise WireError(ErrorCode.BAD_MESSAGE, "binary frame's type", expected=expected, got=header["type"])
        header[cls.sound_field] = Sound(sound, form) if sound else None
        if pictures:
            if cls.pictures_field is None:
                raise WireError(ErrorCode.BAD_MESSAGE, "frame_bytes", expected="none", got=len(pictures))
            header[cls.pictures_field] = pictures
        return self.read(header)

    def read(self, given: dict[str, Any]) -> AnyMessage:
        """The message in a JSON object.

        Unknown fields are ignored, null counts as absent, and of a field's aliases the first one present is used.

        Raises:
            WireError: bad_message with the field's name as given, the allowed values and the value.
        """
        cls = self.kind(given)
        given, known = cls.adapted(given), cls.model_fields
        fields = {name: value for name, value in given.items() if value is not None and name in known}
        names: dict[str, str] = {}
        for name, others in cls.aliases.items():
            key = None if name in fields else next((key for key in others if given.get(key) is not None), None)
            if key is not None:
                fields[name], names[name] = given[key], key
        if cls.model_config.get("extra") == "allow":
            fields = {**given, **fields}
        try:
            return self._adapter.validate_python(fields)
        except ValidationError as error:
            raise _wire_error(cls, names, error) from None


def write_message(message: Message, form: Form) -> str | bytes:
    """A message as strict JSON, or as a binary frame if it carries sound and `form` is not base64.

    Raises:
        WireError: for invalid sound or pictures that are held as text or bytes.
    """
    field = message.sound_field
    sound: Sound | None = getattr(message, field) if field else None
    if not sound or form == "base64":
        text = json_text(_fields(message, field))
        # The sound is appended as text: searching it for characters to escape would take most of the time.
        if not field or (not sound and field in message.left_out):
            return text
        return f'{text[:-1]},"{field}":{sound.json_text() if sound else "null"}}}'
    pictures_field = message.pictures_field
    pictures = getattr(message, pictures_field) if pictures_field else []
    header = _fields(message, field, pictures_field)
    return pack_frame(header, sound.packed(form), [picture_bytes(one, str(pictures_field)) for one in pictures])


def peek_header(data: str | bytes) -> dict[str, Any]:
    """The fields of a server message except its sound, for a proxy; {} for anything that is not a message.

    The sound, which `write_message` puts last, is not parsed.
    """
    try:
        if isinstance(data, bytes):
            return read_header(data)
        before_sound = data.find(SOUND_BEGINS)
        return read_object(data if before_sound < 0 else f"{data[:before_sound]}}}")
    except WireError:
        return {}


def _fields(message: Message, *payloads: str | None) -> dict[str, Any]:
    """The fields to send, except the payloads."""
    left_out = {name for name in message.left_out if getattr(message, name) is None}
    return message.model_dump(exclude=left_out | set(filter(None, payloads)), exclude_none=not message.sends_nulls)


def _wire_error(cls: type[Message], names: dict[str, str], error: ValidationError) -> WireError:
    entries = error.errors(include_url=False, include_context=False)
    places = [one["loc"] if one["loc"][0] == cls.kind() else (cls.kind(), *one["loc"]) for one in entries]
    [tag, field] = places[0][:2]
    # A union reports every member; the deepest location belongs to the member that matched furthest.
    place, entry = max(
        (pair for pair in zip(places, entries, strict=True) if pair[0][1] == field), key=lambda pair: len(pair[0])
    )
    info = cls.model_fields[str(field)]
    what, annotation, metadata = f"{tag}.{names.get(str(field), field)}", info.annotation, info.metadata
    for step in place[2:]:  # names of union members are steps too
        if isinstance(step, int):
            what, [annotation], metadata = f"{what}[{step}]", _list_items(annotation), []
        elif group := next((one for one in _field_groups(annotation) if step in one.model_fields), None):
            info = group.model_fields[step]
            what, annotation, metadata = f"{what}.{step}", info.annotation, info.metadata
    got = "nothing" if entry["type"] == "missing" else shown(entry["input"])
    return WireError(ErrorCode.BAD_MESSAGE, what, expected=describe_type(annotation, metadata), got=got)


def _members(annotation: Any) -> list[Any]:
    """The types that a union or an annotated type stands for."""
    if get_origin(annotation) in (types.UnionType, Union, Annotated):
        return [found for one in get_args(annotation) for found in _members(one)]
    return [annotation]


def _list_items(annotation: Any) -> list[Any]:
    return [item for one in _members(annotation) if get_origin(one) is list for item in get_args(one)]


def _field_groups(annotation: Any) -> list[type[FieldGroup]]:
    return [one for one in _members(annotation) if isinstance(one, type) and issubclass(one, FieldGroup)]
