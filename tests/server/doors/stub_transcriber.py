"""A transcriber whose transcripts a test gives."""

from collections.abc import Callable
from dataclasses import dataclass, field

from server.access.identity import Identity
from server.doors.core.transcriber import SpokenInput, TranscriptEnd, WholeTranscript


@dataclass(eq=False)
class StubTranscription:
    """One that has begun. end: reports its end."""

    spoken: SpokenInput
    end: Callable[[TranscriptEnd], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def complete(self, text: str) -> None:
        """Report the whole text."""
        self.end(WholeTranscript(text, self.spoken.seconds))


@dataclass
class StubTranscriber:
    """begun: all transcriptions, in order."""

    is_enabled: bool = True
    begun: list[StubTranscription] = field(default_factory=list)

    def start(
        self,
        session_id: str,
        identity: Identity,
        spoken: SpokenInput,
        on_text: Callable[[str], None],
        on_end: Callable[[TranscriptEnd], None],
    ) -> StubTranscription:
        self.begun.append(StubTranscription(spoken, on_end))
        return self.begun[-1]
