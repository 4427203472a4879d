"""The tables of every message, as docs/protocol.md holds them: `python -m worker.protocol.doc` prints them. Torch-free.

Knows how messages are declared and Markdown. Does not know what the document says around the tables.
"""

import json
from typing import Any

from pydantic_core import PydanticUndefined

from worker.protocol.codec import FieldGroup, Message, allowed
from worker.protocol.messages import CLIENT, SERVER, Spec


def table(record: type[FieldGroup]) -> str:
    """Every field but `type`, in the order of the definition, then those that follow from others."""
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    names = record.aliases if issubclass(record, Message) else {}
    left_out = record.left_out if issubclass(record, Message) else frozenset()
    for name, info in record.model_fields.items():
        if name == "type":
            continue
        meaning = info.description or ""
        if also := names.get(name):
            meaning += f". Also: {', '.join(f'`{one}`' for one in also)}"
        default = "left out" if name in left_out else _default(info.default)
        rows.append(f"| `{name}` | {allowed(info.annotation, info.metadata)} | {default} | {meaning} |")
    for name, info in record.model_computed_fields.items():
        rows.append(f"| `{name}` | {allowed(info.return_type)} | | {info.description} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def section(record: type[FieldGroup], title: str) -> str:
    """Heading, what the message is for, table."""
    text = " ".join((record.__doc__ or "").split())
    return "\n\n".join(filter(None, (f"### {title}", text, table(record))))


def sections() -> str:
    """Everything that is generated, from the client's messages to the server's."""
    parts = ["## Client to server", *(section(cls, f"`{name}`") for name, cls in CLIENT.classes.items())]
    parts += [section(Spec, "The `spec` of `prepare` and `prepared`")]
    parts += ["## Server to client", *(section(cls, f"`{name}`") for name, cls in SERVER.classes.items())]
    return "\n\n".join(parts) + "\n"


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return "as its table says" if isinstance(value, FieldGroup) else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(sections(), end="")
