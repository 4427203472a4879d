"""Every section of `config.json`: keys, types, ranges, defaults, and the order of the sources. Torch-free.

Flags override the environment, which overrides the file, which overrides the defaults. Does not check that files
exist; the code that opens them does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from models.checkpoint.embedded import DEFAULT
from models.checkpoint.precision import Precision, Weights
from worker.config.access import ApiKeyEntry, ClientLimits
from worker.config.api import ApiSection
from worker.config.compile import CompileConfig, S3CompileModes
from worker.config.hub_id import ModelPath, OptionalModelPath
from worker.config.json_file import read_json
from worker.config.layers import LayeredSettings, SettingsLayer, setting_fields, with_sources
from worker.config.session import VOICES_TEXT, EngineConfig, SessionConfig
from worker.config.settings import HIDDEN, SettingError, SettingProblem, Settings
from worker.config.webrtc import WebRtcConfig
from worker.config.weights import DECODE_COPY_TEXT, KV_LAYOUT_TEXT, WEIGHTS_TEXT, KVLayoutSetting, PartWeights
from worker.describe import shown

ROOT = Path(__file__).resolve().parents[2]
FILE_NAME = "config.json"
INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_S = 86_400  # seconds of any wait
TRACE_FOLDER = "traces"  # below `service.data_dir`: of sessions that have asked for one

FOREIGN_VOICE = "ref_minicpm_signature.wav"
# Keys of settings files for the public implementation that have no effect here -> what applies instead.
UNUSED_KEYS = {
    "service.eta_streaming_s": "service.eta_half_duplex_s estimates turns",
    "service.eta_duplex_s": "service.eta_audio_duplex_s and service.eta_omni_duplex_s estimate calls",
    "service.request_timeout": "service.worker_timeout_s bounds how long a worker may take to answer",
    "backend": "PyTorch runs the model",
    "cpp_backend": "PyTorch runs the model",
}
# model.attn_implementation -> service.compile.attention.
ATTENTION = {"auto": "auto", "flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager"}


class ModelSection(Settings):
    """The model and its device."""

    model_path: ModelPath = Field(
        DEFAULT,
        strict=False,
        description="checkpoint folder, or a Hugging Face model id such as openbmb/MiniCPM-o-4_5; null: the default",
    )
    pt_path: Path | None = Field(
        None, strict=False, description="a `.pt` state dict whose tensors replace the checkpoint's"
    )
    token2wav_path: Path | None = Field(
        None, strict=False, description="vocoder folder; null: assets/token2wav in the checkpoint"
    )
    s3gen_path: Path | None = Field(
        None, strict=False, description="checkpoint file of S3Gen, for voice conversions; null: they are refused"
    )
    s3gen_modes: S3CompileModes = Field(S3CompileModes(), description="modes of torch.compile of its components")
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto",
        description="attention kernels; flash_attention_2 takes PyTorch's flash kernels, not the package flash-attn",
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
    omni: bool = Field(True, description="false: `model.model_path` is not served, only `model.speech_path`")
    speech_path: OptionalModelPath = Field(
        None,
        strict=False,
        description="Qwen3-TTS checkpoint folder or model id, served on the same GPU; null: no speech model",
    )
    speech_sessions: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="texts that the speech model speaks at a time; null: 32 on a GPU, else 4",
    )
    speech_context_rows: int = Field(
        2048, ge=128, le=32_768, description="context length of each of them; a frame of 80 ms takes one"
    )

    def _conflicts(self) -> list[SettingProblem]:
        if self.omni or self.speech_path is not None:
            return []
        return [SettingProblem("omni", "true, or a model in model.speech_path", "false")]

    @property
    def precision(self) -> Precision:
        """The kinds of quantised weights, by part."""
        return self.part_weights.precision(self.weights)


class AudioSection(Settings):
    """The default voice, and sound options of the web pages."""

    ref_audio_path: Path | None = Field(
        Path("assets/ref_audio/default.wav"), strict=False, description="voice of sessions without a voice of their own"
    )
    playback_delay_ms: int = Field(200, ge=0, le=2000, description="milliseconds of playback delay in the web pages")
    chat_vocoder: Literal["token2wav", "cosyvoice2"] = Field(
        "token2wav", description="vocoder of non-streaming answers; both values select token2wav"
    )


class ServiceSection(Settings):
    """Ports, queueing, start-up and caches."""

    gateway_port: int = Field(8006, ge=1, le=65_535, description="port for clients")
    worker_base_port: int = Field(22_400, ge=1, le=65_535, description="worker i listens on this port plus i")
    max_queue_size: int = Field(1000, ge=0, le=1_000_000, description="most waiting tickets for the slots of a model")
    ssl_certfile: Path | None = Field(None, strict=False, description="TLS certificate; null: plain HTTP")
    ssl_keyfile: Path | None = Field(None, strict=False, description="private key of the certificate")
    ssl_cafile: Path | None = Field(
        None, strict=False, description="certificates of other gateways of a [cluster](cluster.md); null: this one's"
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=["https://talk.example.org", "*"],
        description="origins of other servers' pages that may connect; `*`: all; this server's pages always may",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=["talk.example.org", "*"],
        description="host names under which browsers may reach this server without keys, in addition to localhost, IP "
        "addresses, this machine's name and the hosts of `service.allowed_origins`; `*`: all",
    )
    api_keys: Annotated[tuple[ApiKeyEntry, ...], HIDDEN] = Field(
        (), strict=False, description="API keys; see [keys.md](keys.md)"
    )
    limits: ClientLimits = Field(
        ClientLimits(), description="limits of each client and connection; see [limits.md](limits.md)"
    )
    webrtc: WebRtcConfig = Field(
        WebRtcConfig(), description="calls over WebRTC; see [openai.md](openai.md#webrtc-calls)"
    )
    worker_timeout_s: float = Field(
        5.0, ge=0.5, le=MAX_S, description="seconds without an answer from a worker until it counts as lost"
    )
    max_worker_memory_gb: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="gigabytes of memory above which a worker is replaced; null: 4.3, and twice what it had once ready",
    )
    compile: CompileConfig = Field(
        CompileConfig(), description="true, false, auto, or an object of the keys below, which implies true"
    )
    eta_chat_s: float = Field(
        15.0, ge=0, le=MAX_S, description="estimated seconds of a chat, until enough are measured"
    )
    eta_half_duplex_s: float = Field(180.0, ge=0, le=MAX_S, description="the same for half duplex")
    eta_audio_duplex_s: float = Field(120.0, ge=0, le=MAX_S, description="the same for duplex without pictures")
    eta_omni_duplex_s: float = Field(90.0, ge=0, le=MAX_S, description="the same for duplex with pictures")
    eta_ema_alpha: float = Field(0.3, ge=0, le=1, description="weight of the newest duration in the moving average")
    eta_ema_min_samples: int = Field(3, ge=1, le=1_000_000, description="measured durations that replace the estimate")
    warmup_video: Path = Field(Path("assets/warmup.mp4"), strict=False, description="video for the warm-up")
    max_warmup_chunks: int = Field(10, ge=1, le=600, description="most seconds of the video")
    drain_timeout_s: float = Field(
        30.0, ge=0, le=3600, description="seconds for sessions to end before the process stops"
    )
    resume_grace_s: float = Field(
        30.0, ge=0, le=600, description="seconds that a session keeps its slot after a lost connection; 0: none does"
    )
    cache_dir: Path = Field(Path("torch_compile_cache"), strict=False, description="folder of compiled kernels")
    trace_dir: Path | None = Field(
        None,
        strict=False,
        description="folder of [traces](traces.md) of all duplex sessions, for bug reports; null: none are written",
    )
    record_traces: bool = Field(
        False, description="sessions may ask for a [trace](traces.md#one-session) of themselves, below `data_dir`"
    )
    data_dir: Path = Field(
        Path("data"),
        strict=False,
        description="folder of recordings, uploaded voices, own presets and changes by operators",
    )

    def _conflicts(self) -> list[SettingProblem]:
        found = []
        if self.gateway_port == self.worker_base_port:
            expected = f"a port other than service.gateway_port ({self.gateway_port})"
            found.append(SettingProblem("worker_base_port", expected, str(self.worker_base_port)))
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_certfile" if self.ssl_certfile is None else "ssl_keyfile"
            found.append(SettingProblem(missing, "a path, since certificate and key belong together", "null"))
        return found


class DuplexSection(Settings):
    """Limits and defaults of live sessions."""

    pause_timeout: float = Field(60.0, ge=0.1, le=MAX_S, description="seconds until a paused session ends")
    idle_timeout: float | None = Field(
        300.0, ge=1, le=MAX_S, description="seconds without a unit until a session ends; null: never"
    )
    max_sessions: int | None = Field(None, ge=1, le=1024, description="slots; null: as many as fit; on a GPU up to 64")
    admission: Literal["auto", "measured", "fixed"] = Field(
        "auto",
        description="`measured`: a session gets a slot only while the units of all are answered in time; `fixed`: it "
        "gets any free slot; auto: `measured` unless `duplex.max_sessions` is set",
    )
    context_rows: int = Field(8192, ge=1, le=1_000_000, description="context length of a slot in tokens")
    euler_steps: int | None = Field(None, ge=1, le=50, description="solver steps of the flow; null: the model's, or 10")
    voices_s: float = Field(60.0, ge=6, le=3600, description=VOICES_TEXT)
    early_pictures: bool = Field(
        True,
        description="encode pictures when they arrive, while no unit is in flight; false: with their unit",
    )
    early_prefill: bool | Literal["auto"] = Field(
        "auto",
        description="with early_pictures: also feed such pictures to the language model before their unit, which "
        "takes one more forward; auto: while at most four sessions are open",
    )
    first_sound_first: bool = Field(
        True,
        description="work of turns that have no sound yet goes first; sessions whose clients have sound left to play "
        "wait meanwhile",
    )
    spread_units: bool = Field(
        True,
        description="`prepared` tells clients when to begin, so that the units of a worker's sessions are spread "
        "evenly over the second",
    )
    max_backlog_mb: float = Field(32.0, ge=1, le=4096, description="most megabytes of waiting input per session")
    session: SessionConfig = Field(
        SessionConfig(), description="defaults of the [settings of a session](session-config.md)"
    )


class RecordingSection(Settings):
    """Recordings of sessions, and when they are removed."""

    enabled: bool = Field(False, description="record every session; see [recording.md](recording.md)")
    session_retention_days: int = Field(
        -1, ge=-1, le=36_500, description="days after which a recording is removed; -1: never"
    )
    max_storage_gb: float = Field(
        -1.0, ge=-1, le=1_000_000, description="gigabytes above which the oldest recordings are removed; -1: no limit"
    )


class Config(LayeredSettings):
    """All sections. `load_config` makes its paths absolute."""

    unused_keys = UNUSED_KEYS

    model: ModelSection = ModelSection()
    audio: AudioSection = AudioSection()
    service: ServiceSection = ServiceSection()
    duplex: DuplexSection = DuplexSection()
    recording: RecordingSection = RecordingSection()
    api: ApiSection = ApiSection()

    def _conflicts(self) -> list[SettingProblem]:
        problems = []
        named, compiled = ATTENTION[self.model.attn_implementation], self.service.compile.attention
        if "auto" not in (named, compiled) and named != compiled:
            expected = f"auto, or the same as model.attn_implementation ({self.model.attn_implementation})"
            problems.append(SettingProblem("service.compile.attention", expected, shown(compiled)))
        if self.model.omni and self.speech_name == self.omni_name:
            expected = "another name than that of the omni model"
            problems.append(SettingProblem("api.speech_model_name", expected, shown(self.speech_name)))
        return problems

    @property
    def omni_name(self) -> str:
        """The name of the omni model in the list of models."""
        return self.api.model_name or self.model.model_path.name

    @property
    def speech_name(self) -> str | None:
        """The name of the speech model in the list of models; None: there is none."""
        path = self.model.speech_path
        return None if path is None else self.api.speech_model_name or path.name

    @property
    def compile(self) -> CompileConfig:
        """`service.compile`, with the attention backend that either section names."""
        compiled = self.service.compile
        if compiled.attention != "auto":
            return compiled
        return compiled.model_copy(update={"attention": ATTENTION[self.model.attn_implementation]})

    def engine(self) -> EngineConfig:
        """The settings of one worker's engine. Raises: SettingError for sessions that do not fit into a slot."""
        model, duplex = self.model, self.duplex
        engine = EngineConfig(
            model_path=model.model_path,
            pt_path=model.pt_path,
            token2wav_path=model.token2wav_path,
            device=model.device,
            dtype=model.dtype,
            weights=model.weights,
            part_weights=model.part_weights,
            decode_copy=model.decode_copy,
            kv_layout=model.kv_layout,
            max_sessions=duplex.max_sessions,
            llm_len=duplex.context_rows,
            euler_steps=duplex.euler_steps,
            voices_s=duplex.voices_s,
            early_pictures=duplex.early_pictures,
            early_prefill=duplex.early_prefill,
            session=duplex.session,
            s3gen_path=model.s3gen_path,
            s3gen_modes=model.s3gen_modes,
            omni=model.omni,
            speech_path=model.speech_path,
            speech_sessions=model.speech_sessions,
            speech_rows=model.speech_context_rows,
            first_sound_first=duplex.first_sound_first,
            compile=self.compile,
        )
        engine.check_session(duplex.session)
        return engine


