"""What a load or an unload changes: the settings, and which models are freed."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

from models.errors import SettingsError
from models.qwen3_tts.codec.config import load_speech_tokenizer_config
from models.qwen3_tts.codec.load import TOKENIZER_FOLDER
from models.qwen3_tts.config import load_qwen3_tts_config
from worker.config.hub_id import hub_id
from worker.config.session import EngineConfig
from worker.status import StateError

ModelName = Literal["omni", "speech", "conversion"]
MODEL_NAMES: tuple[ModelName, ...] = get_args(ModelName)
SPEECH_FIELDS = {"speech_path", "speech_sessions", "speech_rows"}
CONVERSION_FIELDS = {"s3gen_path", "s3gen_modes"}


def changed_engine(engine: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """The settings with these fields replaced, `compile` by true or false.

    Raises: SettingError; ConfigError, SettingsError for a speech model or an S3Gen whose files are not there.
    """
    given = dict(changes)
    if "compile" in given:
        given["compile"] = engine.compile.model_copy(update={"enabled": given["compile"]})
    own_parts = {"token2wav_path": None, "pt_path": None} if "model_path" in given else {}
    changed = EngineConfig(**{**dict(engine), **own_parts, **given})
    if (path := changed.speech_path) is not None and hub_id(path) is None:
        load_qwen3_tts_config(path)
        load_speech_tokenizer_config(path / TOKENIZER_FOLDER)
    if "s3gen_path" in given and not (changed.s3gen_path and changed.s3gen_path.is_file()):
        raise SettingsError("s3gen_path", expected="a checkpoint file of S3Gen", got=changed.s3gen_path)
    return changed


def replaced_models(changes: Mapping[str, Any]) -> set[ModelName]:
    """Models beside the omni model that a load with these changes replaces."""
    replaced: set[ModelName] = set()
    if not CONVERSION_FIELDS.issuperset(changes):
        replaced.add("speech")
    if not SPEECH_FIELDS.issuperset(changes):
        replaced.add("conversion")
    return replaced


def check_load(engine: EngineConfig, changes: Mapping[str, Any], loaded: Collection[ModelName]) -> None:
    """Check that a load changes something, and nothing of an omni model that is loaded.

    Args:
        engine: the settings with the changes.
        loaded: models that are loaded.
    Raises: StateError.
    """
    wanted = {"omni": engine.omni, "speech": engine.speech_path, "conversion": engine.s3gen_path}
    is_missing = any(path and name not in loaded for name, path in wanted.items())
    is_of_omni = not (SPEECH_FIELDS | CONVERSION_FIELDS).issuperset(changes)
    if ("omni" in loaded and is_of_omni) or not (changes or is_missing):
        raise StateError("worker: load", expected="changes of models that are not loaded", got="others")


def close_all(closing: list[Callable[[], None]]) -> None:
    """Free models, and forget them: what still refers to one keeps its memory. Raises: EngineError."""
    while closing:
        closing.pop(0)()
