"""Settings of turn-based answers and half-duplex conversations: names, ranges, defaults. Torch-free.

Contains the translation to sampler, prompt and session settings. Does not contain running sessions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self, cast

from pydantic import Field

from models.errors import SettingsError
from models.inputs.chat_template import ToolSchema
from models.inputs.prompts import PromptOptions
from models.sampling.beams import MAX_BEAMS, BeamSettings
from models.sampling.settings import (
    DUPLEX_SPEECH,
    HALF_DUPLEX_TEXT,
    MAX_COUNT,
    MIN_TEMPERATURE,
    TURN_SPEECH,
    SpeechSampling,
    TextSampling,
)
from worker.chat.reply import TEXT_CHUNK
from worker.config.session import REPLY_SET, REPLY_TEXT_SET, SessionConfig, WindowConfig
from worker.config.settings import SettingProblem, Settings, notes, overlaid
from worker.describe import shown
from worker.protocol.chat_messages import MAX_STOPS, Priority

SEGMENT_ROWS = 450  # maximum context rows of a user's turn: 30 s of sound with marks and the template around it

USUAL = SessionConfig()


class ReplyConfig(Settings):
    """Settings of one turn-based answer."""

    max_new_tokens: int = Field(
        256, ge=1, le=4096, description="maximum tokens of the answer; reference rounds it up to a multiple of 10"
    )
    length_penalty: float = Field(
        1.1,
        ge=0.1,
        le=5,
        description="above 1: the end of the answer is less likely; with beams: the power of the number of tokens that "
        "divides a log-probability",
    )
    decode_mode: Literal["sampling", "greedy"] = Field("sampling", description="how text tokens are chosen")
    num_beams: int = Field(
        1,
        ge=1,
        le=MAX_BEAMS,
        description="above 1: beam search with this many hypotheses, with decode_mode greedy only",
    )
    temperature: float = Field(
        0.7, ge=0, le=2, description="of text tokens; below 0.000001: greedy; ignored in reference"
    )
    top_k: int = Field(
        100,
        ge=0,
        le=MAX_COUNT,
        description="number of most likely text tokens to draw from; 0: all; ignored in reference",
    )
    top_p: float = Field(
        0.8, ge=0, le=1, description="probability mass to draw from; 0 and 1: all; ignored in reference"
    )
    repetition_penalty: float = Field(1.02, ge=0.1, le=10, description="above 1: recent tokens are less likely")
    repetition_window: int = Field(
        128, ge=0, le=4096, description="tokens before a text chunk that count as recent; with beams all tokens do"
    )
    speak: bool = Field(False, description="voice the answer; false: text only")
    tts_temperature: float | None = Field(
        None,
        ge=MIN_TEMPERATURE,
        le=2,
        description="of speech tokens, which are drawn with decode_mode greedy too; null: that of duplex sessions",
    )
    tts_repetition_penalty: float | None = Field(
        None,
        ge=0.1,
        le=10,
        description="above 1: recent speech tokens are less likely; null: that of duplex sessions",
    )
    euler_steps: int | None = Field(
        None, ge=1, le=50, description="solver steps of the flow; null: the engine's default"
    )
    enable_thinking: bool = Field(False, description="the model writes its reasoning before the answer")
    use_tts_template: bool = Field(False, description="prompt for text to be voiced even if `speak` is false")
    omni_mode: bool = Field(False, description="no line break between the parts of a message")
    max_slice_nums: int | None = Field(
        None, ge=1, le=16, description="maximum slices of a large image; null: the checkpoint's value"
    )
    use_image_id: bool | None = Field(None, description="number the images; null: the checkpoint's value")
    seed: int | None = Field(
        None, ge=0, le=2**64 - 1, description="of all random draws; null: drawn from the engine's seed"
    )
    compat: Literal["fixed", "reference"] = Field(
        "fixed", description="reference: reproduce the public implementation, including its bugs"
    )
    tools: tuple[dict[str, Any], ...] = Field((), description="functions that the model may call, as in the OpenAI API")
    answer_start: str = Field("", description="text that the answer begins with; not part of its text")
    stop: tuple[str, ...] = Field((), max_length=MAX_STOPS, description="texts that end the answer")
    text: str | None = Field(
        None, min_length=1, description="the answer, which is voiced as it is; null: the model generates it"
    )
    priority: Priority = Field(
        "normal", description="low: the answer yields to units and to other answers; without speech and beams only"
    )

    @classmethod
    def of(cls, defaults: Self, given: Mapping[str, object]) -> tuple[Self, list[str]]:
        """Settings from a client's values and defaults for the rest, and a sentence for each key that is ignored.

        Raises: SettingError, which names every setting outside its range.
        """
        if not isinstance(given, Mapping):
            raise SettingsError("answer settings", expected="an object", got=shown(given))
        overlay, ignored = overlaid(defaults, given)
        values: dict[str, Any] = overlay  # checked when the model is made
        return cls(**values), notes(cls, ignored)

    @property
    def max_rows(self) -> int:
        """Maximum context rows of the answer."""
        whole = -(-self.max_new_tokens // TEXT_CHUNK) * TEXT_CHUNK
        return whole if self.compat == "reference" else self.max_new_tokens

    def session_config(self) -> SessionConfig:
        """Settings of a session for such answers."""
        return SessionConfig(
            generate_audio=self.speak,
            window=WindowConfig(mode="off"),
            euler_steps=self.euler_steps,
            seed=self.seed,
            compat=self.compat,
        )

    def prompt_options(self) -> PromptOptions:
        """Layout of the prompt for such answers."""
        return PromptOptions(
            max_slice_nums=self.max_slice_nums,
            use_image_id=self.use_image_id,
            omni_mode=self.omni_mode,
            use_tts_template=self.use_tts_template or self.speak,
            enable_thinking=self.enable_thinking,
            tools=tuple(cast(ToolSchema, tool) for tool in self.tools),
            answer_start=self.answer_start,
        )

    def text_sampling(self) -> TextSampling:
        """How text tokens are drawn."""
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

    def beam_settings(self, stop_ids: frozenset[int], *, speaks: bool) -> BeamSettings:
        """How the text is searched for. stop_ids: ids that end it. speaks: it is voiced."""
        return BeamSettings(
            n_beams=self.num_beams,
            max_new_tokens=self.max_new_tokens,
            stop_ids=stop_ids,
            length_penalty=self.length_penalty,
            repetition_penalty=self.repetition_penalty,
            set_index=REPLY_SET if speaks else REPLY_TEXT_SET,
        )

    def speech_sampling(self, usual: SessionConfig = USUAL, *, in_units: bool = False) -> SpeechSampling:
        """How speech tokens are drawn.

        Args:
            usual: the worker's settings of duplex sessions.
            in_units: the answer is spoken in units.
        """
        temperature, penalty = self.tts_temperature, self.tts_repetition_penalty
        return replace(
            DUPLEX_SPEECH if in_units else TURN_SPEECH,
            temperature=usual.tts_temperature if temperature is None else temperature,
            repetition_penalty=usual.tts_repetition_penalty if penalty is None else penalty,
        )

    def _conflicts(self) -> list[SettingProblem]:
        found = []
        if self.num_beams > 1 and self.decode_mode != "greedy":
            found.append(SettingProblem("num_beams", "1 where tokens are drawn at random", str(self.num_beams)))
        if self.priority == "low" and (self.speak or self.num_beams > 1):
            found.append(SettingProblem("priority", "normal for an answer with speech or with beams", self.priority))
        return found


class HalfDuplexConfig(Settings):
    """Settings of a half-duplex conversation."""

    reply: ReplyConfig = Field(ReplyConfig(speak=True), description="settings of its answers")
    threshold: float = Field(0.7, ge=0.05, le=1, description="probability of speech at which a segment begins")
    min_speech_ms: int = Field(128, ge=0, le=10_000, description="segments with less speech are discarded")
    min_silence_ms: int = Field(500, ge=100, le=10_000, description="silence that ends a segment")
    speech_pad_ms: int = Field(
        30, ge=0, le=1_000, description="sound before the first speech that belongs to the segment"
    )
    barge_in: bool = Field(
        False, description="speech during an answer interrupts it; false: sound during an answer is ignored"
    )
    barge_in_ms: int = Field(200, ge=0, le=10_000, description="speech after which an answer is interrupted")
    frame_interval_s: float = Field(1.0, ge=0.1, le=60, description="seconds between two pictures of a turn")
    max_slice_nums: int = Field(1, ge=1, le=9, description="slices of a large picture")
    deaf_s: float = Field(0.5, ge=0, le=10, description="sound is ignored for this long after the start")
    high_tokens: int = Field(
        8000, ge=1, le=1_000_000, description="context rows above which the oldest rounds are dropped"
    )
    low_tokens: int = Field(6000, ge=0, le=1_000_000, description="rows at which dropping stops; at most high_tokens")

    def marks(self, llm_len: int) -> tuple[int, int]:
        """High and low watermark for a slot of `llm_len` rows; above the high one, one more round still fits."""
        high = min(self.high_tokens, llm_len - SEGMENT_ROWS - self.reply.max_rows)
        return max(high, 0), max(min(self.low_tokens, high), 0)

    def _conflicts(self) -> list[SettingProblem]:
        if self.low_tokens <= self.high_tokens:
            return []
        expected = f"at most high_tokens ({self.high_tokens})"
        return [SettingProblem("low_tokens", expected, str(self.low_tokens))]
