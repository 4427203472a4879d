"""A small engine for replies, and a reply in a plain loop to compare with.

One bucket per axis, as in `engines`. The speech of a text chunk ends after few tokens, and a stub replaces the vocoder
unless a test uses the real one, so that a reply takes tenths of a second.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.message_reader import Content, MessageReader
from models.stages.region_table import Shapes
from models.stages.runner import Runner
from models.stages.speech_stream import SpeechStream
from models.stages.unit_steps import UnitSteps
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk
from models.token2wav.stream.windows import TokenWindows
from models.token2wav.voice.voice import Voice
from tests.models.layers.speech_reference import PlainSpeaker, PlainStream
from tests.worker.loop.engines import QUIET, make_config, make_unit, short_speech, voice
from worker.assembly import parts as building
from worker.assembly import sizes
from worker.assembly.parts import EngineParts
from worker.chat.answers import Answers
from worker.chat.config import ReplyConfig
from worker.config.session import SessionConfig
from worker.loop import voice_manager as voice_module
from worker.loop.language import Language
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Event, Failure, PartialResult, Prefilled, ReplyResult
from worker.loop.session import Session
from worker.loop.sessions import Sessions
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager

LLM_LEN, SPEECH_LEN = 512, 768
CHUNK_TOKENS = 8  # speech tokens of a text chunk at most, instead of 500
MAX_ITERATIONS = 300  # of the loop, before `run_until` fails
WRITTEN = ReplyConfig(max_new_tokens=24, seed=1)
SPOKEN = WRITTEN.model_copy(update={"speak": True, "max_new_tokens": 12})
LONGER = SPOKEN.model_copy(update={"max_new_tokens": 35, "seed": 3})
SETTINGS = {"spoken": SPOKEN, "fixed": LONGER, "reference": LONGER.model_copy(update={"compat": "reference"})}
MANY = 30  # speech tokens of a text chunk, more than fit a window
ASKED = "Hello there, how are you?"


def short_chunks(max_speech_tokens: int = CHUNK_TOKENS, **stream: Any) -> Any:
    """Limit text chunks to few speech tokens."""
    return mock.patch.object(
        voice_module, "SpeechStream", partial(SpeechStream, max_speech_tokens=max_speech_tokens, **stream)
    )


def make_parts(n_slots: int = 3, rows: tuple[int, ...] = (96,)) -> EngineParts:
    n = (n_slots,)
    shapes = Shapes(
        batch=n,
        slices=(2,),
        patches=(1088,),
        clip_frames=(1000,),
        rows=rows,
        kv=(LLM_LEN,),
        spoken=(24,),
        tokens=(96,),
        speech_kv=(SPEECH_LEN,),
    )
    vocoder_shapes = VocoderShapes(batch=n, speech_tokens=(28,), columns=(224,), prompt=(60,))
    with mock.patch.object(sizes, "SPEECH_ROWS", SPEECH_LEN):
        return building.build(make_config(n_slots, LLM_LEN), shapes=shapes, vocoder_shapes=vocoder_shapes)


@dataclass(frozen=True, eq=False)
class Turn:
    """State of a session of `ToneVocoder`."""

    n_voiced: int = 0


@dataclass(eq=False)
class ToneLaunch:
    """Sounds by session, and each session's state before and after."""

    sounds: dict[int, np.ndarray]
    moves: dict[int, tuple[Turn, Turn]]
    is_here: bool
    is_over: bool = False


