"""The speech model over whole replies, with gradients: text tokens and their states to speech tokens, as in serving.

In each unit of a reply serving feeds one row for each spoken text token, the begin-of-audio row, and the unit's speech
tokens. Units after the end of the text have no text rows. Only in them, in the last unit of the text and in the first
unit of a turn may the end token be drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.layers.tts import FoldedHead, NormedWeight
from models.omni import OmniModel
from models.token2wav.settings import SILENCE_TOKEN
from training.timelines.layout import NOTHING, ContextRows
from training.timelines.timeline import TimelineUnit

SPEECH_TOKENS_PER_UNIT = 25
SPOKEN, BEGIN, SPEECH = range(3)  # kinds of rows


@dataclass(frozen=True)
class SpeechRows:
    """Rows of one reply, [n] each.

    Args:
        kinds: SPOKEN, BEGIN or SPEECH.
        values: text token or speech token; 0 at BEGIN.
        places: context row of a spoken token; NOTHING at other rows.
        targets: the speech token that follows, or NOTHING.
    """

    kinds: list[int]
    values: list[int]
    places: list[int]
    targets: list[int]


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
) -> SpeechRows:
    """The rows of a reply.

    Args:
        text, places: spoken tokens of each unit of the reply, and their context rows. An interrupted reply ends with a
            unit without any.
        speech_tokens: of the whole reply; silence fills up what is missing before the last unit of text.
        end: the token that ends speech.
        per_unit: speech tokens of a unit.
    """
    tokens = [*speech_tokens, *[silence] * (per_unit * (len(text) - 1) - len(speech_tokens))]
    rows = SpeechRows([], [], [], [])

    def add(kind: int, value: int, place: int, target: int) -> None:
        rows.kinds.append(kind)
        rows.values.append(value)
        rows.places.append(place)
        rows.targets.append(target)

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
    return rows


def predict_speech(model: OmniModel, hidden: Tensor, rows: SpeechRows) -> tuple[Tensor, Tensor]:
    """Logits [n, speech tokens] after all rows that have a target, and the targets [n].

    Args:
        hidden: [T, D] states of the reply's context.
    """
    tts, config, device = model.tts, model.config.tts_config, model.device
    kinds, values, places, targets = (
        torch.tensor(part, device=device) for part in (rows.kinds, rows.values, rows.places, rows.targets)
    )
    is_text, is_speech = kinds == SPOKEN, kinds == SPEECH
    begin = torch.full_like(values, config.audio_bos_token_id)
    embeds = tts.emb_text(begin)
    if is_text.any():
        normalize = config.normalize_projected_hidden
        spoken = tts.text_rows(values[is_text], hidden[places[is_text]], normalize, model.backend)
        embeds = embeds.masked_scatter(is_text[:, None], spoken)
    if is_speech.any():
        embeds = embeds.masked_scatter(is_speech[:, None], tts.emb_code[0](values[is_speech]))
    n = len(rows.kinds)
    cache = KVCache(
        n_layers=config.num_hidden_layers,
        n_slots=1,
        max_len=n,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=device,
    )
    slot = torch.zeros(1, dtype=torch.int64, device=device)
    states = tts.model(embeds[None], cache, slot, slot + n, n, model.backend)[0]
    learned = targets != NOTHING
    return F.linear(states[learned], speech_head(model)).float(), targets[learned]


def speech_head(model: OmniModel) -> Tensor:
    """The output matrix, folded from lengths and directions with gradients to both; serving folds it once."""
    head = cast(FoldedHead, model.tts.head_code[0])
    stored = cast(NormedWeight, head.parametrizations["weight"])
    return stored.original0 * F.normalize(stored.original1, dim=1)
