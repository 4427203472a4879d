"""Errors in config.json name the key."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint.config import load_config, load_preprocessor_config, parse_config
from models.errors import ConfigError


@pytest.fixture
def raw(tiny: Path) -> dict[str, Any]:
    return json.loads((tiny / "config.json").read_text())


def changed(raw: dict[str, Any], path: str, value: Any = None, *, rename: str | None = None) -> dict[str, Any]:
    """A copy with the key at `path` set to `value`, renamed, or (with neither) removed."""
    raw = copy.deepcopy(raw)
    *sections, key = path.split(".")
    section = raw
    for name in sections:
        section = section[name]
    old = section.pop(key, None)
    if rename:
        section[rename] = old
    elif value is not None:
        section[key] = value
    return raw


def test_a_folder_and_its_file_give_the_same_config(tiny: Path) -> None:
    assert load_config(tiny) == load_config(tiny / "config.json")


def test_released_config_has_the_derived_values(root: Path) -> None:
    config = load_config(root / "tests/data/released_config.json")
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (4096, 36, 128)
    assert config.resampler_heads == 32
    assert config.vision_config.table_side == 70
    assert config.tts_config.speech_eos_id == 6561
    assert config.tts_config.head_dim == 64


@pytest.mark.parametrize(
    "path",
    [
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "vision_config",
        "vision_config.patch_size",
        "audio_config.d_model",
        "audio_config.encoder_layers",
        "tts_config",
    ],
)
def test_missing_key_is_named(raw: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw, path))
    assert path in str(caught.value)


def test_omitted_speech_keys_have_the_released_values(root: Path) -> None:
    """`transformers` omits nested keys that equal a class default, as in the released section."""
    released = json.loads((root / "tests/data/released_config.json").read_text())
    assert parse_config(released | {"tts_config": {"model_type": "minicpmtts"}}) == parse_config(released)


def test_speech_defaults_must_fit_the_other_keys(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tts_config.audio_bos_token_id: expected below \d+, got 151687"):
        parse_config(changed(raw, "tts_config.audio_bos_token_id"))


@pytest.mark.parametrize(
    ("path", "misspelt"),
    [
        ("hidden_size", "hiden_size"),
        ("drop_vision_last_layer", "drop_vision_lastlayer"),
        ("vision_config.intermediate_size", "intermediate_sizes"),
        ("audio_config.encoder_ffn_dim", "encoder_ffn_dims"),
        ("tts_config.condition_type", "condition_typ"),
    ],
)
def test_misspelt_key_is_named_with_the_right_spelling(raw: dict[str, Any], path: str, misspelt: str) -> None:
    present = changed(raw, path, "x") if path.endswith("condition_type") else raw
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(present, path, rename=misspelt))
    assert path in caught.value.expected
    assert misspelt in caught.value.got


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("hidden_size", -1, "hidden_size"),
        ("hidden_size", "128", "hidden_size"),
        ("hidden_size", 100, "hidden_size"),
        ("model_type", "qwen3", "model_type"),
        ("head_dim", 31, "head_dim"),
        ("num_key_value_heads", 3, "num_attention_heads"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("use_sliding_window", True, "use_sliding_window"),
        ("rms_norm_eps", 0.0, "rms_norm_eps"),
        ("vision_config.hidden_size", 33, "vision_config"),
        ("vision_config.patch_size", 16, "patch_size"),
        ("vision_config.hidden_act", "relu", "vision_config.hidden_act"),
        ("audio_config.encoder_ffn_dim", 128, "audio_config.encoder_ffn_dim"),
        ("audio_config.scale_embedding", True, "audio_config.scale_embedding"),
        ("tts_config.llm_dim", 256, "tts_config.llm_dim"),
        ("tts_config.num_vq", 4, "tts_config.num_vq"),
        ("tts_config.attention_type", "local", "tts_config.attention_type"),
        ("tts_config.audio_bos_token_id", 768, "tts_config.audio_bos_token_id"),
        ("tts_config", [], "tts_config"),
        ("rope_scaling", {"type": "yarn", "factor": 4}, "rope_scaling"),
        ("rope_theta", float("inf"), "rope_theta"),
        ("audio_pool_step", 10, "audio_pool_step"),
        ("audio_chunk_length", float("nan"), "audio_chunk_length"),
        ("vision_config.image_size", 10, "vision_config.image_size"),
    ],
)
def test_invalid_value_is_named(raw: dict[str, Any], path: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw, path, value))
    assert named in str(caught.value)


def test_contradicting_values_give_one_line(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(raw, "head_dim", 33))
    assert str(caught.value) == "config.json: head_dim: expected an even number, got 33"


def test_speech_may_be_absent(raw: dict[str, Any]) -> None:
    without = {key: value for key, value in raw.items() if key != "tts_config"} | {"init_tts": False}
    assert not parse_config(without).init_tts


def test_all_invalid_values_are_named_at_once(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(changed(raw, "hidden_size", 0), "tts_config.num_vq", 2))
    assert "hidden_size" in str(caught.value)
    assert "tts_config.num_vq" in str(caught.value)


def test_dropping_the_only_vision_layer_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"vision_config\.num_hidden_layers"):
        parse_config(changed(changed(raw, "drop_vision_last_layer", True), "vision_config.num_hidden_layers", 1))


def test_keys_of_other_software_are_ignored(raw: dict[str, Any]) -> None:
    assert parse_config(raw | {"transformers_version": "4.51.0", "auto_map": {}}) == parse_config(raw)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "null"])
def test_a_file_without_a_json_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json.*no such file"):
        load_config(tmp_path)


def test_preprocessor_settings_have_released_defaults(tiny: Path, tmp_path: Path) -> None:
    released = load_preprocessor_config(tmp_path)
    assert load_preprocessor_config(tiny) == released
    assert released.max_slice_nums == 9
    (tmp_path / "preprocessor_config.json").write_text('{"max_slice_nums": 0}')
    with pytest.raises(ConfigError, match="max_slice_nums"):
        load_preprocessor_config(tmp_path)
