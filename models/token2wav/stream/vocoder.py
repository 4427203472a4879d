"""Host side of the vocoder: voices and sessions in slots, chunks of many sessions in one call, whole utterances.

Knows counts, buckets and leases. Does not know sockets, time, nor where codes come from (`windows` cuts them).
A session has two slots. Every call reads the one where the session stands and writes the other, and moves its sessions
over once all of it has succeeded: one that is refused or fails half-way has not happened.
"""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from models.errors import AudioError, SettingsError, ShapeError, SlotError, TokenError
from models.graphs.compiler import force_eager
from models.graphs.input_block import padded_array
from models.graphs.streams import SideStream
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.flow.flow_state import REFERENCE_FLOW, FlowRules, FlowSizes, FlowState
from models.token2wav.hift.hift import Hift
from models.token2wav.settings import FRAMES_PER_TOKEN, SAMPLES_PER_TOKEN, SILENCE_TOKEN
from models.token2wav.stream.fused_choice import Kernels, fused_flow, fused_hift
from models.token2wav.stream.noise import NOISE_FRAMES, noise_table
from models.token2wav.stream.region_table import VocoderParts, VocoderRegions, VocoderShapes
from models.token2wav.stream.vocode import REFERENCE_RULES, VocodeRules, VocodeState, vocode
from models.token2wav.stream.vocoder_future import VocoderFuture, VocoderSession
from models.token2wav.stream.windows import CHUNK_TOKENS
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_slots import VoiceSlots

Taken = TypeVar("Taken")


class Chunk(NamedTuple):
    """One session's codes for one call, the look-ahead included unless `last`."""

    session: int
    speech_tokens: Sequence[int]
    last: bool = False


