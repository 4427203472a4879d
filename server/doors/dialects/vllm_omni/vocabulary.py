"""Names in the events of vLLM-Omni sessions, and what this server offers of the dialect."""

CAPABILITIES: dict[str, object] = {
    "implementation_level": "model_native_duplex",
    "chunk_period_ms": 1000,
    "input_modes": ["audio", "text", "video"],
    "supports_input_append": True,
    "supports_client_commit": True,
    "supports_barge_in": True,
    "supports_playback_ack": True,
    "supports_multi_session": True,
    "supports_session_resume": True,
    "supports_audio_truncate": True,
}
ALIASES = {
    "close": "session.close",
    "close_session": "session.close",
    "input.commit": "input_audio_buffer.commit",
    "input_text.append": "input.text.append",
    "push_text": "input.text.append",
    "audio.playback_ack": "playback.ack",
    "signal_turn": "turn.signal",
}
SIGNALS = (
    "barge_in",
    "input.cancel",
    "response.cancel",
    "session.update",
    "conversation.item.create",
    "conversation.item.delete",
    "conversation.item.truncate",
    "conversation.item.retrieve",
)
TURN_STATES = {"user_started": "user_speaking", "user_committed": "user_committed"}  # signals without effect