class ToneVocoder:
    """Fake `Vocoder`: a token's sound depends on the token, its index in the turn and the session's voice.

    is_held: sounds arrive when a test sets `is_here`. broken: sessions whose sound fails. launches: all so far.
    """

    lookahead = 3

    def __init__(self, n_slots: int):
        self._free = list(range(n_slots))
        self._voices: dict[int, Voice] = {}
        self._turns: dict[int, Turn] = {}
        self.is_held = False
        self.broken: set[int] = set()
        self.launches: list[ToneLaunch] = []

    @property
    def n_free(self) -> int:
        return len(self._free)

    def open(self, voice: Voice, n_steps: int | None) -> int:
        number = self._free.pop(0)
        self._voices[number], self._turns[number] = voice, Turn()
        return number

    def close(self, number: int) -> None:
        del self._voices[number], self._turns[number]
        self._free.append(number)

    def begin_turn(self, *numbers: int) -> None:
        self._turns.update({number: Turn() for number in numbers})

    def start(self, chunks: Sequence[Chunk]) -> ToneLaunch:
        launch = ToneLaunch({}, {}, not self.is_held)
        for number, speech_tokens, last in chunks:
            turn, voiced = self._turns[number], speech_tokens if last else speech_tokens[: -self.lookahead]
            twice = [one for one in self.launches if not one.is_over and one.moves.get(number, (None,))[0] is turn]
            assert not twice, f"session {number}: a window was launched before the previous one has arrived"
            tones = torch.tensor(voiced) + 7000 * (turn.n_voiced + torch.arange(len(voiced)))
            sound = (tones + self._voices[number].speech_tokens[0] / 7000).float().repeat_interleave(960)
            launch.sounds[number], launch.moves[number] = sound.numpy(), (turn, Turn(turn.n_voiced + len(voiced)))
        self.launches.append(launch)
        return launch

    def finish(self, launch: ToneLaunch) -> list[np.ndarray]:
        assert launch.is_here and not launch.is_over, "expected a launch that has arrived to be finished, once"
        launch.is_over = True
        if self.broken & launch.sounds.keys():
            raise RuntimeError("broken")
        for number, (before, after) in launch.moves.items():
            if self._turns.get(number) is before:
                self._turns[number] = after
        return list(launch.sounds.values())

    def release_oldest(self) -> None:
        """Release the oldest held launch."""
        next(launch for launch in self.launches if not launch.is_here).is_here = True


class AnsweringEngine:
    """Sessions, replies and loop as on the engine thread, driven by the test; events by session name."""

    def __init__(self, parts: EngineParts, observer: Observer | None = None):
        self.parts, self.unit_steps, self.language = parts, parts.unit_steps, parts.language
        self.reader = MessageReader(parts.model.config, self.language.tokenizer, parts.pictures)
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.use(ToneVocoder(parts.n_slots), observer)

    def use(
        self,
        vocoder: Any,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: bool,
    ) -> None:
        """Start over with this vocoder. options: of the loop."""
        self.vocoder, self.observer = vocoder, observer or Script()
        self.voices = VoiceManager(self.unit_steps, vocoder)
        self.loop = UnitLoop(self.unit_steps, vocoder, self.voices, observer=self.observer, clock=clock, **options)
        config = make_config(self.parts.n_slots, LLM_LEN)
        self.sessions = Sessions(self.unit_steps, self.language, self.voices, self.loop, config)
        self.answers = Answers(self.sessions, self.unit_steps, self.language, self.voices, self.loop)

    def content(self, *parts: Any, config: ReplyConfig = WRITTEN) -> Content:
        """One user message as content."""
        messages = [{"role": "user", "content": list(parts)}]
        return self.reader.cut(self.reader.read(messages, config.prompt_options()))

    def ask(self, name: str, *parts: Any, config: ReplyConfig = WRITTEN, speaker: int | None = 0) -> Session:
        """Start a chat about one message."""
        content, speaks = self.content(*parts, config=config), None if speaker is None else voice(speaker)
        return self.answers.chat(name, content, config, self.events[name].append, voice=speaks, arrived=0.0)

    def open(self, name: str, config: SessionConfig = QUIET, speaker: int | None = None) -> Session:
        """A prepared duplex session."""
        session = self.sessions.open(name, config, self.events[name].append)
        self.sessions.prepare(
            session, SystemPrompt.of("You are kind.", None, None if speaker is None else voice(speaker))
        )
        return session

    def send(self, session: Session, *given: Any, **settings: Any) -> None:
        self.sessions.unit(session, make_unit(*given, **settings))

    def step(self) -> bool:
        """One iteration of the engine thread. Returns: whether a job is left."""
        self.sessions.dispatch()
        self.loop.run()
        self.sessions.dispatch()
        return not self.loop.is_idle

    def settle(self) -> None:
        while self.step():
            pass

    def run_until(self, done: Callable[[], bool]) -> None:
        """Run until `done` returns true; fail after `MAX_ITERATIONS`."""
        for _ in range(MAX_ITERATIONS):
            if done():
                return
            self.step()
        raise AssertionError(f"expected an end within {MAX_ITERATIONS} iterations")

    def received(self, name: str) -> list[Event]:
        """A session's events since the last call, without `Prefilled`."""
        return [event for event in self.take(name) if not isinstance(event, Prefilled)]

    def outcome(self, name: str) -> ReplyResult | Failure:
        """Run until no job is left. Returns: a session's last event."""
        self.settle()
        return self.events[name][-1]

    def take(self, name: str) -> list[Event]:
        events = self.events[name][:]
        self.events[name].clear()
        return events

    @property
    def n_free(self) -> tuple[int, int]:
        """Free slots of the model and of the vocoder."""
        return self.unit_steps.n_free, self.vocoder.n_free


