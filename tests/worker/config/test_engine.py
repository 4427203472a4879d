"""Engine settings: paths, devices, and windows that must fit a slot."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint.embedded import DEFAULT
from models.checkpoint.precision import PRESETS
from tests.worker.config.setting_values import JSON, refused
from worker.config.service import default_config
from worker.config.session import (
    EngineConfig,
    SessionConfig,
)
from worker.config.settings import SettingError
from worker.config.weights import PartWeights
from worker.describe import shown


def test_vocoder_folder_defaults_to_the_checkpoint() -> None:
    assert EngineConfig().token2wav_folder == DEFAULT / "assets" / "token2wav"
    assert EngineConfig(model_path="/m").token2wav_folder == Path("/m/assets/token2wav")
    assert EngineConfig(model_path="/m", token2wav_path="/v").token2wav_folder == Path("/v")


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_accepts_devices(device: str) -> None:
    assert EngineConfig(device=device).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:0\n", " cpu", "", None, 0])
def test_refuses_other_devices(device: object) -> None:
    text = str(refused(EngineConfig, device=device))
    assert text == f'setting device: expected text like "auto", "cpu", "cuda", "cuda:0", got {shown(device)}', text


def test_layout_is_open_by_default() -> None:
    assert EngineConfig().kv_layout == default_config().model.kv_layout == default_config().engine().kv_layout == "auto"
    for layout in ("auto", "slots", "pages"):
        assert EngineConfig(kv_layout=layout).kv_layout == layout
    expected = """setting kv_layout: expected "auto" or "slots" or "pages", got 'rows'"""
    assert str(refused(EngineConfig, kv_layout="rows")) == expected


def test_the_flow_has_a_precision_of_its_own_and_refuses_int4() -> None:
    engine = EngineConfig(weights="fp8", part_weights=PartWeights(flow="int8"))
    assert engine.precision == replace(PRESETS["fp8"], flow="int8")
    expected = """setting flow: expected null or "bf16" or "fp8" or "int8", got 'int4'"""
    assert str(refused(PartWeights, flow="int4")) == expected


def test_slot_must_hold_window_and_unit() -> None:
    session = SessionConfig(window={"high_tokens": 300, "low_tokens": 200})
    # <unit>, a picture, ten tokens of sound, an inserted turn end, 20 tokens, terminator, </unit>
    assert session.unit_rows == 1 + 66 + 10 + 1 + 20 + 2
    EngineConfig(llm_len=400, session=session)
    error = refused(EngineConfig, llm_len=399, session=session)
    assert [one.setting for one in error.problems] == ["session.window.high_tokens"], error.problems
    assert "100 tokens for a unit in llm_len (399), got 300" in str(error), error


def test_checks_window_of_each_session() -> None:
    engine = EngineConfig(llm_len=5000)
    engine.check_session(SessionConfig(window={"high_tokens": 4900}))
    with pytest.raises(SettingError, match=r"setting window\.high_tokens: .* got 4901"):
        engine.check_session(SessionConfig(window={"high_tokens": 4901}))
    context = {"mode": "context", "previous_max_tokens": 4901}
    with pytest.raises(SettingError, match=r"setting window\.previous_max_tokens"):
        engine.check_session(SessionConfig(window=context))
    engine.check_session(SessionConfig(window={"mode": "off", "high_tokens": 4901}))
    more_slices = SessionConfig(max_slice_nums=2, window={"high_tokens": 4900})
    with pytest.raises(SettingError, match=r"leaves 232 tokens"):
        engine.check_session(more_slices)


def test_errors_use_full_names_of_nested_settings() -> None:
    error = refused(EngineConfig, session={"window": {"max_units": 0}, "top_k": -1}, llm_len=0)
    got = [one.setting for one in error.problems]
    assert got == ["llm_len", "session.top_k", "session.window.max_units"], got


@given(values=st.dictionaries(st.sampled_from(list(EngineConfig.model_fields)), JSON))
def test_engine_settings_raise_only_setting_errors(values: dict[str, object]) -> None:
    try:
        EngineConfig(**values)
    except SettingError as error:
        assert error.problems
