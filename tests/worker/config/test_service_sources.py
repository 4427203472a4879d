"""Sources of settings: their priority, environment variables, relative paths."""

from pathlib import Path

import pytest

from models.checkpoint.embedded import DEFAULT
from tests.worker.config.settings_file import load, refused
from worker.config.layers import setting_fields
from worker.config.service import ROOT, Config

# --- priority of the sources -------------------------------------------------------------------------


def test_flags_override_environment_overrides_file_overrides_defaults(file: Path) -> None:
    content = {"service": {"gateway_port": 1001, "max_queue_size": 1002, "eta_chat_s": 1003}}
    environ = {"DUOLOGUE_SERVICE_GATEWAY_PORT": "2001", "DUOLOGUE_SERVICE_MAX_QUEUE_SIZE": "2002"}
    service = load(file, content, environ=environ, flags={"service.gateway_port": 3001, "model.dtype": None})[0].service
    got = (service.gateway_port, service.max_queue_size, service.eta_chat_s, service.eta_omni_duplex_s)
    assert got == (3001, 2002, 1003, 90), got


def test_merges_objects_key_by_key(file: Path) -> None:
    content = {"duplex": {"session": {"temperature": 0.5, "window": {"max_units": 7, "mode": "context"}}}}
    environ = {"DUOLOGUE_DUPLEX_SESSION": '{"top_k": 5}', "DUOLOGUE_DUPLEX_SESSION_WINDOW_MAX_UNITS": "9"}
    session = load(file, content, environ=environ, flags={"duplex.session.window": {"marker": "x"}})[0].duplex.session
    got = (session.temperature, session.top_k, session.window.mode, session.window.max_units, session.window.marker)
    assert got == (0.5, 5, "context", 9, "x"), got


@pytest.mark.parametrize(
    ("content", "environ", "flags", "enabled", "mode"),
    [
        (None, {}, {}, "auto", "default"),
        ("auto", {}, {}, "auto", "default"),
        ({"mode": "max-autotune", "enabled": "auto"}, {}, {}, "auto", "max-autotune"),
        ({"mode": "max-autotune", "enabled": False}, {"DUOLOGUE_SERVICE_COMPILE": "auto"}, {}, "auto", "max-autotune"),
        (False, {"DUOLOGUE_SERVICE_COMPILE_ENABLED": "auto"}, {}, "auto", "default"),
        (False, {"DUOLOGUE_SERVICE_COMPILE_ENABLED": "true"}, {}, True, "default"),
        ("auto", {}, {"service.compile.enabled": False}, False, "default"),
        ("auto", {}, {"service.compile.enabled": True}, True, "default"),
        (True, {}, {}, True, "default"),
        ({}, {}, {}, True, "default"),
        ({"mode": "max-autotune"}, {}, {}, True, "max-autotune"),
        ({"mode": "max-autotune", "enabled": False}, {}, {}, False, "max-autotune"),
        ({"mode": "max-autotune", "enabled": False}, {}, {"service.compile": True}, True, "max-autotune"),
        ({"mode": "max-autotune"}, {"DUOLOGUE_SERVICE_COMPILE": "false"}, {}, False, "max-autotune"),
        (False, {"DUOLOGUE_SERVICE_COMPILE": '{"mode": "reduce-overhead"}'}, {}, True, "reduce-overhead"),
        # A single key inside does not turn compilation on.
        (False, {"DUOLOGUE_SERVICE_COMPILE_MODE": "reduce-overhead"}, {}, False, "reduce-overhead"),
        (False, {}, {"service.compile.mode": "max-autotune"}, False, "max-autotune"),
        (True, {"DUOLOGUE_SERVICE_COMPILE": "true"}, {"service.compile": False}, False, "default"),
    ],
)
def test_compile_takes_a_switch_value_or_an_object(
    file: Path, content: object, environ: dict[str, str], flags: dict[str, object], enabled: bool | str, mode: str
) -> None:
    service = {} if content is None else {"compile": content}
    config, _ = load(file, {"service": service}, environ=environ, flags=flags)
    assert (config.compile.enabled, config.compile.mode) == (enabled, mode), config.compile


