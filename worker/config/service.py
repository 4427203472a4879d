"""The one settings file: every section of `config.json`, its keys, types, ranges and defaults. Torch-free.

Knows what the programs can be told and in which order the places count: flags, environment, file, defaults. Does not
know sessions in motion, sockets or devices; whether files exist is found out by whoever opens them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from worker.config.compile import CompileConfig
from worker.config.hub_id import ModelPath
from worker.config.layers import Layers, read_json, setting_fields
from worker.config.session import EngineConfig, SessionConfig
from worker.config.settings import SettingError, SettingProblem, Settings

ROOT = Path(__file__).resolve().parents[2]
FILE_NAME = "config.json"
INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_S = 86_400  # seconds of any wait

FOREIGN_VOICE = "ref_minicpm_signature.wav"
# Keys of files written for other versions of this protocol.
DEAD = {
    "service.eta_streaming_s": "turns are estimated by service.eta_half_duplex_s",
    "service.eta_duplex_s": "calls are estimated by service.eta_audio_duplex_s and service.eta_omni_duplex_s",
}
# The file's name of an attention backend -> the compile settings'.
ATTENTION = {"auto": "auto", "flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager"}


class ModelSection(Settings):
    """Which model runs, and where."""

    model_path: ModelPath = Field(
        Path("assets/tiny"),
        strict=False,
        description="checkpoint folder, or a model id of the Hugging Face hub such as openbmb/MiniCPM-o-4_5; "
        "null: the default",
    )
    pt_path: Path | None = Field(None, strict=False, description="a `.pt` file whose weights replace the folder's")
    token2wav_path: Path | None = Field(
        None, strict=False, description="vocoder folder; null: assets/token2wav in the checkpoint"
    )
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = Field(
        "auto", description="attention kernels; flash_attention_2 takes PyTorch's own flash kernels"
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$",
        examples=["auto", "cpu", "cuda", "cuda:0"],
        description="auto: the first GPU if there is one",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on a GPU")


class AudioSection(Settings):
    """Voices and sound for clients that name none."""

    ref_audio_path: Path | None = Field(
        Path("assets/ref_audio/default.wav"), strict=False, description="the voice of sessions that bring none"
    )
    playback_delay_ms: int = Field(200, ge=0, le=2000, description="handed to web pages")
    chat_vocoder: Literal["token2wav", "cosyvoice2"] = Field(
        "token2wav", description="of answers in one piece; token2wav speaks in either case"
    )


class ServiceSection(Settings):
    """Ports, waiting, starting, and where files go."""

    gateway_port: int = Field(8006, ge=1, le=65_535, description="where clients connect")
    worker_base_port: int = Field(22_400, ge=1, le=65_535, description="worker i listens on this plus i")
    max_queue_size: int = Field(1000, ge=0, le=1_000_000, description="tickets that may wait")
    ssl_certfile: Path | None = Field(None, strict=False, description="certificate for https; null: plain http")
    ssl_keyfile: Path | None = Field(None, strict=False, description="its private key")
    allowed_origins: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=["https://talk.example.org", "*"],
        description="pages from elsewhere that may talk here; `*`: any; pages of this server always may",
    )
    worker_timeout_s: float = Field(
        5.0, ge=0.5, le=MAX_S, description="seconds without a sign of life after which a worker counts as lost"
    )
    request_timeout: float = Field(300.0, ge=0.1, le=MAX_S, description="seconds for a worker's answer over HTTP")
    compile: CompileConfig = Field(
        CompileConfig(), description="true, false, auto, or an object of the keys below, which means true"
    )
    data_dir: Path = Field(Path("data"), strict=False, description="what the service keeps")
    eta_chat_s: float = Field(15.0, ge=0, le=MAX_S, description="seconds a chat takes, until some are measured")
    eta_half_duplex_s: float = Field(180.0, ge=0, le=MAX_S, description="as above, for half duplex")
    eta_audio_duplex_s: float = Field(120.0, ge=0, le=MAX_S, description="as above, for duplex without pictures")
    eta_omni_duplex_s: float = Field(90.0, ge=0, le=MAX_S, description="as above, for duplex with pictures")
    eta_ema_alpha: float = Field(0.3, ge=0, le=1, description="weight of the newest measured one")
    eta_ema_min_samples: int = Field(3, ge=1, le=1_000_000, description="measured ones that replace the guess")
    warmup_video: Path = Field(Path("assets/warmup.mp4"), strict=False, description="what the warm-up listens to")
    max_warmup_chunks: int = Field(10, ge=1, le=600, description="seconds of it at most")
    drain_timeout_s: float = Field(30.0, ge=0, le=3600, description="seconds that sessions have to end at a stop")
    cache_dir: Path = Field(Path("torch_compile_cache"), strict=False, description="compiled kernels")

    def _misfits(self) -> list[SettingProblem]:
        found = []
        if self.gateway_port == self.worker_base_port:
            expected = f"another port than service.gateway_port ({self.gateway_port})"
            found.append(SettingProblem("worker_base_port", expected, str(self.worker_base_port)))
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            missing = "ssl_certfile" if self.ssl_certfile is None else "ssl_keyfile"
            found.append(SettingProblem(missing, "a path, as the other half of the pair is given", "null"))
        return found


class DuplexSection(Settings):
    """What live sessions may take, and what they start from."""

    pause_timeout: float = Field(60.0, ge=0.1, le=MAX_S, description="seconds until a paused session ends")
    idle_timeout: float | None = Field(
        None, ge=1, le=MAX_S, description="seconds without a message until a session ends; null: never"
    )
    max_sessions: int | None = Field(None, ge=1, le=1024, description="slots; null: as many as free memory holds")
    context_rows: int = Field(8192, ge=1, le=1_000_000, description="context rows of a slot")
    euler_steps: int = Field(10, ge=1, le=50, description="solver steps of the flow")
    max_backlog_mb: float = Field(32.0, ge=1, le=4096, description="megabytes of input a session may have waiting")
    session: SessionConfig = Field(
        SessionConfig(), description="what sessions start from: [settings of a session](session-config.md)"
    )


class RecordingSection(Settings):
    """What is kept of sessions. Accepted for files that have it; nothing is recorded."""

    enabled: bool = Field(True, description="without effect: sessions are not recorded")
    session_retention_days: int = Field(-1, ge=-1, le=36_500, description="without effect; -1: for ever")
    max_storage_gb: float = Field(-1.0, ge=-1, le=1_000_000, description="without effect; -1: no limit")


class Config(Settings):
    """The whole file. Paths are absolute when it comes from `load_config`."""

    model: ModelSection = ModelSection()
    audio: AudioSection = AudioSection()
    service: ServiceSection = ServiceSection()
    duplex: DuplexSection = DuplexSection()
    recording: RecordingSection = RecordingSection()

    def _misfits(self) -> list[SettingProblem]:
        asked, held = ATTENTION[self.model.attn_implementation], self.service.compile.attention
        if "auto" in (asked, held) or asked == held:
            return []
        expected = f"auto, or the same as model.attn_implementation ({self.model.attn_implementation})"
        return [SettingProblem("service.compile.attention", expected, repr(held))]

    @property
    def compile(self) -> CompileConfig:
        """What is compiled, with the attention backend that either section names."""
        held = self.service.compile
        if held.attention != "auto":
            return held
        return held.model_copy(update={"attention": ATTENTION[self.model.attn_implementation]})

    def engine(self) -> EngineConfig:
        """What one worker's engine is built with. Raises: SettingError for sessions that no slot could hold."""
        model, duplex = self.model, self.duplex
        engine = EngineConfig(
            model_path=model.model_path,
            pt_path=model.pt_path,
            token2wav_path=model.token2wav_path,
            device=model.device,
            dtype=model.dtype,
            max_sessions=duplex.max_sessions,
            llm_len=duplex.context_rows,
            euler_steps=duplex.euler_steps,
            session=duplex.session,
            compile=self.compile,
        )
        engine.check_session(duplex.session)
        return engine


