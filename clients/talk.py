"""`python -m clients.talk --input assets/warmup.mp4 --out reply.wav`: a conversation from the shell.

Sends one unit per second, or with `--mode half_duplex` sound for turns; prints one line per answer, and writes the
reply on the time line. The output files are also written after an error.

Exit status: 0; 1 if the connection, the server or a unit failed; 2 for invalid arguments or input; 130 if interrupted
twice.
"""

import argparse
import asyncio
import io
import sys
import uuid
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import numpy as np

from clients import talk_table
from clients.duplex import DuplexClient, connect
from clients.errors import ClientError
from clients.half_duplex import connect_half_duplex
from clients.record import TalkLog
from clients.reply_sound import ReplySound
from clients.resumption import ConnectionChange
from clients.sound_card import SoundCard
from clients.talk_options import HALF_DUPLEX_MODE, check, parser, session_config, spec, turn_settings
from clients.terminal import interruptible, note
from clients.turn_wait import SpeechEnd
from clients.turns import TurnSession
from clients.units import ClientUnit, FileUnits, MessageLength, PieceSource, Source, read_voice
from models.errors import ModelError
from models.inputs.audio_sizes import SAMPLE_RATE, UNIT_SAMPLES
from worker.protocol.gateway_messages import Queued, QueueUpdate, SessionMoved, SessionMoving
from worker.protocol.messages import Error, Partial, Prepared, Result, Timeout
from worker.protocol.wire import Sound, WireError

FAILED, USAGE, INTERRUPTED = 1, 2, 130
MOVE_REASONS = {
    "worker_lost": "the worker is lost",
    "draining": "the worker shuts down",
    "memory": "the worker is short of memory",
}
PICTURE_LEAD_S = 0.5  # by which a picture of a file comes before its unit, as from a camera
Value = TypeVar("Value")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write each row at once, also into a pipe, and replace characters that the terminal cannot encode.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        check(args)
        return asyncio.run(_run_turns(args) if args.mode == HALF_DUPLEX_MODE else _run(args))
    except ModelError as error:
        note(f"error: {error}")
        return FAILED if isinstance(error, ClientError | WireError) else USAGE
    except OSError as error:
        note(f"error: {error.filename or 'files'}: expected a writable file path, got {error.strerror or error}")
        return FAILED
    except KeyboardInterrupt:
        note("interrupted")
        return INTERRUPTED


async def _run(args: argparse.Namespace) -> int:
    config = session_config(args)
    speech = SpeechEnd()
    length = MessageLength(speech if config.get("early_unit") == "auto" else None)
    source = (
        SoundCard(args.delay_ms, length)
        if args.mic
        else FileUnits.of(args.input, video=not args.no_video, loop=args.loop)
    )
    voice = None if args.voice is None else await asyncio.to_thread(read_voice, args.voice)
    sends_pictures = isinstance(source, FileUnits) and source.has_video
    name = args.session_id or f"{'omni' if sends_pictures else 'adx'}_{uuid.uuid4().hex[:12]}"
    log = TalkLog()
    with ReplySound(args.out, args.delay_ms) as reply:
        talk = ClientSession(args, source, log, reply, speech, length)
        try:
            # The sound card records from the moment it is opened, so it is opened after the wait in the queue.
            async with (
                talk.interruptible(),
                connect(
                    args.url,
                    name,
                    on_queue=_note_position,
                    on_connection=_note_connection,
                    insecure=args.insecure,
                    key=args.key,
                ) as client,
            ):
                prepared = await client.prepare(args.prompt, ref_audio=voice, config=config, spec=spec(args))
                _note_session(client, prepared)
                if not args.fast:  # the units of the server's sessions are spread over the second
                    await asyncio.sleep((prepared.start_after_ms or 0) / 1000)
                async with source:
                    await talk.run(client)
        finally:
            reply.fill(talk.sent_s)
            if args.transcript is not None and log.units:
                head = {"url": args.url, "session_id": name, "input": "mic" if args.mic else args.input.name}
                head |= {"system": args.prompt, "config": config}
                args.transcript.write_text(log.as_json(head), encoding="utf-8")
            if log.units:
                print(talk_table.closing(log.summary()))
    return FAILED if log.n_failed else 0