class Script(Observer):
    """Replaces sampled tokens by scripted ones, by session and in order; later tokens are kept."""

    def __init__(self, **ids: Sequence[int]):
        self.ids = {name: list(own) for name, own in ids.items()}

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        own = self.ids.get(session)
        return own.pop(0) if own else token


def script(engine: AnsweringEngine, **ids: Sequence[int]) -> None:
    """Set the next tokens by session."""
    engine.observer.ids = {name: list(own) for name, own in ids.items()}


def words(engine: AnsweringEngine, n: int) -> list[int]:
    """Ids of `n` words that can be voiced."""
    (word,) = engine.language.tokenizer.encode("x")
    return [word] * n


def partials(events: Sequence[Event]) -> list[PartialResult]:
    """The partial results."""
    return [event for event in events if isinstance(event, PartialResult)]


@contextmanager
def answering(parts: EngineParts) -> Iterator[AnsweringEngine]:
    """An engine with short chunks and short speech; checks that every slot is free at the end."""
    engine = AnsweringEngine(parts)
    free = engine.n_free
    with short_chunks(), short_speech():
        yield engine
    engine.sessions.close_all()
    assert engine.n_free == free, f"slots: expected {free} free afterwards, got {engine.n_free}"


def replies_alone(parts: EngineParts) -> dict[str, list[Event]]:
    """Events of a reply with each of `SETTINGS`, by name."""
    engine = AnsweringEngine(parts)
    with short_chunks():
        return {name: alone(engine, config) for name, config in SETTINGS.items()}


def alone(engine: AnsweringEngine, config: ReplyConfig = SPOKEN) -> list[Event]:
    """Events of a reply without other sessions."""
    engine.ask("alone", ASKED, config=config)
    engine.settle()
    return engine.received("alone")


@dataclass
class Plain:
    """A greedy reply in a plain loop, text first, then speech."""

    ids: list[int] = field(default_factory=list)
    speech_tokens: list[int] = field(default_factory=list)
    windows: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)


