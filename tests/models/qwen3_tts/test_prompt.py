"""Layouts of prompts: rows, the text after them, and requests that a checkpoint cannot serve."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.errors import SettingsError, ShapeError
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.prompt import PromptText, SpeechVoice, lay_out

TEXTS = PromptText(role=(300, 302, 304), text=(1, 2, 3, 4, 5))
WITH_TRANSCRIPT = replace(TEXTS, reference=(7, 8))


def reference(frames: int, width: int = 64) -> SpeechVoice:
    return SpeechVoice(embedding=np.ones(width, np.float32), reference_codes=np.zeros((frames, 16), np.int64))


def vector(width: int = 64) -> SpeechVoice:
    return SpeechVoice(embedding=np.ones(width, np.float32))


def test_lengths_of_all_layouts(base_model: Qwen3TTS) -> None:
    """9 rows for a voice with automatic language, 10 with a language, as many as its parts otherwise."""
    config = base_model.config
    lengths = {
        (streams, language, frames): len(
            lay_out(
                config,
                WITH_TRANSCRIPT if frames else TEXTS,
                reference(frames) if frames else vector(),
                language=language,
                streams_text=streams,
            )
        )
        for streams in (True, False)
        for language in ("auto", "English")
        for frames in (0, 4)
    }
    assert lengths == {
        (True, "auto", 0): 9,
        (True, "English", 0): 10,
        (False, "auto", 0): 9 + 5 + 1,
        (False, "English", 0): 10 + 5 + 1,
        (True, "auto", 4): 9 + 4,
        (True, "English", 4): 10 + 4,
        (False, "auto", 4): 9 + 4 + 2 + 5 + 1,
        (False, "English", 4): 10 + 4 + 2 + 5 + 1,
    }


def test_text_after_the_prompt(base_model: Qwen3TTS) -> None:
    config = base_model.config
    streamed = lay_out(config, TEXTS, vector(), streams_text=True)
    assert streamed.trailing == (2, 3, 4, 5, config.tts_eos_token_id) and not streamed.is_open
    live = lay_out(config, TEXTS, vector(), streams_text=True, is_open=True)
    assert live.trailing == (2, 3, 4, 5) and live.is_open
    assert lay_out(config, WITH_TRANSCRIPT, reference(4), streams_text=True, is_open=True).trailing == (4, 5)
    assert lay_out(config, TEXTS, vector()).trailing == ()


def test_small_custom_voice_model_ignores_instructions(custom_model: Qwen3TTS) -> None:
    texts, voice = replace(TEXTS, instruct=(9, 9, 9)), SpeechVoice(name="ryan")
    large = custom_model.config
    small = large.model_copy(update={"tts_model_size": "0b6"})
    assert len(lay_out(large, texts, voice)) == len(lay_out(small, texts, voice)) + 3


@pytest.mark.parametrize(
    ("texts", "voice", "options", "error", "message"),
    [
        (TEXTS, vector(), {"language": "Klingon"}, SettingsError, "language: expected one of .'auto', 'chinese'"),
        (TEXTS, SpeechVoice(name="ryan"), {}, SettingsError, "voice of a base model: expected a speaker embedding"),
        (TEXTS, vector(63), {}, ShapeError, r"speaker embedding: expected \(64,\), got \(63,\)"),
        (replace(TEXTS, text=()), vector(), {}, SettingsError, "text: expected at least one token"),
        (replace(TEXTS, instruct=(1,)), vector(), {}, SettingsError, "instructions of a base model: expected none"),
        (TEXTS, reference(4), {}, SettingsError, "reference codes: expected a transcript"),
        (WITH_TRANSCRIPT, reference(0), {}, ShapeError, "reference codes"),
        (TEXTS, vector(), {"is_open": True}, SettingsError, "live text: expected the layout that streams the text"),
        (
            WITH_TRANSCRIPT,
            reference(9),
            {"is_open": True, "streams_text": True},
            SettingsError,
            "live text with a reference: expected at least 10 tokens .* got 7",
        ),
    ],
)
def test_bad_requests_are_refused(
    base_model: Qwen3TTS,
    texts: PromptText,
    voice: SpeechVoice,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        lay_out(base_model.config, texts, voice, **options)


def test_unknown_speaker_and_codes_out_of_range(base_model: Qwen3TTS, custom_model: Qwen3TTS) -> None:
    with pytest.raises(SettingsError, match=r"voice: expected one of \['dylan', 'ryan', 'vivian'\], got 'bob'"):
        lay_out(custom_model.config, TEXTS, SpeechVoice(name="bob"))
    voice = reference(4)
    assert voice.reference_codes is not None
    voice.reference_codes[0, 3] = 64
    with pytest.raises(SettingsError, match=r"codes in 0\.\.63, got 0\.\.64"):
        lay_out(base_model.config, WITH_TRANSCRIPT, voice)