def load_config(
    path: Path | None = None, *, flags: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Config, list[str]]:
    """The settings from all sources. Flags override the environment, which overrides the file.

    A relative path in the file starts at the file's folder; every other one starts at the repository's root.

    Args:
        path: the file; None: `config.json` at the root, if it exists.
        flags: full name -> value, such as {"service.compile": True}; None means not given.
        environ: the environment; DUOLOGUE_<SECTION>_<KEY> and TORCHINDUCTOR_CACHE_DIR are read.
    Returns:
        The settings, and a sentence for each given key without effect.
    Raises:
        ConfigError: for a file that is not JSON.
        SettingError: for every unknown key and every invalid value, with its source.
    """
    file = path or ROOT / FILE_NAME
    content = read_json(file) if path is not None or file.exists() else {}
    inductor = {"service.cache_dir": environ.get(INDUCTOR_VARIABLE) or None}
    layers = [
        SettingsLayer.of_keys(Config, flags, "flag", ROOT),
        SettingsLayer.of_environment(Config, environ, ROOT),
        SettingsLayer.of_keys(Config, inductor, INDUCTOR_VARIABLE, ROOT),
        SettingsLayer.of_file(Config, content, file, ROOT),
        _default_paths(),
    ]
    config, voice_notes = _with_default_voice(Config.from_layers(layers))
    try:
        config.engine()
    except SettingError as error:
        raise SettingError(with_sources([_in_file_names(one) for one in error.problems], layers)) from None
    notes = [note for layer in reversed(layers) for note in layer.notes]
    return config, notes + voice_notes + _without_effect(config)


