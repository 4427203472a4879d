"""Texts of a request to token ids, whole or as they arrive. Torch-free.

The wrapper's tokens are put around the text as ids, so that names of special tokens in a text are plain characters.
"""

import unicodedata
from pathlib import Path
from typing import Self

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from models.errors import TokenError
from models.qwen3_tts.config import Qwen3TTSConfig
from models.qwen3_tts.prompt import PromptText

# Where a text is split before its pieces become tokens. `mistral` is the pattern that the public package ends up with
# for a local folder; it splits a word where lower case turns to upper case.
PATTERNS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "mistral": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
MAX_WORD = 1024  # characters of a live text that are kept back
LINE_BREAKS = "\r\n"  # at the start of a text they would become one token with the wrapper's; they are dropped


class PromptTokenizer:
    """The vocabulary of a checkpoint. Immutable; requests share one."""

    def __init__(self, engine: Tokenizer, split: pre_tokenizers.PreTokenizer, config: Qwen3TTSConfig):
        self._engine, self._split, self._config = engine, split, config
        newline = self.encode("\n")
        if len(newline) != 1:
            raise TokenError("tokenizer", expected="one token for a line break", got=newline)
        self.role = (config.im_start_token_id, config.assistant_token_id, newline[0])

    @classmethod
    def load(cls, folder: str | Path, config: Qwen3TTSConfig, *, pattern: str = "qwen2") -> Self:
        """The tokenizer of a checkpoint folder: `vocab.json` and `merges.txt`.

        Args:
            pattern: a key of PATTERNS.
        Raises: TokenError if a file is missing or unreadable, or the pattern is unknown.
        """
        if pattern not in PATTERNS:
            raise TokenError("pattern", expected=f"one of {sorted(PATTERNS)}", got=repr(pattern))
        files = [Path(folder) / name for name in ("vocab.json", "merges.txt")]
        if missing := [file.name for file in files if not file.exists()]:
            raise TokenError(str(folder), expected="vocab.json and merges.txt", got=f"no {' and no '.join(missing)}")
        try:
            engine = Tokenizer(models.BPE.from_file(*map(str, files)))
        except Exception as error:  # tokenizers raises Exception itself for an unreadable file
            raise TokenError(str(folder), expected="readable tokenizer files", got=error) from None
        split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated")
        engine.normalizer = normalizers.NFC()
        bytes_of_pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        engine.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_pieces])
        return cls(engine, split, config)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as plain characters. Raises: TokenError if it contains half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenError("text", expected="valid Unicode", got=f"{error.reason} at {error.start}") from None
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids

    def encode_spoken(self, text: str) -> tuple[int, ...]:
        """Token ids of a text to speak, or of a transcript."""
        return tuple(self.encode(text.lstrip(LINE_BREAKS)))

    def encode_instruct(self, text: str) -> tuple[int, ...]:
        """Token ids of an instruction with its wrapper; none for an empty text."""
        if not text:
            return ()
        config, newline = self._config, self.role[2]
        return config.im_start_token_id, *self.encode(f"user\n{text}"), config.im_end_token_id, newline

    def texts(self, text: str, *, reference: str = "", instruct: str = "") -> PromptText:
        """The token ids of a request. Raises: as `encode`."""
        return PromptText(
            role=self.role,
            text=self.encode_spoken(text),
            reference=self.encode_spoken(reference),
            instruct=self.encode_instruct(instruct),
        )

    def settled(self, text: str) -> int:
        """Number of characters of a text in NFC that more text cannot change the tokens of.

        The piece that has the last character which is not white space may still grow; before it, only a base letter
        that later accents could join is kept back.
        """
        end = len(text.rstrip())
        starts = [start for _, (start, _) in self._split.pre_tokenize_str(text) if start < end]
        while starts and unicodedata.combining(text[starts[-1]]):
            starts.pop()
        return starts[-1] if starts else 0


class LiveText:
    """Token ids of one text that arrives in pieces.

    All ids together are those of the whole text, unless it has a word of more than `MAX_WORD` characters, which is cut:
    what is kept back is read again with each piece.
    """

    def __init__(self, tokenizer: PromptTokenizer):
        self._tokenizer, self._kept, self._has_begun = tokenizer, "", False

    def push(self, piece: str) -> list[int]:
        """The ids that this piece settles. Raises: TokenError as `PromptTokenizer.encode`."""
        return [one for at in range(0, len(piece), MAX_WORD) for one in self._push(piece[at : at + MAX_WORD])]

    def _push(self, piece: str) -> list[int]:
        if not self._has_begun:
            piece = piece.lstrip(LINE_BREAKS)
            self._has_begun = bool(piece)
        text = unicodedata.normalize("NFC", self._kept + piece)
        n = self._tokenizer.settled(text)
        if len(text) - n > MAX_WORD:
            n = len(text)
        ids = self._tokenizer.encode(text[:n]) if n else []
        self._kept = text[n:]
        return ids

    def finish(self) -> list[int]:
        """The ids of what is left."""
        ids, self._kept = self._tokenizer.encode(self._kept), ""
        return ids
