"""Text to token ids and back, and the ids of special tokens by name. Torch-free.

Knows the byte-level BPE files of a checkpoint. No id is written down anywhere: checkpoints share the strings of
their special tokens, not the numbers.
"""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE

from models.checkpoint.config import read_json
from models.errors import TokenError

# How text is split before merging: contractions, words, single digits, runs of punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Never sampled while speaking, because they cannot be voiced.
UNVOICED = ":：；#“”‘’@*【】「」()（）[]&/$"


def _spelt(token: str) -> Any:
    return field(metadata={"token": token})


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens the model works with."""

    unk: int = _spelt("<unk>")
    im_start: int = _spelt("<|im_start|>")
    im_end: int = _spelt("<|im_end|>")
    endoftext: int = _spelt("<|endoftext|>")
    image_start: int = _spelt("<image>")
    image_end: int = _spelt("</image>")
    slice_start: int = _spelt("<slice>")
    slice_end: int = _spelt("</slice>")
    image_id_start: int = _spelt("<image_id>")
    image_id_end: int = _spelt("</image_id>")
    unit_start: int = _spelt("<unit>")
    unit_end: int = _spelt("</unit>")
    audio_start: int = _spelt("<|audio_start|>")
    audio_end: int = _spelt("<|audio_end|>")
    think_start: int = _spelt("<think>")
    think_end: int = _spelt("</think>")
    listen: int = _spelt("<|listen|>")
    speak: int = _spelt("<|speak|>")
    turn_eos: int = _spelt("<|turn_eos|>")
    chunk_eos: int = _spelt("<|chunk_eos|>")
    chunk_tts_eos: int = _spelt("<|chunk_tts_eos|>")
    tts_bos: int = _spelt("<|tts_bos|>")
    tts_eos: int = _spelt("<|tts_eos|>")
    tts_pad: int = _spelt("<|tts_pad|>")

    @classmethod
    def resolve(cls, tokenizer: "Tokenizer") -> Self:
        """Look every field up by its spelling. Raises: TokenError naming the first one the vocabulary lacks."""
        return cls(**{entry.name: tokenizer.id(entry.metadata["token"]) for entry in fields(cls)})


class Tokenizer:
    """A checkpoint's vocabulary. Immutable; safe to share between sessions."""

    def __init__(self, engine: Engine, settings: dict[str, Any]):
        """settings: the contents of `tokenizer_config.json`."""
        self._engine = engine
        self._ids: dict[str, int] = engine.get_vocab(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in engine.get_added_tokens_decoder().items() if token.special)
        self._bytes = {i: _token_bytes(text) for text, i in self._ids.items()}
        self.unk_id = self.id(_text(settings.get("unk_token") or "<unk>"))
        self.eos_id = self.id(_text(settings.get("eos_token") or "<|im_end|>"))
        self.pad_id = self.id(_text(settings.get("pad_token") or "<|endoftext|>"))
        self.bos_id = self.id(_text(settings.get("bos_token") or "<|im_start|>"))
        self.bad_token_ids = tuple(_checked_ids(settings.get("bad_token_ids") or ()))
        self.special = SpecialTokens.resolve(self)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The tokenizer of a checkpoint folder: `tokenizer.json`, or `vocab.json` and `merges.txt` without it.

        Raises: TokenError if the files are missing or broken, or a special token is missing.
        """
        folder = Path(path)
        config = folder / "tokenizer_config.json"
        settings = read_json(config) if config.exists() else {}
        whole = folder / "tokenizer.json"
        try:
            engine = Engine.from_file(str(whole)) if whole.exists() else _assemble(folder, settings)
        except TokenError:
            raise
        except Exception as error:  # the library raises bare Exception for a broken file
            raise TokenError(str(folder), expected="readable tokenizer files", got=error) from None
        return cls(engine, settings)

    @property
    def highest_id(self) -> int:
        """The model's vocabulary must reach beyond it."""
        return max(self._bytes)

    def __len__(self) -> int:
        """Entries of the vocabulary; the model's may be padded beyond them."""
        return len(self._ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens in it recognised, nothing added in front or behind.

        Raises: TokenError if the text holds half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenError("text", expected="valid Unicode", got=f"{error.reason} at {error.start}") from None
        return self._engine.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        `skip_special` leaves out tokens declared special; `<think>` and a few others are added but not special.
        """
        return b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """What one token adds to the text; nothing for padding rows of the model's vocabulary.

        Raises: TokenError if the id is negative.
        """
        if token_id < 0:
            raise TokenError("token id", expected="at least 0", got=token_id)
        if skip_special and token_id in self.special_ids:
            return b""
        return self._bytes.get(token_id, b"")

    def id(self, token: str) -> int:
        """The id of a vocabulary entry. Raises: TokenError naming it if there is none."""
        if token not in self._ids:
            raise TokenError("tokenizer", expected=f"an entry {token!r}", got="none")
        return self._ids[token]

    def lookup(self, token: str) -> int:
        """The id of a vocabulary entry, or that of `<unk>`. Entries are spelt in the byte alphabet: see `UNVOICED`."""
        return self._ids.get(token, self.unk_id)


class TextStream:
    """Text of a growing list of ids. A character whose bytes come in several tokens appears with the last one."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def copy(self) -> Self:
        """Another one that has seen the same ids."""
        other = type(self)(self._tokenizer, skip_special=self._skip_special)
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, ids: Iterable[int]) -> str:
        """The text these ids complete. All pushes and the flush together are `decode` of all ids."""
        return self._decoder.decode(
            b"".join(self._tokenizer.token_bytes(i, skip_special=self._skip_special) for i in ids)
        )

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD; the stream is then as new."""
        tail = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return tail


def unvoiced_ids(tokenizer: Tokenizer) -> list[int]:
    """One id per character of `UNVOICED`, by plain lookup.

    A character beyond ASCII is no entry under its own spelling, so it turns into `<unk>` and is not suppressed
    as such. That is how the model is meant to be run.
    """
    return [tokenizer.lookup(character) for character in UNVOICED]


def forbidden_speech_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that must not be sampled while the text is voiced, ascending."""
    return tuple(sorted({*unvoiced_ids(tokenizer), *tokenizer.bad_token_ids}))


