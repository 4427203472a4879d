"""The conversation of a Realtime session as a chat request, for the turn lane and responses out of band."""

import base64
from collections.abc import Iterable
from typing import Any

from server.doors.core.chat_turn import TurnPath, TurnRequest
from server.doors.realtime.items import ConversationItem
from server.doors.realtime.session_config import RealtimeConfig
from worker.protocol.wire import Sound

Json = dict[str, Any]
DEFAULT_TOKENS = 1024
# A chat answers its last message, which must be the user's.
NO_INPUT = "(The user has not said anything.)"


def turn_request(config: RealtimeConfig, voice: str | None, items: Iterable[ConversationItem]) -> TurnRequest:
    """The request that answers a conversation. Copies media: call it on a thread.

    Args:
        config: settings of the response.
        voice: registered voice; None: the server's default.
        items: the conversation.
    """
    messages: list[Json] = [{"role": "system", "content": config.instructions}] if config.instructions else []
    for item in items:
        content = _content_of(item)
        if content and item.status != "in_progress":
            messages.append({"role": item.role or "user", "content": content})
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": NO_INPUT})
    speech: Json = {"enabled": config.modality == "audio"}
    if voice is not None:
        speech["ref_audio_path"] = voice
    fields: Json = {
        "messages": _with_system_first(messages),
        "streaming": True,
        "generation": {"max_new_tokens": config.max_output_tokens or DEFAULT_TOKENS},
        "tts": speech,
        "use_tts_template": config.modality == "audio",
        "omni_mode": True,
        "report_usage": True,
    }
    return TurnRequest(TurnPath.CHAT, fields)


def _with_system_first(messages: list[Json]) -> list[Json]:
    """The messages with one system message, which holds all texts of the system."""
    texts = [text for message in messages if message["role"] == "system" for text in _texts(message["content"])]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _texts(content: str | list[Json]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _content_of(item: ConversationItem) -> list[Json]:
    if item.kind == "function_call":
        return []
    if item.kind == "function_call_output":
        return [{"type": "text", "text": f"Result of the function: {item.output or ''}"}]
    parts: list[Json] = [{"type": "image", "data": base64.b64encode(data).decode()} for data in item.pictures]
    if item.sound is not None:
        parts.append({"type": "audio", "data": Sound(item.sound).base64()})
    if item.text:
        parts.append({"type": "text", "text": item.text})
    return parts
