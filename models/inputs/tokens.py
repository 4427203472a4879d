"""Text to token ids and back, and the ids of special tokens by name. Torch-free if there is a `tokenizer.json`.

Contains no token ids: checkpoints share the strings of their special tokens, not the numbers.
"""

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as Engine

from models.checkpoint.config import read_json
from models.errors import TokenError
from models.inputs.pretrained import load_pretrained

# Characters that are never sampled while the model speaks: they have no sound.
UNVOICED = ":：；#“”‘’@*【】「」()（）[]&/$"


def _string(token: str) -> Any:
    """A dataclass field for the id of the special token that is written `token`."""
    return field(metadata={"token": token})


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens that the model uses."""

    unk: int = _string("<unk>")
    im_start: int = _string("<|im_start|>")
    im_end: int = _string("<|im_end|>")
    endoftext: int = _string("<|endoftext|>")
    image_start: int = _string("<image>")
    image_end: int = _string("</image>")
    slice_start: int = _string("<slice>")
    slice_end: int = _string("</slice>")
    image_id_start: int = _string("<image_id>")
    image_id_end: int = _string("</image_id>")
    unit_start: int = _string("<unit>")
    unit_end: int = _string("</unit>")
    audio_start: int = _string("<|audio_start|>")
    audio_end: int = _string("<|audio_end|>")
    think_start: int = _string("<think>")
    think_end: int = _string("</think>")
    listen: int = _string("<|listen|>")
    speak: int = _string("<|speak|>")
    turn_eos: int = _string("<|turn_eos|>")
    chunk_eos: int = _string("<|chunk_eos|>")
    chunk_tts_eos: int = _string("<|chunk_tts_eos|>")
    tts_bos: int = _string("<|tts_bos|>")
    tts_eos: int = _string("<|tts_eos|>")
    tts_pad: int = _string("<|tts_pad|>")

    @classmethod
    def resolve(cls, tokenizer: "Tokenizer") -> Self:
        """The ids of all fields in one vocabulary. Raises: TokenError naming the first missing token."""
        return cls(**{entry.name: tokenizer.id(entry.metadata["token"]) for entry in fields(cls)})


class Tokenizer:
    """The vocabulary of a checkpoint. Immutable; sessions share one."""

    def __init__(self, engine: Engine, settings: dict[str, Any]):
        """
        Args:
            settings: the contents of `tokenizer_config.json`.
        """
        self._engine = engine
        self._ids: dict[str, int] = engine.get_vocab(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in engine.get_added_tokens_decoder().items() if token.special)
        added = sorted((token.content for token in engine.get_added_tokens_decoder().values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._bytes = {i: _token_bytes(text) for text, i in self._ids.items()}
        self.unk_id = self.id(_text(settings.get("unk_token") or "<unk>"))
        self.eos_id = self.id(_text(settings.get("eos_token") or "<|im_end|>"))
        self.pad_id = self.id(_text(settings.get("pad_token") or "<|endoftext|>"))
        self.bad_token_ids = tuple(_checked_ids(settings.get("bad_token_ids") or ()))
        self.special = SpecialTokens.resolve(self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The tokenizer of a checkpoint folder: `tokenizer.json`, or without it `vocab.json` and `merges.txt`.

        Raises: TokenError if a file is missing or unreadable, or a special token is missing; ConfigError for a damaged
            JSON file, also one that is not needed.
        """
        folder = Path(path)
        config = folder / "tokenizer_config.json"
        settings = read_json(config) if config.exists() else {}
        _check_tables(folder)
        whole = folder / "tokenizer.json"
        try:
            engine = Engine.from_file(str(whole)) if whole.exists() else _from_vocab_and_merges(folder, settings)
        except TokenError:
            raise
        except Exception as error:  # tokenizers raises Exception itself for an unreadable file
            raise TokenError(str(folder), expected="readable tokenizer files", got=error) from None
        return cls(engine, settings)

    @property
    def highest_id(self) -> int:
        """The largest token id; the model's vocabulary has to be larger."""
        return max(self._bytes)

    def __len__(self) -> int:
        """Number of vocabulary entries; the model's vocabulary may be padded to more."""
        return len(self._ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens in the text are recognised; no token is added at the start or the end.

        Raises: TokenError if the text contains half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenError("text", expected="valid Unicode", got=f"{error.reason} at {error.start}") from None
        return self._engine.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text` as ordinary characters: the names of added tokens in it are not recognised.

        Raises: as `encode`.
        """
        ids: list[int] = []
        start = 0
        for found in self._added.finditer(text):  # a name that is cut after its first character is plain text
            ids += self.encode(text[start : found.start() + 1])
            start = found.start() + 1
        return ids + self.encode(text[start:])

    def without_added(self, text: str) -> str:
        """`text` with a space inside the name of each added token, for a place where `encode` reads it."""
        return self._added.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special: leave out tokens declared special. `<think>` and a few other added tokens are not special.
        """
        return b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes of one token in the text; none for padding entries of the model's vocabulary.

        Raises: TokenError if the id is negative.
        """
        if token_id < 0:
            raise TokenError("token id", expected="at least 0", got=token_id)
        if skip_special and token_id in self.special_ids:
            return b""
        return self._bytes.get(token_id, b"")

    def id(self, token: str) -> int:
        """The id of a vocabulary entry. Raises: TokenError if the vocabulary does not have it."""
        if token not in self._ids:
            raise TokenError("tokenizer", expected=f"an entry {token!r}", got="none")
        return self._ids[token]

    def lookup(self, token: str) -> int:
        """The id of a vocabulary entry, or of `<unk>` if there is none.

        Entries are written in the byte alphabet (`ALPHABET`), so a character beyond ASCII is not its own entry.
        """
        return self._ids.get(token, self.unk_id)


class TextStream:
    """Incremental decoding. A character whose bytes are spread over several tokens appears with the last of them."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self) -> Self:
        """An independent stream with the same state."""
        other = type(self)(self._tokenizer, skip_special=self._skip_special)
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete. All pushes and the final flush together equal `decode` of all ids."""
        return self._decoder.decode(
            b"".join(self._tokenizer.token_bytes(i, skip_special=self._skip_special) for i in ids)
        )

    def flush(self) -> str:
        """U+FFFD for an unfinished character, or nothing; resets the stream."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


def unvoiced_ids(tokenizer: Tokenizer) -> list[int]:
    """One id per character of `UNVOICED`, by `Tokenizer.lookup`.

    A character beyond ASCII is looked up as `<unk>`, so the character itself is not suppressed. The reference
    implementation does the same.
    """
    return [tokenizer.lookup(character) for character in UNVOICED]


def forbidden_speech_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that are not sampled while the text is voiced, ascending."""
    return tuple(sorted({*unvoiced_ids(tokenizer), *tokenizer.bad_token_ids}))


def _check_tables(folder: Path) -> None:
    """Check `vocab.json` and `added_tokens.json`, which `tokenizer.json` replaces: damage to a folder shows."""
    for file in (folder / "vocab.json", folder / "added_tokens.json"):
        table = read_json(file) if file.exists() else {}
        for token, number in table.items():
            if type(number) is not int or number < 0:
                raise TokenError(f"{file}: {token!r}", expected="a token id", got=repr(number))


def _from_vocab_and_merges(folder: Path, settings: dict[str, Any]) -> Engine:
    """The tokenizer from `vocab.json`, `merges.txt` and the files that declare added tokens."""
    files = [folder / "vocab.json", folder / "merges.txt"]
    if missing := [file.name for file in files if not file.exists()]:
        raise TokenError(
            str(folder), expected="tokenizer.json, or vocab.json and merges.txt", got=f"no {' and no '.join(missing)}"
        )
    engine: Engine = load_pretrained(folder).backend_tokenizer
    # The library appends a new token to the vocabulary, whatever id the files declare for it.
    for token, expected in _declared_ids(folder, settings).items():
        if (got := engine.token_to_id(token)) != expected:
            raise TokenError(f"{folder}: added token {token!r}", expected=f"id {expected}", got=got)
    return engine


def _declared_ids(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Ids of added tokens as the settings' table declares them, or else `added_tokens.json`."""
    if table := settings.get("added_tokens_decoder"):
        return {entry["content"]: int(i) for i, entry in table.items()}
    file = folder / "added_tokens.json"
    return read_json(file) if file.exists() else {}


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _checked_ids(ids: Iterable[object]) -> Iterable[int]:
    for value in ids:
        if type(value) is not int or value < 0:
            raise TokenError("tokenizer_config.json: bad_token_ids", expected="token ids", got=repr(value))
        yield value


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: visible Latin-1 as it is, the other bytes from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """The bytes of a token; one with characters outside the alphabet stands for its own text, as in `tokenizers`."""
    try:
        return bytes(map(ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()
