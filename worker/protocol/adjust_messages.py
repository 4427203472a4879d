"""The messages that change a running duplex session. Torch-free."""

from typing import Any, Literal

from pydantic import Field

from worker.describe import cut, shown
from worker.protocol.codec import FromClient, FromServer
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import WireError


class Adjust(FromClient):
    """Change the session from the next unit on and keep its context. Answered with `adjusted`.

    Legal after `prepare`, also while paused. All changes take effect, or none: an unknown field is refused with
    `bad_message`, an unknown setting with `bad_config`.
    """

    type: Literal["adjust"] = "adjust"
    config: dict[str, Any] = Field({}, description="settings of the session to change; the others keep their values")
    max_slice_nums: int | None = Field(
        None, ge=1, description="the setting `max_slice_nums`; overrides that of `config`"
    )

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The object itself. Raises: WireError bad_message for an unknown field."""
        unknown = [key for key in given if key not in cls.model_fields]
        if unknown:
            expected = "no field but " + ", ".join(name for name in cls.model_fields if name != "type")
            raise WireError(
                ErrorCode.BAD_MESSAGE, f"adjust.{cut(unknown[0])}", expected=expected, got=shown(given[unknown[0]])
            )
        return given


class Adjusted(FromServer):
    """The session has changed."""

    type: Literal["adjusted"] = "adjusted"
    applied: dict[str, Any] = Field(
        description="`config`: the given settings with their values now in force; `true` for each other given field"
    )
    from_unit: int = Field(ge=1, description="number of the first unit that the changes apply to")
    notes: list[str] = Field([], description="one sentence for each change that takes effect later, or not at all")