def default_config() -> Config:
    """The settings without a file, environment and flags; paths are absolute."""
    return Config.from_layers([_default_paths()])


def _default_paths() -> SettingsLayer:
    """The defaults of all paths, made absolute."""
    defaults = {setting.key: setting.default for setting in setting_fields(Config) if setting.is_path}
    return SettingsLayer.of_keys(Config, defaults, "default", ROOT)


def _with_default_voice(config: Config) -> tuple[Config, list[str]]:
    """The settings with our default voice in place of the public implementation's, which is not distributed here."""
    named, default = config.audio.ref_audio_path, AudioSection().ref_audio_path
    if named is None or default is None or named.name != FOREIGN_VOICE or named.exists():
        return config, []
    audio = config.audio.model_copy(update={"ref_audio_path": ROOT / default})
    note = f"setting audio.ref_audio_path: {FOREIGN_VOICE} does not exist; {default.name} is used instead"
    return config.model_copy(update={"audio": audio}), [note]


def _in_file_names(problem: SettingProblem) -> SettingProblem:
    """A problem of the engine's settings, named as in the file."""
    name = f"duplex.session.{problem.setting.removeprefix('session.')}"
    return problem._replace(setting=name, expected=problem.expected.replace("llm_len", "duplex.context_rows"))


def _without_effect(config: Config) -> list[str]:
    found = []
    if config.audio.chat_vocoder != "token2wav":
        found.append("setting audio.chat_vocoder has no effect: token2wav is used")
    return found
