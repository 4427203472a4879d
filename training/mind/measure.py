"""Figures on records that training never sees: right tokens with the right ones before them, and answers of its own."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs.tokens import Tokenizer
from training.edits import edit_distance
from training.mind.forward import embed_rows, logits_of, run_decoder, run_rows
from training.mind.learner import Learner
from training.mind.pool import Pool, Stored
from training.mind.words.loss import best_tokens, collate_words
from training.timelines.layout import NOTHING

AT_ONCE = 16  # records
MAX_ANSWER = 96  # tokens; counting to thirty has the most


@torch.no_grad()
def measure(
    learner: Learner, pool: Pool, stored: Sequence[Stored], tokenizer: Tokenizer, until: float = math.inf
) -> dict[str, float]:
    """Figures of held-out records, as parts of one; of fewer records where `until`, by time.monotonic, has passed.

    Of each task: `text`, tokens of replies that are right; `replies`, whole replies that are; `words`, tokens of what
    is heard that the head of the training finds. Of conversations: `starts`, replies that begin in their unit;
    `false_starts`, silent units that would begin one; `stops`, interruptions that are noticed in their unit. Of
    chats: `answers`, in words that are accepted, by skill.
    """
    figures: dict[str, float] = {}
    for task in dict.fromkeys(one.record.task for one in stored):
        records = [one for one in stored if one.record.task == task]
        counts = _teacher_forced(learner, pool, records, until)
        if task in ("text", "chat"):
            counts |= _answers(learner, pool, records, tokenizer, until)
        figures |= {f"{task}_{name}": round(right / total, 4) for name, (right, total) in counts.items() if total}
    return figures


@torch.no_grad()
def measure_loss(learner: Learner, pool: Pool, stored: Sequence[Stored], until: float = math.inf) -> dict[str, float]:
    """Means of what a learner logs, over held-out records."""
    sums: dict[str, list[float]] = {}
    for part in _parts(stored, until):
        with learner.precision():
            measured = learner.loss(pool, part)[1]
        for name, value in measured.items():
            if math.isfinite(float(value)):
                sums.setdefault(name, []).append(float(value))
    return {name: round(sum(values) / len(values), 4) for name, values in sums.items()}


def _teacher_forced(learner: Learner, pool: Pool, stored: Sequence[Stored], until: float) -> dict[str, tuple[int, int]]:
    """Right and all, by name."""
    special, counts = learner.special, Counter[tuple[str, bool]]()
    for part in _parts(stored, until):
        with learner.precision():
            batch, inputs = learner.inputs(pool, part, degrades=learner.plan.degrades)
            states = run_rows(learner.model, batch, inputs)
            guessed = logits_of(learner.model, states.hidden, batch.learned).argmax(-1)
            _count_words(learner, part, states.middle, counts)
        targets, owners = batch.targets.cpu().numpy(), batch.owners.cpu().numpy()
        right, decides = guessed.cpu().numpy() == targets, batch.is_decision.cpu().numpy()
        speaks = guessed.cpu().numpy() == special.speak
        before, earlier = (np.r_[[NOTHING] * n, targets][: len(targets)] for n in (1, 2))
        same = np.r_[False, owners[1:] == owners[:-1]]
        goes_on = same & (before == special.chunk_eos) & (earlier != special.turn_eos)
        begins = decides & (targets == special.speak) & ~goes_on
        kinds = {
            "text": (~decides, right),
            "starts": (begins, right),
            "false_starts": (decides & (targets == special.listen), speaks),
            "stops": (decides & (targets == special.turn_eos), right),
        }
        for name, (mask, values) in kinds.items():
            counts[name, True] += int((mask & values).sum())
            counts[name, False] += int((mask & ~values).sum())
        # A reply lasts from its beginning to the next decision to listen.
        quiet = decides & (targets == special.listen)
        reply = np.cumsum(begins | quiet | ~same)
        for number in np.unique(reply[begins]):
            counts["replies", bool(right[reply == number].all())] += 1
    return _pairs(counts)


def _count_words(learner: Learner, stored: Sequence[Stored], middle: Tensor, counts: Counter[tuple[str, bool]]) -> None:
    """Text tokens of what is heard, less the edits between them and those that are found."""
    said = [one.record.words for one in stored]
    if (words := collate_words(said, middle.shape[1])) is None:
        return
    found = best_tokens(learner.words, middle, words.to(middle.device))
    for got, expected in zip(found, (one.tokens.tolist() for record in said for one in record), strict=True):
        n_wrong = min(len(expected), edit_distance(got, expected))
        counts["words", False] += n_wrong
        counts["words", True] += len(expected) - n_wrong


def _answers(
    learner: Learner, pool: Pool, stored: Sequence[Stored], tokenizer: Tokenizer, until: float
) -> dict[str, tuple[int, int]]:
    """Right answers to chats and all: of all skills, and of each."""
    counts = Counter[tuple[str, bool]]()
    for part in _parts(stored, until):
        for one, answer in zip(part, _greedy(learner, pool, part, tokenizer), strict=True):
            for name in ("answers", one.record.skill):
                counts[name, answer in one.record.accepted] += 1
    return _pairs(counts)


def _greedy(learner: Learner, pool: Pool, stored: Sequence[Stored], tokenizer: Tokenizer) -> list[str]:
    """Answers with the best token at each place."""
    model, special = learner.model, learner.special
    ends = (special.tts_eos, special.im_end)
    ended = torch.zeros(len(stored), dtype=torch.bool, device=learner.plan.device)
    with learner.precision():
        batch, inputs = learner.inputs(pool, stored, degrades=learner.plan.degrades)
        embeds = F.pad(embed_rows(model, batch, inputs)[0], (0, 0, 0, MAX_ANSWER))
        n_rows = embeds.shape[1]
        row = torch.arange(len(stored), device=embeds.device)
        starts = [int(np.flatnonzero(one.record.targets != NOTHING)[0]) for one in stored]
        last = torch.tensor(starts, device=embeds.device)
        drawn = []
        for _ in range(MAX_ANSWER):
            hidden, _ = run_decoder(model.llm.model, embeds[:, : int(last.max()) + 1])
            token = logits_of(model, hidden, row * hidden.shape[1] + last).argmax(-1)
            drawn.append(token)
            last = (last + 1).clamp_max(n_rows - 1)
            embeds[row, last] = model.llm.model.embed_tokens(token).to(embeds.dtype)
            ended |= torch.isin(token, torch.tensor(ends, device=token.device))
            if bool(ended.all()):
                break
    answers = []
    for tokens in torch.stack(drawn, dim=1).tolist():
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        answers.append(tokenizer.decode(tokens[:end]))
    return answers


def _pairs(counts: Counter[tuple[str, bool]]) -> dict[str, tuple[int, int]]:
    """Right and all, by name, of counts of right and wrong ones."""
    names = sorted({name for name, _ in counts})
    return {name: (counts[name, True], counts[name, True] + counts[name, False]) for name in names}


def _parts(stored: Sequence[Stored], until: float) -> Iterator[Sequence[Stored]]:
    for start in range(0, len(stored), AT_ONCE):
        if time.monotonic() > until:
            return
        yield stored[start : start + AT_ONCE]