async def _run_turns(args: argparse.Namespace) -> int:
    settings = turn_settings(args)
    source = SoundCard(args.delay_ms) if args.mic else FileUnits.of(args.input, video=False, loop=args.loop)
    voice = [] if args.voice is None else [await asyncio.to_thread(read_voice, args.voice)]
    name = args.session_id or f"hdx_{uuid.uuid4().hex[:12]}"
    with ReplySound(args.out, args.delay_ms) as reply:
        talk = TurnSession(args, source, settings, reply)
        try:
            async with (
                interruptible(talk.stop, lambda: talk.seconds > 0, "the first sound"),
                connect_half_duplex(
                    args.url, name, on_queue=_note_position, insecure=args.insecure, key=args.key
                ) as client,
            ):
                prepared = await client.prepare([args.prompt, *voice], settings)
                note(f"session {prepared.session_id}, for {prepared.timeout_s:g} s")
                async with source:
                    await talk.run(client)
        finally:
            if args.transcript is not None and (talk.seconds or talk.turns):
                head = {"url": args.url, "session_id": name, "input": "mic" if args.mic else args.input.name}
                head |= {"mode": args.mode, "system": args.prompt, "config": settings.model_dump()}
                args.transcript.write_text(talk.as_json(head), encoding="utf-8")
    return FAILED if talk.n_failed else 0


