"""A small engine without a thread, and what to send it: for tests of sessions and their loop.

One size per axis, so that a session's numbers do not hang on how many neighbours share its batches; short units of
speech, few slots and a sound encoder that looks back three seconds, so that a unit costs tens of milliseconds.
"""

import copy
import hashlib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from models.checkpoint.config import PreprocessorConfig, load_preprocessor_config
from models.inputs.image import ImagePatches, image_patches, open_image, plan
from models.inputs.tokens import Tokenizer
from models.load import load_model
from models.omni import OmniModel
from models.stages.region_table import Shapes
from models.stages.unit_steps import UnitSteps
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.voice.voice import Voice
from tests.models.token2wav.stream.vocoders import make_voice
from worker.assembly import parts as building
from worker.assembly.parts import EngineParts
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.loop import duplex_job
from worker.loop.observer import Observer
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.session import Session, UnitInput
from worker.loop.sessions import Sessions, SystemPrompt
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager

TINY = Path(__file__).parents[3] / "assets" / "tiny"
N_SLOTS = 3
LLM_LEN, SPEECH_LEN = 384, 192
POSITIONS = 200  # of the sound encoder, instead of 1500
CODES = 6  # of a unit of speech, instead of 25
OFF = WindowConfig(mode="off")
ALOUD = SessionConfig(force_listen_count=0, max_new_speak_tokens_per_chunk=6, window=OFF, seed=1)
QUIET = ALOUD.model_copy(update={"generate_audio": False})


@contextmanager
def short_speech() -> Iterator[None]:
    """Units of speech of 8 codes: what takes most of a unit's time."""
    with mock.patch.multiple(
        duplex_job, SPEECH_TOKENS_PER_UNIT=CODES, DRAWN_PER_UNIT=CODES + 1, EARLY_SPEECH_TOKENS=CODES - 1
    ):
        yield


def make_config(n_slots: int = N_SLOTS, llm_len: int = LLM_LEN, **knobs: Any) -> EngineConfig:
    knobs = {"session": QUIET, "euler_steps": 1, "snapshots": 2, **knobs}
    return EngineConfig(model_path=TINY, device="cpu", max_sessions=n_slots, llm_len=llm_len, **knobs)


@cache
def loaded() -> tuple[OmniModel, Tokenizer, PreprocessorConfig, FlowAndHift]:
    """The embedded checkpoint; nobody changes its weights."""
    vocoder = load_flow_and_hift(make_config().token2wav_folder)
    return load_model(TINY, device="cpu"), Tokenizer.load(TINY), load_preprocessor_config(TINY), vocoder


@cache
def forgetful() -> OmniModel:
    """The same model with positions for so few units of sound that it starts over at every unit from the fourth on."""
    model = copy.deepcopy(loaded()[0])
    audio = model.config.audio_config.model_copy(update={"max_source_positions": POSITIONS})
    model.config = model.config.model_copy(update={"audio_config": audio})
    model.apm.max_positions = POSITIONS
    weight = model.apm.embed_positions.weight[:POSITIONS].clone()
    model.apm.embed_positions = torch.nn.Embedding.from_pretrained(weight)
    return model


def make_parts(config: EngineConfig, *, short_hearing: bool = True) -> EngineParts:
    """Model, vocoder and slots at one size per axis."""
    n = (config.max_sessions,)
    shapes = Shapes(
        batch=n,
        slices=(2,),
        patches=(1088,),
        clip_frames=(200,),
        rows=(16, 96),  # batches are made of equals here
        kv=(config.llm_len,),
        spoken=(24,),
        tokens=(24,),
        speech_kv=(SPEECH_LEN,),
    )
    # Wide enough for the voices below, and for whatever waits beside a unit of speech.
    vocoder_shapes = VocoderShapes(batch=n, speech_tokens=(10,), columns=(192,), prompt=(60,))
    model, *others = loaded()
    with mock.patch.object(building, "SPEECH_ROWS", SPEECH_LEN):
        model = forgetful() if short_hearing else model
        return building.assemble(model, *others, config, shapes=shapes, vocoder_shapes=vocoder_shapes)


class SmallEngine:
    """Sessions and their loop as the engine's thread holds them, driven by hand; events by session name."""

    def __init__(self, config: EngineConfig | None = None, observer: Observer | None = None, **options: bool):
        self.config = config or make_config()
        self.parts = make_parts(self.config, **options)
        self.duplex, self.vocoder = self.parts.duplex, self.parts.vocoder
        self.desk = VoiceManager(self.duplex, self.vocoder)
        self.loop = UnitLoop(self.duplex, self.vocoder, self.desk, observer=observer)
        self.sessions = Sessions(self.duplex, self.parts.language, self.desk, self.loop, self.config)
        self.events: dict[str, list[Event]] = defaultdict(list)

    def open(self, name: str, config: SessionConfig = QUIET, prompt: SystemPrompt | None = None) -> Session:
        """A session that is ready for its first unit."""
        session = self.sessions.open(name, config, self.events[name].append)
        self.sessions.prepare(session, prompt or make_prompt())
        return session

    def send(self, session: Session, *given: Any, **knobs: Any) -> None:
        """One unit, see `make_unit`; it runs when the loop does."""
        self.sessions.unit(session, make_unit(*given, **knobs))

    def step(self) -> bool:
        """What the thread does in one turn. Returns: whether anything is left to do."""
        self.sessions.dispatch()
        self.loop.run()
        self.sessions.dispatch()
        return not self.loop.is_idle

    def settle(self) -> None:
        """Run everything that was sent."""
        while self.step():
            pass

    def take(self, name: str) -> list[Event]:
        """A session's events since they were last taken."""
        events = self.events[name][:]
        self.events[name].clear()
        return events

    def say(self, session: Session, *given: Any, **knobs: Any) -> UnitResult | Failure:
        """Send one unit and run it. Returns: its outcome."""
        self.send(session, *given, **knobs)
        self.settle()
        return self.take(session.id)[-1]

    def close_all(self) -> None:
        self.sessions.close_all()
        self.events.clear()


