"""Phrases in blocks: reading, variants, and which of them training never sees.

In training a phrase may have words around it that change nothing, or lack one that it does not need.

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
MORE = "paraphrases"  # more phrases of the same blocks, for training only, written without the held-out ones at hand
HELD_OUT_SHARE = 5  # one of five templates of each block

LOOSE_SHARE, SPARE_SHARE = 0.15, 0.06  # of phrases
OPENERS = ("um", "uh", "so", "well", "okay", "hey", "hey duo", "duo", "oh", "now", "please", "excuse me", "listen")
CLOSERS = ("please", "duo", "now", "then", "okay", "for me", "if you can", "my friend")
SPARE = frozenset(("the", "a", "an", "please", "me", "to", "just", "now"))  # words that a phrase may do without

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")

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
        """One phrase, in training as `loosened`; a block without held-out phrases gives those of training."""
        phrase = rng.choice(self.phrases(split) or self.train)
        if split == "held_out":
            return phrase
        said = loosened(phrase, rng)
        return phrase if said in self.held_out else said

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
    more = read_blocks((HERE / f"{MORE}.txt").read_text(encoding="utf-8"))
    if unknown := more.keys() - blocks.keys():
        raise ValueError(f"{MORE}.txt: expected blocks of {', '.join(FILES)}, got {', '.join(sorted(unknown))}")
    kept = {name: held_out_templates(name, templates) for name, (templates, _) in blocks.items()}
    train = {
        name: _all_variants(one for one in templates if one not in kept[name])
        for name, (templates, _) in blocks.items()
    }
    trained = set(itertools.chain.from_iterable(train.values()))
    held_out = {
        name: tuple(one for one in _all_variants(one for one in templates if one in kept[name]) if one not in trained)
        for name, (templates, _) in blocks.items()
    }
    unseen = set(itertools.chain.from_iterable(held_out.values()))
    for name, (templates, _) in more.items():
        train[name] = tuple(dict.fromkeys([*train[name], *_all_variants(templates)]))
    return {
        name: Intent(
            name,
            tuple(one for one in train[name] if one not in unseen),
            held_out[name],
            tuple(answers),
        )
        for name, (_, answers) in blocks.items()
    }


@cache
def small_talk() -> dict[str, Intent]:
    """The blocks whose answers need neither slots nor state."""
    names = read_blocks((HERE / "small_talk.txt").read_text(encoding="utf-8"))
    return {name: intents()[name] for name in names}


def loosened(phrase: str, rng: random.Random) -> str:
    """A phrase as people say it: some with a word before or after it, or without an article or the like."""
    said = phrase.split()
    if rng.random() < LOOSE_SHARE:
        said = [*rng.choice(OPENERS).split(), *said]
    if "{" not in phrase and rng.random() < LOOSE_SHARE:
        said += rng.choice(CLOSERS).split()
    spare = [at for at, word in enumerate(said) if word in SPARE]
    if len(said) > 3 and spare and rng.random() < SPARE_SHARE:
        del said[rng.choice(spare)]
    return " ".join(said)


def fill(template: str, **slots: str) -> str:
    """The template with its slots filled; a slot with a capital letter is filled with a capitalized value."""
    capital = {name.capitalize(): value[:1].upper() + value[1:] for name, value in slots.items()}
    return template.format(**slots, **capital)


def _all_variants(templates: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(map(variants, templates))))
