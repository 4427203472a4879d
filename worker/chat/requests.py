"""A chat request of the wire as settings of the answer, and the system message that introduces a voice."""

import re
from collections.abc import Sequence

import numpy as np

from models.inputs.messages import ChatMessage
from worker.chat.config import ReplyConfig
from worker.protocol.chat_messages import ChatRequest, PromptLanguage, VoiceMode
from worker.protocol.speech_messages import SpeechRequest

# Of the public implementation: hypotheses where a request does not sample, and penalties without and with them.
NUM_BEAMS = 3
REPETITION_PENALTY, BEAM_REPETITION_PENALTY = 1.02, 1.2

CHINESE = re.compile("[\u4e00-\u9fff]")
INTRODUCTIONS: dict[PromptLanguage, str] = {
    "en": "Speak with the voice of this recording.",
    "zh": "请使用这段录音中的音色说话。",
}
INSTRUCTIONS: dict[PromptLanguage, dict[VoiceMode, str]] = {
    "en": {
        "audio_assistant": "You are a helpful assistant. Keep this voice, and answer carefully, in natural spoken "
        "language.",
        "omni": "You are a helpful assistant. You see, hear and read, and you answer by voice and in text, briefly and "
        "to the point.",
        "audio_roleplay": "Play the person with this voice, and keep to the role in every answer.",
        "voice_cloning": "Read the given text aloud in this voice, without any change.",
    },
    "zh": {
        "audio_assistant": "你是一个乐于助人的助手。请保持这种音色，用自然的口语认真回答用户的问题。",
        "omni": "你是一个乐于助人的助手。你能看、能听、能读，请用语音和文字简洁地回答。",
        "audio_roleplay": "请扮演拥有这个声音的人物，并在每次回答中保持角色。",
        "voice_cloning": "请用这种音色原样朗读给出的文字。",
    },
}


def reply_config(request: ChatRequest, default_new_tokens: int) -> ReplyConfig:
    """Settings of the answer. default_new_tokens: limit of its tokens, where the request has none."""
    generation, speech = request.generation, request.tts
    n_beams = generation.num_beams or (1 if generation.do_sample else NUM_BEAMS)
    return ReplyConfig(
        max_new_tokens=default_new_tokens if generation.max_new_tokens is None else generation.max_new_tokens,
        length_penalty=generation.length_penalty,
        decode_mode="sampling" if generation.do_sample else "greedy",
        num_beams=n_beams,
        repetition_penalty=REPETITION_PENALTY if n_beams == 1 else BEAM_REPETITION_PENALTY,
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        speak=speech.enabled,
        tts_temperature=speech.sampling.temperature,
        tts_repetition_penalty=speech.sampling.repetition_penalty,
        enable_thinking=request.enable_thinking,
        use_tts_template=request.use_tts_template,
        omni_mode=request.omni_mode,
        max_slice_nums=request.image.max_slice_nums,
        use_image_id=request.image.use_image_id,
        tools=tuple(request.tools),
        answer_start=request.answer_start,
        stop=tuple(generation.stop),
        seed=generation.seed,
        priority=request.priority,
    )


def speech_config(request: SpeechRequest) -> ReplyConfig:
    """Settings of an answer whose text is given."""
    sampling = request.tts.sampling
    return ReplyConfig(
        text=request.text,
        speak=True,
        tts_temperature=sampling.temperature,
        tts_repetition_penalty=sampling.repetition_penalty,
        seed=request.seed,
    )


def language_of(text: str) -> PromptLanguage:
    """The language of the instruction to read a text: Chinese if the text has Chinese characters."""
    return "zh" if CHINESE.search(text) else "en"


def with_voice_message(
    messages: Sequence[ChatMessage], mode: VoiceMode, language: PromptLanguage, voice: np.ndarray
) -> list[ChatMessage]:
    """The conversation with a system message that introduces a voice, unless it has one or `mode` is "default".

    Args:
        messages: the conversation.
        mode: the kind of instruction.
        language: of the inserted text.
        voice: [n] float32 at 16 kHz.
    """
    if mode == "default" or any(message.role == "system" for message in messages):
        return list(messages)
    parts = (INTRODUCTIONS[language], voice, INSTRUCTIONS[language][mode])
    return [ChatMessage("system", parts), *messages]
