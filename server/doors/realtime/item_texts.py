"""The text that an item adds to the context of the duplex lane."""

from server.doors.live.context_texts import said_text
from server.doors.realtime.items import ConversationItem
from worker.protocol.text_messages import InsertText


def text_of(item: ConversationItem) -> InsertText | None:
    """The message that gives the item's text to the model; None for an item without text."""
    if item.kind == "function_call":
        return InsertText(text=f"You have called {item.name} with {item.arguments or '{}'}", role="system")
    if item.kind == "function_call_output":
        return InsertText(text=item.output, role="tool") if item.output else None
    text = item.text
    if not text:
        return None
    if item.role == "assistant":
        return said_text(text)
    return InsertText(text=text, role="system" if item.role == "system" else "user")
