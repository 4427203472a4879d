"""Settings of an answer from a chat request, and the system message that introduces a voice."""

import numpy as np
import pytest

from models.inputs.messages import ChatMessage
from worker.chat.requests import INSTRUCTIONS, INTRODUCTIONS, reply_config, speech_config, with_voice_message
from worker.config.settings import SettingError
from worker.protocol.chat_messages import PromptLanguage, VoiceMode, read_chat
from worker.protocol.speech_messages import SpeechRequest

VOICE = np.zeros(16_000, np.float32)
QUESTION = ChatMessage("user", ("Hi",))


def test_every_setting_reaches_the_answer() -> None:
    generation = {
        **{"max_new_tokens": 7, "do_sample": False, "temperature": 0.3, "top_p": 0.5, "top_k": 9},
        "length_penalty": 2.0,
    }
    speech = {"enabled": True, "sampling": {"temperature": 0.6, "repetition_penalty": 1.2, "win_size": 16}}
    others = {"use_tts_template": True, "omni_mode": True, "enable_thinking": True}
    image = {"max_slice_nums": 4, "use_image_id": False}
    got = reply_config(read_chat({"generation": generation, "tts": speech, "image": image, **others}), 256)
    assert (got.max_new_tokens, got.decode_mode, got.temperature) == (7, "greedy", 0.3)
    assert (got.top_p, got.top_k, got.length_penalty) == (0.5, 9, 2.0)
    assert (got.num_beams, got.repetition_penalty) == (3, 1.2)
    assert (got.speak, got.tts_temperature, got.tts_repetition_penalty) == (True, 0.6, 1.2)
    assert got.use_tts_template and got.omni_mode and got.enable_thinking
    options = got.prompt_options()
    assert (options.max_slice_nums, options.use_image_id, options.omni_mode) == (4, False, True)


def test_defaults_are_those_of_the_public_implementation() -> None:
    got = reply_config(read_chat({}), 256)
    assert (got.max_new_tokens, got.length_penalty, got.temperature) == (256, 1.1, 0.7)
    assert (got.top_p, got.top_k, got.decode_mode, got.speak) == (0.8, 100, "sampling", False)
    assert (got.max_slice_nums, got.use_image_id) == (None, None)
    assert (got.num_beams, got.repetition_penalty) == (1, 1.02)
    spoken = speech_config(SpeechRequest(text="Hi"))
    assert (got.tts_temperature, spoken.tts_temperature) == (None, None), "expected the worker's own"


@pytest.mark.parametrize(("num_beams", "penalty"), [(1, 1.02), (4, 1.2)])
def test_number_of_beams_is_that_of_the_request(num_beams: int, penalty: float) -> None:
    got = reply_config(read_chat({"generation": {"do_sample": False, "num_beams": num_beams}}), 256)
    assert (got.num_beams, got.repetition_penalty, got.decode_mode) == (num_beams, penalty, "greedy")


def test_beams_with_random_tokens_are_refused() -> None:
    with pytest.raises(SettingError, match="num_beams: expected 1 where tokens are drawn at random, got 3"):
        reply_config(read_chat({"generation": {"do_sample": True, "num_beams": 3}}), 256)


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("mode", ["audio_assistant", "omni", "audio_roleplay", "voice_cloning"])
def test_system_message_introduces_the_voice(mode: VoiceMode, language: PromptLanguage) -> None:
    system, question = with_voice_message([QUESTION], mode, language, VOICE)
    assert (system.role, question) == ("system", QUESTION)
    introduction, voice, instruction = system.parts
    assert voice is VOICE
    assert (introduction, instruction) == (INTRODUCTIONS[language], INSTRUCTIONS[language][mode])


def test_given_system_message_and_default_mode_insert_nothing() -> None:
    messages = [ChatMessage("system", ("Be kind.",)), QUESTION]
    assert with_voice_message(messages, "omni", "en", VOICE) == messages
    assert with_voice_message([QUESTION], "default", "en", VOICE) == [QUESTION]