def plain_answer(
    model: OmniModel,
    language: Language,
    prompt: Content,
    config: ReplyConfig,
    *,
    chunk: int,
    kind: str = "full_attention",
    window: int | None = None,
    eos: int | None = None,
) -> Plain:
    """The expected greedy reply: logits by plain arithmetic, speech by `PlainStream`.

    chunk: speech tokens of a text chunk at most. kind, window: attention between chunks. eos: another end token.
    """
    reference = config.compat == "reference"
    tokenizer, special = language.tokenizer, language.special
    ends = {special.im_end, special.tts_eos} | ({tokenizer.lookup("</s>")} - {tokenizer.unk_id})
    stops = ends if reference else ends | {special.endoftext}
    unvoiced = {tokenizer.lookup(c) for c in ":：；#“”‘’@*【】「」()（）[]&/$"} | set(tokenizer.bad_token_ids)
    limit = -(-config.max_new_tokens // 10) * 10 if reference else config.max_new_tokens
    sets = TokenSets.build([TokenSet()], model.config.vocab_size)
    runner, said = Runner(model, sets, n_slots=1, llm_len=LLM_LEN), Plain()
    steps = UnitSteps(runner, None)
    hidden: list[Tensor] = []
    is_stopped = False
    with steps.lease() as slot:
        (one,) = steps.feed([slot], [prompt.encode(runner)], [False])
        while True:
            # The sampler's chunks begin after tokens 11, 21, 31: the penalty covers a window before and the chunk.
            n = len(said.ids)
            begin = 0 if n < 11 else (n - 1) // 10 * 10 + 1
            seen = set(said.ids[max(begin - config.repetition_window, 0) : n])
            token = choose(one.logits.double(), seen, ends, unvoiced if config.speak else set(), config)
            is_stopped = token in stops
            if is_stopped or n == limit:
                break
            said.ids.append(token)
            (one,) = steps.step([slot], [token], [0], [False])
            hidden.append(runner.state.hidden[slot, 0].clone())
    if config.speak and said.ids:
        window = window if kind == "sliding_window" else None
        eos = model.tts.config.speech_eos_id if eos is None else eos
        speaker = PlainSpeaker(model.tts, config.speech_sampling(), seed=config.seed, eos=eos, window=window)
        stream = PlainStream(speaker, kind, chunk, batch=10**6)
        speak(stream, said, hidden, is_stopped or not reference, reference)
    return said


def choose(logits: Tensor, seen: set[int], ends: set[int], never: set[int], config: ReplyConfig) -> int:
    for token in never:
        logits[token] = float("-inf")
    for tokens, factor in ((seen, config.repetition_penalty), (ends, config.length_penalty)):
        for token in tokens:
            value = logits[token]
            logits[token] = value / factor if value > 0 else value * factor
    return int(logits.argmax())


def speak(stream: PlainStream, said: Plain, hidden: list[Tensor], is_finished: bool, reference: bool) -> None:
    """Speech tokens of all text chunks and their windows, cut as in `SpeechCall.cuts`."""
    tts = stream.speaker.model.tts
    cutter = TokenWindows(min_chunk=25 if reference else 5, joins_end=not reference)
    for start in range(0, len(said.ids), 10):
        ids = said.ids[start : start + 10]
        is_last = start + 10 >= len(said.ids)
        tail = [tts.config.text_eos_token_id] * (is_last and is_finished) + [tts.config.audio_bos_token_id]
        projected = tts.projector_semantic(torch.stack(hidden[start : start + 10]))
        if tts.config.normalize_projected_hidden:
            projected = torch.nn.functional.normalize(projected, dim=-1)
        rows = torch.cat((tts.emb_text(torch.tensor(ids)) + projected, tts.emb_text(torch.tensor(tail))))
        stream.push(rows, final=False)
        speech_tokens = stream.spoken[-1]
        said.speech_tokens += speech_tokens
        first = [8] if start == 0 and not reference else []
        cuts = [n for n in (*first, *range(25, len(speech_tokens) + 1, 25)) if n < len(speech_tokens)]
        for begin, end in zip((0, *cuts), (*cuts, len(speech_tokens)), strict=True):
            ends = start + 10 >= len(said.ids) and end == len(speech_tokens)
            windows = cutter.push(speech_tokens[begin:end], last=ends and not reference)
            if windows:
                cutter.grow()
            said.windows += windows
    if reference:
        said.windows += cutter.push([], last=True)


def rows_of(steps: UnitSteps, slot: int) -> list[Tensor]:
    """A copy of a slot's context: keys and values of every layer."""
    keys, values = steps.state.llm.save(slot, steps.context_len(slot))
    return [*keys, *values]
