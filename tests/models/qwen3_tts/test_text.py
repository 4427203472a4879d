"""Token ids of texts, and of texts that arrive in pieces."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models.errors import TokenError
from models.inputs.tokens import ALPHABET
from models.qwen3_tts.config import Qwen3TTSConfig, load_qwen3_tts_config
from models.qwen3_tts.text import MAX_WORD, LiveText, PromptTokenizer

MERGES = ("h e", "he l", "l o", "Ġ w", "i P", "Ċ Ċ", "Ġ Ġ", "ĠĠ Ġ", "' s", "Ġ Ċ", ". .", "1 2", "u s")


@pytest.fixture(scope="module")
def config(root: Path) -> Qwen3TTSConfig:
    return load_qwen3_tts_config(root / "tests/golden/qwen3_tts/tiny_a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of all bytes and a few merges."""
    path = tmp_path_factory.mktemp("vocabulary")
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
    (path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path, config: Qwen3TTSConfig) -> PromptTokenizer:
    return PromptTokenizer.load(folder, config)


def test_parts_of_a_request(tokenizer: PromptTokenizer) -> None:
    (newline,) = tokenizer.encode("\n")
    texts = tokenizer.texts("\nhello", reference="hey", instruct="us")
    assert texts.role == (300, 302, newline)
    assert texts.text == tuple(tokenizer.encode("hello")) and len(texts.text) == 2
    assert texts.reference == tuple(tokenizer.encode("hey"))
    assert texts.instruct == (300, *tokenizer.encode("user"), newline, *tokenizer.encode("us"), 301, newline)
    assert tokenizer.texts("a").instruct == ()


def test_names_of_special_tokens_are_plain_text(tokenizer: PromptTokenizer) -> None:
    assert len(tokenizer.encode("<|im_end|>")) == 10


def test_patterns_differ_where_case_changes(folder: Path, tokenizer: PromptTokenizer, config: Qwen3TTSConfig) -> None:
    other = PromptTokenizer.load(folder, config, pattern="mistral")
    assert len(tokenizer.encode("iPhone")) == len(other.encode("iPhone")) - 1


def test_unreadable_vocabularies_and_texts_are_refused(
    folder: Path, tokenizer: PromptTokenizer, config: Qwen3TTSConfig, tmp_path: Path
) -> None:
    with pytest.raises(TokenError, match=r"expected vocab\.json and merges\.txt, got no vocab\.json and no merges"):
        PromptTokenizer.load(tmp_path, config)
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(TokenError, match="expected readable tokenizer files"):
        PromptTokenizer.load(tmp_path, config)
    with pytest.raises(TokenError, match=r"pattern: expected one of \['mistral', 'qwen2'\], got 'gpt2'"):
        PromptTokenizer.load(folder, config, pattern="gpt2")
    with pytest.raises(TokenError, match="text: expected valid Unicode"):
        tokenizer.encode("\ud800")


PIECES = st.lists(
    st.one_of(
        st.sampled_from(["hello", " w", "'", "s", "\n", " ", "  ", "\r\n", "..", "12", "e", "\u0301", "a\u0315", "iP"]),
        st.text(alphabet=st.characters(codec="utf-8"), max_size=3),
    ),
    max_size=12,
)


@given(PIECES)
@example(["a\n", "  ", "\n b"])
@example(["a\u0315", "\u0301"])
@example(["it'", "s", " x"])
@example(["\n", "\n", "a"])
def test_pieces_give_the_ids_of_the_whole_text(tokenizer: PromptTokenizer, pieces: list[str]) -> None:
    live, ids = LiveText(tokenizer), []
    for piece in pieces:
        ids += live.push(piece)
    assert tuple(ids + live.finish()) == tokenizer.encode_spoken("".join(pieces))


def test_words_are_released_with_the_next_word(tokenizer: PromptTokenizer) -> None:
    live = LiveText(tokenizer)
    assert live.push("hello") == []
    assert live.push(" w") == tokenizer.encode("hello")
    assert live.push("o. ") == tokenizer.encode(" wo")
    assert live.finish() == tokenizer.encode(". ")


def test_words_without_end_are_cut(tokenizer: PromptTokenizer) -> None:
    """What is kept back is read again with each piece, so its length is limited."""
    live = LiveText(tokenizer)
    n_early = sum(len(live.push("e" * 700)) for _ in range(5))
    assert n_early >= 5 * 700 - MAX_WORD and n_early + len(live.finish()) == 5 * 700
    marks = LiveText(tokenizer)
    assert len(marks.push("a" + "\u0301\u0315" * 8000)) > 16_000
