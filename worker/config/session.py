"""The settings of a session and of an engine: types, ranges, defaults. Torch-free.

A session's settings are frozen: the client's values are laid over the worker's defaults, checked once, and have no
effect on later sessions.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from models.checkpoint.embedded import DEFAULT
from models.checkpoint.precision import Precision, Weights
from models.errors import SettingsError
from models.sampling.settings import (
    DUPLEX_SPEECH,
    DUPLEX_TEXT,
    MAX_COUNT,
    MIN_TEMPERATURE,
    SpeechSampling,
    TextSampling,
)
from worker.config.compile import CompileConfig, S3CompileModes
from worker.config.hub_id import ModelPath, OptionalModelPath
from worker.config.settings import SettingError, SettingProblem, Settings, notes, overlaid
from worker.config.weights import DECODE_COPY_TEXT, KV_LAYOUT_TEXT, WEIGHTS_TEXT, KVLayoutSetting, PartWeights
from worker.describe import TypeWords, shown

# With the default `decode_copy`: most slots, and least bytes of the GPU.
DECODE_COPY_SESSIONS, DECODE_COPY_GPU = 4, 64 * 10**9
# Indices into the shared token sets: duplex as in the public implementation, duplex with its defects fixed,
# turn-based replies with and without speech, and the first token of units that must speak in the two kinds of duplex.
REFERENCE_SET, FIXED_SET, REPLY_SET, REPLY_TEXT_SET, REFERENCE_SPEAK_SET, FIXED_SPEAK_SET = range(6)
# Of a checkpoint with a side lane only: duplex in which a span of the side lane may begin, and the tokens inside one.
SIDE_DUPLEX_SET, SIDE_SET = range(6, 8)

VOICES_TEXT = (
    "total seconds of the prompts of all voices in use; below 30, no voice may be longer; GPU memory is taken as "
    "voices are prepared"
)

TEXT_ROWS = 512  # of inserted texts, for which a session in a pool of rows has room beside its window
DEFAULT_SOLVER_STEPS = 10
CPU_SPEECH_SESSIONS, GPU_SPEECH_SESSIONS = 4, 32
IMAGE_ROWS = 66  # context tokens of one slice, with its two delimiters
UNIT_ROWS = 14  # <unit>, ten tokens of sound, an inserted turn end, terminator, </unit>

MIN_PIECE, MAX_PIECES, UNIT_SPEECH_TOKENS = 5, 4, 25  # speech tokens; the vocoder takes five at least


def _piece_sizes(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and 1 <= len(value) <= MAX_PIECES:
        sizes = tuple(n for n in value if type(n) is int and MIN_PIECE <= n <= UNIT_SPEECH_TOKENS)
        if len(sizes) == len(value):
            return sizes
    raise ValueError("not a list of sizes")


SoundRamp = Annotated[
    tuple[int, ...],
    BeforeValidator(_piece_sizes),
    TypeWords(f"a list of 1 to {MAX_PIECES} whole numbers from {MIN_PIECE} to {UNIT_SPEECH_TOKENS}"),
]

# Settings that only `prepare` can change, with the reason.
PREPARED_SETTINGS = {
    "chunk_ms": "the model is trained on it",
    "sample_rate": "the model is trained on it",
    "window.mode": "the window has kept what this mode needs",
    "window.marker": "the kept text begins with it",
    "euler_steps": "the engine has one number of steps",
    "seed": "random numbers start with the context",
    "compat": "the context has been built by its rules",
}


class WindowConfig(Settings):
    """What is evicted when the context grows: nothing, the oldest units, or the oldest units with their text kept."""

    mode: Literal["off", "basic", "context"] = Field(
        "basic",
        description="off: evicts nothing; basic: evicts by tokens; context: evicts by units and keeps their text",
    )
    high_tokens: int = Field(4000, ge=1, le=1_000_000, description="basic: evict above this context length")
    low_tokens: int = Field(
        3500, ge=0, le=1_000_000, description="basic: evict down to this length; at most high_tokens"
    )
    previous_max_tokens: int = Field(500, ge=1, le=100_000, description="context: most tokens of kept text")
    max_units: int = Field(24, ge=1, le=10_000, description="context: units kept in full")
    marker: str = Field("\n\nprevious: ", max_length=200, description="context: text before the kept text")

    def _conflicts(self) -> list[SettingProblem]:
        if self.low_tokens <= self.high_tokens:
            return []
        expected = f"at most high_tokens ({self.high_tokens})"
        return [SettingProblem("low_tokens", expected, str(self.low_tokens))]


class SessionConfig(Settings):
    """The settings of one session, in force from its first unit to its last."""

    generate_audio: bool = Field(True, description="false: text only")
    ls_mode: Literal["explicit", "implicit"] = Field(
        "explicit", description="explicit: feed the terminator of each unit; implicit: do not"
    )
    force_listen_count: int = Field(3, ge=0, le=1000, description="first units, which only listen")
    max_new_speak_tokens_per_chunk: int = Field(
        20, ge=1, le=64, description="most text tokens of a unit, including the terminator"
    )
    max_chars_per_chunk: int = Field(28, ge=1, le=1000, description="a unit's text stays below this many characters")
    max_side_tokens_per_chunk: int = Field(
        0,
        ge=0,
        le=256,
        description="most tokens of a unit's side lane, which are not spoken: calls of functions; 0: none. No effect "
        "with compat reference or a checkpoint without a side lane",
    )
    max_turn_tokens: int = Field(
        0, ge=0, le=65_536, description="most spoken text tokens of a turn, which then ends; 0: no limit"
    )
    decode_mode: Literal["sampling", "greedy"] = Field(
        "sampling", description="greedy: always the most likely text token"
    )
    temperature: float = Field(0.7, ge=0, le=2, description="temperature of text tokens; below 0.000001: greedy")
    top_k: int = Field(20, ge=0, le=MAX_COUNT, description="most likely text tokens that are kept; 0 keeps all")
    top_p: float = Field(0.8, ge=0, le=1, description="probability mass of text tokens that is kept; 0 and 1 keep all")
    text_repetition_penalty: float = Field(
        1.05, ge=0.1, le=10, description="above 1: recent text tokens become less likely; below 1: more likely"
    )
    text_repetition_window_size: int = Field(
        512, ge=0, le=4096, description="number of recent text tokens it applies to"
    )
    length_penalty: float = Field(1.1, ge=0.1, le=5, description="above 1: the end of a turn becomes less likely")
    listen_prob_scale: float = Field(
        1.0, ge=1e-4, le=100, description="factor on the odds of listening; with compat reference, on the logit"
    )
    listen_top_k: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="listen if listening is among this many most likely tokens; null: off"
    )
    tts_temperature: float = Field(
        0.8, ge=MIN_TEMPERATURE, le=2, description="temperature of speech tokens, which greedy samples too"
    )
    tts_repetition_penalty: float = Field(
        1.05, ge=0.1, le=10, description="above 1: recent speech tokens become less likely"
    )
    chunk_ms: Literal[1000] = Field(1000, description="length of a unit; the model is trained on one second")
    sample_rate: Literal[16000] = Field(16000, description="sample rate of the input in Hz; the model is trained on it")
    max_slice_nums: int = Field(1, ge=1, le=9, description="most slices of a large picture")
    window: WindowConfig = Field(WindowConfig(), description="what is evicted when the context grows")
    euler_steps: int | None = Field(None, ge=1, le=50, description="solver steps of the flow; null: the engine's")
    seed: int | None = Field(
        None, ge=0, le=2**64 - 1, description="seed of all sampling; null: derived from the engine's"
    )
    compat: Literal["fixed", "reference"] = Field(
        "fixed", description="reference: as the public implementation, including its defects"
    )
    early_sound: bool = Field(
        True, description="send sound before its unit is complete; no effect with compat reference"
    )
    sound_ramp: SoundRamp = Field(
        (8,),
        description="speech tokens, 40 ms each, of the pieces in which a unit's sound is sent; the rest of the unit is "
        "the last piece. Of a turn's first 8 tokens 40 ms are audible, of fewer nothing. Their sum is at most 25. No "
        "effect with compat reference, or early_sound false",
    )
    early_unit: Literal["off", "auto"] = Field(
        "off",
        description="auto: at a pause of the user, run the open unit at once, completed with silence, and keep it if "
        "it speaks; for clients that send sound in pieces. No effect with compat reference",
    )
    early_pause_ms: int = Field(
        160, ge=160, le=300, description="silence after speech at which early_unit auto runs the open unit"
    )
    drain_s: float = Field(4.0, ge=0, le=10, description="most seconds of sound after the text of a turn has ended")

    def _conflicts(self) -> list[SettingProblem]:
        if (n := sum(self.sound_ramp)) <= UNIT_SPEECH_TOKENS:
            return []
        return [SettingProblem("sound_ramp", f"a sum of at most {UNIT_SPEECH_TOKENS} speech tokens", str(n))]

    @classmethod
    def of(cls, defaults: "SessionConfig", given: Mapping[str, object]) -> tuple["SessionConfig", list[str]]:
        """The worker's defaults with the client's values laid over them.

        Args:
            defaults: the worker's settings.
            given: the client's values; a `window` object may be partial.
        Returns:
            The settings, and one sentence for each unknown key.
        Raises:
            SettingError: for every value outside its range.
        """
        if not isinstance(given, Mapping):
            raise SettingsError("session settings", expected="an object", got=shown(given))
        values, ignored = overlaid(defaults, given)
        if isinstance(inner := values["window"], Mapping):
            values["window"], inner_ignored = overlaid(defaults.window, inner)
            ignored += [f"window.{key}" for key in inner_ignored]
        return cls(**values), notes(cls, ignored)

    def adjusted(self, given: Mapping[str, object]) -> "SessionConfig":
        """These settings with values laid over them.

        Args:
            given: the client's values; a `window` object may be partial.
        Raises:
            SettingError: for every unknown key and every value outside its range.
        """
        values = {**dict(self), **given}
        if isinstance(window := given.get("window"), Mapping):
            try:
                values["window"] = WindowConfig(**{**dict(self.window), **window})
            except SettingError as error:
                problems = [one._replace(setting=f"window.{one.setting}") for one in error.problems]
                raise SettingError(problems) from None
        return SessionConfig(**values)

    def check_adjustable(self, after: "SessionConfig") -> None:
        """Raises: SettingError if `after` differs in settings that only `prepare` can change."""
        problems = []
        for name, why in PREPARED_SETTINGS.items():
            group, _, inner = name.rpartition(".")
            held, new = ((getattr(one, group) if group else one) for one in (self, after))
            if getattr(held, inner) != getattr(new, inner):
                expected = f"{shown(getattr(held, inner))}, as prepared: {why}"
                problems.append(SettingProblem(name, expected, shown(getattr(new, inner))))
        if problems:
            raise SettingError(problems)

    def text_sampling(self) -> TextSampling:
        """The sampling of this session's duplex text tokens."""
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
        """The sampling of this session's speech tokens; `decode_mode` applies to text only."""
        return replace(DUPLEX_SPEECH, temperature=self.tts_temperature, repetition_penalty=self.tts_repetition_penalty)

    @property
    def runs_early(self) -> bool:
        """Whether units may run before their seconds are full."""
        return self.early_unit == "auto" and self.compat == "fixed"

    @property
    def wants_side_lane(self) -> bool:
        """Whether the model may write beside its speech, if the checkpoint has a side lane."""
        return self.max_side_tokens_per_chunk > 0 and self.compat == "fixed"

    @property
    def speak_set(self) -> int:
        """Index of the token set that a unit which must speak chooses its first token from."""
        return REFERENCE_SPEAK_SET if self.compat == "reference" else FIXED_SPEAK_SET

    @property
    def unit_rows(self) -> int:
        """Most context tokens of a unit with one picture."""
        n_slices = 1 if self.max_slice_nums == 1 else 1 + self.max_slice_nums
        return UNIT_ROWS + n_slices * IMAGE_ROWS + self.max_new_speak_tokens_per_chunk + self.max_side_tokens_per_chunk

    @property
    def rows_needed(self) -> int:
        """Least context length of a slot for this session: what its window keeps, and one unit."""
        kept = {"off": 0, "basic": self.window.high_tokens, "context": self.window.previous_max_tokens}
        return kept[self.window.mode] + self.unit_rows


