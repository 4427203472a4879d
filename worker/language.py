"""What jobs need of a checkpoint's vocabulary: ids that steer, text of ids, rows that media take. Torch-free."""

from collections.abc import Sequence

from models.tokens import TextStream, Tokenizer
from worker.talk import TalkIds


class Language:
    """Shared by all sessions; holds no state of theirs."""

    def __init__(self, tokenizer: Tokenizer, *, image_rows: int, sound_rows: int = 10):
        """image_rows, sound_rows: context rows of one image slice and of one unit of sound."""
        self.tokenizer, self.special = tokenizer, tokenizer.special
        self.talk_ids = TalkIds.of(tokenizer.special)
        self.image_rows, self.sound_rows = image_rows, sound_rows
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

    def stream(self) -> TextStream:
        """Text of a turn as its tokens come."""
        return TextStream(self.tokenizer)
