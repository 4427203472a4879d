"""Fields of a request's JSON object, read one by one: unknown ones are ignored, impossible values are named.

null counts as not given.
"""

import math
from collections.abc import Collection, Mapping

from server.doors.errors import ApiError, invalid, missing
from worker.describe import shown
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import WireError, read_object

MAX_SEED = 2**64


class RequestFields:
    """The fields of one object.

    Args:
        given: the object.
        path: its name in the request, before its fields' names; "" for the request itself.
    """

    def __init__(self, given: Mapping[str, object], path: str = ""):
        self.given, self._path = given, path

    @classmethod
    def of_body(cls, body: bytes) -> "RequestFields":
        """The object in a body. Slow for megabytes: call on a thread. Raises: ApiError."""
        try:
            return cls(read_object(body, "body"))
        except WireError as error:
            code = "invalid_json" if error.code is ErrorCode.BAD_JSON else "invalid_value"
            raise ApiError(400, str(error), code=code) from None

    def name(self, key: str) -> str:
        """The field's whole name, for errors."""
        return f"{self._path}{key}"

    def has(self, key: str) -> bool:
        return self.given.get(key) is not None

    def required(self, key: str) -> object:
        """Any value. Raises: ApiError if there is none."""
        value = self.given.get(key)
        if value is None:
            raise missing(self.name(key))
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Raises: ApiError for another type, and for none without a default."""
        value = self.given.get(key)
        if value is None and default is not None:
            return default
        value = self.required(key)
        if not isinstance(value, str):
            raise invalid(self.name(key), expected="text", got=shown(value))
        return value

    def choice(self, key: str, allowed: Collection[str], default: str | None = None) -> str:
        """One of some words."""
        value = self.given.get(key)
        if value is None and default is not None:
            return default
        value = self.required(key)
        if not isinstance(value, str) or value not in allowed:
            raise invalid(self.name(key), expected=f"one of {', '.join(allowed)}", got=shown(value))
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """A number of a range; None if it is not given."""
        value = self.given.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise invalid(self.name(key), expected=f"a number from {low:g} to {high:g}", got=shown(value))
        return float(value)

    def whole(self, key: str, low: int, high: float = math.inf) -> int | None:
        """A whole number of a range; None if it is not given."""
        value = self.given.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            upper = "" if high == math.inf else f" to {high:g}"
            raise invalid(self.name(key), expected=f"a whole number from {low}{upper}", got=shown(value))
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.given.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.name(key), expected="true or false", got=shown(value))
        return value

    def seed(self) -> int | None:
        """`seed`, which may be negative, as a number that the engine takes."""
        value = self.whole("seed", -(2**63), 2**64 - 1)
        return None if value is None else value % MAX_SEED

    def group(self, key: str) -> "RequestFields | None":
        """The fields of an object; None if it is not given."""
        value = self.given.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise invalid(self.name(key), expected="an object", got=shown(value))
        return RequestFields(value, f"{self.name(key)}.")

    def items(self, key: str) -> list[object]:
        """A list; [] if it is not given."""
        value = self.given.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise invalid(self.name(key), expected="a list", got=shown(value))
        return value


def item_fields(item: object, name: str) -> RequestFields:
    """The fields of an object in a list. name: its whole name. Raises: ApiError for another type."""
    if not isinstance(item, Mapping):
        raise invalid(name, expected="an object", got=shown(item))
    return RequestFields(item, f"{name}.")
