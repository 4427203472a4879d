"""The unit of a session that its worker runs now."""

from dataclasses import dataclass

from worker.protocol.messages import AudioChunk


@dataclass
class UnitInFlight:
    """A unit that the worker runs.

    ran_early: with a piece of its sound. is_discarded: its output belongs to a cancelled response. text: sent so far.
    """

    chunk: AudioChunk
    is_forced: bool
    ran_early: bool = False
    is_discarded: bool = False
    text: str = ""
