"""What a session and an engine can be told: knobs, ranges, defaults. Torch-free.

A config is frozen and whole: a session's is made from the worker's defaults and what the client gave, checked once,
and nothing of it reaches the next session. Knows the samplers' settings; does not know files, sockets or devices.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import Field

from models.errors import SettingsError
from models.sampling.settings import (
    DUPLEX_SPEECH,
    DUPLEX_TEXT,
    MAX_COUNT,
    MIN_TEMPERATURE,
    SpeechSampling,
    TextSampling,
)
from worker.config.compile import CompileConfig
from worker.config.hub_id import ModelPath
from worker.config.settings import SettingError, SettingProblem, Settings, notes, overlaid, shown

# Rows of the shared token sets: duplex as the public implementation has it, duplex as meant, turn-based replies
# with and without speech.
REFERENCE_SET, FIXED_SET, REPLY_SET, REPLY_TEXT_SET = range(4)

IMAGE_ROWS = 66  # context rows of one slice with its two marks
UNIT_ROWS = 14  # <unit>, ten rows of sound, a turn end put in, terminator, </unit>


class WindowConfig(Settings):
    """What leaves the context when it grows: nothing, oldest units by rows, or oldest units into a text of the past."""

    mode: Literal["off", "basic", "context"] = Field(
        "basic", description="off: nothing leaves; basic: by rows; context: by units, their words are kept as text"
    )
    high_tokens: int = Field(4000, ge=1, le=1_000_000, description="basic: above this many rows units leave")
    low_tokens: int = Field(3500, ge=0, le=1_000_000, description="basic: until this many are left; high at most")
    previous_max_tokens: int = Field(500, ge=1, le=100_000, description="context: tokens kept of what was said")
    max_units: int = Field(24, ge=1, le=10_000, description="context: units kept whole")
    marker: str = Field("\n\nprevious: ", max_length=200, description="context: text in front of what was said")

    def _misfits(self) -> list[SettingProblem]:
        if self.low_tokens <= self.high_tokens:
            return []
        expected = f"at most high_tokens ({self.high_tokens})"
        return [SettingProblem("low_tokens", expected, str(self.low_tokens))]


class SessionConfig(Settings):
    """One session's knobs, all of them in force from its first unit to its last."""

    generate_audio: bool = Field(True, description="speak; otherwise text only")
    ls_mode: Literal["explicit", "implicit"] = Field("explicit", description="whether a unit's terminator is fed")
    force_listen_count: int = Field(3, ge=0, le=1000, description="units at the start that only listen")
    max_new_speak_tokens_per_chunk: int = Field(
        20, ge=1, le=64, description="tokens of one unit's text, the terminator included"
    )
    max_chars_per_chunk: int = Field(28, ge=1, le=1000, description="characters of one unit's text, below this many")
    decode_mode: Literal["sampling", "greedy"] = Field("sampling", description="how text tokens are chosen")
    temperature: float = Field(0.7, ge=0, le=2, description="of text tokens; below 0.000001 it means greedy")
    top_k: int = Field(20, ge=0, le=MAX_COUNT, description="text tokens to choose from; 0 keeps all")
    top_p: float = Field(0.8, ge=0, le=1, description="probability to choose from; 0 and 1 keep all")
    text_repetition_penalty: float = Field(
        1.05, ge=0.1, le=10, description="above 1 makes recent tokens less likely, below 1 more"
    )
    text_repetition_window_size: int = Field(512, ge=0, le=4096, description="recent tokens it looks at")
    length_penalty: float = Field(1.1, ge=0.1, le=5, description="above 1 makes the end of a turn less likely")
    listen_prob_scale: float = Field(
        1.0, ge=1e-4, le=100, description="factor on the odds of listening; on the logit in reference"
    )
    listen_top_k: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="listen as soon as listen is among this many likeliest"
    )
    tts_temperature: float = Field(0.8, ge=MIN_TEMPERATURE, le=2, description="of speech codes, drawn in greedy too")
    tts_repetition_penalty: float = Field(1.05, ge=0.1, le=10, description="above 1 makes recent codes less likely")
    chunk_ms: Literal[1000] = Field(1000, description="length of a unit: the model is trained on one second")
    sample_rate: Literal[16000] = Field(16000, description="of the sound heard, in Hz: the model is trained on it")
    max_slice_nums: int = Field(1, ge=1, le=9, description="slices that a large picture may be cut into")
    window: WindowConfig = Field(WindowConfig(), description="what leaves the context when it grows")
    euler_steps: int | None = Field(None, ge=1, le=50, description="solver steps of the flow; null: the engine's")
    seed: int | None = Field(None, ge=0, le=2**64 - 1, description="of all draws; null: one from the engine's")
    compat: Literal["fixed", "reference"] = Field(
        "fixed", description="reference: as the public implementation, its bugs included"
    )
    early_sound: bool = Field(True, description="send sound before its unit is complete; not in reference")
    drain_s: float = Field(4.0, ge=0, le=10, description="sound a turn may still make after its text has ended")

    @classmethod
    def of(cls, defaults: "SessionConfig", given: Mapping[str, object]) -> tuple["SessionConfig", list[str]]:
        """The worker's defaults with what a client gave laid over them.

        A `window` that is given as an object may name some of its knobs only.
        Returns: the config, and one sentence for each key that was ignored because there is no such knob.
        Raises: SettingError naming every knob that is outside its range.
        """
        if not isinstance(given, Mapping):
            raise SettingsError("session settings", expected="an object", got=shown(given))
        values, ignored = overlaid(defaults, given)
        if isinstance(inner := values["window"], Mapping):
            values["window"], inner_ignored = overlaid(defaults.window, inner)
            ignored += [f"window.{key}" for key in inner_ignored]
        return cls(**values), notes(cls, ignored)

    def text_sampling(self) -> TextSampling:
        """How this session's duplex text tokens are chosen."""
        reference = self.compat == "reference"
        return replace(
            DUPLEX_TEXT,
            greedy=self.decode_mode == "greedy" or self.temperature < MIN_TEMPERATURE,
            temperature=max(self.temperature, MIN_TEMPERATURE),
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.text_repetition_penalty,
            repetition_window=self.text_repetition_window_size,
            sign_blind=reference,
            length_penalty=self.length_penalty,
            listen_scale=self.listen_prob_scale,
            listen_scale_on_probability=not reference,
            listen_top_k=self.listen_top_k or 0,
            set_index=REFERENCE_SET if reference else FIXED_SET,
        )

    def speech_sampling(self) -> SpeechSampling:
        """How this session's speech codes are chosen; `decode_mode` is about text and does not matter here."""
        return replace(DUPLEX_SPEECH, temperature=self.tts_temperature, repetition_penalty=self.tts_repetition_penalty)

    @property
    def unit_rows(self) -> int:
        """Most context rows that a unit with one picture adds."""
        n_slices = 1 if self.max_slice_nums == 1 else 1 + self.max_slice_nums
        return UNIT_ROWS + n_slices * IMAGE_ROWS + self.max_new_speak_tokens_per_chunk

    @property
    def rows_needed(self) -> int:
        """Context rows without which this session could not go on: what its window lets stand, and one unit."""
        stands = {"off": 0, "basic": self.window.high_tokens, "context": self.window.previous_max_tokens}
        return stands[self.window.mode] + self.unit_rows


