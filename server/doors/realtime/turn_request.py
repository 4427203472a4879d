"""The conversation of a Realtime session as a chat request, for the turn lane and responses out of band."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

from server.doors.core.chat_turn import TurnPath, TurnRequest
from server.doors.core.tool_calls import CALL
from server.doors.realtime.items import ConversationItem
from server.doors.realtime.session_config import RealtimeConfig
from worker.protocol.wire import Sound, WireError, json_text, read_object

Json = dict[str, Any]
DEFAULT_TOKENS = 1024
KEPT = 0.75  # share of the items that stays when they do not fit
# A chat answers its last message, which must be the user's.
NO_INPUT = "(The user has not said anything.)"


def turn_request(config: RealtimeConfig, voice: str | None, items: Sequence[ConversationItem]) -> TurnRequest:
    """The request that answers a conversation. Copies media: call it on a thread.

    Args:
        config: settings of the response.
        voice: registered voice; None: the server's default.
        items: the conversation.
    """
    messages = _with_system_first(_messages(config.instructions, items))
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        messages.append({"role": "user", "content": NO_INPUT})
    tools = [] if config.tool_choice == "none" else [_tool(tool) for tool in _offered(config)]
    # Speech suppresses characters that calls need: with functions the text comes first, and is voiced afterwards.
    speaks = config.modality == "audio" and not tools
    speech: Json = {**registered_voice_fields(voice), "enabled": speaks}
    fields: Json = {
        "messages": messages,
        "streaming": True,
        "generation": {"max_new_tokens": config.max_output_tokens or DEFAULT_TOKENS},
        "tts": speech,
        "use_tts_template": speaks,
        "omni_mode": True,
        "report_usage": True,
    }
    details = {part.detail for item in items for part in item.parts if part.type == "input_image"}
    if details == {"low"}:
        fields["image"] = {"max_slice_nums": 1}
    if tools:
        fields |= {"tools": tools, "answer_start": answer_start(config)}
    return TurnRequest(TurnPath.CHAT, fields)


def without_oldest(items: Sequence[ConversationItem], ratio: float | None) -> list[ConversationItem]:
    """The items without some of the oldest, but with all of the system; the same ones if only the last may be left.

    ratio: share of the items that stays; None: `KEPT`.
    """
    spared = [item for item in items[:-1] if item.role != "system"]
    n_dropped = len(spared) - min(int(len(spared) * (KEPT if ratio is None else ratio)), len(spared) - 1)
    dropped = {item.id for item in spared[:n_dropped]} if spared else set()
    calls = {item.call_id for item in items if item.id in dropped and item.kind == "function_call"}

    def stays(item: ConversationItem) -> bool:
        return item.id not in dropped and not (item.kind == "function_call_output" and item.call_id in calls)

    return [item for item in items if item is items[-1] or stays(item)]


def voicing_request(request: TurnRequest, text: str, voice: str | None) -> TurnRequest:
    """The request that voices a text as the answer to a request's conversation."""
    fields = {"text": text, "messages": request.fields["messages"], "tts": registered_voice_fields(voice)}
    return TurnRequest(TurnPath.SPEECH, fields)


def answer_start(config: RealtimeConfig) -> str:
    """The text that the answer begins with: the beginning of a call if one is required."""
    if config.tool_choice != "required" or not config.tools:
        return ""
    named = [tool["name"] for tool in config.tools if tool["name"] == config.forced_function]
    return f'{CALL}\n{{"name": {json_text(named[0])}, "arguments": ' if named else f"{CALL}\n"


def _offered(config: RealtimeConfig) -> list[Json]:
    """The functions that the model may call: the forced one alone, if there is one."""
    return [tool for tool in config.tools if tool["name"] == config.forced_function] or list(config.tools)


def registered_voice_fields(voice: str | None) -> Json:
    """Fields of `tts`. voice: registered voice; None: the server's default."""
    return {} if voice is None else {"ref_audio_path": voice}


def _tool(tool: Json) -> Json:
    """A function as a chat template reads it."""
    described = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": described}


def _messages(instructions: str, items: Iterable[ConversationItem]) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if item.status == "in_progress":
            continue
        if item.kind == "function_call":
            call = {"name": item.name or "", "arguments": _arguments(item.arguments or "{}")}
            if messages and "tool_calls" in messages[-1]:
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif item.kind == "function_call_output":
            messages.append({"role": "tool", "content": item.output or ""})
        elif content := _content_of(item):
            messages.append({"role": item.role or "user", "content": content})
    return messages


def _arguments(text: str) -> Json:
    """The arguments of a call that a client has put into the history; none for a text that is no object."""
    try:
        return read_object(text)
    except WireError:
        return {}


def _with_system_first(messages: list[Json]) -> list[Json]:
    """The messages with one system message, which holds all texts of the system."""
    texts = [text for message in messages if message["role"] == "system" for text in _texts(message["content"])]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _texts(content: str | list[Json]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _content_of(item: ConversationItem) -> list[Json]:
    parts: list[Json] = [{"type": "image", "data": base64.b64encode(data).decode()} for data in item.pictures]
    if item.sound is not None:
        parts.append({"type": "audio", "data": Sound(item.sound).base64()})
    text = item.text if item.sound is None else item.written  # the sound is not given as words too
    if text:
        parts.append({"type": "text", "text": text})
    return parts
