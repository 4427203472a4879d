"""`python -m clients.talk --url ws://localhost:8006 --input talk.mp4 --out reply.wav`: a conversation from the shell.

The only file of it that prints. A unit goes out every second, counted from the first; what comes back is told line by
line and laid on the time line. Exit status: 0; 1 if the connection, the server or a unit failed; 2 if what was given
cannot be used; 130 if it is interrupted twice. What there is gets written in any case.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from clients import talk_table
from clients.duplex import DuplexClient, connect
from clients.errors import ClientError
from clients.record import ClientUnitLog, TalkLog
from clients.reply_sound import ReplySound
from clients.sound_card import SoundCard
from clients.talk_options import check, parser, session_config, spec
from clients.units import SILENCE, ClientUnit, FileUnits, Source, read_voice
from models.errors import ModelError
from worker.protocol.messages import Error, Partial, Prepared, Result, Timeout
from worker.protocol.wire import Sound, WireError

FAILED, USAGE, INTERRUPTED = 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    # A row is out when its unit is, also into a pipe; and a terminal that lacks a letter does not end the talk.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        check(args)
        return asyncio.run(_run(args))
    except ModelError as error:
        _note(f"error: {error}")
        return FAILED if isinstance(error, ClientError | WireError) else USAGE
    except OSError as error:
        _note(f"error: {error.filename or 'files'}: expected a place for a file, got {error.strerror or error}")
        return FAILED
    except KeyboardInterrupt:
        _note("interrupted")
        return INTERRUPTED


async def _run(args: argparse.Namespace) -> int:
    source = SoundCard(args.delay_ms) if args.mic else FileUnits.of(args.input, video=not args.no_video, loop=args.loop)
    voice = None if args.voice is None else await asyncio.to_thread(read_voice, args.voice)
    sends_pictures = isinstance(source, FileUnits) and source.has_video
    name = args.session_id or f"{'omni' if sends_pictures else 'adx'}_{uuid.uuid4().hex[:12]}"
    config = session_config(args)
    record = TalkLog()
    with ReplySound(args.out, args.delay_ms) as reply:
        talk = ClientSession(args, source, record, reply)
        try:
            # A card listens from the moment it is opened: not before it is this client's turn.
            async with talk.interruptible(), connect(args.url, name, on_queue=_wait, insecure=args.insecure) as client:
                prepared = await client.prepare(args.prompt, ref_audio=voice, config=config, spec=spec(args))
                _greet(client, prepared)
                async with source:
                    await talk.run(client)
        finally:
            reply.fill(len(record.units))
            if args.transcript is not None and record.units:
                head = {"url": args.url, "session_id": name, "input": "mic" if args.mic else args.input.name}
                head |= {"system": args.prompt, "config": config}
                args.transcript.write_text(record.as_json(head), encoding="utf-8")
            if record.units:
                print(talk_table.closing(record.summary()))
    return FAILED if record.n_failed else 0


class ClientSession:
    """One conversation, from its first unit to its last answer."""

    def __init__(self, args: argparse.Namespace, source: Source, record: TalkLog, reply: ReplySound):
        self._args, self._source, self._record, self._reply = args, source, record, reply
        self._paced = not args.fast and not args.mic  # a sound card has a clock of its own
        self._stop, self._answered = asyncio.Event(), asyncio.Event()
        self._n_tail = 0

    @contextlib.asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """Inside, Ctrl-C ends the conversation; before it has begun, it ends the waiting. A second one breaks off."""
        loop, begun = asyncio.get_running_loop(), asyncio.current_task()

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            if self._record.units:
                self._stop.set()
            else:
                begun.cancel()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            yield
        except asyncio.CancelledError:
            if self._record.units:
                raise
            _note("interrupted before the first unit")
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def run(self, client: DuplexClient) -> None:
        """Raises: ClientError, MediaError."""
        hearing = asyncio.create_task(self._hear(client))
        hearing.add_done_callback(lambda _: self._stop.set())
        try:
            print(talk_table.header())
            await self._send_all(client)
            if not hearing.done():
                await client.stop()
            await hearing
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)

    async def _send_all(self, client: DuplexClient) -> None:
        loop = asyncio.get_running_loop()
        begin = None
        while (unit := await self._until_stop(self._next())) is not None:
            if begin is None:
                begin = loop.time()
            if self._paced:
                await self._until_stop(asyncio.sleep(begin + len(self._record.units) - loop.time()))
            if self._stop.is_set():
                return
            now = loop.time()
            heard_s = len(self._record.units) + 1 if self._args.fast else now - begin + 1
            self._answered.clear()
            self._record.sent(now, heard_s)
            await client.send_unit(unit.sound, unit.jpegs)
            if self._args.fast:
                await self._until_stop(self._answered.wait())

    async def _next(self) -> ClientUnit | None:
        """Units of the input, then silence while the model is still speaking."""
        n = len(self._record.units) - self._n_tail
        unit = None if n == self._args.units or self._n_tail else await self._source.next()
        if unit is not None or self._args.mic or self._n_tail == self._args.tail:
            return unit
        if self._paced:  # what the last unit came to shows within its second
            while self._record.n_open and not self._stop.is_set():
                await self._answered.wait()
                self._answered.clear()
        if not self._record.turn_open:
            return None
        self._n_tail += 1
        return SILENCE

    async def _until_stop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` comes to; None if it is to stop before."""
        working, stopping = asyncio.ensure_future(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _hear(self, client: DuplexClient) -> None:
        loop = asyncio.get_running_loop()
        async for message in client:
            now, done = loop.time(), None
            match message:
                case Partial():
                    self._sound(message, message.audio_data, now)
                case Result():
                    self._sound(message, message.audio_data, now)
                    done = self._record.answered(message, now)
                case Error():
                    done = self._record.failed(message, now)
                    if done is None:
                        _note(f"error {message.code}: {message.error}")
                case Timeout():
                    _note(f"the server ends the conversation: {message.reason}")
            if done is not None:
                self._tell(done)

    def _tell(self, unit: ClientUnitLog) -> None:
        print(talk_table.row(unit))
        self._answered.set()

    def _sound(self, message: Partial | Result, sound: Sound | None, now: float) -> None:
        unit = self._record.current()
        if not sound or unit is None:
            return
        pcm = sound.samples(f"{message.type}.audio_data")
        begin = self._reply.add(unit.arrived_s(now), pcm)
        self._record.sounded(unit, now, len(pcm), begin)
        if isinstance(self._source, SoundCard):
            self._source.play(pcm)


def _greet(client: DuplexClient, prepared: Prepared) -> None:
    told = f"session {client.session_id}"
    if prepared.recording_session_id:
        told += f", recorded as {prepared.recording_session_id}"
    _note(f"{told}; sound travels as {client.spec.sound_out}")
    for note in prepared.notes:
        _note(f"note: {note}")


def _wait(message: Any) -> None:
    _note(talk_table.waiting(message))


def _note(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
