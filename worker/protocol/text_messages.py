"""The messages that insert text into a running duplex session. Torch-free."""

from typing import Any, Literal

from pydantic import Field

from worker.protocol.codec import FromClient, FromServer
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import WireError

TextRole = Literal["system", "user", "tool"]


class InsertText(FromClient):
    """Insert a text into the context, between the unit before it and the unit after it. Answered with `text_inserted`.

    Legal after `prepare`, also before the first unit, while paused and while the model speaks. It forces no decision.
    A text that does not fit is refused with `context_full`, and the context stays as it was.
    """

    type: Literal["insert_text"] = "insert_text"
    text: str = Field(description="plain text, not empty; control tokens in it are read as characters")
    role: TextRole = Field(
        "user", description="whose message it is in the chat template; tool: the output of a function"
    )

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The object as it is. Raises: WireError bad_message for an empty text."""
        if given.get("text") != "":
            return given
        raise WireError(ErrorCode.BAD_MESSAGE, "insert_text.text", expected="at least one character", got="none")


class TextInserted(FromServer):
    """The text is in the context, in front of the next unit."""

    type: Literal["text_inserted"] = "text_inserted"
    n_rows: int = Field(description="context rows of the text, those of its template included")
