"""Phrases in blocks: reading, variants, and which of them training never sees.

A file has blocks headed by `[name]`: plain lines are what a person says, lines with `> ` are answers. In a line,
`(a|b)` is a choice, `[a|b]` a choice that may be left out, and `{slot}` is filled by the caller.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
FILES = ("small_talk", "skills")
HELD_OUT_SHARE = 5  # one of five templates of each block

Split = Literal["train", "held_out"]

_CHOICE = re.compile(r"\(([^()]*)\)|\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Intent:
    """A block: what a person says, by split, and the answers. Slots are not filled."""

    name: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    answers: tuple[str, ...]

    def phrases(self, split: Split) -> tuple[str, ...]:
        """Everything a person may say in one split."""
        return self.train if split == "train" else self.held_out

    def draw(self, rng: random.Random, split: Split) -> str:
        """One phrase; a block without held-out phrases gives those of training."""
        return rng.choice(self.phrases(split) or self.train)

    def answer(self, rng: random.Random) -> str:
        return rng.choice(self.answers)


def variants(template: str) -> list[str]:
    """All texts of a template, slots left as they are."""
    parts: list[list[str]] = []
    end = 0
    for found in _CHOICE.finditer(template):
        parts.append([template[end : found.start()]])
        choice, option = found.groups()
        parts.append(choice.split("|") if choice is not None else ["", *option.split("|")])
        end = found.end()
    parts.append([template[end:]])
    return list(dict.fromkeys(" ".join("".join(one).split()) for one in itertools.product(*parts)))


def read_blocks(text: str) -> dict[str, tuple[list[str], list[str]]]:
    """Name -> templates and answers of each block. Raises: ValueError for a line before the first block."""
    blocks: dict[str, tuple[list[str], list[str]]] = {}
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if head := re.fullmatch(r"\[(\w+)\]", line):
            name = head[1]
            if name in blocks:
                raise ValueError(f"line {number}: expected a new block, got {name} again")
            blocks[name] = ([], [])
        elif not name:
            raise ValueError(f"line {number}: expected a block's head, got {line!r}")
        elif line.startswith("> "):
            blocks[name][1].extend(variants(line[2:]))
        else:
            blocks[name][0].append(line)
    return blocks


def held_out_templates(name: str, templates: list[str]) -> set[str]:
    """The templates of a block that are kept for evaluation: a fifth, rounded up, by the digest of their text."""

    def rank(template: str) -> str:
        return hashlib.sha256(f"{name}:{template}".encode()).hexdigest()

    return set(sorted(templates, key=rank)[: -(-len(templates) // HELD_OUT_SHARE)])


@cache
def intents() -> dict[str, Intent]:
    """All blocks of all files. A phrase that any block trains on is held out by none."""
    blocks: dict[str, tuple[list[str], list[str]]] = {}
    for file in FILES:
        blocks |= read_blocks((HERE / f"{file}.txt").read_text(encoding="utf-8"))
    kept = {name: held_out_templates(name, templates) for name, (templates, _) in blocks.items()}
    train = {
        name: _all_variants(one for one in templates if one not in kept[name])
        for name, (templates, _) in blocks.items()
    }
    trained = set(itertools.chain.from_iterable(train.values()))
    return {
        name: Intent(
            name,
            train[name],
            tuple(one for one in _all_variants(one for one in templates if one in kept[name]) if one not in trained),
            tuple(answers),
        )
        for name, (templates, answers) in blocks.items()
    }


@cache
def small_talk() -> dict[str, Intent]:
    """The blocks whose answers need neither slots nor state."""
    names = read_blocks((HERE / "small_talk.txt").read_text(encoding="utf-8"))
    return {name: intents()[name] for name in names}


def fill(template: str, **slots: str) -> str:
    """The template with its slots filled; a slot with a capital letter is filled with a capitalized value."""
    capital = {name.capitalize(): value[:1].upper() + value[1:] for name, value in slots.items()}
    return template.format(**slots, **capital)


def _all_variants(templates: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(map(variants, templates))))
