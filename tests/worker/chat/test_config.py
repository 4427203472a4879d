"""Settings of answers and half-duplex conversations: their translation to sampler settings, and their ranges."""

from typing import Any

import pytest

from models.errors import SettingsError
from models.inputs.prompts import PromptOptions
from models.sampling.settings import HALF_DUPLEX_TEXT, TURN_SPEECH
from worker.chat.config import SEGMENT_ROWS, HalfDuplexConfig, ReplyConfig
from worker.config.session import REPLY_SET, REPLY_TEXT_SET, SessionConfig
from worker.config.settings import SettingError


def test_defaults_are_the_released_ones() -> None:
    config = ReplyConfig()
    assert (config.max_new_tokens, config.length_penalty, config.speak) == (256, 1.1, False)
    got = config.text_sampling()
    assert got == HALF_DUPLEX_TEXT.__class__(
        temperature=0.7,
        top_k=100,
        top_p=0.8,
        repetition_penalty=1.02,
        repetition_window=128,
        chunked_window=True,
        length_penalty=1.1,
        set_index=REPLY_TEXT_SET,
    )
    assert config.speech_sampling() == TURN_SPEECH
    assert config.prompt_options() == PromptOptions()
    half = HalfDuplexConfig()
    assert half.reply == ReplyConfig(speak=True)
    assert (half.threshold, half.min_speech_ms, half.min_silence_ms, half.speech_pad_ms) == (0.7, 128, 500, 30)
    assert (half.high_tokens, half.low_tokens, half.deaf_s) == (8000, 6000, 0.5)


@pytest.mark.parametrize(
    ("given", "field", "expected"),
    [
        ({"temperature": 1.3}, "temperature", 1.3),
        ({"temperature": 0}, "greedy", True),
        ({"temperature": 1e-7}, "greedy", True),
        ({"temperature": 1e-6}, "greedy", False),
        ({"decode_mode": "greedy"}, "greedy", True),
        ({"top_k": 7}, "top_k", 7),
        ({"top_p": 0.3}, "top_p", 0.3),
        ({"repetition_penalty": 1.4}, "repetition_penalty", 1.4),
        ({"repetition_window": 5}, "repetition_window", 5),
        ({"length_penalty": 0.9}, "length_penalty", 0.9),
        ({"speak": True}, "set_index", REPLY_SET),
    ],
)
def test_text_settings_reach_the_sampler(given: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(ReplyConfig(**given).text_sampling(), field) == expected


def test_reference_ignores_temperature_top_k_and_top_p() -> None:
    requested = ReplyConfig(
        compat="reference", temperature=0, top_k=3, top_p=0.1, length_penalty=2.0, decode_mode="greedy"
    )
    got, plain = requested.text_sampling(), ReplyConfig().text_sampling()
    assert (got.temperature, got.top_k, got.top_p) == (plain.temperature, plain.top_k, plain.top_p)
    assert (got.length_penalty, got.greedy) == (2.0, True)
    assert not ReplyConfig(compat="reference", temperature=0).text_sampling().greedy


def test_speech_session_and_prompt_settings() -> None:
    config = ReplyConfig(tts_temperature=0.5, tts_repetition_penalty=1.2, euler_steps=4, speak=True, seed=9)
    speech_tokens = config.speech_sampling()
    assert (speech_tokens.temperature, speech_tokens.repetition_penalty) == (0.5, 1.2)
    usual = SessionConfig(tts_temperature=0.4, tts_repetition_penalty=1.1)
    assert config.speech_sampling(usual) == speech_tokens, "expected settings of the answer to come first"
    by_default = ReplyConfig().speech_sampling(usual)
    assert (by_default.temperature, by_default.repetition_penalty) == (0.4, 1.1)
    session = config.session_config()
    assert (session.generate_audio, session.euler_steps, session.seed, session.compat) == (True, 4, 9, "fixed")
    assert session.window.mode == "off"
    shared = {"max_slice_nums": 2, "omni_mode": True, "enable_thinking": True}
    assert ReplyConfig(**shared).prompt_options() == PromptOptions(**shared)
    assert config.prompt_options().use_tts_template, (
        "expected the prompt of a spoken answer to request text to be voiced"
    )
    assert ReplyConfig(use_tts_template=True).prompt_options().use_tts_template


@pytest.mark.parametrize(("compat", "n", "expected"), [("fixed", 11, 11), ("reference", 11, 20), ("reference", 20, 20)])
def test_maximum_rows_of_an_answer(compat: str, n: int, expected: int) -> None:
    assert ReplyConfig(compat=compat, max_new_tokens=n).max_rows == expected


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 4097},
        {"temperature": 2.1},
        {"temperature": "1"},
        {"top_p": -0.1},
        {"speak": 1},
        {"seed": -1},
        {"compat": "upstream"},
        {"max_slice_nums": 0},
        {"tts_temperature": 0},
        {"max_tokens": 5},
    ],
)
def test_refuses_settings_outside_their_range(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(SettingError, match=rf"setting {name}: expected .+, got "):
        ReplyConfig(**given)


def test_client_values_replace_defaults_and_unknown_keys_are_noted() -> None:
    defaults = ReplyConfig(max_new_tokens=99, top_k=5)
    config, notes = ReplyConfig.of(defaults, {"top_k": 6, "do_sampel": True})
    assert (config.max_new_tokens, config.top_k) == (99, 6)
    (note,) = notes
    assert note.startswith("setting do_sampel does not exist and is ignored")
    with pytest.raises(SettingsError, match="expected an object, got"):
        ReplyConfig.of(defaults, ["top_k"])


def test_watermarks_leave_room_for_one_round() -> None:
    config = HalfDuplexConfig(reply=ReplyConfig(max_new_tokens=250))
    assert config.marks(20_000) == (8000, 6000)
    assert config.marks(6_500) == (6_500 - SEGMENT_ROWS - 250, 6_500 - SEGMENT_ROWS - 250)
    assert config.marks(100) == (0, 0)
    with pytest.raises(SettingError, match=r"setting low_tokens: expected at most high_tokens \(10\), got 11"):
        HalfDuplexConfig(high_tokens=10, low_tokens=11)
    with pytest.raises(SettingError, match="min_silence_ms"):
        HalfDuplexConfig(min_silence_ms=50)