class EngineConfig(Settings):
    """What one engine is built with; `session` is what its sessions start from."""

    model_path: ModelPath = Field(
        Path("assets/tiny"), strict=False, description="checkpoint folder, or a model id of the Hugging Face hub"
    )
    pt_path: Path | None = Field(
        None, strict=False, description="a .pt state dict whose tensors replace those of the checkpoint"
    )
    token2wav_path: Path | None = Field(
        None, strict=False, description="vocoder folder; null: assets/token2wav in the checkpoint"
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$",
        examples=["auto", "cpu", "cuda", "cuda:0"],
        description="auto: the first GPU if there is one",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU")
    max_sessions: int | None = Field(None, ge=1, le=1024, description="slots; null: as many as free memory holds")
    llm_len: int = Field(8192, ge=1, le=1_000_000, description="context rows of a slot")
    euler_steps: int = Field(10, ge=1, le=50, description="solver steps of the flow")
    session: SessionConfig = Field(SessionConfig(), description="what sessions start from")
    max_prompt_s: float = Field(30.0, ge=0.5, le=30, description="longest sound of a prompt")
    voices_s: float = Field(60.0, ge=6, le=3600, description="prompts of all voices in use, in seconds together")
    max_waiting_units: int = Field(16, ge=1, le=600, description="units of sound a session may have waiting")
    snapshots: int = Field(8, ge=0, le=1024, description="prepared prompts kept for the next session")
    seed: int = Field(0, ge=0, le=2**64 - 1, description="what seeds come from, for sessions that name none")
    compile: CompileConfig = Field(CompileConfig(), description="what is compiled and how, and the switches of speed")

    @property
    def token2wav_folder(self) -> Path:
        return self.token2wav_path or self.model_path / "assets" / "token2wav"

    def check_session(self, session: SessionConfig) -> None:
        """Raises: SettingError if a slot could not hold the session's window and one unit more, or for solver steps
        that
        the engine was not built for.
        """
        problems = [self._overflow(session)]
        if session.euler_steps not in (None, self.euler_steps):
            problems.append(
                SettingProblem("euler_steps", f"null or {self.euler_steps}, the engine's", str(session.euler_steps))
            )
        if problems := [problem for problem in problems if problem]:
            raise SettingError(problems)

    def _misfits(self) -> list[SettingProblem]:
        problem = self._overflow(self.session)
        return [problem._replace(knob=f"session.{problem.knob}")] if problem else []

    def _overflow(self, session: SessionConfig) -> SettingProblem | None:
        if session.rows_needed <= self.llm_len:
            return None
        knob = {"off": "mode", "basic": "high_tokens", "context": "previous_max_tokens"}[session.window.mode]
        expected = f"one that leaves {session.unit_rows} rows for a unit in llm_len ({self.llm_len})"
        return SettingProblem(f"window.{knob}", expected, repr(getattr(session.window, knob)))
