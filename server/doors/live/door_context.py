"""What the doors of live sessions share: the parts of the gateway that a session uses, and bounds of its events."""

from dataclasses import dataclass

from server.admission import Admission
from server.doors.core.chat_turn import ChatTurns
from server.doors.model_names import ModelNames
from server.doors.voices import VoiceNames
from server.live.slot_wait import SlotWait
from server.recording.recordings import Recordings

LARGE_EVENT = 2**18  # characters, from which on an event is read on a thread
IDLE_S = 300.0  # without an event of the client


@dataclass(frozen=True)
class DoorContext:
    """What sessions of the door use."""

    slots: SlotWait
    recordings: Recordings
    admission: Admission
    model_names: ModelNames
    voices: VoiceNames
    turns: ChatTurns
