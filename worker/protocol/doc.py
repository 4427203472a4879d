"""Markdown tables of all messages for docs/protocol.md: `python -m worker.protocol.doc` prints them. Torch-free.

Does not contain the document's text around the tables.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticUndefined

from worker.describe import describe_type
from worker.protocol.chat_messages import (
    ChatRequest,
    ChatResponse,
    GenerationFields,
    ImageFields,
    PrefillDone,
    ReplyChunk,
    ReplyUsage,
    SpeechFields,
    SpeechSamplingFields,
    SpokenReplyDone,
    TokenStats,
)
from worker.protocol.codec import FieldGroup, Message
from worker.protocol.content import CONTENT_CLASSES, ChatTurn, ToolCallFields
from worker.protocol.gateway_messages import RESUME_CLIENT, StartProgress
from worker.protocol.half_duplex_messages import (
    HALF_DUPLEX_CLIENT,
    HALF_DUPLEX_SERVER,
    AnswerFields,
    LengthFields,
    SpokenFields,
    SystemSound,
    SystemText,
    TurnChunk,
    VadFields,
    VisionFields,
)
from worker.protocol.messages import CLIENT, SERVER, Spec
from worker.protocol.speech_messages import (
    ConversionRequest,
    SpeakEnd,
    SpeakRequest,
    SpeakSampling,
    SpeakText,
    SpeechRequest,
)
from worker.protocol.streaming_messages import STREAMING_CLIENT, STREAMING_SERVER
from worker.protocol.unit_counters import Mark, UnitUsage


def table(group: type[FieldGroup]) -> str:
    """A row per field except `type`, in the order of definition, then the computed fields; "" without fields."""
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    names = group.aliases if issubclass(group, Message) else {}
    left_out = group.left_out if issubclass(group, Message) else frozenset()
    for name, field in group.model_fields.items():
        if name == "type":
            continue
        meaning = field.description or ""
        if aliases := names.get(name):
            meaning += f". Also: {', '.join(f'`{one}`' for one in aliases)}"
        default = "left out" if name in left_out else _default(field.default)
        rows.append(f"| `{name}` | {describe_type(field.annotation, field.metadata)} | {default} | {meaning} |")
    for name, computed in group.model_computed_fields.items():
        rows.append(f"| `{name}` | {describe_type(computed.return_type)} | | {computed.description} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def section(group: type[FieldGroup], title: str) -> str:
    """Heading, purpose of the message, table."""
    text = " ".join((group.__doc__ or "").split())
    return "\n\n".join(filter(None, (f"### {title}", text, table(group))))


def sections() -> str:
    """All generated sections, from the client's messages to the server's."""
    classes = {**CLIENT.classes, **RESUME_CLIENT.classes}
    parts = ["## Client to server", *(section(cls, f"`{name}`") for name, cls in classes.items())]
    parts += [section(Spec, "The `spec` of `prepare` and `prepared`")]
    parts += ["## Server to client", *(section(cls, f"`{name}`") for name, cls in SERVER.classes.items())]
    parts += [section(UnitUsage, "The `usage` of `result`"), section(Mark, "An element of the `marks` of `result`")]
    parts += [section(StartProgress, "The `progress` of `queued` and `queue_update`")]
    return "\n\n".join(parts) + "\n"


def chat_sections() -> str:
    """The generated sections of chat and speech: the request, then the answer."""
    groups: dict[str, type[FieldGroup]] = {
        "Chat: the request": ChatRequest,
        "Chat: an element of `messages`": ChatTurn,
        "Chat: an element of `tool_calls`": ToolCallFields,
        **{f"Chat: an item of type `{name}`": cls for name, cls in CONTENT_CLASSES.items()},
        "Chat: `generation`": GenerationFields,
        "Chat: `tts`": SpeechFields,
        "Chat: `tts.sampling`": SpeechSamplingFields,
        "Chat: `image`": ImageFields,
        "Chat: `prefill_done`": PrefillDone,
        "Chat: `chunk`": ReplyChunk,
        "Chat: `done`": SpokenReplyDone,
        "Chat: the `usage` of `done`": ReplyUsage,
        "Chat: the body of the answer to `POST /chat`": ChatResponse,
        "Chat: `token_stats`": TokenStats,
        "Speech: the request": SpeechRequest,
        "Speech model: `speak`": SpeakRequest,
        "Speech model: `sampling`": SpeakSampling,
        "Speech model: `text`": SpeakText,
        "Speech model: `end`": SpeakEnd,
        "Conversion: the request": ConversionRequest,
    }
    return "\n\n".join(section(group, title) for title, group in groups.items()) + "\n"


def streaming_sections() -> str:
    """The generated sections of turn streaming: the client's messages, the server's messages."""
    shared: set[type[Message]] = {*CLIENT.classes.values(), *SERVER.classes.values(), TurnChunk}
    groups = _own(STREAMING_CLIENT.classes, shared) | _own(STREAMING_SERVER.classes, shared)
    return "\n\n".join(section(group, f"Turn streaming: {title}") for title, group in groups.items()) + "\n"


def half_duplex_sections() -> str:
    """The generated sections of half duplex: the client's messages, the settings, the server's messages."""
    shared = {*CLIENT.classes.values(), *SERVER.classes.values()}
    groups: dict[str, type[FieldGroup]] = {
        **_own(HALF_DUPLEX_CLIENT.classes, shared),
        "an item of `system_content` with text": SystemText,
        "an item of `system_content` with sound": SystemSound,
        "`config.vad`": VadFields,
        "`config.generation`": AnswerFields,
        "`config.tts`": SpokenFields,
        "`config.vision`": VisionFields,
        "`config.session`": LengthFields,
        **_own(HALF_DUPLEX_SERVER.classes, shared),
    }
    return "\n\n".join(section(group, f"Half duplex: {title}") for title, group in groups.items()) + "\n"


def _own(classes: Mapping[str, type[Message]], shared: Collection[type[Message]]) -> dict[str, type[FieldGroup]]:
    """The classes by title, without those that the duplex protocol describes."""
    return {f"`{name}`": cls for name, cls in classes.items() if cls not in shared}


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return "see its table" if isinstance(value, FieldGroup) else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(sections(), half_duplex_sections(), chat_sections(), streaming_sections(), sep="\n", end="")
