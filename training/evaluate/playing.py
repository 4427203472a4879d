"""Plays cases through a gateway over the duplex protocol, one unit after the other.

A unit is sent when the result of the one before has come; with `real_time` also not before its second is over, and its
picture half a second before that, as the page does. Decisions depend on the order of units only, so that both give the
same conversation but for rounding.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from clients.duplex import DuplexClient, connect
from clients.errors import ClientError
from training.evaluate.acts import LEAD_UNITS, Act, Appear, Case, Happened, HeardUnit, Idle, Played, Say, Show
from training.scenes.render import jpeg
from training.timelines.layout import SYSTEM
from training.timelines.speech import RATE, Samples
from training.timelines.stage import heard_in
from training.timelines.timeline import Picture, View
from worker.protocol.messages import Error, Result, Spec, Timeout
from worker.protocol.wire import Sound

LOG = logging.getLogger(__name__)
PATIENCE = 4  # units in which a reply has to begin
SETTLED = 2  # silent units after which a reply is over
MAX_REPLY = 20  # units
LOUD = 0.003  # root mean square of a unit that speaks; speech has about 0.08
UNIT_MS = 1000.0
PICTURE_LEAD_S = 0.5  # by which a picture comes before its unit in real time
RESULT_S = 120.0
QUALITY = 80  # of JPEG files, as the page sends them
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
SPEC = Spec(sound_in="pcm16", sound_out="pcm16")

Render = Callable[[Picture], bytes]


def photograph(picture: Picture) -> bytes:
    """The JPEG file of a picture."""
    return jpeg(picture.render(), QUALITY)


async def play_all(
    url: str,
    cases: Sequence[Case],
    *,
    concurrency: int = 2,
    real_time: bool = False,
    render: Render = photograph,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> list[Played]:
    """Play all cases, in their order, at most `concurrency` at once. settings: of the sessions."""
    waiting = list(reversed(cases))
    done: dict[str, Played] = {}

    async def play_some() -> None:
        while waiting:
            case = waiting.pop()
            done[case.name] = await play(url, case, real_time=real_time, render=render, settings=settings)
            LOG.info("%d of %d: %s, %d units", len(done), len(cases), case.name, len(done[case.name].units))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(play_some())
    return [done[case.name] for case in cases]


async def play(
    url: str,
    case: Case,
    *,
    real_time: bool = False,
    render: Render = photograph,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> Played:
    """Play one case. A session that cannot begin, or breaks off, has an `error`."""
    played = Played(case)
    try:
        async with connect(url, f"evaluate_{case.name}") as client:
            config = {"seed": case.seed, "generate_audio": case.is_voiced, **settings}
            await client.prepare(SYSTEM, config=config, spec=SPEC)
            await Player(client, played, real_time=real_time, render=render).run()
            await client.stop()
    except ClientError as error:
        played.error = str(error)
    return played


class Player:
    """One session. played: what came of it so far."""

    def __init__(self, client: DuplexClient, played: Played, *, real_time: bool, render: Render):
        self.played = played
        self._client, self._render, self._real_time = client, render, real_time
        self._view: View | None = None
        self._pending = np.zeros(0, np.float32)  # sound from the next unit on
        self._noise = np.random.default_rng(played.case.seed)
        self._begun = time.monotonic()

    async def run(self) -> None:
        """Play all acts. Raises: ClientError."""
        await self._idle(LEAD_UNITS)
        for act in self.played.case.acts:
            if self._now >= self.played.case.max_units:
                return
            self.played.happened.append(await self._do(act))

    @property
    def _now(self) -> int:
        return len(self.played.units)

    async def _do(self, act: Act) -> Happened:
        first = self._now
        match act:
            case Say():
                return await self._say(act)
            case Show():
                self._view = None if act.view is None else _from(act.view, first)
            case Appear():
                self._view = _from(act.view, first)
                await self._wait_for_reply(first)
            case Idle():
                await self._idle(act.units)
        return Happened(act, float(first), float(self._now), self._now)

    async def _say(self, act: Say) -> Happened:
        reached = not act.after or await self._wait_until_speaking(act.after)
        start = self._now + act.phase
        self._add(act.sound, act.phase)
        end = start + len(act.sound) / RATE
        complete = heard_in(end)
        while self._now <= complete:
            await self._unit()
        if act.waits:
            await self._wait_for_reply(complete)
        return Happened(act, start, end, self._now, reached)

    async def _wait_for_reply(self, first: int) -> None:
        """Wait until a reply that begins in unit `first` or later is over, or none has begun in time."""
        while self._now < first + MAX_REPLY:
            speaks = self.played.speaks[first:]
            if not any(speaks) and len(speaks) > PATIENCE:
                return
            if any(speaks) and len(speaks) > SETTLED and not any(speaks[-SETTLED:]):
                return
            await self._unit()

    async def _wait_until_speaking(self, n_units: int) -> bool:
        for _ in range(PATIENCE + n_units):
            if self._now >= n_units and all(self.played.speaks[-n_units:]):
                return True
            await self._unit()
        return all(self.played.speaks[-n_units:])

    async def _idle(self, n_units: int) -> None:
        for _ in range(n_units):
            await self._unit()

    def _add(self, sound: Samples, phase: float) -> None:
        first = round(phase * RATE)
        room = max(len(self._pending), first + len(sound))
        self._pending = np.pad(self._pending, (0, room - len(self._pending)))
        self._pending[first : first + len(sound)] += sound

    async def _unit(self) -> None:
        sound = np.pad(self._pending[:RATE], (0, max(0, RATE - len(self._pending))))
        self._pending = self._pending[RATE:]
        sound = sound + self.played.case.noise * self._noise.standard_normal(RATE, np.float32)
        pictures = [] if self._view is None else [await asyncio.to_thread(self._render, self._view.picture(self._now))]
        if self._real_time:
            due = self._begun + self._now + 1
            await _sleep_until(due - PICTURE_LEAD_S)
            while pictures:
                await self._client.send_picture(pictures.pop(0))
            await _sleep_until(due)
        sent = time.monotonic()
        await self._client.send_unit(sound.clip(-1, 1), pictures)
        result = await self._result()
        ms = UNIT_MS * (time.monotonic() - sent)
        self.played.units.append(heard(result, ms))

    async def _result(self) -> Result:
        got = "the end of the session"
        try:
            async with asyncio.timeout(RESULT_S):
                async for message in self._client:
                    if isinstance(message, Result):
                        return message
                    if isinstance(message, Error | Timeout):
                        got = message.model_dump_json()
                        break
        except TimeoutError:
            got = f"nothing for {RESULT_S:.0f} s"
        raise ClientError(f"unit {self._now}", expected="a result", got=got)


async def _sleep_until(due: float) -> None:
    """due: s of `time.monotonic`; returns at once if that is over."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))


def heard(result: Result, ms: float) -> HeardUnit:
    """The unit of a result. ms: from sending to the result."""
    sound = np.zeros(0, np.float32)
    if isinstance(result.audio_data, Sound):
        sound = result.audio_data.samples("result.audio_data")
    is_loud = bool(len(sound)) and float(np.sqrt(np.square(sound).mean())) > LOUD
    return HeardUnit(
        text=result.text,
        sound=sound,
        speaks=is_loud or bool(result.text.strip()),
        listens=result.is_listen,
        ends=result.end_of_turn,
        ms=ms,
        is_late=ms > UNIT_MS,
    )


def _from(view: View, unit: int) -> View:
    return View(view.shown, view.look, unit, view.movement)
