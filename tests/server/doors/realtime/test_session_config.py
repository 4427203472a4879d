from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.doors.live.event_error import EventError
from server.doors.realtime.events.session_patch import read_patch
from server.doors.realtime.session_config import RealtimeConfig

BASE = RealtimeConfig("duo")
Json = dict[str, Any]


def merged(given: Json, base: RealtimeConfig = BASE, **options: bool) -> RealtimeConfig:
    return base.merged(read_patch(given), **options)


def test_only_named_fields_change() -> None:
    after = merged({"type": "realtime", "instructions": "Be brief."})
    expected = {**BASE.described(), "instructions": "Be brief."}
    assert after.described() == expected
    assert merged({}, after).described() == expected


def test_null_and_empty_values_clear() -> None:
    full = merged(
        {
            "instructions": "x",
            "tools": [{"type": "function", "name": "look"}],
            "audio": {"input": {"noise_reduction": {"type": "near_field"}, "turn_detection": {"type": "server_vad"}}},
        }
    )
    cleared = merged(
        {"instructions": "", "tools": [], "audio": {"input": {"noise_reduction": None, "turn_detection": None}}}, full
    )
    shown = cleared.described()
    assert shown["instructions"] == "" and shown["tools"] == []
    assert shown["audio"]["input"]["turn_detection"] is None and shown["audio"]["input"]["noise_reduction"] is None


def test_turn_detection_keeps_its_settings_until_its_type_changes() -> None:
    def detection(given: Json, base: RealtimeConfig) -> RealtimeConfig:
        return merged({"audio": {"input": {"turn_detection": given}}}, base)

    strict = detection({"type": "server_vad", "threshold": 0.9, "idle_timeout_ms": 6000}, BASE)
    longer = detection({"type": "server_vad", "silence_duration_ms": 900}, strict)
    assert longer.turn_detection is not None
    assert (longer.turn_detection.threshold, longer.turn_detection.silence_duration_ms) == (0.9, 900)
    assert longer.turn_detection.idle_timeout_ms == 6000
    shown = detection({"type": "semantic_vad", "eagerness": "low"}, longer).described()["audio"]["input"]
    assert shown["turn_detection"] == {
        "type": "semantic_vad",
        "eagerness": "low",
        "create_response": True,
        "interrupt_response": True,
    }


BETA = {
    "modalities": ["text", "audio"],
    "voice": "alloy",
    "input_audio_format": "g711_ulaw",
    "output_audio_format": "pcm16",
    "turn_detection": {"type": "server_vad", "create_response": False},
    "input_audio_transcription": {"model": "whisper-1"},
    "temperature": 0.8,
    "max_response_output_tokens": 200,
}
GA = {
    "output_modalities": ["audio"],
    "max_output_tokens": 200,
    "audio": {
        "input": {
            "format": {"type": "audio/pcmu"},
            "turn_detection": BETA["turn_detection"],
            "transcription": {"model": "whisper-1"},
        },
        "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": {"id": "alloy"}},
    },
}


def test_beta_spellings_mean_the_same_and_are_never_shown() -> None:
    assert merged(BETA).described() == merged(GA).described()
    assert merged(BETA).described().keys().isdisjoint(BETA)


def test_transcription_shows_what_was_named_until_it_is_cleared() -> None:
    def shown(given: Json | None, config: RealtimeConfig) -> tuple[RealtimeConfig, Json | None]:
        config = config.merged(read_patch({"audio": {"input": {"transcription": given}}}))
        return config, config.described()["audio"]["input"]["transcription"]

    config, first = shown({"language": "en", "delay": "low"}, RealtimeConfig("duo"))
    assert first == {"model": "duo", "language": "en"}, "expected the keys that stock clients know"
    config, second = shown({"model": "gpt-4o-transcribe", "prompt": "H200"}, config)
    assert second == {"model": "gpt-4o-transcribe", "language": "en", "prompt": "H200"}
    config, third = shown({"language": None}, config)
    assert third == {"model": "gpt-4o-transcribe", "prompt": "H200"}
    assert shown(None, config)[1] is None


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "transcription"}, "session.type"),
        (
            {"output_modalities": ["audio", "text", "audio"], "audio": {"output": {"speed": 9}}},
            "session.audio.output.speed",
        ),
        ({"output_modalities": ["video"]}, "session.output_modalities[0]"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        ({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}}, "session.audio.input.format"),
        ({"audio": {"input": {"turn_detection": {"type": "magic"}}}}, "session.audio.input.turn_detection.type"),
        ({"tool_choice": "magic"}, "session.tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "session.tool_choice"),
        ({"tool_choice": {"type": "function"}}, "session.tool_choice.name"),
        ({"tracing": 5}, "session.tracing"),
        ({"audio": {"input": {"transcription": {"prompt": "x" * 5000}}}}, "session.audio.input.transcription.prompt"),
        ({"tools": [{"type": "mcp"}]}, "session.tools"),
        ({"instructions": "x" * 40_000}, "session.instructions"),
    ],
)
def test_impossible_values_are_named(given: Json, param: str) -> None:
    with pytest.raises(EventError) as caught:
        merged(given)
    assert caught.value.param == param and "Value error" not in caught.value.message


def test_a_forced_function_shows_as_a_word_until_another_choice() -> None:
    forced = merged({"tool_choice": {"type": "function", "name": "look"}})
    assert forced.described()["tool_choice"] == "required" and forced.forced_function == "look"
    assert merged({"instructions": "x"}, forced).forced_function == "look"
    assert merged({"tool_choice": "required"}, forced).forced_function is None


def test_a_format_may_have_its_rate_alone() -> None:
    law = merged({"audio": {"input": {"format": {"type": "audio/pcmu"}}}})
    assert merged({"audio": {"input": {"format": {}}}}, law).input_format == "audio/pcmu"
    assert merged({"audio": {"input": {"format": {"rate": 24000}}}}, law).input_format == "audio/pcm"


def test_the_voice_stays_after_the_first_sound() -> None:
    with pytest.raises(EventError) as caught:
        merged({"instructions": "new", "audio": {"output": {"voice": "nova"}}}, has_spoken=True)
    assert caught.value.code == "cannot_update_voice"
    assert merged({"audio": {"output": {"voice": "default"}}}, has_spoken=True).voice == "default"


@given(
    st.dictionaries(
        st.sampled_from(
            ["tool_choice", "voice", "audio", "tools", "turn_detection", "prompt", "modalities", "reasoning"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers(-5, 9999) | st.text(max_size=4) | st.just("server_vad"),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["type", "input", "output", "format", "voice", "id", "rate"]), inner)
            ),
            max_leaves=6,
        ),
    )
)
def test_any_update_changes_the_session_or_is_refused(given: Json) -> None:
    try:
        shown = merged(given).described()
    except EventError as error:
        assert error.message and error.code
        return
    assert isinstance(shown["tool_choice"], str) and isinstance(shown["audio"]["output"]["voice"], str)
    assert shown["audio"]["input"]["transcription"] is None
