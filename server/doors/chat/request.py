"""The request of `POST /v1/chat/completions`. Contains no voices' files and no turn."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from server.doors.chat.messages import FindTranscript, max_slices, worker_messages
from server.doors.core.request_fields import RequestFields, item_fields
from server.doors.core.sound_formats import FormatName
from server.doors.core.tool_calls import CALL
from server.doors.errors import invalid, missing
from server.doors.voices import DEFAULT
from worker.describe import shown
from worker.protocol.chat_messages import MAX_NEW_TOKENS, MAX_STOP_CHARS, MAX_STOPS, MAX_TOOLS
from worker.protocol.wire import json_text

NEW_TOKENS = 2048  # of an answer without a limit
MODALITIES = ("text", "audio")
AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
AUDIO_FORMATS: dict[AudioFormat, FormatName] = {
    "wav": "wav",
    "mp3": "mp3",
    "flac": "flac",
    "opus": "opus",
    "aac": "aac",
    "pcm16": "pcm",
}


@dataclass(frozen=True)
class AudioOrder:
    """The answer's sound. voice: as the client names it. ref_audio: a sound file whose voice speaks instead."""

    voice: str
    format: FormatName
    ref_audio: str | None = None


@dataclass(frozen=True)
class ChatOrder:
    """What to answer and how.

    Attributes:
        model: as the client names it.
        messages: of the worker's request.
        generation: of the worker's request.
        audio: None for text alone.
        tools: functions that the model may call.
        answer_start: text that the answer begins with: that of a call the client demands.
        stream: send the answer in parts.
        include_usage: end a stream with the usage.
        stop: texts before which the answer ends.
        max_slices: of a picture; None: as the server cuts it.
    """

    model: str
    messages: list[dict[str, Any]]
    generation: dict[str, object]
    audio: AudioOrder | None
    tools: list[dict[str, Any]]
    answer_start: str
    stream: bool
    include_usage: bool
    stop: tuple[str, ...]
    max_slices: int | None = None


def chat_order(body: bytes, find_transcript: FindTranscript) -> ChatOrder:
    """The order in a body. Slow for pictures and sound: call on a thread. Raises: ApiError."""
    fields = RequestFields.of_body(body)
    _refuse_unsupported(fields)
    stream = fields.flag("stream")
    options = fields.group("stream_options")
    stop = _stop(fields)
    tools = _tools(fields)
    return ChatOrder(
        model=fields.text("model"),
        messages=worker_messages(fields, find_transcript),
        generation=_generation(fields, stop),
        audio=_audio(fields, is_stream=stream),
        tools=_chosen_tools(fields, tools),
        answer_start=_answer_start(fields, tools),
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
        stop=stop,
        max_slices=max_slices(fields),
    )


def _refuse_unsupported(fields: RequestFields) -> None:
    if (fields.whole("n", 1, 128) or 1) != 1:
        raise invalid("n", expected="1", got=shown(fields.given["n"]))
    if fields.flag("logprobs"):
        raise invalid("logprobs", expected="false", got="true")
    form = fields.group("response_format")
    if form is not None and form.text("type", "text") != "text":
        raise invalid("response_format.type", expected="text", got=shown(form.given["type"]))


def _generation(fields: RequestFields, stop: tuple[str, ...]) -> dict[str, object]:
    limit = fields.whole("max_completion_tokens", 1) or fields.whole("max_tokens", 1) or NEW_TOKENS
    given: dict[str, object] = {
        "max_new_tokens": min(limit, MAX_NEW_TOKENS),
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "stop": list(stop),
        "seed": fields.seed(),
    }
    return {key: value for key, value in given.items() if value is not None}


def _stop(fields: RequestFields) -> tuple[str, ...]:
    value = fields.given.get("stop")
    stops = [value] if isinstance(value, str) else fields.items("stop")
    if len(stops) > MAX_STOPS:
        raise invalid("stop", expected=f"at most {MAX_STOPS} texts", got=len(stops))
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", expected=f"texts of 1 to {MAX_STOP_CHARS} characters", got=shown(stop))
    return tuple(cast(list[str], stops))


def _audio(fields: RequestFields, *, is_stream: bool) -> AudioOrder | None:
    modalities = fields.items("modalities")
    for one in modalities:
        if one not in MODALITIES:
            raise invalid("modalities", expected="text or audio", got=shown(one))
    audio = fields.group("audio")
    if "audio" not in modalities:
        return None
    if audio is None:
        raise missing("audio")
    name = cast(AudioFormat, audio.choice("format", tuple(AUDIO_FORMATS), "pcm16" if is_stream else "wav"))
    if is_stream and name != "pcm16":
        raise invalid("audio.format", expected="pcm16 in a stream", got=name)
    voice: object = audio.given.get("voice")
    if isinstance(voice, dict):
        voice = voice.get("id")
    if voice is not None and not isinstance(voice, str):
        raise invalid("audio.voice", expected="the name of a voice, or an object with its id", got=shown(voice))
    reference = audio.text("ref_audio", "") or audio.text("prompt_wav", "")
    return AudioOrder(voice or DEFAULT, AUDIO_FORMATS[name], reference or None)


def _tools(fields: RequestFields) -> list[dict[str, Any]]:
    """The functions, with the fields that a chat template reads."""
    tools: list[dict[str, Any]] = []
    given = fields.items("tools")
    if len(given) > MAX_TOOLS:
        raise invalid("tools", expected=f"at most {MAX_TOOLS} functions", got=len(given))
    for i, one in enumerate(given):
        tool = item_fields(one, f"tools[{i}]")
        tool.choice("type", ("function",), "function")
        function = tool.group("function")
        if function is None:
            raise missing(tool.name("function"))
        parameters = function.group("parameters")
        described: dict[str, Any] = {"name": function.text("name")}
        if function.has("description"):
            described["description"] = function.text("description")
        described["parameters"] = {} if parameters is None else dict(parameters.given)
        tools.append({"type": "function", "function": described})
    return tools


def _choice(fields: RequestFields) -> str:
    """`none`, `auto`, `required`, or the name of a function after a colon."""
    value = fields.given.get("tool_choice")
    if isinstance(value, dict):
        choice = RequestFields(value, "tool_choice.")
        function = choice.group("function")
        return f":{function.text('name') if function is not None else choice.text('name')}"
    return fields.choice("tool_choice", ("none", "auto", "required"), "auto")


def _chosen_tools(fields: RequestFields, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choice = _choice(fields)
    if choice in ("auto", "required"):
        return tools
    found = [tool for tool in tools if f":{tool['function']['name']}" == choice]
    if choice != "none" and not found:
        raise invalid("tool_choice", expected="the name of one of the tools", got=choice[1:])
    return found


def _answer_start(fields: RequestFields, tools: list[dict[str, Any]]) -> str:
    choice = _choice(fields)
    if choice in ("none", "auto") or (choice == "required" and not tools):
        return ""
    if choice == "required":
        return f"{CALL}\n"
    return f'{CALL}\n{{"name": {json_text(choice[1:])}, "arguments": '
