"""The settings file: keys, errors, notes, and the settings passed to the engine."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint.embedded import DEFAULT
from models.errors import ConfigError
from tests.worker.config.public_files import EXAMPLE, PUBLIC
from tests.worker.config.settings_file import load, refused, value_of
from worker.config.compile import TARGETS
from worker.config.doc import table
from worker.config.json_file import MAX_FILE_BYTES
from worker.config.layers import setting_fields
from worker.config.service import Config, load_config
from worker.config.settings import SettingError

# Keys of PUBLIC without effect, in the order of the file.
UNUSED = [
    "service.request_timeout",
    "service.eta_streaming_s",
]
# Defaults that clients, scripts and documents of the public implementation rely on.
PROMISED = {
    "audio.playback_delay_ms": 200,
    "audio.chat_vocoder": "token2wav",
    "model.pt_path": None,
    "model.attn_implementation": "auto",
    "service.gateway_port": 8006,
    "service.worker_base_port": 22400,
    "service.max_queue_size": 1000,
    "service.compile.enabled": "auto",
    "service.eta_chat_s": 15,
    "recording.enabled": False,
    "recording.session_retention_days": -1,
    "recording.max_storage_gb": -1,
    "service.eta_half_duplex_s": 180,
    "service.eta_audio_duplex_s": 120,
    "service.eta_omni_duplex_s": 90,
    "service.eta_ema_alpha": 0.3,
    "service.eta_ema_min_samples": 3,
    "duplex.pause_timeout": 60,
    "duplex.context_rows": 8192,
}


# --- files ----------------------------------------------------------------------------------------


def test_uses_defaults_without_a_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.config.service.ROOT", tmp_path)
    config, notes = load_config(flags={}, environ={})
    got = {key: value_of(config, key) for key in PROMISED}
    assert got == PROMISED and not notes, (got, notes)
    assert config.service.compile.targets == TARGETS
    file.write_text('{"service": {"gateway_port": 1234}}')
    assert load_config(flags={}, environ={})[0].service.gateway_port == 1234, "expected the file at the root"


def test_refuses_missing_file_that_was_named(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags={}, environ={})
    assert str(caught.value) == f"{file}: expected a settings file, got No such file or directory"


def test_shipped_file_equals_the_defaults(root: Path, file: Path) -> None:
    shipped, notes = load_config(root / "config.json", flags={}, environ={})
    assert not notes, notes
    assert shipped == load(file, {})[0], "expected the shipped file to change nothing"
    assert shipped.model.model_path == root / DEFAULT


@pytest.mark.parametrize("content", [PUBLIC, EXAMPLE], ids=["every key", "example file"])
def test_accepts_files_for_the_public_implementation(file: Path, content: dict[str, Any]) -> None:
    config, notes = load(file, content)
    unused = [key for key in UNUSED if key.partition(".")[0] in content]
    *key_notes, voice_note = notes
    assert [note.split()[1] for note in key_notes] == unused, f"expected a note for each of {unused}, got {notes}"
    assert all("has no effect: " in note for note in key_notes), notes
    assert voice_note == (
        "setting audio.ref_audio_path: ref_minicpm_signature.wav does not exist; default.wav is used instead"
    )
    assert config.audio.ref_audio_path is not None and config.audio.ref_audio_path.is_file()
    assert config.model.model_path == config.engine().model_path == Path("openbmb/MiniCPM-o-4_5")
    for section, values in content.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if key not in (*UNUSED, "audio.ref_audio_path", "model.model_path", "service.compile", "service.data_dir"):
                assert value_of(config, key) == value, f"{key}: expected {value}, got {value_of(config, key)}"
    assert config.service.compile.enabled is False


def test_unused_keys_of_flags_and_variables_give_notes(file: Path) -> None:
    _, notes = load(file, {}, flags={"service.request_timeout": 5}, environ={"DUOLOGUE_SERVICE_ETA_DUPLEX_S": "9"})
    assert [note.split(" has")[0] for note in notes] == [
        "setting service.eta_duplex_s (DUOLOGUE_SERVICE_ETA_DUPLEX_S)",
        "setting service.request_timeout (flag)",
    ]


@pytest.mark.parametrize("value", ["cpp", {"llamacpp_root": "/x", "model": {"dir": "/y"}}, None], ids=str)
def test_sections_of_another_backend_give_one_note_each(file: Path, value: object) -> None:
    config, notes = load(file, {"backend": value, "cpp_backend": value})
    assert [note.split(" has no effect")[0] for note in notes] == [
        "setting backend (config.json)",
        "setting cpp_backend (config.json)",
    ]
    assert config == load(file, {})[0]


def test_a_variable_holds_a_list_as_json(file: Path) -> None:
    environ = {"DUOLOGUE_SERVICE_ALLOWED_ORIGINS": '["https://a.example", "https://b.example"]'}
    got = load(file, {}, environ=environ)[0].service.allowed_origins
    assert got == ("https://a.example", "https://b.example"), f"expected two origins, got {got}"


@pytest.mark.parametrize("source", ["file", "flag", "environment"])
def test_model_id_is_a_path_only_if_the_folder_exists(file: Path, tmp_path: Path, source: str) -> None:
    content = {"model": {"model_path": "someone/model"}} if source == "file" else {}
    flags = {"model.model_path": "someone/model"} if source == "flag" else {}
    environ = {"DUOLOGUE_MODEL_MODEL_PATH": "someone/model"} if source == "environment" else {}
    assert load(file, content, flags=flags, environ=environ)[0].model.model_path == Path("someone/model")
    (tmp_path / "someone" / "model").mkdir(parents=True)
    expected = tmp_path / "someone" / "model" if source == "file" else Path("someone/model")
    assert load(file, content, flags=flags, environ=environ)[0].model.model_path == expected


def test_other_path_settings_take_no_model_ids(file: Path, tmp_path: Path) -> None:
    config, _ = load(file, {"model": {"token2wav_path": "someone/vocoder"}})
    assert config.model.token2wav_path == tmp_path / "someone" / "vocoder"


def test_notes_name_keys_without_effect(file: Path) -> None:
    given = {"service": {"eta_duplex_s": None, "request_timeout": 5}, "audio": {"chat_vocoder": "cosyvoice2"}}
    _, notes = load(file, given)
    assert len(notes) == 3, notes
    for note, key in zip(notes, ("service.eta_duplex_s", "service.request_timeout", "audio.chat_vocoder"), strict=True):
        assert key in note and "no effect" in note, note


@pytest.mark.parametrize(
    ("text", "place", "expected", "got"),
    [
        ('{"service": {\n  "compile" true}}', " line 2 column 13", "':' delimiter", "'true}}'"),
        ("", " line 1 column 1", "value", "the end of the file"),
        ('{"a": [1', " line 1 column 9", "',' delimiter", "the end of the file"),
        ('{"a": "x\n"}', " line 1 column 9", "valid JSON", "invalid control character at: the end of the line"),
        ("[]", "", "an object of sections", "[]"),
        ('{"model": {}, "model": {}}', "", "JSON", "duplicate keys: 'model'"),
        ('{"a": ' * 100_000, "", "JSON", "maximum recursion depth exceeded"),
    ],
)
def test_json_errors_name_line_and_column(file: Path, text: str, place: str, expected: str, got: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(file, text)
    start = f"{file}{place}: expected {expected}, got {got}"
    assert str(caught.value).startswith(start), f"expected {start!r}, got {str(caught.value)!r}"


def test_refuses_other_files(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b'{"model": "\xff"}')
    with pytest.raises(ConfigError, match="expected UTF-8 text, got an invalid byte at 11"):
        load_config(file, flags={}, environ={})
    with pytest.raises(ConfigError, match=f"expected at most {MAX_FILE_BYTES} bytes, got more"):
        load(file, "{}" + " " * MAX_FILE_BYTES)
    with pytest.raises(ConfigError, match="expected a settings file, got Is a directory"):
        load_config(tmp_path, flags={}, environ={})
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert load_config(file, flags={}, environ={})[1] == [], "expected a byte order mark to be no matter"


# --- wrong keys and values ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "key", "near"),
    [
        ({"servce": {}}, "servce", "service"),
        ({"service": {"compiel": True}}, "service.compiel", "service.compile"),
        ({"service": {"pause_timeout": 3}}, "service.pause_timeout", "duplex.pause_timeout"),
        ({"model_path": "x"}, "model_path", "model.model_path"),
        ({"service": {"compile": {"modes": "default"}}}, "service.compile.modes", "service.compile.mode"),
        ({"servce.gateway_port": 1}, "servce.gateway_port", "service.gateway_port"),
        ({"duplex": {"session": {"temprature": 1}}}, "duplex.session.temprature", "duplex.session.temperature"),
    ],
)
def test_refuses_unknown_keys_with_the_nearest_one(file: Path, given: dict[str, Any], key: str, near: str) -> None:
    text = str(refused(file, given))
    assert text.startswith(f"setting {key}: expected a setting that exists, such as {near}, got "), text
    assert text.endswith("(config.json)"), text


def test_refuses_full_names_in_files_with_the_nested_form(file: Path) -> None:
    text = str(refused(file, {"service.compile.mode": "default"}))
    expected = 'expected {"service": {"compile": {"mode": ...}}}, got \'default\' (config.json)'
    assert text == f"setting service.compile.mode: {expected}"
    text = str(refused(file, {"service": {"compile.mode": "default"}}))
    assert text.startswith('setting service.compile.mode: expected {"compile": {"mode": ...}}, got '), text


@pytest.mark.parametrize(("given", "key"), [({"": 1}, '""'), ({"service": {"": 1}}, 'service.""')])
def test_names_an_empty_key(file: Path, given: dict[str, Any], key: str) -> None:
    text = str(refused(file, given))
    assert text == f"setting {key}: expected a setting that exists, got 1 (config.json)"


def test_error_names_every_problem_and_its_source(file: Path) -> None:
    given = {"service": {"gateway_port": True, "compile": 3}, "model": None, "typo": 1}
    error = refused(file, given, environ={"DUOLOGUE_DUPLEX_EULER_STEPS": "0"}, flags={"service.worker_timeout_s": -1})
    got = {one.setting: (one.expected, one.got) for one in error.problems}
    assert got == {
        "service.gateway_port": ("a whole number from 1 to 65535", "true (config.json)"),
        "service.compile": ('true or false or "auto" or an object', "3 (config.json)"),
        "model": ("an object", "null (config.json)"),
        "typo": ("a setting that exists", "1 (config.json)"),
        "duplex.euler_steps": ("null or a whole number from 1 to 50", "0 (DUOLOGUE_DUPLEX_EULER_STEPS)"),
        "service.worker_timeout_s": ("a number from 0.5 to 86400", "-1 (flag)"),
    }, got


def test_error_names_all_values_of_enabled(file: Path) -> None:
    error = refused(file, {"service": {"compile": {"enabled": "yes"}}})
    [problem] = error.problems
    assert problem == ("service.compile.enabled", 'true or false or "auto"', "'yes' (config.json)")


def test_error_names_allowed_items_of_lists(file: Path) -> None:
    error = refused(file, {"service": {"compile": {"targets": ["vpm", "lm_head"]}}})
    [problem] = error.problems
    assert problem.setting == "service.compile.targets"
    assert problem.expected.startswith('a list, each "vpm" or "llm.model" or '), problem.expected
    assert problem.got == "'lm_head' (config.json)"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"service": {"gateway_port": 9000, "worker_base_port": 9000}},
            "service.worker_base_port: expected a port other than service.gateway_port (9000), got 9000 (config.json)",
        ),
        (
            {"model": {"attn_implementation": "sdpa"}, "service": {"compile": {"attention": "eager"}}},
            "service.compile.attention: expected auto, or the same as model.attn_implementation (sdpa), "
            "got 'eager' (config.json)",
        ),
        (
            {"duplex": {"context_rows": 4000, "session": {"window": {"high_tokens": 3999}}}},
            "duplex.session.window.high_tokens: expected a value that leaves 100 tokens for a unit in "
            "duplex.context_rows (4000), got 3999 (config.json)",
        ),
        (
            {"model": {"speech_path": "/any"}, "api": {"model_name": "voices", "speech_model_name": "voices"}},
            "api.speech_model_name: expected another name than that of the omni model, got 'voices' (config.json)",
        ),
        (
            {"duplex": {"euler_steps": 5, "session": {"euler_steps": 6}}},
            "duplex.session.euler_steps: expected null or 5, the engine's, got 6 (config.json)",
        ),
    ],
)
def test_refuses_conflicting_values(file: Path, given: dict[str, Any], text: str) -> None:
    assert str(refused(file, given)) == f"setting {text}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = [setting.key for setting in setting_fields(Config)]


@given(flags=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4), value=st.text(max_size=20))
def test_raises_only_setting_errors(flags: dict[str, object], value: str) -> None:
    variables = {setting.variable: value for setting in setting_fields(Config) if setting.key not in flags}
    try:
        load_config(flags=flags, environ={name: variables[name] for name in list(variables)[:5]})
    except SettingError as error:
        assert error.problems


# --- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "expected"),
    [("auto", "auto"), ("flash_attention_2", "flash"), ("sdpa", "sdpa"), ("eager", "eager")],
)
def test_maps_attention_names(file: Path, named: str, expected: str) -> None:
    config, _ = load(file, {"model": {"attn_implementation": named}, "service": {"compile": True}})
    assert config.engine().compile.attention == expected and config.engine().compile.enabled
    ours, _ = load(file, {"model": {"attn_implementation": named}, "service": {"compile": {"attention": expected}}})
    assert ours.engine().compile.attention == expected


def test_passes_settings_to_the_engine(file: Path) -> None:
    content = {
        "model": {"model_path": "/m", "pt_path": "/w.pt", "token2wav_path": "/v", "device": "cpu", "dtype": "bfloat16"},
        "service": {"compile": {"dynamic": False}},
        "duplex": {"max_sessions": 3, "context_rows": 5000, "euler_steps": 4, "session": {"top_k": 9}},
    }
    engine = load(file, content)[0].engine()
    assert (engine.model_path, engine.pt_path, engine.token2wav_folder) == (Path("/m"), Path("/w.pt"), Path("/v"))
    assert (engine.device, engine.dtype, engine.max_sessions) == ("cpu", "bfloat16", 3)
    assert (engine.llm_len, engine.euler_steps, engine.session.top_k) == (5000, 4, 9)
    assert (engine.compile.enabled, engine.compile.dynamic) == (True, False)


# --- documentation --------------------------------------------------------------------------------


def test_document_contains_the_generated_table(root: Path) -> None:
    text = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    expected, got = table(), [line for line in text.splitlines() if line.startswith("|")]
    missing, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    assert got == expected, f"expected what python -m worker.config.doc prints, got {missing=} {extra=}"
    assert len(got) == 2 + sum("." in key and not key.startswith("duplex.session.") for key in KEYS)


def test_document_names_keys_without_effect(root: Path) -> None:
    text = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    for key in ("service.eta_streaming_s", "service.request_timeout", "TORCHINDUCTOR_CACHE_DIR", "DUOLOGUE_LOG_LEVEL"):
        assert f"`{key}`" in text, key


def test_examples_of_the_document_load(file: Path) -> None:
    example = {"mode": "max-autotune", "targets": ["llm.model", "tts.model"]}
    environ = {"DUOLOGUE_SERVICE_GATEWAY_PORT": "9000", "DUOLOGUE_DUPLEX_SESSION_TEMPERATURE": "0.5"}
    config, _ = load(file, {"service": {"compile": example}}, environ=environ)
    assert config.compile.enabled and config.compile.targets == ("llm.model", "tts.model")
    assert config.service.gateway_port == 9000 and config.duplex.session.temperature == 0.5
