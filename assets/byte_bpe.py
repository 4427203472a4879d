"""Trains a small byte-level BPE and writes its files in the layout of the released tokenizer. Deterministic."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers

# The regular expression that splits text before merging in the released tokenizer; each digit is a part.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Vocabulary:
    """tokens: by id, written in the byte alphabet. merges: by rank."""

    tokens: list[str]
    merges: list[tuple[str, str]]


def byte_spelling() -> dict[int, str]:
    """Byte -> the printable character for it in vocabulary files, in the order of the first 256 ids."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def train(text: str, n_tokens: int) -> Vocabulary:
    """A vocabulary of the 256 bytes and the most frequent pairs; of equally frequent pairs, the first in sort order.

    Args:
        n_tokens: size of the vocabulary.
    """
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = Counter(tuple(word) for line in text.splitlines() for word, _ in split.pre_tokenize_str(line))
    tokens, merges = list(byte_spelling().values()), []
    while len(tokens) < n_tokens:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        if "".join(best) not in tokens:
            tokens.append("".join(best))
        words = Counter({_merge(word, best): count for word, count in words.items()})
    return Vocabulary(tokens, merges)


def write_files(
    out: Path, vocabulary: Vocabulary, added: dict[str, int], special: set[str], extra: dict[str, Any]
) -> None:
    """Write vocab.json, merges.txt, added_tokens.json, tokenizer.json and tokenizer_config.json to `out`.

    Args:
        added: token -> id of the tokens matched before splitting; ids below the vocabulary's size are existing tokens.
        special: those of `added` that decoding may skip.
        extra: further keys of tokenizer_config.json.
    """
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    declared = [
        {"id": i, "content": token, **flags, "special": token in special}
        for token, i in sorted(added.items(), key=lambda item: item[1])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": declared,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level | {"trim_offsets": False},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }
    config = extra | {
        "added_tokens_decoder": {
            str(token["id"]): {key: token[key] for key in ("content", *flags, "special")} for token in declared
        }
    }
    write_json(out / "vocab.json", ids)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in vocabulary.merges)]
    (out / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    write_json(out / "added_tokens.json", {token: i for token, i in added.items() if i >= len(ids)})
    write_json(out / "tokenizer.json", tokenizer)
    write_json(out / "tokenizer_config.json", config)


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write JSON with one value a line, so that diffs are small."""
    file.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", newline="\n")


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    at = 0
    while at < len(word):
        if word[at : at + 2] == pair:
            merged.append("".join(pair))
            at += 2
        else:
            merged.append(word[at])
            at += 1
    return tuple(merged)