class EngineConfig(Settings):
    """The settings of an engine; `session` holds the defaults of its sessions."""

    model_path: ModelPath = Field(
        DEFAULT, strict=False, description="checkpoint folder, or a model id of the Hugging Face hub"
    )
    pt_path: Path | None = Field(
        None, strict=False, description="a .pt state dict whose tensors replace the checkpoint's"
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
    weights: Weights = Field("bf16", description=WEIGHTS_TEXT)
    part_weights: PartWeights = Field(PartWeights(), description="weights of single parts")
    decode_copy: bool | Literal["auto"] = Field("auto", description=DECODE_COPY_TEXT)
    kv_layout: KVLayoutSetting = Field("auto", description=KV_LAYOUT_TEXT)
    max_sessions: int | None = Field(None, ge=1, le=1024, description="slots; null: as many as fit; on a GPU up to 64")
    llm_len: int = Field(8192, ge=1, le=1_000_000, description="context length of a slot in tokens")
    euler_steps: int | None = Field(None, ge=1, le=50, description="solver steps of the flow; null: the model's, or 10")
    session: SessionConfig = Field(SessionConfig(), description="defaults of sessions")
    max_prompt_s: float = Field(30.0, ge=0.5, le=30, description="longest voice prompt in seconds")
    voices_s: float = Field(60.0, ge=6, le=3600, description=VOICES_TEXT)
    first_sound_first: bool = Field(True, description="work of turns without sound goes first")
    max_waiting_units: int = Field(16, ge=1, le=600, description="most waiting units of a session")
    early_pictures: bool = Field(
        True, description="encode pictures when they arrive, while no unit is in flight, rather than with their unit"
    )
    early_prefill: bool | Literal["auto"] = Field(
        "auto",
        description="feed pictures that are encoded before their unit while no unit is in flight; auto: with few "
        "sessions",
    )
    snapshots: int = Field(8, ge=0, le=1024, description="prepared prompts kept for later sessions")
    seed: int = Field(0, ge=0, le=2**64 - 1, description="source of the seeds of sessions without one")
    s3gen_path: Path | None = Field(None, strict=False, description="checkpoint file of S3Gen for voice conversions")
    s3gen_modes: S3CompileModes = Field(S3CompileModes(), description="modes of its components")
    omni: bool = Field(True, description="serve the model of `model_path`")
    speech_path: OptionalModelPath = Field(None, strict=False, description="Qwen3-TTS checkpoint that is served too")
    speech_sessions: int | None = Field(None, ge=1, le=1024, description="slots of the speech model")
    speech_rows: int = Field(2048, ge=128, le=32_768, description="context length of such a slot")
    compile: CompileConfig = Field(CompileConfig(), description="compilation and backend flags")

    @property
    def token2wav_folder(self) -> Path:
        return self.token2wav_path or self.model_path / "assets" / "token2wav"

    @property
    def solver_steps(self) -> int:
        """Steps of the flow's solver; see `worker.assembly.solver_steps` for those of a checkpoint."""
        return self.euler_steps or DEFAULT_SOLVER_STEPS

    @property
    def precision(self) -> Precision:
        """The kinds of quantised weights, by part."""
        return self.part_weights.precision(self.weights)

    def keeps_decode_copy(self, gpu_bytes: int) -> bool:
        """Whether a worker keeps a copy for decoding on a GPU of so many bytes, if the project's kernels run."""
        if self.decode_copy != "auto":
            return self.decode_copy
        is_small = self.max_sessions is not None and self.max_sessions <= DECODE_COPY_SESSIONS
        is_bf16 = self.precision.llm is None and self.dtype != "float32"
        return is_small and is_bf16 and gpu_bytes >= DECODE_COPY_GPU

    def speech_slots(self, device_type: str) -> int:
        """Slots of the speech model on a device of this type, `cuda` or `cpu`."""
        return self.speech_sessions or (GPU_SPEECH_SESSIONS if device_type == "cuda" else CPU_SPEECH_SESSIONS)

    def rows_of(self, session: SessionConfig) -> int:
        """Context rows that a session needs until its end; a longer prompt needs more."""
        if session.window.mode != "basic" or session.compat == "reference":
            return self.llm_len
        return min(session.rows_needed + TEXT_ROWS, self.llm_len)

    def check_session(self, session: SessionConfig) -> None:
        """Check a session's settings against this engine.

        Raises:
            SettingError: if a slot cannot hold the session's window and one more unit, or if `euler_steps` differs
                from the engine's, where that is known.
        """
        overflow = self._overflow(session)
        problems = [overflow] if overflow else []
        if self.euler_steps is not None and session.euler_steps not in (None, self.euler_steps):
            expected = f"null or {self.euler_steps}, the engine's"
            problems.append(SettingProblem("euler_steps", expected, str(session.euler_steps)))
        if problems:
            raise SettingError(problems)

    def _conflicts(self) -> list[SettingProblem]:
        problem = self._overflow(self.session)
        return [problem._replace(setting=f"session.{problem.setting}")] if problem else []

    def _overflow(self, session: SessionConfig) -> SettingProblem | None:
        if session.rows_needed <= self.llm_len:
            return None
        name = {"off": "mode", "basic": "high_tokens", "context": "previous_max_tokens"}[session.window.mode]
        expected = f"a value that leaves {session.unit_rows} tokens for a unit in llm_len ({self.llm_len})"
        return SettingProblem(f"window.{name}", expected, shown(getattr(session.window, name)))
