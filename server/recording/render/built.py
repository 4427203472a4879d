"""What a timeline becomes: the entries of `recording.json`, and what the replay shows."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from server.recording.timeline import TimelineRecord


class Slide(NamedTuple):
    """A picture of the user's camera. at_s: in the replay. path: relative to the recording's folder."""

    at_s: float
    path: str


class Caption(NamedTuple):
    """What the model has said so far in its turn. at_s: in the replay."""

    at_s: float
    text: str


@dataclass
class BuiltRecording:
    """The content of a recording.

    Attributes:
        mode: `duplex`, or the kind of a recording that consists of turns.
        entries_key: `chunks` or `turns`, where `entries` stand in `recording.json`.
        config: settings of the session.
        seconds: from the start to the last message.
        replay_s: length of the replay.
        notes: one sentence for each shortcoming.
        slides, captions: for the video.
    """

    mode: str
    entries_key: str
    entries: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    replay_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    slides: list[Slide] = field(default_factory=list)
    captions: list[Caption] = field(default_factory=list)


class Builder(Protocol):
    """Reads a timeline, record by record."""

    def add(self, record: TimelineRecord) -> None:
        """Read the next record. Raises: OSError if a file cannot be written."""

    def finish(self) -> BuiltRecording:
        """Complete what is open, after the last record. Raises: OSError."""
