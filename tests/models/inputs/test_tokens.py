"""Encoding, decoding bit by bit, special tokens by name, and vocabularies in their older form."""

import json
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine

from models.errors import TokenError
from models.inputs.tokens import SPLIT, UNVOICED, TextStream, Tokenizer, forbidden_speech_ids, unvoiced_ids

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
def older_form(request, tmp_path_factory) -> Tokenizer:
    """The checkpoint without tokenizer.json: added tokens from the settings' table, or from the files beside it."""
    folder = copy_of_tiny(tmp_path_factory.mktemp("older"), "tokenizer.json")
    if request.param == "no table":
        config = json.loads((folder / "tokenizer_config.json").read_text())
        del config["added_tokens_decoder"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@given(texts)
def test_encode_decode(text):
    tokenizer = tiny()
    ids = tokenizer.encode(text)
    assert ids == library().encode(text, add_special_tokens=False).ids
    normal = library().normalizer.normalize_str(text)
    assert tokenizer.decode(ids, skip_special=False) == normal


@given(ids_of, st.booleans())
def test_decode_is_the_library_s(ids, skip):
    assert tiny().decode(ids, skip_special=skip) == library().decode(ids, skip_special_tokens=skip)


@given(ids_of, st.lists(st.integers(0, 30), max_size=6), st.booleans())
def test_streamed_text_is_the_decoded_text(ids, cuts, skip):
    stream = TextStream(tiny(), skip_special=skip)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + stream.flush() == tiny().decode(ids, skip_special=skip)


@given(st.text(min_size=1))
def test_no_replacement_character_before_its_time(text):
    stream = TextStream(tiny())
    normal = library().normalizer.normalize_str(text)
    shown = ""
    for token in tiny().encode(text):
        shown += stream.push([token])
        assert "\ufffd" in text or normal.startswith(shown)
    assert stream.flush() == ""


def test_flush_shows_a_broken_tail_and_starts_over():
    tokenizer = tiny()
    # One character in several tokens: the last one is missing.
    head = tokenizer.encode("🎉")[:-1]
    assert len(head) > 0
    stream = TextStream(tokenizer)
    assert (stream.push(head), stream.flush()) == ("", "\ufffd")
    assert (stream.push(tokenizer.encode("a🎉")), stream.flush()) == ("a🎉", "")


@given(text=texts)
def test_older_form_gives_the_same_ids(older_form, text):
    assert older_form.encode(text) == tiny().encode(text)


def test_text_is_split_as_the_checkpoint_says():
    # Merges of a small vocabulary hardly tell one splitting from another, so the rule itself is compared.
    steps = json.loads((TINY / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert steps[0]["pattern"]["Regex"] == SPLIT


def test_older_form_has_the_same_vocabulary(older_form):
    assert len(older_form) == len(tiny())
    assert older_form.special == tiny().special
    # Without the table only the tokens listed as special are known to be.
    assert older_form.special_ids <= tiny().special_ids
    assert {older_form.eos_id, older_form.special.unk} <= older_form.special_ids
    assert older_form.special.think_end not in older_form.special_ids
    assert older_form.bad_token_ids == tiny().bad_token_ids


def test_special_tokens():
    tokenizer = tiny()
    assert tokenizer.special.listen == tokenizer.id("<|listen|>")
    assert tokenizer.special.slice_end == tokenizer.id("</slice>")
    assert tokenizer.encode("<unit><|speak|>") == [tokenizer.special.unit_start, tokenizer.special.speak]
    assert tokenizer.eos_id == tokenizer.special.im_end
    assert tokenizer.pad_id == tokenizer.special.endoftext
    assert tokenizer.bos_id == tokenizer.special.im_start
    # A thought is text to be kept, so its markers are added but not special.
    assert tokenizer.special.think_start not in tokenizer.special_ids
    assert tokenizer.special.unk in tokenizer.special_ids


def test_unknown_special_token_is_named():
    with pytest.raises(TokenError, match=r"'<\|warble\|>'"):
        tiny().id("<|warble|>")
    assert tiny().lookup("<|warble|>") == tiny().special.unk


def test_vocabulary_without_a_needed_token(tmp_path):
    folder = copy_of_tiny(tmp_path)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("<|chunk_eos|>", "<|other|>"))
    with pytest.raises(TokenError, match=r"'<\|chunk_eos\|>'"):
        Tokenizer.load(folder)


def test_added_token_under_another_id(tmp_path):
    folder = copy_of_tiny(tmp_path, "tokenizer.json")
    text = (folder / "tokenizer_config.json").read_text()
    last = len(tiny()) - 1
    assert f'"{last}":' in text
    (folder / "tokenizer_config.json").write_text(text.replace(f'"{last}":', f'"{last + 2}":'))
    with pytest.raises(TokenError, match=f"expected id {last + 2}, got {last}"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("broken", "content"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer.json", None)]
)
def test_broken_files(tmp_path, broken, content):
    folder = copy_of_tiny(tmp_path, broken, "merges.txt")
    if content is not None:
        (folder / broken).write_text(content)
    with pytest.raises(TokenError, match=r"expected (readable|tokenizer\.json)"):
        Tokenizer.load(folder)


def test_bad_token_ids_must_be_ids(tmp_path):
    folder = copy_of_tiny(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bad_token_ids": [3, "x"]}))
    with pytest.raises(TokenError, match="bad_token_ids"):
        Tokenizer.load(folder)


def test_forbidden_while_speaking():
    tokenizer = tiny()
    lookups = unvoiced_ids(tokenizer)
    assert len(lookups) == len(UNVOICED) == 23
    assert lookups[0] == tokenizer.encode(":")[0]
    assert {i for i, c in zip(lookups, UNVOICED, strict=True) if not c.isascii()} == {tokenizer.special.unk}
    forbidden = forbidden_speech_ids(tokenizer)
    assert set(forbidden) == {*lookups, *tokenizer.bad_token_ids}
    assert list(forbidden) == sorted(set(forbidden))


def test_ids_out_of_range():
    with pytest.raises(TokenError, match="expected at least 0, got -1"):
        tiny().decode([5, -1])
    assert tiny().decode([5000]) == ""


def test_half_a_surrogate_pair():
    with pytest.raises(TokenError, match="expected valid Unicode"):
        tiny().encode("a\ud83c")
