"""Recorded messages as fields and sounds. Reads leniently: a recording may hold messages of any client and worker."""

from typing import Any, NamedTuple, get_args

import numpy as np

from worker.protocol.wire import Form, Sound, WireError, read_object, unpack_frame

FORMS: tuple[str, ...] = get_args(Form)
SOUND_FIELD = "audio_data"


class WorkerMessage(NamedTuple):
    """A message to the client. samples: [n] float32; None without sound."""

    kind: str
    fields: dict[str, Any]
    samples: np.ndarray | None


def worker_message(data: str | bytes, form: Form) -> WorkerMessage:
    """A message to the client; of kind "" if it is not one. form: encoding of sound in binary frames."""
    try:
        if isinstance(data, str):
            fields = read_object(data)
            given = fields.pop(SOUND_FIELD, None)
            sound = Sound(given) if isinstance(given, str) else None
        else:
            fields, packed, _ = unpack_frame(data)
            sound = Sound(packed, form)
    except WireError:
        return WorkerMessage("", {}, None)
    return WorkerMessage(text_of(fields.get("type")), fields, samples_of(sound))


def samples_of(sound: Sound | None) -> np.ndarray | None:
    """[n] float32; None without sound, and for sound that cannot be decoded."""
    if not sound:
        return None
    try:
        return sound.samples("sound")
    except WireError:
        return None


def form_of(spec: object, field: str) -> Form:
    """The encoding that `spec` names in this field; base64 by default."""
    given = spec.get(field) if isinstance(spec, dict) else None
    return given if given in FORMS else "base64"


def text_of(value: object) -> str:
    """A text field; empty for any other value."""
    return value if isinstance(value, str) else ""


def number_of(value: object) -> float | None:
    """A finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**63:
        return None
    return value


def joined(parts: list[np.ndarray]) -> np.ndarray | None:
    """Sounds end to end; None without samples."""
    return np.concatenate(parts) if parts else None


def jsonable(value: object) -> Any:
    """A value from a client's JSON without infinite numbers, which JSON cannot hold."""
    if isinstance(value, dict):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [jsonable(one) for one in value]
    if isinstance(value, float) and number_of(value) is None:
        return None
    return value
