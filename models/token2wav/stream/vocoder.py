"""The host side of the vocoder: voices and sessions in slots, chunks of many sessions in one call, whole utterances.

Contains counts, buckets and leases. Does not contain sockets, clocks, nor the division of tokens into chunks
(`windows`).

A session has two slots. Every call reads the session's current slot and writes the other one. The session moves to the
written slot after the whole call has succeeded, so a refused or failed call has no effect.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.errors import AudioError, SettingsError, SlotError
from models.graphs.compiler import force_eager
from models.graphs.input_block import padded_array
from models.graphs.streams import SideStream
from models.token2wav.backends import Kernels, flow_backend, hift_backend
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.flow.flow_state import REFERENCE_FLOW, FlowRules, FlowSizes, FlowState
from models.token2wav.hift.hift import Hift
from models.token2wav.settings import FRAMES_PER_TOKEN, SILENCE_TOKEN
from models.token2wav.stream import regions
from models.token2wav.stream.chunk import Chunk, check_tokens
from models.token2wav.stream.noise import NOISE_FRAMES, noise_table
from models.token2wav.stream.offline import synthesize
from models.token2wav.stream.region_table import VocoderParts, VocoderRegions, VocoderShapes
from models.token2wav.stream.regions import FlowContext, HiftContext
from models.token2wav.stream.vocode import REFERENCE_RULES, VocodeRules, VocodeState
from models.token2wav.stream.vocoder_future import SessionMove, VocoderFuture, VocoderSession
from models.token2wav.stream.voice_rows import take_rows
from models.token2wav.stream.windows import CHUNK_TOKENS
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_slots import VoiceSlots

__all__ = ["Chunk", "Vocoder"]


class Vocoder:
    """Flow and HiFT over slots: the vocoder of one worker. Not thread-safe.

    On a GPU its work runs on a separate stream. The caller's stream waits for it only where it reads the sounds of
    `speak`.
    """

    def __init__(
        self,
        flow: Flow,
        hift: Hift,
        *,
        sizes: FlowSizes | None = None,
        shapes: VocoderShapes | None = None,
        steps: Sequence[int] = (10,),
        compat: Literal["reference"] | None = None,
        kernels: Kernels = "auto",
        seed: int = 0,
    ):
        """
        Args:
            flow: tokens to mel.
            hift: mel to sound.
            sizes: capacity of the state; None = four sessions and four voices.
            shapes: bucket sizes, limited to what the slots can hold.
            steps: numbers of Euler steps that sessions may choose; the first is the default.
            compat: "reference" trims caches, fades and restarts phases as the public implementation does.
            kernels: "fused" runs on the project's own GPU kernels, "plain" runs the modules as they are. "auto" is
                "fused" if there is a GPU, the sizes are supported, and matrix products use tensor cores under the
                current settings of torch.
            seed: of the noise that speech starts from.
        Raises: SettingsError.
        """
        for name, value, allowed in (
            ("compat", compat, (None, "reference")),
            ("kernels", kernels, ("auto", "plain", "fused")),
        ):
            if value not in allowed:
                raise SettingsError(name, expected=f"one of {allowed}", got=value)
        if flow.config.vocab_size <= SILENCE_TOKEN:
            expected = f"more than {SILENCE_TOKEN}, which is silence"
            raise SettingsError("vocab_size", expected=expected, got=flow.config.vocab_size)
        most = sizes.max_steps if sizes else None
        if not steps or not all(isinstance(n, int) and 1 <= n <= (most or n) for n in steps):
            expected = f"one or more whole numbers from 1 {f'to {most}' if most else 'on'}"
            raise SettingsError("euler steps", expected=expected, got=tuple(steps))
        lookahead = flow.config.encoder.lookahead
        # The last window of a turn may contain a whole lookahead in addition to a chunk.
        max_chunk = CHUNK_TOKENS + lookahead
        self.sizes = sizes or FlowSizes(n_sessions=4, n_voices=4, max_steps=max(steps), max_chunk=max_chunk)
        most = NOISE_FRAMES - HISTORY_FRAMES - FRAMES_PER_TOKEN * self.sizes.max_chunk
        if self.sizes.max_prompt > most:
            raise SettingsError("token2wav sizes: max_prompt", expected=f"at most {most}", got=self.sizes.max_prompt)
        self.shapes = (shapes or VocoderShapes()).fitted(self.sizes)
        self.parts, self.device = VocoderParts(flow, hift), flow.device
        self.lookahead = lookahead
        reference = compat == "reference"
        self.rules = REFERENCE_RULES if reference else VocodeRules()
        self.state = FlowState(flow, self.sizes, REFERENCE_FLOW if reference else FlowRules())
        self.vocode_state = VocodeState.allocate(self.sizes.scratch, flow.config.n_mels, self.device)
        with torch.no_grad():
            self.schedules: dict[int, Schedule] = {n: flow.schedule(n) for n in dict.fromkeys(steps)}
        self.noise = noise_table(flow.config.n_mels, seed).to(self.device)
        self.regions = self._regions(kernels)
        self.voices = VoiceSlots(self.sizes)
        self._stream = SideStream(self.device)
        self._sessions: dict[int, VocoderSession] = {}
        self._next_voices: dict[int, VocoderSession] = {}  # sessions with the voice of their next turn
        self._free = list(range(self.sizes.n_sessions))
        self._grow_plain()

    @property
    def n_free(self) -> int:
        """Sessions that can be opened."""
        return len(self._free)

    @property
    def n_bytes(self) -> int:
        """Size of the state of all slots with as many voices as fit."""
        return self.state.n_bytes + self.vocode_state.n_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the state holds now: `n_bytes` without the rows that no voice has needed yet."""
        return self.state.held_bytes + self.vocode_state.n_bytes

    def use_plain(self, shapes: VocoderShapes | None = None) -> None:
        """Switch to the plain backends between two calls; voices and sessions stay unchanged.

        `regions` becomes a new table, of which nothing is compiled or captured.

        Args:
            shapes: bucket sizes of the new table; None = unchanged.
        Raises: torch.OutOfMemoryError if the rows of all voices do not fit the device.
        """
        self.regions.uncompile()
        if shapes is not None:
            self.shapes = shapes.fitted(self.sizes)
        self.regions = self._regions("plain")
        self._grow_plain()

    def _grow_plain(self) -> None:
        """Take memory for the rows of all voices if the flow is plain: compiled code may copy a tensor as a whole."""
        if "flow" not in self.regions.kernels:
            self.state.grow_voices(self.sizes.voice_frames)

    def prepare(self, voice: Voice, n_steps: int | None = None) -> None:
        """Run a voice's prompt through the flow now, which makes a later `open` with this voice fast.

        Raises: AudioError, SettingsError, SlotError as `open`.
        """
        self._voice_slot(voice, self._checked_steps(n_steps))

    def open(self, voice: Voice, n_steps: int | None = None) -> int:
        """The number of a new session with this voice, at the start of a turn.

        Args:
            voice: the voice of all its chunks.
            n_steps: Euler steps of all its chunks, one of `steps`; None = the first of `steps`.
        Raises: AudioError if the voice does not fit the flow or is too long; SettingsError for other steps; SlotError
            if no slot is free, or there is no room or no memory for another voice. Any error of the device. No slot is
            leased then, but an unused voice may have been evicted.
        """
        n_steps = self._checked_steps(n_steps)
        if not self._free:
            raise SlotError("vocoder session", expected="a free slot", got=f"all {self.sizes.n_sessions} leased")
        voice_slot, number = self._voice_slot(voice, n_steps), self._free[0]
        other = VocoderSession(number + self.sizes.n_sessions, number, voice_slot, voice.n_frames, n_steps)
        session = other.at_turn_start()
        with self._stream.work():
            self._begin([session])
        self.voices.acquire(voice_slot)
        self._sessions[number] = session
        self._free.pop(0)
        return number

    def begin_turn(self, *sessions: int) -> None:
        """Start a new turn in these sessions; the current turn and the sound it holds back are dropped.

        Raises: SlotError. Any error of the device: the sessions are unchanged then.
        """
        self._check_sessions(sessions)
        begun = {number: self._at_turn_start(number) for number in sessions}
        with self._stream.work():
            self._begin(list(begun.values()))
        left = [self._sessions[number].voice for number in sessions if self._next_voices.pop(number, None)]
        self._sessions |= begun
        for voice_slot in left:
            self.voices.release(voice_slot)

    def change_voice(self, session: int, voice: Voice) -> None:
        """Use another voice from the session's next `begin_turn` on, instead of one that was set before.

        Raises: as `open`; the session's voices stay then.
        """
        self._check_sessions([session])
        current = self._sessions[session]
        voice_slot = self._voice_slot(voice, current.n_steps)
        self.voices.acquire(voice_slot)
        if (waiting := self._next_voices.get(session)) is not None:
            self.voices.release(waiting.voice)
        self._next_voices[session] = current.with_voice(voice_slot, voice.n_frames)

    def _at_turn_start(self, number: int) -> VocoderSession:
        session, other = self._sessions[number], self._next_voices.get(number)
        if other is not None:
            session = session.with_voice(other.voice, other.n_prompt)
        return session.at_turn_start()

    def close(self, session: int) -> None:
        """Release a session's slots. Raises: SlotError if it is not open."""
        self._check_sessions([session])
        for held in (self._sessions.pop(session), self._next_voices.pop(session, None)):
            if held is not None:
                self.voices.release(held.voice)
        self._free.append(session)

    def speak(self, chunks: Sequence[Chunk]) -> list[Tensor]:
        """The sound of one chunk for each of several sessions.

        Sessions with the same number of Euler steps share the calls of the regions. A batch that is larger than the
        largest bucket is divided. All chunks succeed or none: after an error every session is unchanged, so the caller
        can retry the same chunks, together or one by one.

        Args:
            chunks: at most one per session.
        Returns: per chunk [n] float32 at 24 kHz on the vocoder's device, an own copy: 960 samples per synthesized
            token. The newest 160 ms are held back until the next chunk, unless this chunk is the last. NaN and infinity
            stay in the session where they arise: its sound is not finite until `begin_turn`.
        Raises: SlotError for a session that is not open or given twice; TokenError for tokens out of range or too few
            tokens; ShapeError for too many; any error of the device.
        """
        with self._stream.work():
            moves, sounds = self._run(chunks)
        self._stream.join(*sounds)
        self._move(moves)
        return sounds

    def start(self, chunks: Sequence[Chunk]) -> VocoderFuture:
        """`speak` without waiting for the sounds: `finish` returns them and moves the sessions.

        Until then, a session must not be in another call, unless `begin_turn` or `close` came between; the pending call
        has no effect on that session then. A future that is never finished has no effect.
        Raises: as `speak`.
        """
        with self._stream.work():
            return VocoderFuture(*self._run(chunks))

    def finish(self, future: VocoderFuture) -> list[np.ndarray]:
        """The sounds of a pending call on the host, in the order of its chunks.

        Raises: any error of the device; all sessions are unchanged then.
        """
        sounds = future.take()
        self._move(future.moves)
        return sounds

    def offline(self, speech_tokens: Sequence[int], voice: Voice, n_steps: int | None = None) -> Tensor:
        """The sound of a whole utterance in one pass, [960 * len(speech_tokens)] float32 at 24 kHz.

        The quality is better than streamed, because every frame attends to all others. Memory grows with the square of
        the length.

        Raises: AudioError, SettingsError, TokenError; ShapeError beyond 82 s, the prompt included.
        """
        flow, hift = self.parts.flow, self.parts.hift
        schedule = self.schedules[self._checked_steps(n_steps)]
        voice.check(flow.config)
        check_tokens("speech tokens", speech_tokens, flow.config.vocab_size, at_least=1)
        return synthesize(flow, hift, speech_tokens, voice, schedule=schedule, noise=self.noise, rules=self.rules)

    def _regions(self, kernels: Kernels) -> VocoderRegions:
        flow = FlowContext(flow_backend(self.parts.flow, kernels), self.state, self.schedules, self.noise)
        hift = HiftContext(hift_backend(self.parts.hift, kernels), self.vocode_state, self.rules)
        return VocoderRegions(self.parts, flow, hift, self.shapes)

    def _begin(self, sessions: list[VocoderSession]) -> None:
        """Set the slots of sessions to the state after their voices' prompts."""
        scratch = self.state.scratch
        for rows in self._batches(len(sessions)):
            part = sessions[rows]
            size = self.shapes.fit("begin", "batch", len(part))
            slots = padded_array([session.slot for session in part], size, scratch)
            self.regions.run(regions.begin, slots, padded_array([s.voice for s in part], size, scratch))

    def _run(self, chunks: Sequence[Chunk]) -> tuple[dict[int, SessionMove], list[Tensor]]:
        """Run all chunks. Returns: the moves by session; the sounds by chunk."""
        self._check(chunks)
        done: dict[int, tuple[VocoderSession, Tensor]] = {}
        for n_steps in self.schedules:
            group = [chunk for chunk in chunks if self._sessions[chunk.session].n_steps == n_steps]
            for rows in self._batches(len(group)):
                part = group[rows]
                done |= zip((chunk.session for chunk in part), self._run_batch(part, n_steps), strict=True)
        moves = {number: SessionMove(self._sessions[number], after) for number, (after, _) in done.items()}
        return moves, [done[chunk.session][1] for chunk in chunks]

    def _run_batch(self, chunks: list[Chunk], n_steps: int) -> list[tuple[VocoderSession, Tensor]]:
        """Run chunks as one batch. Returns: per chunk, the session after it and the sound."""
        sessions = [self._sessions[chunk.session] for chunk in chunks]
        counts = [chunk.n_synthesized(self.lookahead) for chunk in chunks]
        size = self.shapes.fit("flow", "batch", len(chunks))
        count = self.shapes.fit("flow", "speech_tokens", max(counts))
        seen = max(session.n_seen for session in sessions)
        columns = self.shapes.fit("flow", "columns", seen + FRAMES_PER_TOKEN * count)
        scratch = self.state.scratch
        slots = padded_array([session.slot for session in sessions], size, scratch)
        targets = padded_array([session.next_slot for session in sessions], size, scratch)
        speech_tokens = np.zeros((size, count + self.lookahead), np.int64)
        for row, chunk in enumerate(chunks):
            speech_tokens[row, : len(chunk.speech_tokens)] = chunk.speech_tokens
        last = padded_array([bool(chunk.last) for chunk in chunks], size, False)
        n_speech_tokens = padded_array([len(chunk.speech_tokens) for chunk in chunks], size, 0)
        width = columns - FRAMES_PER_TOKEN * count
        inputs = slots, targets, speech_tokens, n_speech_tokens, last
        mel = self.regions.run(regions.flow_chunk, *inputs, width=width, n_steps=n_steps)
        n_new = padded_array([FRAMES_PER_TOKEN * n for n in counts], size, 0)
        wave, _ = self.regions.run(regions.vocode_chunk, slots, targets, mel, n_new, last)
        done = [
            session.after_chunk(FRAMES_PER_TOKEN * n, chunk.last, self.rules)
            for session, n, chunk in zip(sessions, counts, chunks, strict=True)
        ]
        return [(session, wave[row, :n].clone()) for row, (session, n) in enumerate(done)]

    def _move(self, moves: dict[int, SessionMove]) -> None:
        """Move sessions to the end of their chunks, except those that began a turn or were closed since."""
        for number, move in moves.items():
            if self._sessions.get(number) is move.before:
                self._sessions[number] = move.after

    def _batches(self, n: int) -> Iterator[slice]:
        most = self.shapes.batch[-1]
        return (slice(start, start + most) for start in range(0, n, most))

    def _voice_slot(self, voice: Voice, n_steps: int) -> int:
        """The slot with the voice's state for this number of Euler steps; prepares the voice if there is none.

        Its rows take memory of the device unless an earlier voice had them; memory of evicted voices is kept.
        """
        voice.check(self.parts.flow.config)
        key = (voice.digest, n_steps)
        if (slot := self.voices.find(key)) is not None:
            return slot
        if voice.n_frames > self.sizes.max_prompt:
            got = f"{voice.n_frames}"
            raise AudioError("voice: mel frames", expected=f"at most {self.sizes.max_prompt}", got=got)
        size = self.shapes.fit("voice", "prompt", voice.n_frames)
        with self._stream.work():
            slot, start = take_rows(self.voices, self.state, key, voice.n_frames)
            try:
                self._run_prompt(voice, n_steps, size, slot, start)
            except BaseException:
                self.voices.evict(slot)  # `find` must not return a voice whose preparation failed
                raise
        return slot

    def _run_prompt(self, voice: Voice, n_steps: int, size: int, slot: int, start: int) -> None:
        speech_tokens = np.zeros((1, size // FRAMES_PER_TOKEN + self.lookahead), np.int64)
        seen = torch.cat((voice.speech_tokens, torch.full((self.lookahead,), SILENCE_TOKEN)))
        speech_tokens[0, : len(seen)] = seen
        mel = torch.zeros(1, size, voice.mel.shape[1])
        mel[0, : voice.n_frames] = voice.mel
        numbers = [padded_array([value], 1, 0) for value in (slot, start)]
        inputs = *numbers, speech_tokens, padded_array([len(seen)], 1, 0), mel.numpy(), voice.speaker[None].numpy()
        # Uncompiled: a prompt runs once per voice and may have any length.
        with force_eager():
            self.regions.run(regions.prepare_voice, *inputs, n_steps=n_steps)

    def _checked_steps(self, n_steps: int | None) -> int:
        n_steps = next(iter(self.schedules)) if n_steps is None else n_steps
        if n_steps not in self.schedules:
            raise SettingsError("euler steps", expected=f"one of {tuple(self.schedules)}", got=n_steps)
        return n_steps

    def _check_sessions(self, sessions: Sequence[int]) -> None:
        if not sessions or len(set(sessions)) != len(sessions) or any(s not in self._sessions for s in sessions):
            expected = f"different ones of {sorted(self._sessions)}"
            raise SlotError("vocoder sessions", expected=expected, got=list(sessions))

    def _check(self, chunks: Sequence[Chunk]) -> None:
        self._check_sessions([chunk.session for chunk in chunks])
        vocab_size = self.parts.flow.config.vocab_size
        for chunk in chunks:
            what = f"speech tokens of session {chunk.session}"
            check_tokens(what, chunk.speech_tokens, vocab_size, at_least=1 if chunk.last else self.lookahead + 1)
            self.shapes.fit(what, "speech_tokens", chunk.n_synthesized(self.lookahead))