def _assemble(folder: Path, settings: dict[str, Any]) -> Engine:
    """The tokenizer from its older form: vocabulary, merges, and tokens added by two more files."""
    files = [folder / "vocab.json", folder / "merges.txt"]
    if missing := [file.name for file in files if not file.exists()]:
        raise TokenError(str(folder), expected="tokenizer.json, or vocab.json and merges.txt", got=f"no {missing}")
    engine = Engine(BPE.from_file(*map(str, files)))
    engine.normalizer = normalizers.NFC()
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    added = _added_tokens(folder, settings)
    # The library numbers new tokens in the order they come, after the vocabulary.
    engine.add_tokens([token for _, token in sorted(added, key=lambda pair: pair[0])])
    for expected, token in added:
        if (got := engine.token_to_id(token.content)) != expected:
            raise TokenError(f"{folder}: added token {token.content!r}", expected=f"id {expected}", got=got)
    return engine


def _added_tokens(folder: Path, settings: dict[str, Any]) -> list[tuple[int, AddedToken]]:
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    if table := settings.get("added_tokens_decoder"):
        return [
            (int(i), AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in flags}))
            for i, entry in table.items()
        ]
    plain, special = folder / "added_tokens.json", folder / "special_tokens_map.json"
    names = read_json(special) if special.exists() else settings
    declared = {_text(token) for key, token in names.items() if key.endswith("_token") and token}
    declared |= {_text(token) for token in names.get("additional_special_tokens") or ()}
    ids = read_json(plain) if plain.exists() else {}
    vocabulary = read_json(folder / "vocab.json")
    ids |= {token: vocabulary[token] for token in declared if token in vocabulary}
    return [(i, AddedToken(token, normalized=False, special=token in declared)) for token, i in ids.items()]


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _checked_ids(ids: Iterable[object]) -> Iterable[int]:
    for value in ids:
        if type(value) is not int or value < 0:
            raise TokenError("tokenizer_config.json: bad_token_ids", expected="token ids", got=repr(value))
        yield value


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level vocabularies are spelt in: visible Latin-1 as it is, the other bytes from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A token that strays from the alphabet stands for its own text, as in the library."""
    try:
        return bytes(map(ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()
