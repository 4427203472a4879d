"""The committed tiny checkpoint equals what its script builds, and its tokenizer has the released one's properties."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from assets.build_tiny import build
from assets.released_layout import ADDED
from models.checkpoint.config import load_config

MAX_BYTES = 6_500_000


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    build(out)
    return out


def test_script_builds_the_committed_files(tiny: Path, rebuilt: Path) -> None:
    expected, got = ({p.name for p in folder.iterdir() if p.is_file()} for folder in (rebuilt, tiny))
    assert got == expected
    for file in sorted(rebuilt.iterdir()):
        if file.suffix == ".safetensors":
            continue  # compared by value below, because the header depends on the library version
        assert (tiny / file.name).read_bytes() == file.read_bytes(), f"{file.name} differs from what the script builds"


def test_script_builds_the_committed_weights(tiny: Path, rebuilt: Path) -> None:
    for file in sorted(rebuilt.glob("*.safetensors")):
        expected, got = load_file(file), load_file(tiny / file.name)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype
            assert got[name].equal(tensor), f"{name}: max diff {(got[name] - tensor).abs().max()}"


def test_no_weight_is_trivial(tiny: Path) -> None:
    for file in tiny.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert tensor.isfinite().all(), f"{name}: expected finite values"
            assert tensor.std() > 1e-3, f"{name}: expected varied values, got std {tensor.std()}"


def test_size_and_layout(tiny: Path) -> None:
    assert len(list(tiny.glob("model-*-of-*.safetensors"))) >= 2
    n_bytes = sum(file.stat().st_size for file in tiny.iterdir() if file.is_file())
    assert n_bytes < MAX_BYTES, f"expected less than {MAX_BYTES} bytes, got {n_bytes}"
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    stored = sum(t.nbytes for file in tiny.glob("*.safetensors") for t in load_file(file).values())
    assert index["metadata"]["total_size"] == stored


def test_markers_are_single_tokens(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    config = load_config(tiny)
    assert tokenizer.get_vocab_size() == config.vocab_size <= config.tts_config.num_text_tokens
    for i, token in enumerate(ADDED):
        expected = config.vocab_size - len(ADDED) + i
        assert tokenizer.encode(token, add_special_tokens=False).ids == [expected], token
    assert tokenizer.encode("<unk>", add_special_tokens=False).ids == [tokenizer.token_to_id("<unk>")]
    assert config.tts_config.audio_bos_token_id == tokenizer.token_to_id("<focus>")
    assert config.tts_config.text_eos_token_id == tokenizer.token_to_id("</perception>")


@pytest.mark.parametrize(
    "text",
    [
        "Hello, how are you today?",
        "你好，今天过得怎么样？",
        "émojis 🎉🚀 — “quotes”\n\n\n  tabs\t12345",
        "<|im_start|>user\n<think>\n\n</think>\n\nhi</s><|im_end|>\n",
    ],
)
def test_any_text_round_trips(tiny: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_files_agree(tiny: Path) -> None:
    vocab, added, whole, config = (
        json.loads((tiny / name).read_text(encoding="utf-8"))
        for name in ("vocab.json", "added_tokens.json", "tokenizer.json", "tokenizer_config.json")
    )
    assert whole["model"]["vocab"] == vocab
    assert sorted([*vocab.values(), *added.values()]) == list(range(len(vocab) + len(added)))
    merges = (tiny / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert [" ".join(pair) for pair in whole["model"]["merges"]] == merges
    declared = {token["content"]: token["id"] for token in whole["added_tokens"]}
    assert declared == added | {"<unk>": vocab["<unk>"]}
    assert declared == {entry["content"]: int(i) for i, entry in config["added_tokens_decoder"].items()}
    assert 0 < len(config["bad_token_ids"]) < len(vocab) / 2
    assert max(config["bad_token_ids"]) < vocab["</s>"]