def load_config(
    path: Path | None = None, *, flags: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Config, list[str]]:
    """Settings from everywhere: flags count most, then the environment, then the file, then defaults.

    A relative path in the file starts at the file's folder; any other one at the root, the folder above this one.

    Args:
        path: the file; None: `config.json` at the root, which need not be there.
        flags: full name -> value, such as {"service.compile": True}; None means not given.
        environ: DUOLOGUE_<SECTION>_<KEY> variables and TORCHINDUCTOR_CACHE_DIR count.
    Returns: the settings, and a sentence for each key that is known to do nothing.
    Raises: ConfigError for a file that is no JSON; SettingError naming every setting that does not exist or cannot be.
    """
    layers = _with_defaults()
    file = path or ROOT / FILE_NAME
    if path is not None or file.exists():
        layers.add(read_json(file), file.name, file.absolute().parent)
    if folder := environ.get(INDUCTOR_VARIABLE):
        layers.add_dotted({"service.cache_dir": folder}, INDUCTOR_VARIABLE, ROOT)
    layers.add_environment(environ, ROOT)
    layers.add_dotted(flags, "flag", ROOT)
    config, elsewhere = _voice_of_ours(layers.build())
    try:
        config.engine()
    except SettingError as error:
        layers.problems += map(_as_in_the_file, error.problems)
        layers.raise_problems()
    return config, layers.notes + elsewhere + _without_effect(config, layers)


def _voice_of_ours(config: Config) -> tuple[Config, list[str]]:
    """Files written for the public implementation name its own voice, which is not ours to ship."""
    named = config.audio.ref_audio_path
    if named is None or named.name != FOREIGN_VOICE or named.exists():
        return config, []
    audio = config.audio.model_copy(update={"ref_audio_path": ROOT / AudioSection().ref_audio_path})
    told = f"setting audio.ref_audio_path: {FOREIGN_VOICE} is not here, {audio.ref_audio_path.name} speaks instead"
    return config.model_copy(update={"audio": audio}), [told]


def default_config() -> Config:
    """What there is without file, environment and flags."""
    config: Config = _with_defaults().build()
    return config


def _with_defaults() -> Layers:
    layers = Layers(Config, DEAD, frozenset({"service.compile"}))
    layers.add_dotted({knob.key: knob.default for knob in setting_fields(Config) if knob.is_path}, "default", ROOT)
    return layers


def _as_in_the_file(problem: SettingProblem) -> SettingProblem:
    """An engine's problem in the file's names."""
    knob = f"duplex.session.{problem.knob.removeprefix('session.')}"
    return problem._replace(knob=knob, expected=problem.expected.replace("llm_len", "duplex.context_rows"))


def _without_effect(config: Config, layers: Layers) -> list[str]:
    found = []
    if config.audio.chat_vocoder != "token2wav":
        found.append("setting audio.chat_vocoder has no effect: token2wav speaks")
    if config.compile.attention != "auto" and config.compile.enabled is False:
        found.append("setting model.attn_implementation takes effect with service.compile only")
    if any(key.startswith("recording.") for key in layers.sources):
        found.append("settings of recording have no effect: sessions are not recorded")
    return found
