"""What a result counts for accounts and for cutting a turn: rows, tokens, marks. Torch-free."""

from typing import Annotated

from pydantic import Field

from worker.protocol.codec import FieldGroup, Ms, known_fields


class UnitUsage(FieldGroup):
    """What one unit has cost. The sum over a session's results is the session's cost after its prompt."""

    text_rows: int = Field(0, description="context rows of control tokens and of text inserted since the last unit")
    audio_rows: int = Field(0, description="context rows of sound")
    image_rows: int = Field(0, description="context rows of pictures, without their delimiters")
    text_tokens: int = Field(0, description="text tokens spoken")
    speech_tokens: int = Field(0, description="speech tokens drawn")
    side_tokens: int = Field(0, description="text tokens of the side lane, which are not spoken")


class Mark(FieldGroup):
    """How far a turn has come with a unit."""

    text_chars: int = Field(description="characters of the turn's text so far")
    audio_ms: Ms = Field(description="length of the turn's sound so far, as sent, ms")


UsageField = Annotated[UnitUsage, known_fields(UnitUsage)]
MarkField = Annotated[Mark, known_fields(Mark)]
