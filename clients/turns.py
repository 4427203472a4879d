"""A half-duplex conversation from the shell: sends a source's sound, prints and logs one line per turn.

Without barge-in no sound is sent from the end of a turn until its answer has been played, as a person with a speaker
would have it; a file waits meanwhile.
"""

import argparse
import asyncio
import json
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from clients.half_duplex import HalfDuplexClient
from clients.reply_sound import ReplySound
from clients.sound_card import SoundCard
from clients.terminal import note
from clients.units import Source
from models.inputs.audio_sizes import SAMPLE_RATE
from worker.protocol.half_duplex_messages import (
    AnswerInterrupted,
    HalfDuplexAnswer,
    HalfDuplexSettings,
    TurnChunk,
    TurnDone,
    TurnHeard,
    TurnTimeout,
    VadState,
)
from worker.protocol.messages import Error
from worker.protocol.wire import SOUND_RATE
from worker.transcript.table import Columns

PIECE_S = 0.5
PIECE = int(PIECE_S * SAMPLE_RATE)
DEAF_S = 0.6  # the server ignores sound for half a second after `prepared`
ECHO_S = 0.8  # after the playback, for the echo that a microphone records
TURN = Columns(("turn",))
# Times in ms. heard: the user's turn; first, answer: from its end to the first sound and to the end of the answer.
FACTS = Columns(("heard", "first", "answer", "sound", "stopped"), min_width=8)


@dataclass
class LoggedTurn:
    """One turn. Times in ms.

    Attributes:
        heard_ms: length of the user's turn.
        first_sound_ms: time from `generating` to the first sound; None without sound.
        answer_ms: time from `generating` to the end of the answer.
        sound_ms: length of the answer's sound.
        stopped: why the answer ended; "" while it is made.
    """

    index: int
    heard_ms: float
    first_sound_ms: float | None = None
    answer_ms: float = 0.0
    sound_ms: float = 0.0
    text: str = ""
    stopped: str = ""

    def row(self) -> str:
        """The turn's line of the table."""
        first = "-" if self.first_sound_ms is None else f"{self.first_sound_ms:.0f}"
        cells = [f"{self.heard_ms:.0f}", first, f"{self.answer_ms:.0f}", f"{self.sound_ms:.0f}", self.stopped]
        return f"{TURN.line([str(self.index)])} {FACTS.line(cells)} | {self.text!r}"


def header() -> str:
    """The names of the columns."""
    return f"{TURN.line(TURN.names)} {FACTS.line(FACTS.names)} | text"


class TurnSession:
    """Sends the sound of a source and logs the turns.

    Attributes:
        turns: the turns so far.
        n_failed: errors of the server.
        seconds: of sound that was sent.
    """

    def __init__(self, args: argparse.Namespace, source: Source, settings: HalfDuplexSettings, reply: ReplySound):
        self._args, self._source, self._reply = args, source, reply
        self._barge_in = settings.vad.barge_in
        self.turns: list[LoggedTurn] = []
        self.n_failed, self.seconds = 0, 0.0
        self.stop = asyncio.Event()
        self._changed = asyncio.Event()  # the user or the server began or ended something
        self._is_speaking = self._is_answering = False
        # On the event loop's clock; `_due` is when the sound to send next has been recorded.
        self._begun = self._due = self._generating = self._plays_until = 0.0

    async def run(self, client: HalfDuplexClient) -> None:
        """Hold the conversation. Raises: ClientError, MediaError."""
        loop = asyncio.get_running_loop()
        self._begun = loop.time()
        receiving = asyncio.create_task(self._receive_all(client))
        receiving.add_done_callback(lambda _: self.stop.set())
        try:
            print(header())
            await asyncio.sleep(DEAF_S)
            self._due = loop.time()
            await self._until_stop(self._send_all(client))
            if not receiving.done():
                await client.stop()
            await receiving
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _until_stop(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, Ctrl-C is pressed or the conversation ends."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _send_all(self, client: HalfDuplexClient) -> None:
        n_units = 0
        while self._args.units is None or n_units < self._args.units:
            unit = await self._source.next()
            if unit is None:
                break
            n_units += 1
            for sound in np.split(unit.sound, [PIECE]):
                await self._send(client, sound)
        silence = np.zeros(PIECE, np.float32)
        for n in range(int(self._args.tail / PIECE_S)):
            if self._is_answering or (n >= 1 / PIECE_S and not self._is_speaking):
                break
            await self._send(client, silence)
        while self._is_answering:
            await self._wait_for_change()

    async def _send(self, client: HalfDuplexClient, sound: np.ndarray) -> None:
        """Send half a second of a file at its time, or of the microphone unless an answer is made or played."""
        loop = asyncio.get_running_loop()
        if self._args.mic:
            plays = loop.time() < self._plays_until + ECHO_S
            if not self._barge_in and (self._is_answering or plays):
                return
        else:
            self._due += PIECE_S
            await asyncio.sleep(self._due - loop.time())
            if not self._barge_in:
                await self._wait_for_playback()
                self._due = max(self._due, loop.time())
        self.seconds += PIECE_S
        await client.send_sound(sound)

    async def _wait_for_playback(self) -> None:
        loop = asyncio.get_running_loop()
        while self._is_answering or loop.time() < self._plays_until:
            if self._is_answering:
                await self._wait_for_change()
            else:
                await asyncio.sleep(self._plays_until - loop.time())

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _receive_all(self, client: HalfDuplexClient) -> None:
        loop = asyncio.get_running_loop()
        async for message in client:
            self._take(message, loop.time())
            self._changed.set()

    def _take(self, message: HalfDuplexAnswer, now: float) -> None:
        match message:
            case VadState():
                self._is_speaking = message.speaking
            case TurnHeard():
                self._is_answering, self._generating = True, now
                self.turns.append(LoggedTurn(len(self.turns) + 1, message.speech_duration_ms))
            case TurnChunk():
                self._add(message, now)
            case AnswerInterrupted():
                self._plays_until = 0.0
                if isinstance(self._source, SoundCard):
                    self._source.drop()
            case TurnDone() if self.turns:
                turn, self._is_answering = self.turns[-1], False
                turn.text, turn.stopped = message.text, message.stopped
                turn.answer_ms = 1000 * (now - self._generating)
                print(turn.row())
            case TurnTimeout():
                note(f"the server ends the conversation: {message.reason}")
            case Error():
                self.n_failed += 1
                note(f"error {message.code}: {message.error}")

    def _add(self, chunk: TurnChunk, now: float) -> None:
        if not chunk.audio_data or not self.turns:
            return
        turn, pcm = self.turns[-1], chunk.audio_data.samples("chunk.audio_data")
        if turn.first_sound_ms is None:
            turn.first_sound_ms = 1000 * (now - self._generating)
        turn.sound_ms += 1000 * len(pcm) / SOUND_RATE
        self._plays_until = max(self._plays_until, now) + len(pcm) / SOUND_RATE
        self._reply.add(now - self._begun, pcm)
        if isinstance(self._source, SoundCard):
            self._source.play(pcm)

    def as_json(self, head: dict[str, Any]) -> str:
        """The transcript as JSON: `head`, then the turns."""
        return json.dumps({**head, "turns": [asdict(turn) for turn in self.turns]}, ensure_ascii=False, indent=1) + "\n"
