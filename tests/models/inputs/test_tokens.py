"""Encoding, incremental decoding, special tokens by name, and vocabularies kept as vocab.json and merges.txt."""

import json
import shutil
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from models.errors import ModelError, TokenError
from models.inputs.pretrained import load_pretrained
from models.inputs.tokens import UNVOICED, TextStream, Tokenizer, forbidden_speech_ids, unvoiced_ids

TINY = Path(__file__).parents[3] / "assets" / "tiny"
MARKS = ["<|im_start|>", "<think>", "<unk>", "</image>", "<|tts_eos|>", "<|timbre_21|>", "</think>", "<|", "<im"]
WORDS = [
    "Hello",
    " we'LL",
    "你好，面壁",
    "🎉👩‍👩‍👧",
    "é",
    "e\u0301",
    "\u212b",
    "\n\n ",
    "\t",
    " 2026",
    "…",
    "\x00",
    "  x",
]
texts = st.lists(st.one_of(st.sampled_from(MARKS + WORDS), st.text(max_size=6)), max_size=8).map("".join)


@cache
def tiny() -> Tokenizer:
    return Tokenizer.load(TINY)


@cache
def library() -> Engine:
    return Engine.from_file(str(TINY / "tokenizer.json"))


ids_of = st.lists(st.integers(0, len(tiny()) - 1), max_size=30)


def copy_of_tiny(folder: Path, *leave_out: str) -> Path:
    for file in TINY.iterdir():
        if file.suffix in (".json", ".txt") and file.name not in leave_out:
            shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module", params=["table of added tokens", "no table"])