class ClientSession:
    """Sends the units of a source and logs the answers, from the first unit to the last answer."""

    def __init__(
        self,
        args: argparse.Namespace,
        source: Source,
        log: TalkLog,
        reply: ReplySound,
        speech: SpeechEnd,
        length: MessageLength,
    ):
        """speech: hears what is sent. length: of each message."""
        self._args, self._log, self._reply = args, log, reply
        self._card = source if isinstance(source, SoundCard) else None
        self._source = source if length.is_whole or self._card is not None else PieceSource(source, length)
        self._length, self._speech = length, speech
        self._n_sent = 0  # samples
        self._paced = not args.fast and not args.mic  # a sound card has a clock of its own
        self._looks_ahead = self._paced and length.is_whole  # pieces have the picture in their middle
        self._stop, self._answered = asyncio.Event(), asyncio.Event()
        self._n_tail = 0  # samples

    def interruptible(self) -> AbstractAsyncContextManager[None]:
        """Inside it, Ctrl-C ends the conversation, or cancels the connecting before the first unit."""
        return interruptible(self._stop, lambda: bool(self._log.units), "the first unit")

    async def run(self, client: DuplexClient) -> None:
        """Hold the conversation. Raises: ClientError, MediaError."""
        receiving = asyncio.create_task(self._receive_all(client))
        receiving.add_done_callback(lambda _: self._stop.set())
        try:
            print(talk_table.header())
            await self._send_all(client)
            if not receiving.done():
                await client.stop()
            await receiving
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _send_all(self, client: DuplexClient) -> None:
        loop = asyncio.get_running_loop()
        start = None
        while (unit := await self._until_stop(self._next())) is not None:
            if start is None:
                start = loop.time()
            if self._looks_ahead:
                await self._send_pictures(client, unit, start + self.sent_s - PICTURE_LEAD_S)
            if self._paced:
                await self._until_stop(asyncio.sleep(start + self.sent_s - loop.time()))
            if self._stop.is_set():
                return
            now, seconds = loop.time(), len(unit.sound) / SAMPLE_RATE
            heard_s = self.sent_s + seconds if self._args.fast else now - start + seconds
            self._answered.clear()
            self._n_sent += len(unit.sound)
            self._speech.push(unit.sound)
            self._length.sent(len(unit.sound))
            self._log.sent(now, heard_s, self._spoken_s(heard_s))
            await client.send_unit(unit.sound, () if self._looks_ahead else unit.jpegs)
            if self._args.fast:
                await self._until_stop(self._answered.wait())

    async def _send_pictures(self, client: DuplexClient, unit: ClientUnit, due: float) -> None:
        """Send a unit's pictures at their time on the loop's clock, as a camera does."""
        if unit.jpegs:
            await self._until_stop(asyncio.sleep(due - asyncio.get_running_loop().time()))
        for jpeg in () if self._stop.is_set() else unit.jpegs:
            await client.send_picture(jpeg)

    @property
    def sent_s(self) -> float:
        """Length of the sound that was sent, in s."""
        return self._n_sent / SAMPLE_RATE

    def _spoken_s(self, heard_s: float) -> float | None:
        """The end of the speech so far on the time line; `heard_s` is that of the last sample."""
        return None if self._speech.end_s is None else heard_s - self.sent_s + self._speech.end_s

    async def _next(self) -> ClientUnit | None:
        """The next unit of the input; at its end silence while a turn goes on; then None."""
        n, most = self._n_sent - self._n_tail, self._args.units
        n_over = self._n_sent % UNIT_SAMPLES
        unit = None if (most and n >= most * UNIT_SAMPLES) or self._n_tail else await self._source.next()
        if unit is not None or self._args.mic or self._n_tail == self._args.tail * UNIT_SAMPLES:
            return unit
        is_whole = not n_over
        if self._paced and is_whole:  # the answer to the last unit decides, and arrives within a second
            while self._log.n_open and not self._stop.is_set():
                await self._answered.wait()
                self._answered.clear()
        if is_whole and not self._log.turn_open:
            return None
        silence = np.zeros(self._length.next(UNIT_SAMPLES - n_over), np.float32)
        self._n_tail += len(silence)
        return ClientUnit(silence)

    async def _until_stop(self, work: Coroutine[Any, Any, Value]) -> Value | None:
        """The result of `work`; None if Ctrl-C or the end of the conversation comes first."""
        working, stopping = asyncio.ensure_future(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _receive_all(self, client: DuplexClient) -> None:
        loop = asyncio.get_running_loop()
        async for message in client:
            now, done = loop.time(), None
            if isinstance(message, Result | Error):
                self._answered.set()
            match message:
                case Partial():
                    self._add_sound(message, message.audio_data, now)
                case Result():
                    self._add_sound(message, message.audio_data, now)
                    self._length.answered(ends_unit=not message.incomplete)
                    done = self._log.answered(message, now)
                case Error():
                    self._length.refused()
                    done = self._log.failed(message, now)
                    if done is None:
                        note(f"error {message.code}: {message.error}")
                case SessionMoving():
                    note(f"{MOVE_REASONS[message.reason]}: waiting for another one")
                case SessionMoved():
                    note(_moved(message))
                case Timeout():
                    note(f"the server ends the conversation: {message.reason}")
            if done is not None:
                print(talk_table.row(done))

    def _add_sound(self, message: Partial | Result, sound: Sound | None, now: float) -> None:
        unit = self._log.current()
        if not sound or unit is None:
            return
        pcm = sound.samples(f"{message.type}.audio_data")
        begin = self._reply.add(unit.arrived_s(now), pcm)
        self._log.sounded(unit, now, len(pcm), begin)
        if self._card is not None:
            self._card.play(pcm)


def _note_session(client: DuplexClient, prepared: Prepared) -> None:
    text = f"session {client.session_id}"
    if prepared.recording_session_id:
        text += f", recorded as {prepared.recording_session_id}"
    note(f"{text}; sound is sent as {client.spec.sound_out}")
    for sentence in prepared.notes:
        note(f"note: {sentence}")


def _moved(message: SessionMoved) -> str:
    """What a move has cost, in words."""
    text = f"another worker goes on after {message.seconds:.1f} s"
    if message.omitted:
        text += f", without the first {message.omitted} s and their {message.omitted_pictures} pictures"
    if message.dropped:
        lost = f"{message.dropped_sound_s:.1f} s of sound and {message.dropped_pictures} pictures"
        text += f"; {lost} are dropped, because workers failed on them"
    return text


def _note_connection(change: ConnectionChange) -> None:
    note(
        f"the conversation goes on after {change.seconds:.1f} s" if change.is_back else "connection lost: trying again"
    )


def _note_position(message: Queued | QueueUpdate) -> None:
    note(talk_table.waiting(message))


if __name__ == "__main__":
    sys.exit(main())
