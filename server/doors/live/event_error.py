"""The errors of a session that are sent to its client."""

import re

from pydantic import ValidationError

from worker.describe import cut

MAX_SHOWN = 60  # characters of a value in an error
# Names that pydantic gives the branches of a union, which are no fields.
BRANCH = re.compile(r"(constrained-)?(int|str|float|bool)|(literal|dict|list)\[.*")


class EventError(Exception):
    """A client's event is refused; the session goes on.

    Attributes:
        code: word for programs.
        message: text for people.
        param: name of the invalid field.
        type: class of the error.
    """

    def __init__(self, code: str, message: str, param: str | None = None, type: str = "invalid_request_error"):
        super().__init__(message)
        self.code, self.message, self.param, self.type = code, message, param, type

    def fields(self, event_id: str | None) -> dict[str, object]:
        """The content of `error` in the event. event_id: of the client's event."""
        return {
            "type": self.type,
            "code": self.code,
            "message": self.message,
            "param": self.param,
            "event_id": event_id,
        }


class EventRefusedError(Exception):
    """An event that cannot be read. event_id: of the event, if it has one. error: for the client."""

    def __init__(self, event_id: str | None, error: EventError):
        super().__init__(error.message)
        self.event_id, self.error = event_id, error


def invalid_value(param: str, *, expected: object, got: object) -> EventError:
    """The error of a field with an impossible value."""
    return EventError("invalid_value", f"{param}: expected {expected}, got {str(got)[:MAX_SHOWN]}", param)


def of_validation(error: ValidationError, prefix: str = "") -> EventError:
    """The error of the first invalid field, without the invalid input. prefix: of the field's name."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = prefix
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not BRANCH.fullmatch(part):
            name = cut(part)  # clients choose the names of unknown fields
            param += f".{name}" if param else name
    param = param or "event"
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return EventError(code, f"{param}: {first['msg'].removeprefix('Value error, ')}", param)
