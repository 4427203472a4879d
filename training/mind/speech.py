"""The speech model over whole replies, with gradients: text tokens and their states to speech tokens, as in serving.

In each unit of a reply serving feeds one row for each spoken text token, the begin-of-audio row, and the unit's speech
tokens. Units after the end of the text have no text rows. Only in them, in the last unit of the text and in the first
unit of a turn may the end token be drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.tts import FoldedHead, NormedWeight
from models.omni import OmniModel
from models.token2wav.settings import SILENCE_TOKEN
from training.mind.batches import to_device
from training.mind.forward import Passes
from training.mind.records import Record, SpeechRecord
from training.timelines.layout import NOTHING, ContextRows
from training.timelines.timeline import TimelineUnit

SPEECH_TOKENS_PER_UNIT = 25
SPOKEN, BEGIN, SPEECH = range(3)  # kinds of rows


@dataclass(frozen=True)
class SpeechBatch:
    """R replies of at most n rows, [R, n] each; fields as in `SpeechRecord`. Rows after a reply's end have no target.

    Args:
        places: rows of the flattened states of the batch.
        learned: [N] places r * n + i of rows with a target. targets: [N] the targets.
    """

    kinds: Tensor
    values: Tensor
    places: Tensor
    learned: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> "SpeechBatch":
        """The same on a device."""
        parts = (self.kinds, self.values, self.places, self.learned, self.targets)
        return SpeechBatch(*(to_device(part, device) for part in parts))


def spoken_places(rows: ContextRows, number: int, unit: TimelineUnit) -> list[int]:
    """Context rows of the tokens of a unit that condition speech: all but the first and the terminator."""
    last = max(i for i, one in enumerate(rows.units.tolist()) if one == number)  # `</unit>`
    return list(range(last - len(unit.tokens) + 1, last - 1))


def speech_rows(
    text: Sequence[Sequence[int]],
    places: Sequence[Sequence[int]],
    speech_tokens: Sequence[int],
    end: int,
    *,
    per_unit: int = SPEECH_TOKENS_PER_UNIT,
    silence: int = SILENCE_TOKEN,
) -> SpeechRecord:
    """The rows of a reply.

    Args:
        text, places: spoken tokens of each unit of the reply, and their context rows. An interrupted reply ends with a
            unit without any.
        speech_tokens: of the whole reply; silence fills up what is missing before the last unit of text.
        end: the token that ends speech.
        per_unit: speech tokens of a unit.
    """
    tokens = [*speech_tokens, *[silence] * (per_unit * (len(text) - 1) - len(speech_tokens))]
    rows: list[tuple[int, int, int, int]] = []

    def add(*row: int) -> None:
        kind, value, place, target = row
        rows.append((kind, value, place, target))

    n_units = max(len(text), -(-len(tokens) // per_unit))
    for unit in range(n_units):
        if unit < len(text):
            for token, place in zip(text[unit], places[unit], strict=True):
                add(SPOKEN, token, place, NOTHING)
        chunk = tokens[unit * per_unit : (unit + 1) * per_unit]
        # After the last token of a full unit serving draws one more and drops it, unless it ends the speech.
        after = end if unit == n_units - 1 else NOTHING
        add(BEGIN, 0, NOTHING, chunk[0] if chunk else after)
        for token, following in zip(chunk, [*chunk[1:], after], strict=False):
            add(SPEECH, token, NOTHING, following)
    kinds, values, spots, targets = zip(*rows, strict=True)
    return SpeechRecord(
        np.array(kinds, np.int8), np.array(values, np.int16), np.array(spots, np.int32), np.array(targets, np.int16)
    )


def collate_replies(records: Sequence[Record], n_rows: int) -> SpeechBatch | None:
    """All replies of records, whose rows are padded to `n_rows`; None without any."""
    replies = [(row, reply) for row, one in enumerate(records) for reply in one.replies]
    if not replies:
        return None
    longest = max(len(reply.kinds) for _, reply in replies)
    kinds = np.full((len(replies), longest), SPEECH, np.int64)
    values, places = np.zeros_like(kinds), np.zeros_like(kinds)
    targets = np.full_like(kinds, NOTHING)
    for number, (row, reply) in enumerate(replies):
        n = len(reply.kinds)
        kinds[number, :n], values[number, :n], targets[number, :n] = reply.kinds, reply.values, reply.targets
        places[number, :n] = np.where(reply.places == NOTHING, 0, row * n_rows + reply.places)
    learned = np.flatnonzero(targets != NOTHING)
    parts = (kinds, values, places, learned, targets.ravel()[learned])
    return SpeechBatch(*map(torch.from_numpy, parts))


WRONG_SHARE = 0.1  # of the speech tokens that are read in training
STATELESS_SHARE = 0.4  # of replies whose text is read without the states of the language model


def with_noise(batch: SpeechBatch, generator: torch.Generator, end: int) -> tuple[SpeechBatch, Tensor]:
    """The batch with some wrong speech tokens among those that are read, and which replies [R] read states.

    Serving draws tokens, so the model must go on after one that it has not learned from. Without some states it learns
    sounds from the text; states alone tell which of the known replies it is.

    Args:
        end: the token that ends speech, which is never read.
    """
    device = batch.values.device

    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    is_wrong = (batch.kinds == SPEECH) & (chance(*batch.kinds.shape) < WRONG_SHARE)
    others = batch.targets[(chance(*batch.kinds.shape) * len(batch.targets)).long()]
    values = torch.where(is_wrong & (others != end), others, batch.values)
    return replace(batch, values=values), chance(len(batch.kinds)) >= STATELESS_SHARE


def predict_speech(
    model: OmniModel,
    hidden: Tensor,
    batch: SpeechBatch,
    passes: Passes | None = None,
    has_states: Tensor | None = None,
) -> Tensor:
    """Logits [N, speech tokens] float32 after all rows that have a target.

    Args:
        hidden: [B, T, D] states of the contexts.
        has_states: [R] replies that read them; None: all.
    """
    tts, config = model.tts, model.config.tts_config
    is_text, is_speech = (batch.kinds == SPOKEN)[..., None], (batch.kinds == SPEECH)[..., None]
    states = hidden.flatten(0, 1)[batch.places]
    if has_states is not None:
        states = states * has_states[:, None, None]
    spoken = tts.text_rows(
        torch.where(is_text[..., 0], batch.values, 0),
        states,
        config.normalize_projected_hidden,
        model.backend,
    )
    begin = tts.emb_text.weight[config.audio_bos_token_id].to(spoken.dtype)
    tokens = tts.emb_code[0](torch.where(is_speech[..., 0], batch.values, 0)).to(spoken.dtype)
    decoder = (passes or Passes()).decoder
    states, _ = decoder(tts.model, torch.where(is_text, spoken, torch.where(is_speech, tokens, begin)))
    return F.linear(states.flatten(0, 1)[batch.learned], speech_head(model)).float()


def speech_head(model: OmniModel) -> Tensor:
    """The output matrix, folded from lengths and directions with gradients to both; serving folds it once."""
    head = cast(FoldedHead, model.tts.head_code[0])
    stored = cast(NormedWeight, head.parametrizations["weight"])
    return stored.original0 * F.normalize(stored.original1, dim=1)