class Vocoder:
    """Flow and HiFT over slots. One instance is one worker's vocoder; not thread-safe.

    On a GPU it has a stream of its own: nothing of what it does waits for the caller's work or holds it up, but that
    the sounds of `speak` are there when they are read.
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
            steps: the numbers of Euler steps that sessions may ask for.
            compat: "reference" forgets, fades and restarts phases as the public implementation does.
            kernels: "fused" speaks by the project's own GPU kernels, "plain" by the modules as they are; "auto" takes
                the first where there is a GPU, sizes suit them and products run on tensor cores, as is set by now.
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
        # The last window of a turn may hold a whole look-ahead beside a chunk.
        max_chunk = CHUNK_TOKENS + lookahead
        self.sizes = sizes or FlowSizes(n_sessions=4, n_voices=4, max_steps=max(steps), max_chunk=max_chunk)
        most = NOISE_FRAMES - HISTORY_FRAMES - FRAMES_PER_TOKEN * self.sizes.max_chunk
        if self.sizes.max_prompt > most:
            raise SettingsError("token2wav sizes: max_prompt", expected=f"at most {most}", got=self.sizes.max_prompt)
        self.shapes = (shapes or VocoderShapes()).fitted(self.sizes)
        self.parts, self.device = VocoderParts(flow, hift), flow.device
        self.lookahead = lookahead
        reference = compat == "reference"
        flow_rules = REFERENCE_FLOW if reference else FlowRules()
        self.rules = REFERENCE_RULES if reference else VocodeRules()
        self.state = FlowState(flow, self.sizes, flow_rules)
        self.vocode_state = VocodeState.allocate(self.sizes.scratch, flow.config.n_mels, self.device)
        with torch.no_grad():
            self.schedules: dict[int, Schedule] = {n: flow.schedule(n) for n in dict.fromkeys(steps)}
        self.noise = noise_table(flow.config.n_mels, seed).to(self.device)
        self.regions = self._regions(kernels)
        self.voices = VoiceSlots(self.sizes)
        self._stream = SideStream(self.device)
        self._sessions: dict[int, VocoderSession] = {}
        self._free = list(range(self.sizes.n_sessions))

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_bytes(self) -> int:
        """Of the state of all slots."""
        return self.state.n_bytes + self.vocode_state.n_bytes

    def use_plain(self, shapes: VocoderShapes | None = None) -> None:
        """Speak by the modules as they are from now on, between two calls; voices and sessions stay what they are.

        `regions` is another table then, of which nothing is compiled or captured.
        Args: shapes: its sizes; None: as they were.
        """
        self.regions.uncompile()
        if shapes is not None:
            self.shapes = shapes.fitted(self.sizes)
        self.regions = self._regions("plain")

    def prepare(self, voice: Voice, n_steps: int | None = None) -> None:
        """Run a voice's prompt through the flow now, so that opening a session with it later is quick.

        Raises: AudioError, SettingsError, SlotError as `open`.
        """
        self._voice_slot(voice, self._checked_steps(n_steps))

    def open(self, voice: Voice, n_steps: int | None = None) -> int:
        """A session with this voice, at the start of a turn.

        Args: n_steps: Euler steps of all its chunks, one of `steps`; None = the first of them.
        Returns: the session's number.
        Raises: AudioError if the voice does not fit the flow or is too long; SettingsError for other steps; SlotError
            if no slot is free, or no room for one more voice. Whatever the device raises: nothing is taken then,
            though an unused voice may have made room.
        """
        n_steps = self._checked_steps(n_steps)
        if not self._free:
            raise SlotError("vocoder session", expected="a free slot", got=f"all {self.sizes.n_sessions} leased")
        voice_slot, number = self._voice_slot(voice, n_steps), self._free[0]
        new = VocoderSession(number + self.sizes.n_sessions, number, voice_slot, voice.n_frames, n_steps).begun()
        with self._stream.work():
            self._begin([new])
        self.voices.hold(voice_slot)
        self._sessions[number] = new
        self._free.pop(0)
        return number

    def begin_turn(self, *sessions: int) -> None:
        """Forget the turn of these sessions, held-back sound included, and start a new one.

        Raises: SlotError. Whatever the device raises: the sessions are where they were then.
        """
        self._check_sessions(sessions)
        begun = {number: self._sessions[number].begun() for number in sessions}
        with self._stream.work():
            self._begin(list(begun.values()))
        self._sessions |= begun

    def close(self, session: int) -> None:
        """Give a session's slot back. Raises: SlotError if it is not open."""
        self._check_sessions([session])
        self.voices.let_go(self._sessions.pop(session).voice)
        self._free.append(session)

    def speak(self, chunks: Sequence[Chunk], take: Callable[[list[Tensor]], Taken] = list) -> Taken:
        """Sound of one chunk for each of several sessions.

        Sessions of the same number of Euler steps share the call's regions; a batch larger than the largest bucket
        is cut. All chunks are spoken or none: after any error every session is where it was before, so that the
        caller may try the same chunks again, or each of them alone.
        Args: take: given the sounds, makes of them what is returned. It is part of the call: copied to the host in
            it, sounds that do not arrive have not been spoken.
        Returns: per chunk [n] float32 at 24 kHz on the vocoder's device, its own copy: 960 samples a voiced code, of
            which the newest 160 ms wait for the next chunk unless this is the last. Numbers that are not finite
            reach only the session that they arose in: its sound is not finite from then on, until `begin_turn`.
        Raises: SlotError for a session that is not open or named twice; TokenError for codes out of range or too
            few; ShapeError for too many. Whatever the device or `take` raises.
        """
        with self._stream.work():
            moves, sounds = self._launch(chunks)
        self._stream.join(*sounds)
        taken = take(sounds)
        self._move(moves)
        return taken

    def offline(self, speech_tokens: Sequence[int], voice: Voice, n_steps: int | None = None) -> Tensor:
        """A whole utterance in one pass: better than streamed, since every frame sees all others.

        What it needs grows with the square of the length.

        Returns: [960 * len(codes)] float32 at 24 kHz.
        Raises: AudioError, SettingsError, TokenError; ShapeError beyond 82 s, the prompt included.
        """
        flow, hift = self.parts.flow, self.parts.hift
        schedule = self.schedules[self._checked_steps(n_steps)]
        voice.check(flow.config)
        self._check_tokens("speech_tokens", speech_tokens, at_least=1)
        n_prompt, n_all = len(voice.speech_tokens), len(voice.speech_tokens) + len(speech_tokens)
        most = NOISE_FRAMES // FRAMES_PER_TOKEN - n_prompt
        if len(speech_tokens) > most:
            raise ShapeError(
                "codes in one pass", expected=f"at most {most} with this voice; stream more", got=len(speech_tokens)
            )
        # Each utterance has a length of its own: compiled for that, a region would never be used again.
        with torch.no_grad(), force_eager():
            ids = torch.tensor([[*voice.speech_tokens.tolist(), *speech_tokens]], device=self.device)
            prompt = torch.zeros(1, FRAMES_PER_TOKEN * n_all, flow.config.n_mels, device=self.device)
            prompt[:, : voice.n_frames] = voice.mel.to(self.device)
            mel = flow.offline(
                ids,
                torch.tensor([n_all], device=self.device),
                prompt.to(flow.dtype),
                flow.speaker(voice.speaker[None].to(self.device)),
                self.noise[None, : prompt.shape[1]],
                schedule,
            )[:, FRAMES_PER_TOKEN * n_prompt :]
            state = VocodeState.allocate(0, flow.config.n_mels, self.device)
            slot, n_frames = torch.tensor([[0], [mel.shape[1]]], device=self.device)
            whole = torch.ones(1, dtype=torch.bool, device=self.device)
            wave, _ = vocode(hift, state, slot, mel.transpose(1, 2), n_frames, whole, self.rules)
        return wave[0, : SAMPLES_PER_TOKEN * len(speech_tokens)]

    def _regions(self, kernels: Kernels) -> VocoderRegions:
        state, settled = (self.state, self.vocode_state), (self.schedules, self.noise, self.rules, self.shapes)
        fused = fused_flow(self.parts.flow, kernels), fused_hift(self.parts.hift, kernels)
        return VocoderRegions(self.parts, *state, *settled, *fused)

    def _begin(self, sessions: list[VocoderSession]) -> None:
        """Put the slots of sessions that are to begin a turn where their voices ended."""
        scratch = self.state.scratch
        for rows in self._batches(len(sessions)):
            part = sessions[rows]
            size = self.shapes.fit("begin", "batch", len(part))
            slots = padded_array([session.slot for session in part], size, scratch)
            self.regions("begin", slots, padded_array([s.voice for s in part], size, scratch))

    def _speak(self, chunks: list[Chunk], n_steps: int) -> list[tuple[VocoderSession, Tensor]]:
        """One batch. Returns: per chunk where its session goes, and the sound."""
        sessions = [self._sessions[chunk.session] for chunk in chunks]
        n_voiced = [len(chunk.speech_tokens) - self.lookahead * (not chunk.last) for chunk in chunks]
        size = self.shapes.fit("flow", "batch", len(chunks))
        count = self.shapes.fit("flow", "speech_tokens", max(n_voiced))
        seen = max(session.n_seen for session in sessions)
        columns = self.shapes.fit("flow", "columns", seen + FRAMES_PER_TOKEN * count)
        scratch = self.state.scratch
        slots = padded_array([session.slot for session in sessions], size, scratch)
        targets = padded_array([session.spare for session in sessions], size, scratch)
        speech_tokens = np.zeros((size, count + self.lookahead), np.int64)
        for row, chunk in enumerate(chunks):
            speech_tokens[row, : len(chunk.speech_tokens)] = chunk.speech_tokens
        last = padded_array([bool(chunk.last) for chunk in chunks], size, False)
        n_speech_tokens = padded_array([len(chunk.speech_tokens) for chunk in chunks], size, 0)
        mel = self.regions(
            "flow",
            slots,
            targets,
            speech_tokens,
            n_speech_tokens,
            last,
            width=columns - FRAMES_PER_TOKEN * count,
            n_steps=n_steps,
        )
        n_new = padded_array([FRAMES_PER_TOKEN * n for n in n_voiced], size, 0)
        wave, _ = self.regions("hift", slots, targets, mel, n_new, last, rules=self.rules)
        spoken = [
            session.spoken(FRAMES_PER_TOKEN * n, chunk.last, self.rules)
            for session, n, chunk in zip(sessions, n_voiced, chunks, strict=True)
        ]
        return [(session, wave[row, :n].clone()) for row, (session, n) in enumerate(spoken)]

    def _batches(self, n: int) -> Iterator[slice]:
        most = self.shapes.batch[-1]
        return (slice(start, start + most) for start in range(0, n, most))

    def _voice_slot(self, voice: Voice, n_steps: int) -> int:
        """The slot where this voice's state for so many steps lies, made if it is not there."""
        voice.check(self.parts.flow.config)
        key = (voice.digest, n_steps)
        if (slot := self.voices.find(key)) is not None:
            return slot
        if voice.n_frames > self.sizes.max_prompt:
            got = f"{voice.n_frames}"
            raise AudioError("voice: mel frames", expected=f"at most {self.sizes.max_prompt}", got=got)
        size = self.shapes.fit("voice", "prompt", voice.n_frames)
        slot, start = self.voices.place(key, voice.n_frames)
        try:
            with self._stream.work():
                self._run_prompt(voice, n_steps, size, slot, start)
        except BaseException:
            self.voices.drop(slot)  # nobody may find what was not finished
            raise
        return slot

    def _run_prompt(self, voice: Voice, n_steps: int, size: int, slot: int, start: int) -> None:
        speech_tokens = np.zeros((1, size // FRAMES_PER_TOKEN + self.lookahead), np.int64)
        seen = torch.cat((voice.speech_tokens, torch.full((self.lookahead,), SILENCE_TOKEN)))
        speech_tokens[0, : len(seen)] = seen
        mel = torch.zeros(1, size, voice.mel.shape[1])
        mel[0, : voice.n_frames] = voice.mel
        numbers = [padded_array([value], 1, 0) for value in (slot, start)]
        # Once for each voice, at any length: not worth a graph of its own.
        with force_eager():
            self.regions(
                "voice",
                *numbers,
                speech_tokens,
                padded_array([len(seen)], 1, 0),
                mel.numpy(),
                voice.speaker[None].numpy(),
                n_steps=n_steps,
            )

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
        for chunk in chunks:
            what = f"codes of session {chunk.session}"
            self._check_tokens(what, chunk.speech_tokens, at_least=1 if chunk.last else self.lookahead + 1)
            self.shapes.fit(what, "speech_tokens", len(chunk.speech_tokens) - self.lookahead * (not chunk.last))

    def _check_tokens(self, what: str, speech_tokens: Sequence[int], at_least: int) -> None:
        if not isinstance(speech_tokens, Sequence | np.ndarray) or isinstance(speech_tokens, str | bytes):
            raise TokenError(what, expected="a sequence of whole numbers", got=type(speech_tokens).__name__)
        if len(speech_tokens) < at_least:
            raise TokenError(what, expected=f"at least {at_least}", got=len(speech_tokens))
        vocab_size = self.parts.flow.config.vocab_size
        for code in speech_tokens:
            # A float would be cut to a whole number further on without a word.
            if not isinstance(code, Integral) or isinstance(code, bool) or not 0 <= code < vocab_size:
                raise TokenError(what, expected=f"whole numbers from 0 to {vocab_size - 1}", got=code)

    # --- beside the caller's work --------------------------------------------------------------

    def start(self, chunks: Sequence[Chunk]) -> VocoderFuture:
        """`speak` without waiting for the sounds: `finish` gives them, and moves the sessions.

        A session of a launch must not be in another one until then, unless `begin_turn` or `close` came between: what
        the launch does to it then counts for nothing. A launch that nobody finishes has not happened.
        Raises: as `speak`.
        """
        with self._stream.work():
            return VocoderFuture(*self._launch(chunks))

    def finish(self, launch: VocoderFuture) -> list[np.ndarray]:
        """The sounds of a launch, in the order of its chunks, on the host. Raises: whatever the device raises; every
        session is where it was then.
        """
        taken = launch.take()
        self._move(launch.moves)
        return taken

    def _launch(self, chunks: Sequence[Chunk]) -> tuple[dict[int, tuple[VocoderSession, VocoderSession]], list[Tensor]]:
        """Run all chunks. Returns: where each session stood and where it goes, and the chunks' sounds."""
        self._check(chunks)
        spoken: dict[int, tuple[VocoderSession, Tensor]] = {}
        for n_steps in self.schedules:
            group = [chunk for chunk in chunks if self._sessions[chunk.session].n_steps == n_steps]
            for rows in self._batches(len(group)):
                part = group[rows]
                spoken |= zip((chunk.session for chunk in part), self._speak(part, n_steps), strict=True)
        moves = {number: (self._sessions[number], session) for number, (session, _) in spoken.items()}
        return moves, [spoken[chunk.session][1] for chunk in chunks]

    def _move(self, moves: dict[int, tuple[VocoderSession, VocoderSession]]) -> None:
        """Sessions stand where their chunks ended, but for those that have begun a turn or gone away since."""
        for number, (before, behind) in moves.items():
            if self._sessions.get(number) is before:
                self._sessions[number] = behind
