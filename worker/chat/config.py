"""What a turn-based answer and a half-duplex conversation can be told: knobs, ranges, defaults. Torch-free.

Knows the samplers' settings and the prompt's. Does not know sessions in motion.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field

from models.errors import SettingsError
from models.inputs.prompts import PromptOptions
from models.sampling.settings import (
    HALF_DUPLEX_TEXT,
    MAX_COUNT,
    MIN_TEMPERATURE,
    TURN_SPEECH,
    SpeechSampling,
    TextSampling,
)
from worker.chat.reply import TEXT_CHUNK
from worker.config.session import REPLY_SET, REPLY_TEXT_SET, SessionConfig, WindowConfig
from worker.config.settings import SettingProblem, Settings, notes, overlaid, shown

SEGMENT_ROWS = 450  # most context rows of what is said in a round: 30 s with their marks, a template around them


class ReplyConfig(Settings):
    """One turn-based answer's knobs."""

    max_new_tokens: int = Field(256, ge=1, le=4096, description="tokens of the answer; reference rounds up to tens")
    length_penalty: float = Field(1.1, ge=0.1, le=5, description="above 1 makes the end of the answer less likely")
    decode_mode: Literal["sampling", "greedy"] = Field("sampling", description="how text tokens are chosen")
    temperature: float = Field(
        0.7, ge=0, le=2, description="of text tokens; below 0.000001 it means greedy; reference does not listen to it"
    )
    top_k: int = Field(100, ge=0, le=MAX_COUNT, description="text tokens to choose from; 0 keeps all; as temperature")
    top_p: float = Field(0.8, ge=0, le=1, description="probability to choose from; 0 and 1 keep all; as temperature")
    repetition_penalty: float = Field(1.02, ge=0.1, le=10, description="above 1 makes recent tokens less likely")
    repetition_window: int = Field(128, ge=0, le=4096, description="tokens before a text chunk that it looks at")
    speak: bool = Field(False, description="voice the answer; otherwise text only")
    tts_temperature: float = Field(0.8, ge=MIN_TEMPERATURE, le=2, description="of speech codes, drawn in greedy too")
    tts_repetition_penalty: float = Field(1.05, ge=0.1, le=10, description="above 1 makes recent codes less likely")
    euler_steps: int | None = Field(None, ge=1, le=50, description="solver steps of the flow; null: the engine's")
    enable_thinking: bool = Field(False, description="let the model think before it answers")
    use_tts_template: bool = Field(False, description="ask for text to be voiced even if it is not")
    omni_mode: bool = Field(False, description="parts of a message follow each other without a line break")
    max_slice_nums: int | None = Field(
        None, ge=1, le=16, description="slices that a large picture may be cut into; null: as the checkpoint says"
    )
    seed: int | None = Field(None, ge=0, le=2**64 - 1, description="of all draws; null: one from the engine's")
    compat: Literal["fixed", "reference"] = Field(
        "fixed", description="reference: as the public implementation, its bugs included"
    )

    @classmethod
    def of(cls, defaults: Self, given: Mapping[str, object]) -> tuple[Self, list[str]]:
        """The defaults with what a client gave laid over them, and a sentence for each key that was ignored.

        Raises: SettingError naming every knob that is outside its range.
        """
        if not isinstance(given, Mapping):
            raise SettingsError("answer settings", expected="an object", got=shown(given))
        values, ignored = overlaid(defaults, given)
        return cls(**values), notes(cls, ignored)

    @property
    def most_tokens(self) -> int:
        """Context rows that the answer may take."""
        whole = -(-self.max_new_tokens // TEXT_CHUNK) * TEXT_CHUNK
        return whole if self.compat == "reference" else self.max_new_tokens

    def session_config(self) -> SessionConfig:
        """What the session around such answers is opened with."""
        return SessionConfig(
            generate_audio=self.speak,
            window=WindowConfig(mode="off"),
            euler_steps=self.euler_steps,
            seed=self.seed,
            compat=self.compat,
        )

    def prompt_options(self) -> PromptOptions:
        """How messages become the answer's prompt."""
        return PromptOptions(
            max_slice_nums=self.max_slice_nums,
            omni_mode=self.omni_mode,
            use_tts_template=self.use_tts_template or self.speak,
            enable_thinking=self.enable_thinking,
        )

    def text_sampling(self) -> TextSampling:
        sampling = replace(
            HALF_DUPLEX_TEXT,
            greedy=self.decode_mode == "greedy",
            repetition_penalty=self.repetition_penalty,
            repetition_window=self.repetition_window,
            length_penalty=self.length_penalty,
            set_index=REPLY_SET if self.speak else REPLY_TEXT_SET,
        )
        if self.compat == "reference":
            return sampling
        return replace(
            sampling,
            greedy=sampling.greedy or self.temperature < MIN_TEMPERATURE,
            temperature=max(self.temperature, MIN_TEMPERATURE),
            top_k=self.top_k,
            top_p=self.top_p,
        )

    def speech_sampling(self) -> SpeechSampling:
        return replace(TURN_SPEECH, temperature=self.tts_temperature, repetition_penalty=self.tts_repetition_penalty)


class HalfDuplexConfig(Settings):
    """A half-duplex conversation's knobs."""

    reply: ReplyConfig = Field(ReplyConfig(speak=True), description="how its answers are made")
    threshold: float = Field(0.7, ge=0.05, le=1, description="probability of speech that begins a segment")
    min_speech_ms: int = Field(128, ge=0, le=10_000, description="shorter segments are discarded")
    min_silence_ms: int = Field(500, ge=100, le=10_000, description="silence that ends a segment")
    speech_pad_ms: int = Field(30, ge=0, le=1_000, description="sound in front that belongs to the segment")
    deaf_s: float = Field(0.5, ge=0, le=10, description="sound is ignored for so long after the start")
    high_tokens: int = Field(8000, ge=1, le=1_000_000, description="above this many rows whole rounds leave")
    low_tokens: int = Field(6000, ge=0, le=1_000_000, description="until this many are left; high at most")

    def marks(self, llm_len: int) -> tuple[int, int]:
        """High and low mark in a slot of `llm_len` rows, which has to take one round more than the high mark."""
        high = min(self.high_tokens, llm_len - SEGMENT_ROWS - self.reply.most_tokens)
        return max(high, 0), max(min(self.low_tokens, high), 0)

    def _misfits(self) -> list[SettingProblem]:
        if self.low_tokens <= self.high_tokens:
            return []
        expected = f"at most high_tokens ({self.high_tokens})"
        return [SettingProblem("low_tokens", expected, str(self.low_tokens))]