def test_environment_values_are_json_or_text(file: Path) -> None:
    environ = {
        "DUOLOGUE_MODEL_MODEL_PATH": "123",
        "DUOLOGUE_MODEL_DTYPE": "float32",
        "DUOLOGUE_MODEL_DEVICE": '"cpu"',
        "DUOLOGUE_AUDIO_REF_AUDIO_PATH": "null",
        "DUOLOGUE_SERVICE_COMPILE_TARGETS": '["vpm"]',
        "DUOLOGUE_DUPLEX_SESSION_WINDOW_MARKER": "7",
        "DUOLOGUE_SERVICE_GATEWAY_PORT": "",
        "DUOLOGUE_LOG_LEVEL": "DEBUG",
        "OTHER_SERVICE_COMPIEL": "1",
    }
    config, _ = load(file, {}, environ=environ)
    assert config.model.model_path == ROOT / "123" and config.model.dtype == "float32" and config.model.device == "cpu"
    assert config.audio.ref_audio_path is None and config.compile.targets == ("vpm",)
    assert config.duplex.session.window.marker == "7" and config.service.gateway_port == 8006


def test_refuses_unknown_variables(file: Path) -> None:
    text = str(refused(file, {}, environ={"DUOLOGUE_SERVICE_COMPIEL": "1"}))
    assert text == (
        "setting DUOLOGUE_SERVICE_COMPIEL: expected a variable that exists, such as DUOLOGUE_SERVICE_COMPILE, got '1'"
    )


def test_no_two_settings_share_a_variable() -> None:
    names = [setting.variable for setting in setting_fields(Config)]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)


def test_inductor_variable_sets_the_cache_folder(file: Path, tmp_path: Path) -> None:
    content = {"service": {"cache_dir": "here"}}
    assert load(file, content)[0].service.cache_dir == tmp_path / "here"
    inductor = {"TORCHINDUCTOR_CACHE_DIR": "/there"}
    assert load(file, content, environ=inductor)[0].service.cache_dir == Path("/there")
    ours = {**inductor, "DUOLOGUE_SERVICE_CACHE_DIR": "/ours"}
    assert load(file, content, environ=ours)[0].service.cache_dir == Path("/ours")


# --- paths ----------------------------------------------------------------------------------------


def test_relative_paths_start_at_the_folder_of_their_source(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    content = {"model": {"model_path": "m", "pt_path": "~/w.pt"}, "audio": {"ref_audio_path": "/v.wav"}}
    flags = {"service.warmup_video": "clips/a.mp4"}
    config, _ = load(file, content, flags=flags, environ={"DUOLOGUE_MODEL_TOKEN2WAV_PATH": "vocoder"})
    assert config.model.model_path == tmp_path / "m", "expected the file's folder"
    assert config.model.pt_path == tmp_path / "home" / "w.pt" and config.audio.ref_audio_path == Path("/v.wav")
    assert config.model.token2wav_path == ROOT / "vocoder", "expected the root for the environment"
    assert config.service.warmup_video == ROOT / "clips" / "a.mp4", "expected the root for flags"
    assert config.service.cache_dir == ROOT / "torch_compile_cache", "expected the root for defaults"


def test_refuses_unknown_home_folders(file: Path) -> None:
    text = str(refused(file, {"model": {"pt_path": "~no-such-user/w.pt"}}))
    expected = "setting model.pt_path: expected a path in a home folder that exists, got '~no-such-user/w.pt'"
    assert text == f"{expected} (config.json)"
    overridden = str(refused(file, {"model": {"pt_path": "~no-such-user/w.pt"}}, flags={"model.pt_path": "w.pt"}))
    assert overridden == text, "expected the source of the refused value"


def test_a_two_part_model_path_is_looked_up_beside_the_file_then_at_the_root(file: Path, tmp_path: Path) -> None:
    def model_path(text: str) -> Path:
        return load(file, {"model": {"model_path": text}})[0].model.model_path

    assert model_path("assets/tiny") == ROOT / "assets" / "tiny"
    (tmp_path / "assets" / "tiny").mkdir(parents=True)
    assert model_path("assets/tiny") == tmp_path / "assets" / "tiny"
    assert model_path("owner/no-such-folder") == Path("owner/no-such-folder"), "expected a model id unchanged"


@pytest.mark.parametrize("empty", ["", None])
def test_empty_paths_use_defaults(file: Path, empty: str | None) -> None:
    paths = {"model": {"model_path": empty, "pt_path": empty}, "audio": {"ref_audio_path": empty}}
    config, _ = load(file, paths)
    assert config.model.model_path == ROOT / DEFAULT, "expected the default where there must be a path"
    assert config.model.pt_path is None and config.audio.ref_audio_path is None
