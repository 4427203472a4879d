"""The worker of a live session: a lost one is replaced, and the new context begins with the conversation's texts."""

import asyncio
import logging
import time
from collections import deque
from typing import Protocol

from server.dispatch.dispatcher import PendingSession
from server.doors.core.unit_session import UnitSession
from server.doors.live.unit_lane import LiveLane
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.slot_wait import SlotWait
from server.live.worker_link import WorkerLostError
from worker.protocol.messages import Prepare
from worker.protocol.text_messages import InsertText

LOG = logging.getLogger(__name__)
REPLACE_WAIT_S = 30.0  # for a slot, after a worker is lost
MAX_LOSSES, LOSSES_S = 3, 120.0  # workers that one session may lose within this time


class ContextSource(Protocol):
    """The session whose contexts are begun. configured: set once the first one may begin."""

    @property
    def configured(self) -> asyncio.Event: ...

    @property
    def lane(self) -> LiveLane:
        """Its units."""

    def prepare(self) -> Prepare:
        """The message that begins a context."""

    def history(self) -> list[InsertText]:
        """The texts that come before the context's first unit."""

    def on_worker_lost(self) -> None:
        """The context is lost; another one begins."""


async def run_units(
    slots: SlotWait, live: LiveSession, recorder: Recorder, source: ContextSource, pending: PendingSession
) -> None:
    """Pass units to a worker, and to another one if it is lost, until a worker ends the session by itself.

    pending: the session's ticket for the first slot.
    Raises: SessionEnd; TimeoutError if no slot is free for the replacement; WorkerLostError after `MAX_LOSSES`.
    """
    lost_at: deque[float] = deque(maxlen=MAX_LOSSES)
    while True:
        units = UnitSession(slots, live, recorder)
        try:
            async with asyncio.timeout(REPLACE_WAIT_S if lost_at else None):
                await units.open(pending)
            await source.configured.wait()
            source.lane.attach(units, source.prepare(), source.history())
            await units.run(source.lane)
            return
        except WorkerLostError as error:
            source.lane.detach()
            source.on_worker_lost()
            lost_at.append(time.monotonic())
            if len(lost_at) == MAX_LOSSES and lost_at[-1] - lost_at[0] < LOSSES_S:
                raise
            LOG.warning("session %s begins again: %s", live.session_id, error)
        finally:
            await units.close(graceful=False)
        pending = slots.submit("audio_duplex", live.session_id, live.identity, live.needs)