def make_sound(seed: int, n: int = 16_000) -> np.ndarray:
    """[n] float32 noise whose loudness wavers."""
    rng = np.random.default_rng([seed, n])
    swell = 0.05 + 0.1 * np.sin(np.arange(n) * rng.uniform(0.001, 0.01)) ** 2
    return (swell * rng.standard_normal(n)).astype(np.float32)


def make_picture(seed: int, width: int = 112, height: int = 84) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@cache
def make_patches(seed: int) -> list[ImagePatches]:
    image = open_image(make_picture(seed))
    return image_patches(image, plan(*image.size, 1))


def make_unit(
    seed: int | None = 0, n: int = 16_000, *, pictures: Sequence[int] = (), force_listen: bool = False
) -> UnitInput:
    """A unit of `n` samples, or without sound; pictures by seed."""
    sound = None if seed is None else make_sound(seed, n)
    return UnitInput(sound, [make_patches(number) for number in pictures], force_listen, arrived=0.0)


@cache
def voice(number: int) -> Voice:
    """Voices nobody prepared from sound; 60 mel frames each."""
    return make_voice(number)


def make_prompt(text: str = "You are kind.", ref: int | None = None, speaker: int | None = None) -> SystemPrompt:
    """ref: seed of the sound that the language model hears. speaker: number of the voice."""
    sound = None if ref is None else make_sound(1000 + ref)
    return SystemPrompt.of(text, sound, None if speaker is None else voice(speaker))


class Director(Observer):
    """Steers a session's turns by chance, as a model with something to say would: the tiny one only babbles.

    What becomes of a token depends on the session's name, how many units it has decided and what this one holds.
    logits: digests of what each unit's prefill ends with, by session: ids alone forgive a difference that is small.
    """

    def __init__(self, listen: float = 0.3, turn_end: float = 0.12, unit_end: float = 0.15):
        self.listen, self.turn_end, self.unit_end = listen, turn_end, unit_end
        self.logits: dict[str, list[str]] = defaultdict(list)

    def prefilled(self, session: str, logits: torch.Tensor) -> None:
        self.logits[session].append(digest(logits.numpy()))

    def token(self, session: str, job: Any, token: int) -> int:
        ids = job.language.special
        luck = random.Random(f"{session} {job.session.n_decided} {len(job.talk.all_ids)}").random()
        if not job.talk.all_ids:
            return ids.listen if luck < self.listen else ids.speak
        for share, steered in ((self.turn_end, ids.turn_eos), (self.unit_end, ids.chunk_eos)):
            if luck < share:
                return steered
            luck -= share
        return token


def told(event: Event) -> tuple[Any, ...]:
    """All of an event that may not differ from one run to another."""
    if isinstance(event, Failure):
        return "failure", event.unit, type(event.error).__name__
    if isinstance(event, PartialResult):
        return "partial", event.unit, event.text, bits(event.pcm)
    kept = {name: value for name, value in vars(event).items() if name not in ("session", "times", "pcm")}
    return "result", *kept.items(), ("pcm", bits(event.pcm))


def bits(pcm: np.ndarray | None) -> tuple[int, str] | None:
    """Length and digest, so that a difference can be printed."""
    return None if pcm is None else (len(pcm), digest(pcm))


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def assert_told(name: str, got: Sequence[Event], expected: Sequence[Event]) -> None:
    """The same events in the same order, every sample and id the same."""
    for number, (one, other) in enumerate(zip(map(told, got), map(told, expected), strict=False)):
        assert one == other, f"{name}, event {number}: expected {other}, got {one}"
    assert len(got) == len(expected), f"{name}: expected {len(expected)} events, got {len(got)}"


def assert_mirrors(duplex: UnitSteps, slot: int) -> None:
    """What the host believes of a slot is what its tensors say."""
    at, state, held = duplex.counters(slot), duplex.state, duplex.context._held.get(slot)
    pairs = {
        "context rows": (at.context_len, state.llm.lengths),
        "context position": (at.context_len + (held.ahead if held else 0), state.llm.positions),
        "text draws": (at.draws, state.text.draws),
        "tokens remembered": (at.remembered, state.text.count),
        "chunk start": (at.chunk_start, state.text.chunk_start),
        "samples": (at.n_samples, state.mel.n_samples),
        "frames": (at.n_frames, state.mel.n_emitted),
        "units": (at.n_units, state.recent_mel.n_units),
        "encoder rows": (at.audio_rows, state.apm.lengths, state.apm.positions),
    }
    if not duplex.speaker.is_in_call(slot):  # within a call the host counts when it looks
        pairs["speech rows"] = (at.speech_rows, state.speech.cache.lengths, state.speech.cache.positions)
        pairs["code draws"] = (at.speech_draws, state.speech.sampler.draws)
        pairs["codes remembered"] = (at.tokens_remembered, state.speech.sampler.count)
    wrong = {what: (own, [int(t[slot]) for t in tensors]) for what, (own, *tensors) in pairs.items()}
    wrong = {what: pair for what, pair in wrong.items() if set(pair[1]) != {pair[0]}}
    assert not wrong, f"slot {slot}: expected the host's counts on the device, got {wrong}"
    assert torch.equal(at.tail, state.mel.tail[slot].cpu()), f"slot {slot}: expected the newest samples on both sides"
