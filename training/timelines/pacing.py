"""A reply's text over units: as fast as it is spoken, so that text is never far ahead of sound.

The text model conditions each second of speech on the tokens of its unit; serving cuts a unit at 28 characters.
"""

from collections.abc import Callable, Sequence

from training.timelines.speech import spoken_s

MAX_TOKENS = 9  # of text in a unit, unless one word has more
MAX_WORD_TOKENS = 17  # serving feeds 19 tokens in a unit, `<|speak|>` and `<|turn_eos|>` among them
MAX_CHARS = 27  # one below the default of `max_chars_per_chunk`

Encode = Callable[[str], list[int]]


def pace(parts: Sequence[str], encode: Encode) -> list[list[int]]:
    """Text tokens of each unit, in order.

    A word belongs to the second in which it begins; a unit that is full passes its next word on. Each part begins a
    unit of its own.

    Args:
        encode: text to token ids. Words keep the space before them, so that pieces encode as the whole does.
    Raises: ValueError for a word that no unit can hold.
    """
    units: list[list[int]] = []
    for number, part in enumerate(parts):
        first, spoken = len(units), ""
        text = ""
        for position, word in enumerate(part.split()):
            piece = word if number == position == 0 else f" {word}"
            ids = encode(piece)
            if len(ids) > MAX_WORD_TOKENS or len(piece) > MAX_CHARS:
                raise ValueError(f"word {word!r}: expected at most {MAX_WORD_TOKENS} tokens, got {len(ids)}")
            begins = first + int(spoken_s(spoken)) if spoken else first
            is_full = bool(units[first:]) and (len(text + piece) > MAX_CHARS or len(units[-1] + ids) > MAX_TOKENS)
            if not units[first:] or begins >= len(units) or is_full:
                units.append([])
                text = ""
            units[-1] += ids
            text += piece
            spoken += piece
    return units


def playback_s(parts: Sequence[str]) -> float:
    """Seconds of a reply's sound: a part that begins in a unit of its own lasts for at least a second."""
    return sum(spoken_s(part) if len(parts) == 1 else max(1.0, spoken_s(part)) for part in parts)
