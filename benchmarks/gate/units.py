"""Units whose work does not depend on chance: the tokens of their text are given, and so is the picture.

A session listens and speaks in the same units on every machine, so that what a unit does can be counted.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from PIL import Image

from models.errors import SettingsError
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.voice.voice import Voice
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig, SessionConfig
from worker.engine import Engine
from worker.loop.duplex_job import SPEECH_TOKENS_PER_UNIT
from worker.loop.job import Job
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Event, Failure, UnitResult

TINY = Path(__file__).resolve().parents[2] / "assets" / "tiny"
KINDS = ("listen", "speak")
TEXT = "Ja, das ist gut so."  # of a speaking unit: about as many tokens as a second of speech has
N_TEXT = 6
VOICE_TOKENS = 50
PICTURE_SIDE = 224
SAMPLES = 16_000
N_WARM = 2  # units of each kind before the first one that counts


class ScriptedText(Observer):
    """Replaces every token after a unit's decision: speaking units have the same text."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def token_sampled(self, session: str, job: Job, token: int) -> int:
        """The next token of the text, then the end of the unit; the decision itself is forced by the unit."""
        n_before = len(job.decoder.all_ids)  # type: ignore[attr-defined]  # units only
        return self.ids[n_before - 1] if 0 < n_before <= len(self.ids) else token


class UnitDriver:
    """One session of an engine at a time. n_units: run so far. events: of the latest unit."""

    def __init__(self, engine: Engine, script: ScriptedText):
        self.engine = engine
        tokenizer = engine.parts.language.tokenizer
        script.ids = [*tokenizer.encode_plain(TEXT)[:N_TEXT], tokenizer.special.chunk_eos]
        self.events: list[Event] = []
        self._queue: SimpleQueue[Event] = SimpleQueue()
        noise = np.random.default_rng(0)
        self._sound = noise.standard_normal(SAMPLES).astype(np.float32) / 10
        data = io.BytesIO()
        pixels = noise.integers(0, 255, (PICTURE_SIDE, PICTURE_SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data, "JPEG")
        self._picture = data.getvalue()
        self.n_units = 0
        self._open()

    def _open(self) -> None:
        self._handle = self.engine.open("gate", None, self._queue.put).result()
        prompt = SystemPrompt.of("Streaming Omni Conversation.", self._sound, gate_voice(self.engine))
        self._handle.prepare(prompt).result()
        for kind in KINDS:
            for _ in range(N_WARM):
                self.run(kind)

    def renew(self) -> None:
        """Go on with an empty context in a new session."""
        self.close()
        self._open()

    def run(self, kind: str) -> UnitResult:
        """Run a unit to its end. Raises: SettingsError for a unit that differs from the others of its kind."""
        self.events = []
        speaks = kind == "speak"
        self._handle.send(self._sound, [self._picture], force_speak=speaks, force_listen=not speaks).result()
        while not self.events or not isinstance(self.events[-1], UnitResult | Failure):
            self.events.append(self._queue.get())
        self.engine.submit(lambda: None).result()  # runs after the unit is closed
        result = self.events[-1]
        if isinstance(result, Failure):
            raise result.error
        assert isinstance(result, UnitResult), result
        self.n_units += 1
        expected = (not speaks, SPEECH_TOKENS_PER_UNIT if speaks and self.engine.has_vocoder else 0)
        if (got := (result.is_listen, result.n_speech_tokens)) != expected:
            raise SettingsError(f"gate: {kind} unit (listens, speech tokens)", expected=expected, got=got)
        return result

    def close(self) -> None:
        """End the session."""
        self._handle.close().result()


def gate_voice(engine: Engine) -> Voice | None:
    """A voice of random features; None for an engine without a vocoder."""
    if engine.parts.vocoder is None:
        return None
    config = engine.parts.vocoder.parts.flow.config
    random = torch.Generator().manual_seed(0)
    mel = torch.randn(FRAMES_PER_TOKEN * VOICE_TOKENS, config.n_mels, generator=random)
    speaker = torch.randn(config.speaker_dim, generator=random)
    return Voice(torch.randint(0, config.vocab_size, (VOICE_TOKENS,), generator=random), mel, speaker)


@contextmanager
def driven(*, model_path: Path = TINY, device: str = "cpu", compiles: bool = False) -> Iterator[UnitDriver]:
    """A session of a new engine with one slot. compiles: with the settings of a worker on a GPU."""
    session = SessionConfig(force_listen_count=0, seed=1, decode_mode="greedy")
    config = EngineConfig(
        model_path=model_path,
        device=device,
        max_sessions=1,
        llm_len=4096,
        voices_s=6,
        euler_steps=10 if compiles else 2,
        session=session.model_copy(update={"window": session.window.model_copy(update={"mode": "off"})}),
        compile=CompileConfig(enabled=compiles),
    )
    script = ScriptedText()
    with Engine.build(config, observer=script) as engine:
        driver = UnitDriver(engine, script)
        yield driver
        driver.close()
