"""Requests of the OpenAI API with most of their fields, from which messages are made."""

CHAT_BODY = {
    "model": "default",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:"}}],
        },
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ],
    "max_tokens": 8,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["x"],
    "stream": False,
    "n": 1,
    "seed": 3,
    "modalities": ["text", "audio"],
    "audio": {"voice": "default", "format": "wav"},
    "stream_options": {"include_usage": True},
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
    ],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "logprobs": False,
    "max_completion_tokens": 5,
}
SPEECH_BODY = {
    "model": "tts",
    "input": "Hello.",
    "voice": "default",
    "response_format": "wav",
    "speed": 1.0,
    "stream_format": "audio",
    "instructions": "x",
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "seed": 1,
    "language": "English",
    "ref_audio": "UklG",
    "ref_text": "a",
    "task_type": "Base",
    "max_new_tokens": 100,
    "stream": False,
}
OMNI_SESSION = {
    "model": "m",
    "instructions": "x",
    "voice": "default",
    "ref_audio": "UklG",
    "input_audio_format": "pcm16",
    "output_audio_format": "pcm16",
    "sample_rate_hz": 16_000,
    "temperature": 0.5,
    "idle_timeout_s": 9,
    "overlap_policy": "listen_only",
    "playback_commit_policy": "ack_only",
    "extra_body": {"force_listen_count": 1, "auto_response": True},
    "turn_detection": {"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 200},
    "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16_000}}, "output": {"format": "pcm16", "voice": "a"}},
    "input_audio_transcription": {"model": "m", "language": "en"},
}
CONVERSION_PARTS = {
    "model": "m",
    "voice": "default",
    "speed": "1.0",
    "seed": "1",
    "response_format": "wav",
    "speech_tokens": "[1, 2]",
}
