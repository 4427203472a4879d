"""What the doors of live sessions share: the parts of the gateway that a session uses, and bounds of its events."""

from dataclasses import dataclass, field

from server.access.usage import DayUsage
from server.admission import Admission
from server.doors.core.chat_turn import ChatTurns
from server.doors.core.picture_urls import PictureUrls
from server.doors.core.transcriber import Transcriber
from server.doors.live.truncation import SlotWindow
from server.doors.model_names import ModelNames
from server.doors.voices import VoiceNames
from server.live.live_client import OtherGateways
from server.live.slot_wait import SlotWait
from server.recording.recordings import Recordings

LARGE_EVENT = 2**18  # characters, from which on an event is read on a thread


@dataclass(frozen=True)
class SessionLimits:
    """How long a session may last.

    session_s: in all. idle_s: without an accepted event of the client. audio_mode_s, video_mode_s: in all, of sessions
    of MiniCPM-o clients; None: as all others. resume_grace_s: without a connection, if clients may resume the session.
    """

    session_s: float = 3600.0
    idle_s: float = 300.0
    audio_mode_s: float | None = None
    video_mode_s: float | None = None
    resume_grace_s: float = 30.0


@dataclass(frozen=True)
class DoorContext:
    """What sessions of the door use.

    live_barge_in_ms: speech that silences a reply of GPT-Live; 0: none does. others: gateways of a cluster, which may
    have a session; None: there are none.
    """

    slots: SlotWait
    recordings: Recordings
    admission: Admission
    model_names: ModelNames
    voices: VoiceNames
    turns: ChatTurns
    transcriber: Transcriber
    usage: DayUsage
    limits: SessionLimits = SessionLimits()
    live_barge_in_ms: int = 0
    slot: SlotWindow = field(default_factory=SlotWindow)
    picture_urls: PictureUrls = field(default_factory=PictureUrls)
    others: OtherGateways | None = None