def vocab_folder(request, tmp_path_factory) -> Path:
    """The checkpoint without tokenizer.json. Added tokens: from the settings' table, or from added_tokens.json."""
    folder = copy_of_tiny(tmp_path_factory.mktemp("vocab"), "tokenizer.json")
    if request.param == "no table":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        del config["added_tokens_decoder"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def from_vocab(vocab_folder) -> Tokenizer:
    return Tokenizer.load(vocab_folder)


@given(texts)
def test_encodes_as_the_library_and_decodes_to_the_normalized_text(text):
    tokenizer = tiny()
    ids = tokenizer.encode(text)
    assert ids == library().encode(text, add_special_tokens=False).ids
    normal = library().normalizer.normalize_str(text)
    assert tokenizer.decode(ids, skip_special=False) == normal


@given(ids_of, st.booleans())
def test_decodes_as_the_library(ids, skip):
    assert tiny().decode(ids, skip_special=skip) == library().decode(ids, skip_special_tokens=skip)


@given(ids_of, st.lists(st.integers(0, 30), max_size=6), st.booleans())
def test_streamed_text_equals_the_decoded_text(ids, cuts, skip):
    stream = TextStream(tiny(), skip_special=skip)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = [stream.push(ids[a:b]) for a, b in pairwise(edges)]
    assert "".join(parts) + stream.flush() == tiny().decode(ids, skip_special=skip)


@given(st.text(min_size=1))
def test_unfinished_characters_are_held_back(text):
    stream = TextStream(tiny())
    normal = library().normalizer.normalize_str(text)
    shown = ""
    for token in tiny().encode(text):
        shown += stream.push([token])
        assert "\ufffd" in text or normal.startswith(shown)
    assert stream.flush() == ""


def test_flush_replaces_an_unfinished_character_and_resets():
    tokenizer = tiny()
    # One character in several tokens, without the last one.
    head = tokenizer.encode("🎉")[:-1]
    assert len(head) > 0
    stream = TextStream(tokenizer)
    assert (stream.push(head), stream.flush()) == ("", "\ufffd")
    assert (stream.push(tokenizer.encode("a🎉")), stream.flush()) == ("a🎉", "")


@given(text=texts)
def test_vocab_and_merges_give_the_same_ids(from_vocab, text):
    assert from_vocab.encode(text) == tiny().encode(text)


def test_vocab_and_merges_split_text_by_the_same_rule(vocab_folder):
    # Merges of a small vocabulary hardly distinguish one rule from another, so the rules themselves are compared.
    steps = [
        json.loads(text)
        for text in (load_pretrained(vocab_folder).backend_tokenizer.to_str(), (TINY / "tokenizer.json").read_text())
    ]
    for part in ("normalizer", "pre_tokenizer"):
        assert steps[0][part] == steps[1][part]


def test_vocab_and_merges_give_the_same_vocabulary(from_vocab):
    assert len(from_vocab) == len(tiny())
    assert from_vocab.special == tiny().special
    # Without the table only the tokens that have a role in the settings are special.
    assert from_vocab.special_ids <= tiny().special_ids
    assert {from_vocab.eos_id, from_vocab.special.unk} <= from_vocab.special_ids
    assert from_vocab.special.think_end not in from_vocab.special_ids
    assert from_vocab.bad_token_ids == tiny().bad_token_ids


def test_transformers_is_not_loaded_for_tokenizer_json(root):
    program = "import sys; from models.inputs.tokens import Tokenizer; Tokenizer.load(sys.argv[1]).encode('a');"
    program += "print({'transformers', 'torch'} & set(sys.modules))"
    command = [sys.executable, "-c", program, str(TINY)]
    assert subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip() == "set()"


def test_special_tokens_are_resolved_by_name():
    tokenizer = tiny()
    assert tokenizer.special.listen == tokenizer.id("<|listen|>")
    assert tokenizer.special.slice_end == tokenizer.id("</slice>")
    assert tokenizer.encode("<unit><|speak|>") == [tokenizer.special.unit_start, tokenizer.special.speak]
    assert tokenizer.eos_id == tokenizer.special.im_end
    assert tokenizer.pad_id == tokenizer.special.endoftext
    # Thoughts stay in the decoded text, so their markers are added tokens but not special.
    assert tokenizer.special.think_start not in tokenizer.special_ids
    assert tokenizer.special.unk in tokenizer.special_ids


def test_an_unknown_token_is_named_in_the_error():
    with pytest.raises(TokenError, match=r"'<\|warble\|>'"):
        tiny().id("<|warble|>")
    assert tiny().lookup("<|warble|>") == tiny().special.unk


def test_refuses_a_vocabulary_without_a_required_token(tmp_path):
    folder = copy_of_tiny(tmp_path)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|chunk_eos|>", "<|other|>"))
    with pytest.raises(TokenError, match=r"'<\|chunk_eos\|>'"):
        Tokenizer.load(folder)


def test_refuses_an_added_token_with_another_id_than_declared(tmp_path):
    folder = copy_of_tiny(tmp_path, "tokenizer.json")
    text = (folder / "tokenizer_config.json").read_text()
    last = len(tiny()) - 1
    assert f'"{last}":' in text
    (folder / "tokenizer_config.json").write_text(text.replace(f'"{last}":', f'"{last + 2}":'))
    with pytest.raises(TokenError, match=f"expected id {last + 2}, got {last}"):
        Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json"])
@pytest.mark.parametrize(("end", "expected"), [("", "a JSON file, got "), (': "x"}', "a token id, got 'x'")])
def test_refuses_damaged_tables_that_are_not_needed(tmp_path, name, end, expected):
    folder = copy_of_tiny(tmp_path, name)
    (folder / name).write_text('{"<a>": 1, "<b>"' + end)
    with pytest.raises(ModelError, match=f"{name}.*: expected {expected}"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("broken", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer.json", None)]
)
def test_refuses_missing_and_unreadable_files(tmp_path, broken, content):
    folder = copy_of_tiny(tmp_path, broken, "merges.txt")
    if content is not None:
        (folder / broken).write_text(content)
    with pytest.raises(TokenError, match=r"expected (readable|tokenizer\.json)"):
        Tokenizer.load(folder)


def test_names_missing_vocabulary_files(tmp_path):
    folder = copy_of_tiny(tmp_path, "tokenizer.json", "vocab.json", "merges.txt")
    with pytest.raises(TokenError) as error:
        Tokenizer.load(folder)
    expected = "expected tokenizer.json, or vocab.json and merges.txt, got no vocab.json and no merges.txt"
    assert str(error.value) == f"{folder}: {expected}"


def test_refuses_bad_token_ids_that_are_no_ids(tmp_path):
    folder = copy_of_tiny(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bad_token_ids": [3, "x"]}))
    with pytest.raises(TokenError, match="bad_token_ids"):
        Tokenizer.load(folder)


def test_unvoiced_and_bad_tokens_are_forbidden_in_speech():
    tokenizer = tiny()
    lookups = unvoiced_ids(tokenizer)
    assert len(lookups) == len(UNVOICED) == 23
    assert lookups[0] == tokenizer.encode(":")[0]
    assert {i for i, c in zip(lookups, UNVOICED, strict=True) if not c.isascii()} == {tokenizer.special.unk}
    forbidden = forbidden_speech_ids(tokenizer)
    assert set(forbidden) == {*lookups, *tokenizer.bad_token_ids}
    assert list(forbidden) == sorted(set(forbidden))


def test_negative_ids_are_refused_and_padding_ids_decode_to_nothing():
    with pytest.raises(TokenError, match="expected at least 0, got -1"):
        tiny().decode([5, -1])
    assert tiny().decode([5000]) == ""


def test_refuses_half_a_surrogate_pair():
    with pytest.raises(TokenError, match="expected valid Unicode"):
        tiny().encode("a\ud83c")
