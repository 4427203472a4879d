"""Words as a help in training: which rows hear an utterance, the loss, what is found, and layers that are added."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.batches import predict, tiny_model
from tests.worker.loop.engines import TINY
from training.mind.examples import Examples
from training.mind.grow import LAYER, OUTPUTS, grown, moved
from training.mind.moments import load_weights, save_small
from training.mind.words.heard import LATE_S, ROW_S, HeardWords, heard_rows
from training.mind.words.loss import best_tokens, collate_words, word_loss
from training.timelines.speech import RATE


def test_rows_hear_an_utterance_and_the_moment_after_it() -> None:
    starts = 3 + ROW_S * np.arange(40)
    rows = heard_rows(starts, 4.02, round(0.5 * RATE))
    assert starts[rows[0]] == pytest.approx(4.0) and starts[rows[-1]] == pytest.approx(4.8)
    assert 4.02 + 0.5 + LATE_S - ROW_S <= starts[rows[-1]] + 1e-9 < 4.02 + 0.5 + LATE_S
    for start, seconds in ((2.5, 1.0), (6.5, 1.0)):
        assert not len(heard_rows(starts, start, round(seconds * RATE))), "expected none for a part of an utterance"


def test_records_name_what_is_said_in_their_rows() -> None:
    examples = Examples(TINY, seconds=12.0, lesson_s=9.0)
    for task in ("echo", "talk", "chat"):
        record = next(one for i in range(20) if (one := examples.record(task, i)).words)
        for one in record.words:
            assert np.all(np.diff(one.rows) > 0) and set(record.kinds[one.rows]) <= {1, 3}
            assert examples.tokenizer.encode(examples.tokenizer.decode(one.tokens.tolist())) == one.tokens.tolist()


def test_the_loss_is_low_for_the_right_words_only() -> None:
    head = nn.Identity()
    states = torch.full((2, 6, 5), -9.0)  # four tokens and the blank
    for row, token in enumerate((4, 2, 2, 4, 0, 4)):
        states[1, row, token] = 9.0

    def said(*tokens: int) -> list[list[HeardWords]]:
        bounds = np.arange(len(tokens) + 1, dtype=np.int16)
        return [[], [HeardWords(np.arange(6, dtype=np.int32), np.array(tokens, np.int16), bounds)]]

    right, wrong = (collate_words(said(*tokens), 6) for tokens in ((2, 0), (0, 2)))
    assert right is not None and wrong is not None
    assert float(word_loss(head, states, right)) < 1e-3 < 5 < float(word_loss(head, states, wrong))
    assert best_tokens(head, states, right) == [[2, 0]]
    too_many = collate_words(said(*[1, 2] * 4), 6)
    assert too_many is not None and float(word_loss(head, states, too_many)) == 0
    assert collate_words([[], []], 6) is None


def test_new_layers_change_nothing_at_first() -> None:
    examples, model = Examples(TINY, lesson_s=5.0), tiny_model()
    record = examples.record("echo", 0)
    before = predict(model, [record]).logits
    weights = {name: one.detach() for name, one in model.state_dict().items()}
    more = grown(weights, [0])
    layers = {int(found[1]) for name in more if (found := LAYER.fullmatch(name))}
    assert layers == set(range(len(model.llm.model.layers) + 1))
    assert all(not more[f"llm.model.layers.1.{part}"].any() for part in OUTPUTS)
    # The same computation: the new layer is one of the model's own, with the new weights.
    layer = tiny_model().llm.model.layers[0]
    layer.load_state_dict({name: more[f"llm.model.layers.1.{name}"] for name in layer.state_dict()})
    model.llm.model.layers.insert(1, layer)
    after = predict(model, [record]).logits
    assert torch.equal(before, after), f"expected the same logits, got a difference of {(before - after).abs().max()}"
    moments = {"llm.model.layers.1.mlp.up_proj.weight": (torch.ones(1), torch.ones(1)), "apm.conv1.weight": ()}
    assert set(moved(moments, [0])) == {"llm.model.layers.2.mlp.up_proj.weight", "apm.conv1.weight"}
    with pytest.raises(ValueError, match="expected some of"):
        grown(weights, [17])


def test_weights_of_helps_may_be_missing_on_either_side(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2), "words.bias": torch.ones(1)}
    save_small(tmp_path, "mind", weights, torch.optim.AdamW(weights.values()), {"step": 3})
    fewer = {"a": torch.zeros(2)}
    assert load_weights(tmp_path, "mind", fewer)["counters"] == {"step": 3} and bool(fewer["a"].all())
    with pytest.raises(ValueError, match="expected the weights of this model"):
        load_weights(tmp_path, "mind", {"b": torch.zeros(2)})
