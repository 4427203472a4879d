"""What jobs need of a checkpoint's vocabulary: ids that steer, text of ids, rows that media take. Torch-free."""

from collections.abc import Sequence

from models.inputs.prompts import START, close_answer, open_answer
from models.inputs.tokens import TextStream, Tokenizer
from worker.loop.unit_decoder import ControlTokens


class Language:
    """Shared by all sessions; holds no state of theirs."""

    def __init__(self, tokenizer: Tokenizer, *, image_rows: int, sound_rows: int = 10):
        """image_rows, sound_rows: context rows of one image slice and of one unit of sound."""
        self.tokenizer, self.special = tokenizer, tokenizer.special
        self.talk_ids = ControlTokens.of(tokenizer.special)
        self.image_rows, self.sound_rows = image_rows, sound_rows
        self.reply_ends = reply_ends(tokenizer)
        # Ids that steer are never content, whether the tokenizer declares them special or not.
        steering = set(vars(self.talk_ids).values()) | {self.special.unit_start, self.special.unit_end}
        self._special_ids = tokenizer.special_ids | steering | {self.special.tts_pad, self.special.tts_eos}

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.tokenizer.decode(ids)

    def length(self, ids: Sequence[int]) -> int:
        """Characters of that text."""
        return len(self.text(ids))

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Text of a turn as its tokens come."""
        return TextStream(self.tokenizer, skip_special=skip_special)

    def close_answer(self, *, is_complete: bool) -> list[int]:
        """What ends an answer in the context before the user has his turn."""
        return self.tokenizer.encode(close_answer(is_complete=is_complete))

    def open_user(self) -> list[int]:
        """What a turn of the user begins with."""
        return self.tokenizer.encode(f"{START}user\n")

    def open_answer(self, *, enable_thinking: bool) -> list[int]:
        """What ends a turn of the user and begins an answer to it that may be voiced."""
        opened = open_answer(enable_thinking=enable_thinking, use_tts_template=True)
        return self.tokenizer.encode(close_answer(is_complete=True) + opened)


def reply_ends(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a turn-based answer."""
    special = tokenizer.special
    return frozenset({special.tts_eos, special.im_end, tokenizer.lookup("</s>")} - {tokenizer.unk_id})
