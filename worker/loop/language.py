"""Views of a checkpoint's vocabulary that jobs need: control tokens, text of ids, rows per media item. Torch-free."""

from collections.abc import Sequence, Sized

from models.inputs.prompts import START, close_answer, open_answer
from models.inputs.tokens import TextStream, Tokenizer
from worker.config.session import SessionConfig
from worker.loop.unit_decoder import ControlTokens, SideLane


class Language:
    """Shared by all sessions; holds no session state."""

    def __init__(
        self, tokenizer: Tokenizer, *, image_rows: int, audio_rows: int = 10, side_lane: SideLane | None = None
    ):
        """
        Args:
            image_rows, audio_rows: context rows of one image slice and of one audio unit.
            side_lane: ids around text that is not spoken; None for a checkpoint without a side lane.
        """
        self.side_lane = side_lane
        self.tokenizer, self.special = tokenizer, tokenizer.special
        self.control_tokens = ControlTokens.of(tokenizer.special)
        self.image_rows, self.audio_rows = image_rows, audio_rows
        self.reply_terminators = reply_terminators(tokenizer)
        # Control tokens are never content, whether the tokenizer declares them special or not.
        control = set(vars(self.control_tokens).values()) | {self.special.unit_start, self.special.unit_end}
        self._special_ids = tokenizer.special_ids | control | {self.special.tts_pad, self.special.tts_eos}

    def text(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.tokenizer.decode(ids)

    def length(self, ids: Sequence[int]) -> int:
        """Number of characters of that text."""
        return len(self.text(ids))

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """A decoder that turns a turn's tokens into text one by one."""
        return TextStream(self.tokenizer, skip_special=skip_special)

    def add_images(self, ids: list[int], starts: list[int], images: Sequence[Sized]) -> None:
        """Append the rows of images in a unit, 0 where media rows stand.

        Args:
            starts: receives the first row of each slice.
            images: slices of each image.
        """
        special = self.special
        marks = ((special.image_start, special.image_end), (special.slice_start, special.slice_end))
        for image in images:
            for number in range(len(image)):
                before, after = marks[number > 0]
                starts.append(len(ids) + 1)
                ids += [before, *[0] * self.image_rows, after]

    def notes_on(self, config: SessionConfig) -> list[str]:
        """One sentence for each of a session's settings that this checkpoint ignores."""
        if self.side_lane is not None or not config.wants_side_lane:
            return []
        return ["setting max_side_tokens_per_chunk has no effect: the checkpoint has no side lane"]

    def close_answer(self, *, is_complete: bool) -> list[int]:
        """Ids that end a reply in the context before the user's turn."""
        return self.tokenizer.encode(close_answer(is_complete=is_complete))

    def message(self, role: str, text: str) -> list[int]:
        """Ids of a message between two units, as the system prompt of a duplex session is written.

        The output of a function (role `tool`) is a message of the user in `<tool_response>`, as in the chat template.
        Raises: TokenError if the text contains half of a surrogate pair.
        """
        special, newline = self.special, self.tokenizer.encode("\n")
        head = [special.im_start, *self.tokenizer.encode("user" if role == "tool" else role), *newline]
        body = self.tokenizer.encode_plain(text)
        if role == "tool":
            body = [*self.tokenizer.encode("<tool_response>\n"), *body, *self.tokenizer.encode("\n</tool_response>")]
        return [*head, *body, special.im_end]

    def open_user(self) -> list[int]:
        """Ids that begin the user's turn."""
        return self.tokenizer.encode(f"{START}user\n")

    def open_answer(self, *, enable_thinking: bool) -> list[int]:
        """Ids that end the user's turn and begin a reply that may be voiced."""
        opened = open_answer(enable_thinking=enable_thinking, use_tts_template=True)
        return self.tokenizer.encode(close_answer(is_complete=True) + opened)


def reply_terminators(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a turn-based reply."""
    special = tokenizer.special
    return frozenset({special.tts_eos, special.im_end, tokenizer.lookup("</s>")} - {tokenizer.unk_id})
