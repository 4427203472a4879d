"""A small engine without a thread, and inputs for it: for tests of sessions and the loop.

One bucket per axis, so that a session's numbers do not depend on the sessions that share its batches; short units of
speech, few slots and an audio encoder with three seconds of history, so that a unit takes tens of milliseconds.
"""

import copy
import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.voice.voice import Voice
from tests.models.token2wav.stream.vocoders import make_voice, source_alone
from worker.assembly import parts as building
from worker.assembly import sizes
from worker.assembly.parts import EngineParts
from worker.config.session import EngineConfig, SessionConfig, WindowConfig
from worker.loop import duplex_job
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.session import Session, UnitInput
from worker.loop.sessions import Sessions
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager

TINY = Path(__file__).parents[3] / "assets" / "tiny"
N_SLOTS = 3
LLM_LEN, SPEECH_LEN = 384, 192
PROMPT_FRAMES = 200  # mel frames of the longest voice, instead of 1500
POSITIONS = 200  # of the audio encoder, instead of 1500
UNIT_TOKENS = 6  # speech tokens of a unit, instead of 25
OFF = WindowConfig(mode="off")
ALOUD = SessionConfig(
    force_listen_count=0, max_new_speak_tokens_per_chunk=6, window=OFF, seed=1, sound_ramp=(UNIT_TOKENS - 1,)
)
QUIET = ALOUD.model_copy(update={"generate_audio": False})


@contextmanager
def short_speech(*, convolutions: bool = False) -> Iterator[None]:
    """Shorten the speech of a unit, which takes most of its time.

    Args:
        convolutions: keep those of HiFT. They have no state, and take most of the rest of the time; without them the
            sound is HiFT's source, which depends on the mel as well.
    """
    shorter = {"SPEECH_TOKENS_PER_UNIT": UNIT_TOKENS, "DRAWN_PER_UNIT": UNIT_TOKENS + 1}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(duplex_job, **shorter))
        if not convolutions:
            stack.enter_context(mock.patch.object(Hift, "decode", source_alone))
        yield


def make_config(n_slots: int = N_SLOTS, llm_len: int = LLM_LEN, **settings: Any) -> EngineConfig:
    settings = {"session": QUIET, "euler_steps": 1, "snapshots": 2, **settings}
    return EngineConfig(model_path=TINY, device="cpu", max_sessions=n_slots, llm_len=llm_len, **settings)


@cache
def loaded() -> tuple[OmniModel, Tokenizer, PreprocessorConfig, FlowAndHift]:
    """The embedded checkpoint, shared by all tests; its weights must not change."""
    vocoder = load_flow_and_hift(make_config().token2wav_folder)
    return load_model(TINY, device="cpu"), Tokenizer.load(TINY), load_preprocessor_config(TINY), vocoder


@cache
def short_history_model() -> OmniModel:
    """The same model with fewer encoder positions: it starts over at every unit from the fourth on."""
    return with_history(copy.deepcopy(loaded()[0]), POSITIONS)


def with_history(model: OmniModel, positions: int) -> OmniModel:
    """The model itself, changed to this number of positions of the audio encoder."""
    audio = model.config.audio_config.model_copy(update={"max_source_positions": positions})
    model.config = model.config.model_copy(update={"audio_config": audio})
    model.apm.max_positions = positions
    weight = model.apm.embed_positions.weight[:positions].clone()
    model.apm.embed_positions = torch.nn.Embedding.from_pretrained(weight)
    return model


def make_parts(config: EngineConfig, *, short_history: bool = True) -> EngineParts:
    """Model, vocoder and slots at one size per axis."""
    n = (config.max_sessions,)
    shapes = Shapes(
        batch=n,
        slices=(2,),
        patches=(1088,),
        clip_frames=(200,),
        rows=(16, 80),  # batches are made of equals here
        kv=(config.llm_len,),
        spoken=(24,),
        tokens=(24,),
        speech_kv=(SPEECH_LEN,),
    )
    # Wide enough for the voices below and for tokens that wait beside a unit of speech.
    vocoder_shapes = VocoderShapes(batch=n, speech_tokens=(10,), columns=(192,), prompt=(60,))
    model, *others = loaded()
    short = mock.patch.object(building, "MAX_PROMPT_FRAMES", PROMPT_FRAMES)
    with short, mock.patch.object(sizes, "SPEECH_ROWS", SPEECH_LEN):
        model = short_history_model() if short_history else model
        return building.assemble(model, *others, config, shapes=shapes, vocoder_shapes=vocoder_shapes)


class SmallEngine:
    """Sessions and loop as on the engine thread, driven by the test; events by session name."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: bool,
    ):
        self.config = config or make_config()
        self.parts = make_parts(self.config, **options)
        self.unit_steps, self.vocoder = self.parts.unit_steps, self.parts.vocoder
        self.voices = VoiceManager(self.unit_steps, self.vocoder)
        self.loop = UnitLoop(
            self.unit_steps,
            self.vocoder,
            self.voices,
            observer=observer,
            clock=clock,
            first_sound_first=self.config.first_sound_first,
        )
        self.sessions = Sessions(self.unit_steps, self.parts.language, self.voices, self.loop, self.config)
        self.events: dict[str, list[Event]] = defaultdict(list)

    def open(self, name: str, config: SessionConfig = QUIET, prompt: SystemPrompt | None = None) -> Session:
        """A prepared session."""
        session = self.sessions.open(name, config, self.events[name].append)
        self.sessions.prepare(session, prompt or make_prompt())
        return session

    def send(self, session: Session, *given: Any, **settings: Any) -> None:
        """Queue one unit, see `make_unit`."""
        self.sessions.unit(session, make_unit(*given, **settings))

    def step(self) -> bool:
        """One iteration of the engine thread. Returns: whether a job is left."""
        self.sessions.dispatch()
        self.loop.run()
        self.sessions.dispatch()
        return not self.loop.is_idle

    def settle(self) -> None:
        """Run until no job is left."""
        while self.step():
            pass

    def take(self, name: str) -> list[Event]:
        """A session's events since the last call."""
        events = self.events[name][:]
        self.events[name].clear()
        return events

    def run_unit(self, session: Session, *given: Any, **settings: Any) -> UnitResult | Failure:
        """Send one unit and run it. Returns: its outcome."""
        self.send(session, *given, **settings)
        self.settle()
        return self.take(session.id)[-1]

    def close_all(self) -> None:
        self.sessions.close_all()
        self.events.clear()


