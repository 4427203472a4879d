"""Texts that a context begins with: given ones, and what the model said in a context that is lost."""

from collections.abc import Sequence

from worker.protocol.text_messages import InsertText

MAX_CHARS = 16_000  # of the texts that a replaced context begins with


def said_text(text: str) -> InsertText:
    """What the model said before. The context has no text of the assistant outside its turns."""
    return InsertText(text=f"You have said: {text}", role="system")


def newest_texts(texts: Sequence[InsertText], max_chars: int = MAX_CHARS) -> list[InsertText]:
    """The newest texts, in order, that have at most `max_chars` characters in all."""
    kept: list[InsertText] = []
    for text in reversed(texts):
        max_chars -= len(text.text)
        if max_chars < 0:
            break
        kept.append(text)
    return kept[::-1]
