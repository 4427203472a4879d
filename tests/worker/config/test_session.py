"""Session settings: ranges, strict types, errors, sampler settings."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from models.errors import SettingsError
from models.sampling.settings import DUPLEX_SPEECH, DUPLEX_TEXT
from tests.worker.config.setting_values import JSON, refused
from worker.config.session import (
    FIXED_SET,
    PREPARED_SETTINGS,
    REFERENCE_SET,
    REPLY_SET,
    REPLY_TEXT_SET,
    SessionConfig,
    WindowConfig,
)
from worker.config.settings import SettingError
from worker.describe import shown

DEFAULTS = SessionConfig()
MAX_COUNT = 2**31 - 1
WHOLE = {
    "force_listen_count": (0, 1000),
    "max_new_speak_tokens_per_chunk": (1, 64),
    "max_chars_per_chunk": (1, 1000),
    "max_side_tokens_per_chunk": (0, 256),
    "max_turn_tokens": (0, 65_536),
    "top_k": (0, MAX_COUNT),
    "text_repetition_window_size": (0, 4096),
    "listen_top_k": (1, MAX_COUNT),
    "max_slice_nums": (1, 9),
    "early_pause_ms": (160, 300),
    "euler_steps": (1, 50),
    "seed": (0, 2**64 - 1),
}
REAL = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "text_repetition_penalty": (0.1, 10),
    "length_penalty": (0.1, 5),
    "listen_prob_scale": (1e-4, 100),
    "tts_temperature": (1e-6, 2),
    "tts_repetition_penalty": (0.1, 10),
    "drain_s": (0, 10),
}
CHOICES = {
    "ls_mode": ("explicit", "implicit"),
    "decode_mode": ("sampling", "greedy"),
    "compat": ("fixed", "reference"),
    "early_unit": ("off", "auto"),
    "chunk_ms": (1000,),
    "sample_rate": (16000,),
}
LISTS = {"sound_ramp": ([8], [5, 20], [5, 5, 5, 10])}
FLAGS = ("generate_audio", "early_sound")
OPTIONAL = ("listen_top_k", "euler_steps", "seed")


def session_settings() -> st.SearchStrategy[dict[str, Any]]:
    """Valid values of any settings."""
    values: dict[str, st.SearchStrategy[Any]] = {name: st.integers(*ends) for name, ends in WHOLE.items()}
    values |= {name: st.floats(*ends) | st.sampled_from(ends) for name, ends in REAL.items()}
    values |= {name: st.sampled_from(choices) for name, choices in CHOICES.items()}
    values |= {name: st.sampled_from(choices).map(tuple) for name, choices in LISTS.items()}
    values |= {name: st.booleans() for name in FLAGS}
    values |= {name: st.none() | values[name] for name in OPTIONAL}
    return st.fixed_dictionaries({}, optional=values)


def test_tables_of_this_file_cover_every_setting() -> None:
    named = {*WHOLE, *REAL, *CHOICES, *LISTS, *FLAGS, "window"}
    assert named == set(SessionConfig.model_fields), named ^ set(SessionConfig.model_fields)


@pytest.mark.parametrize(("setting", "ends"), [*WHOLE.items(), *REAL.items()])
def test_range_limits_are_inclusive(setting: str, ends: tuple[float, float]) -> None:
    for end in ends:
        got = getattr(SessionConfig(**{setting: end}), setting)
        assert got == end, f"{setting}: expected {end}, got {got}"
    low, high = ends
    beyond = (low - 1, high + 1) if setting in WHOLE else (math.nextafter(low, -1), math.nextafter(high, 1000))
    for value in beyond:
        text = str(refused(SessionConfig, **{setting: value}))
        expected = f"setting {setting}: expected {SessionConfig.allowed(setting)}, got {shown(value)}"
        assert text == expected, f"expected {expected!r}, got {text!r}"


def test_sound_ramp_is_a_list_of_pieces_within_a_unit() -> None:
    for ramp in LISTS["sound_ramp"]:
        assert SessionConfig(sound_ramp=ramp).sound_ramp == tuple(ramp)
    expected = f"setting sound_ramp: expected {SessionConfig.allowed('sound_ramp')}, got "
    for bad in ([], [4], [26], ["8"], [8.0], [True], [5] * 5, 8, "8", {"8": 8}, {8}):
        assert str(refused(SessionConfig, sound_ramp=bad)) == expected + shown(bad)
    text = str(refused(SessionConfig, sound_ramp=[8, 9, 9]))
    assert text == "setting sound_ramp: expected a sum of at most 25 speech tokens, got 26", text


def test_errors_name_the_range() -> None:
    assert str(refused(SessionConfig, temperature=3)) == "setting temperature: expected a number from 0 to 2, got 3"
    assert str(refused(SessionConfig, listen_top_k=0)) == (
        "setting listen_top_k: expected null or a whole number from 1 to 2147483647, got 0"
    )
    assert str(refused(SessionConfig, decode_mode="sample")) == (
        'setting decode_mode: expected "sampling" or "greedy", got \'sample\''
    )
    assert str(refused(SessionConfig, tts_temperature=0)) == (
        "setting tts_temperature: expected a number from 0.000001 to 2, got 0"
    )


@pytest.mark.parametrize("setting", [*WHOLE, *REAL, *CHOICES])
def test_types_are_strict(setting: str) -> None:
    for value in (True, False, "1", "", [], {}, math.nan, math.inf, -math.inf, 10**400, object()):
        error = refused(SessionConfig, **{setting: value})
        assert [one.setting for one in error.problems] == [setting], f"{value!r:.20}: {error.problems}"


@pytest.mark.parametrize("setting", WHOLE)
def test_refuses_floats_as_whole_numbers(setting: str) -> None:
    assert [one.setting for one in refused(SessionConfig, **{setting: 2.0}).problems] == [setting]


@pytest.mark.parametrize("setting", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0])
def test_flags_are_bools(setting: str, value: object) -> None:
    text = str(refused(SessionConfig, **{setting: value}))
    assert text == f"setting {setting}: expected true or false, got {shown(value)}", text


@pytest.mark.parametrize("setting", SessionConfig.model_fields)
def test_null_only_for_optional_settings(setting: str) -> None:
    if setting in OPTIONAL:
        assert getattr(SessionConfig(**{setting: None}), setting) is None
    else:
        assert [one.setting for one in refused(SessionConfig, **{setting: None}).problems] == [setting]


def test_accepts_whole_numbers_as_floats() -> None:
    config = SessionConfig(temperature=1, drain_s=2)
    assert (config.temperature, type(config.temperature), config.drain_s) == (1.0, float, 2.0)


def test_error_names_every_invalid_setting() -> None:
    with pytest.raises(SettingError) as caught:
        SessionConfig.of(DEFAULTS, {"temperature": 9, "seed": -1, "window": {"mode": "on", "max_units": 0}, "top_k": 5})
    error = caught.value
    got = [one.setting for one in error.problems]
    assert got == ["temperature", "window.mode", "window.max_units", "seed"], got
    assert str(error) == (
        "settings temperature, window.mode, window.max_units, seed: expected temperature a number from 0 to 2; "
        'window.mode "off" or "basic" or "context"; window.max_units a whole number from 1 to 10000; '
        "seed null or a whole number from 0 to 18446744073709551615, "
        "got temperature 9; window.mode 'on'; window.max_units 0; seed -1"
    )


def test_low_must_not_exceed_high() -> None:
    assert WindowConfig(low_tokens=10, high_tokens=10).low_tokens == 10
    text = str(refused(WindowConfig, low_tokens=11, high_tokens=10))
    assert text == "setting low_tokens: expected at most high_tokens (10), got 11", text
    error = refused(SessionConfig, window={"high_tokens": 10})
    assert [one.setting for one in error.problems] == ["window.low_tokens"], error.problems


def test_errors_truncate_values() -> None:
    long, deep = "x" * 10_000, []
    for _ in range(100_000):
        deep = [deep]
    for value in (long, [long], 10**5000, deep):
        text = str(refused(SessionConfig, temperature=value))
        assert len(text) < 200, f"expected a short text, got {len(text)} characters"
    assert "xxx..." in str(refused(SessionConfig, ls_mode=long))
    assert len(str(refused(SessionConfig, **{long: 1}))) < 200


@given(values=st.dictionaries(st.sampled_from(list(SessionConfig.model_fields)) | st.text(max_size=5), JSON))
def test_raises_only_setting_errors(values: dict[str, object]) -> None:
    try:
        config, _ = SessionConfig.of(DEFAULTS, values)
    except SettingsError as error:
        assert isinstance(error, SettingError)
        for one in error.problems:
            assert one.setting.partition(".")[0] in values, f"expected a setting that was given, got {one.setting}"
            assert one.setting in str(error)
    else:
        assert isinstance(config, SessionConfig)
    try:
        SessionConfig(**values)
    except SettingError as error:
        assert error.problems


def test_settings_are_frozen() -> None:
    config = SessionConfig()
    with pytest.raises(ValidationError):
        config.temperature = 1.0
    with pytest.raises(ValidationError):
        config.window.mode = "off"
    assert hash(config) == hash(SessionConfig())


# --- defaults and client values -------------------------------------------------------------------


def test_client_values_override_defaults() -> None:
    worker = SessionConfig(temperature=0.3, top_k=7, window={"mode": "context", "max_units": 3})
    config, notes = SessionConfig.of(worker, {"top_k": 9, "window": {"max_units": 5}})
    assert notes == []
    assert config == SessionConfig(temperature=0.3, top_k=9, window={"mode": "context", "max_units": 5})


def test_values_do_not_leak_into_next_session() -> None:
    given_first = {"top_k": 9, "window": {"max_units": 5}, "compat": "reference"}
    before = dict(given_first)
    SessionConfig.of(DEFAULTS, given_first)
    second, _ = SessionConfig.of(DEFAULTS, {})
    assert second == SessionConfig() == DEFAULTS, f"expected the defaults, got {second}"
    assert given_first == before


def test_accepts_window_config() -> None:
    window = WindowConfig(mode="off")
    assert SessionConfig.of(DEFAULTS, {"window": window})[0].window is window
    text = str(refused(SessionConfig, window=3))
    assert text == "setting window: expected an object, got 3", text


def test_unknown_keys_are_ignored_with_notes() -> None:
    given = {"temprature": 1, "window": {"hi_tokens": 3}, "high_tokens": 3, "qqqq": None, 5: 6}
    config, notes = SessionConfig.of(DEFAULTS, given)
    assert config == DEFAULTS
    assert notes == [
        "setting temprature does not exist and is ignored; did you mean temperature?",
        "setting high_tokens does not exist and is ignored; did you mean window.high_tokens?",
        "setting qqqq does not exist and is ignored",
        "setting 5 does not exist and is ignored",
        "setting window.hi_tokens does not exist and is ignored; did you mean window.high_tokens?",
    ]


def test_limits_notes_for_many_unknown_keys() -> None:
    _, notes = SessionConfig.of(DEFAULTS, {f"{n}" * 1000: n for n in range(1, 101)})
    assert len(notes) == 21 and notes[-1] == "80 more settings do not exist and are ignored", notes[-1]
    assert max(map(len, notes)) < 150


def test_constructor_refuses_unknown_keys() -> None:
    text = str(refused(SessionConfig, temprature=1))
    assert text == "setting temprature: expected a setting that exists, such as temperature, got 1", text


@pytest.mark.parametrize("given", [[], None, 3, "temperature"])
def test_refuses_other_values_than_objects(given: object) -> None:
    with pytest.raises(SettingsError, match="session settings: expected an object, got"):
        SessionConfig.of(DEFAULTS, given)


# --- sampler settings ---------------------------------------------------------------------------


def test_token_set_indices() -> None:
    assert (REFERENCE_SET, FIXED_SET, REPLY_SET, REPLY_TEXT_SET) == (0, 1, 2, 3)


def test_default_sampling_equals_the_released_one() -> None:
    reference, fixed = SessionConfig(compat="reference"), SessionConfig()
    assert reference.text_sampling() == replace(DUPLEX_TEXT, sign_blind=True, set_index=0)
    assert fixed.text_sampling() == replace(DUPLEX_TEXT, listen_scale_on_probability=True, set_index=1)
    assert reference.speech_sampling() == fixed.speech_sampling() == DUPLEX_SPEECH


def test_passes_all_sampling_settings() -> None:
    config = SessionConfig(
        temperature=0.5,
        top_k=3,
        top_p=0.6,
        text_repetition_penalty=0.9,
        text_repetition_window_size=8,
        length_penalty=1.6,
        listen_prob_scale=0.25,
        listen_top_k=40,
        tts_temperature=1e-5,
        tts_repetition_penalty=1.2,
    )
    assert config.text_sampling() == replace(
        DUPLEX_TEXT,
        temperature=0.5,
        top_k=3,
        top_p=0.6,
        repetition_penalty=0.9,
        repetition_window=8,
        length_penalty=1.6,
        listen_scale=0.25,
        listen_scale_on_probability=True,
        listen_top_k=40,
        set_index=1,
    )
    assert config.speech_sampling() == replace(DUPLEX_SPEECH, temperature=1e-5, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("settings", "greedy"),
    [
        ({"decode_mode": "greedy"}, True),
        ({"temperature": 0}, True),
        ({"temperature": 1e-9}, True),
        ({"temperature": 1e-6}, False),
        ({}, False),
    ],
)
def test_greedy_conditions(settings: dict[str, Any], greedy: bool) -> None:
    got = SessionConfig(**settings).text_sampling().greedy
    assert got is greedy, f"{settings}: expected greedy {greedy}, got {got}"
    assert not SessionConfig(**settings).speech_sampling().greedy


@given(settings=session_settings())
def test_samplers_accept_all_valid_settings(settings: dict[str, Any]) -> None:
    config = SessionConfig(**settings)
    text, speech_tokens = config.text_sampling(), config.speech_sampling()
    assert text.stop_probe and not text.chunked_window
    assert text.sign_blind is (config.compat == "reference") is not text.listen_scale_on_probability
    assert speech_tokens.history_per_call


# --- adjusting ------------------------------------------------------------------------------------


def test_adjusted_settings_are_laid_over_the_current_ones() -> None:
    held = SessionConfig(temperature=0.5, window=WindowConfig(high_tokens=3000, low_tokens=2000))
    got = held.adjusted({"top_k": 3, "window": {"low_tokens": 1000}})
    assert got == SessionConfig(temperature=0.5, top_k=3, window=WindowConfig(high_tokens=3000, low_tokens=1000)), (
        f"expected the other values kept, got {got}"
    )
    assert held.adjusted({}) == held


@pytest.mark.parametrize(
    "given, setting",
    [
        ({"temprature": 1.0}, "temprature: expected a setting that exists, such as temperature"),
        ({"window": {"hihg_tokens": 9}}, "window.hihg_tokens: expected a setting that exists, such as high_tokens"),
        ({"top_p": 1.5}, "top_p: expected a number from 0 to 1, got 1.5"),
        ({"window": {"low_tokens": 9000}}, "window.low_tokens: expected at most high_tokens"),
        ({"window": 5}, "window: expected an object"),
    ],
)
def test_adjusting_refuses_by_name(given: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingError) as caught:
        SessionConfig().adjusted(given)
    assert f"setting {setting}" in str(caught.value), f"expected {setting!r} in the error, got {caught.value}"


def test_adjusting_refuses_all_settings_of_prepare_at_once() -> None:
    given = {"seed": 1, "compat": "reference", "window": {"mode": "off", "marker": "x"}, "euler_steps": 3}
    with pytest.raises(SettingError) as caught:
        SessionConfig().check_adjustable(SessionConfig().adjusted(given))
    names = {problem.setting for problem in caught.value.problems}
    assert names == PREPARED_SETTINGS.keys() - {"chunk_ms", "sample_rate"}, f"expected every changed one, got {names}"
    SessionConfig().check_adjustable(SessionConfig().adjusted({"window": {"high_tokens": 5000}, "tts_temperature": 1}))


# --- documentation --------------------------------------------------------------------------------


def documented(root: Path) -> dict[str, tuple[str, ...]]:
    """setting -> (default, allowed, what it does, adjustable), as in the table."""
    text = (root / "docs" / "session-config.md").read_text(encoding="utf-8")
    lines = text[: text.index("\n## ")].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`"): tuple(row[1:]) for row in rows}


def test_document_lists_every_setting(root: Path) -> None:
    sections = [("", SessionConfig), ("window.", WindowConfig)]
    expected: dict[str, tuple[str, ...]] = {}
    for prefix, settings in sections:
        for name, entry in settings.model_fields.items():
            if name != "window":
                default = f"`{json.dumps(entry.default)}`"
                adjustable = "no" if prefix + name in PREPARED_SETTINGS else "yes"
                expected[prefix + name] = (default, settings.allowed(name), entry.description or "", adjustable)
    got = documented(root)
    assert got.keys() == expected.keys(), (
        f"expected the same settings, got a difference in {got.keys() ^ expected.keys()}"
    )
    for setting, cells in expected.items():
        assert got[setting] == cells, f"{setting}: expected {cells}, got {got[setting]}"