def make_sound(seed: int, n: int = 16_000) -> np.ndarray:
    """[n] float32 noise with varying loudness."""
    rng = np.random.default_rng([seed, n])
    swell = 0.05 + 0.1 * np.sin(np.arange(n) * rng.uniform(0.001, 0.01)) ** 2
    return (swell * rng.standard_normal(n)).astype(np.float32)


def make_image(seed: int, width: int = 112, height: int = 84) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@cache
def make_patches(seed: int) -> list[ImagePatches]:
    image = open_image(make_image(seed))
    return image_patches(image, plan(*image.size, 1))


def make_unit(
    seed: int | None = 0, n: int = 16_000, *, pictures: Sequence[int] = (), force_listen: bool = False, **options: bool
) -> UnitInput:
    """A unit of `n` samples, without sound if `seed` is None; images by seed. options: as in `UnitInput`."""
    sound = None if seed is None else make_sound(seed, n)
    return UnitInput(sound, [make_patches(number) for number in pictures], force_listen, arrived=0.0, **options)


@cache
def voice(number: int) -> Voice:
    """A random voice of 60 mel frames."""
    return make_voice(number)


def make_prompt(text: str = "You are kind.", ref: int | None = None, speaker: int | None = None) -> SystemPrompt:
    """ref: seed of the reference sound. speaker: number of the voice."""
    sound = None if ref is None else make_sound(1000 + ref)
    return SystemPrompt.of(text, sound, None if speaker is None else voice(speaker))


class Director(Observer):
    """Replaces control tokens at random, so that the tiny model's sessions listen, speak and end turns.

    The choice depends on the session's name, its number of decided units and the length of the unit only.
    logits: digests of the logits after each unit's prefill, by session; they detect differences that leave ids equal.
    """

    def __init__(self, listen: float = 0.3, turn_end: float = 0.12, unit_end: float = 0.15):
        self.listen, self.turn_end, self.unit_end = listen, turn_end, unit_end
        self.logits: dict[str, list[str]] = defaultdict(list)

    def prefilled(self, session: str, logits: torch.Tensor) -> None:
        self.logits[session].append(digest(logits.numpy()))

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        ids = job.language.special
        draw = random.Random(f"{session} {job.session.n_decided} {len(job.decoder.all_ids)}").random()
        if not job.decoder.all_ids:
            return ids.listen if draw < self.listen else ids.speak
        for share, steered in ((self.turn_end, ids.turn_eos), (self.unit_end, ids.chunk_eos)):
            if draw < share:
                return steered
            draw -= share
        return token


def content_of(event: Event) -> tuple[Any, ...]:
    """The deterministic part of an event."""
    if isinstance(event, Failure):
        return "failure", event.unit, type(event.error).__name__
    if isinstance(event, PartialResult):
        return "partial", event.unit, event.text, bits(event.pcm)
    kept = {name: value for name, value in vars(event).items() if name not in ("session", "times", "pcm", "decided")}
    return "result", *kept.items(), ("pcm", bits(event.pcm))


def bits(pcm: np.ndarray | None) -> tuple[int, str] | None:
    """Length and digest, short enough to print."""
    return None if pcm is None else (len(pcm), digest(pcm))


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def assert_same_events(name: str, got: Sequence[Event], expected: Sequence[Event]) -> None:
    """The same events in the same order, with equal ids and samples."""
    for number, (one, other) in enumerate(zip(map(content_of, got), map(content_of, expected), strict=False)):
        assert one == other, f"{name}, event {number}: expected {other}, got {one}"
    assert len(got) == len(expected), f"{name}: expected {len(expected)} events, got {len(got)}"


def assert_mirrors(unit_steps: UnitSteps, slot: int) -> None:
    """The host's counters of a slot equal those in its tensors."""
    at, state, held = unit_steps.counters(slot), unit_steps.state, unit_steps.context._held.get(slot)
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
    if not unit_steps.speaker.is_in_call(slot):  # within a call the host counts at the next poll
        pairs["speech rows"] = (at.speech_rows, state.speech.cache.lengths, state.speech.cache.positions)
        pairs["speech draws"] = (at.speech_draws, state.speech.sampler.draws)
        pairs["speech tokens remembered"] = (at.tokens_remembered, state.speech.sampler.count)
    wrong = {what: (own, [int(t[slot]) for t in tensors]) for what, (own, *tensors) in pairs.items()}
    wrong = {what: pair for what, pair in wrong.items() if set(pair[1]) != {pair[0]}}
    assert not wrong, f"slot {slot}: expected the host's counts on the device, got {wrong}"
    assert torch.equal(at.tail, state.mel.tail[slot].cpu()), f"slot {slot}: expected the newest samples on both sides"
