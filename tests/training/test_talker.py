"""The talker's checkpoint: size, files, and the strict loader, which reads it like the released one."""

from pathlib import Path

import pytest
import torch

from models.inputs.tokens import Tokenizer
from models.load import load_model
from training.grammar.corpus import replies
from training.talker.checkpoint import write_checkpoint, write_random
from training.talker.sizes import BYTES_PER_WEIGHT, PART_BYTES, part_weights
from training.talker.tokenizer import talker_lexicon


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("talker")
    write_random(out)
    return out


def test_parts_fit_their_share_of_the_bytes() -> None:
    n_bytes = BYTES_PER_WEIGHT * sum(kinds.total() for kinds in part_weights().values())
    assert n_bytes <= PART_BYTES, f"expected at most {PART_BYTES} bytes, got {n_bytes}"


def test_strict_loader_reads_it(talker: Path) -> None:
    model = load_model(talker, device="cpu")
    assert model.config.hidden_size == model.config.tts_config.llm_dim
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_replies_take_few_tokens(talker: Path) -> None:
    tokenizer = Tokenizer.load(talker)
    texts = replies(seed=1, n=20)
    n_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    n_words = sum(len(text.split()) for text in texts)
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)
    assert n_tokens < 1.6 * n_words, f"expected fewer than 1.6 tokens a word, got {n_tokens / n_words:.2f}"
    assert not set(tokenizer.bad_token_ids) & {token for text in texts for token in tokenizer.encode(text)}


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    assert len(talker_lexicon().ids) > 1000
    with pytest.raises(ValueError, match="expected the"):
        write_checkpoint(tmp_path, {"llm.lm_head.weight": torch.zeros(1, 1)})
    assert not list(tmp_path.iterdir())
