"""Strict loading of the language models, their config and their sampling."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import CheckpointError, ConfigError
from models.qwen3_tts.config import load_qwen3_tts_config, parse_qwen3_tts_config
from models.qwen3_tts.load import load_qwen3_tts, talker_tensors
from models.qwen3_tts.random_weights import random_qwen3_tts, released_config
from models.qwen3_tts.settings import CodeSampling, FrameSampling, load_sampling
from tests.parity.golden import GoldenDir

SIZES = {"0b6": 905.8, "1b7": 1916.7}  # published number of parameters in millions


def released_tensors(root: Path, size: str) -> dict[str, tuple[int, ...]]:
    tensors = {}
    for line in (root / "tests/data/qwen3_tts_talker_state_dict.tsv").read_text().splitlines()[1:]:
        name, *shapes = line.split("\t")
        shape = shapes[list(SIZES).index(size)]
        span = re.search(r"\{0\.\.(\d+)\}", name)
        for number in range(int(span[1]) + 1 if span else 1):
            if shape != "-":
                tensors[name.replace(span[0], str(number)) if span else name] = tuple(map(int, shape.split("x")))
    return tensors


@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_equal_the_released_checkpoint(root: Path, size: str) -> None:
    got = talker_tensors(released_config(size))
    expected = released_tensors(root, size)
    assert len(expected) > 400 and got == expected, f"differ in {sorted(got.items() ^ expected.items())}"
    assert round(sum(math.prod(shape) for shape in got.values()) / 1e6, 1) == SIZES[size]


def test_differences_are_listed_at_once(talker_golden: GoldenDir, tmp_path: Path) -> None:
    folder = talker_golden.model("tiny_a")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors["speaker_encoder.fc.weight"] = torch.zeros(1)  # another loader's
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_qwen3_tts(tmp_path).config.tts_model_type == "base"
    del tensors["talker.codec_head.weight"]
    tensors |= {"talker.extra": torch.zeros(1), "talker.model.norm.weight": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        load_qwen3_tts(tmp_path)
    for part in ("talker.codec_head.weight", "talker.extra", "talker.model.norm.weight: expected [64], got [3]"):
        assert part in str(raised.value), f"expected {part}, got {raised.value}"
    assert "speaker_encoder" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("tts_model_type",), "other", "tts_model_type"),
        (("tts_bos_token_id",), 10**6, "tts_bos_token_id: expected below 320"),
        (("talker_config", "spk_is_dialect", "ryan"), "klingon", "spk_is_dialect.ryan"),
        (("talker_config", "rope_scaling", "mrope_section"), [6, 5, 6], "mrope_section: expected a sum of 16"),
        (("talker_config", "code_predictor_config", "vocab_size"), 65, "expected 64"),
        (("talker_config", "codec_eos_token_id"), None, "codec_eos_token_id"),
    ],
)
def test_bad_config_is_refused_by_key(
    talker_golden: GoldenDir, path: tuple[str, ...], value: object, message: str
) -> None:
    raw = json.loads((talker_golden.path / "tiny_b" / "config.json").read_text())
    section = raw
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_qwen3_tts_config(raw)


def test_languages_leave_out_dialects(talker_golden: GoldenDir) -> None:
    config = load_qwen3_tts_config(talker_golden.path / "tiny_b")
    assert sorted(config.languages) == ["chinese", "english", "german"]
    assert sorted(config.speakers) == ["dylan", "ryan", "vivian"]


def test_sampling_of_a_folder(tmp_path: Path) -> None:
    assert load_sampling(tmp_path) == FrameSampling()
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 7, "subtalker_temperature": 0.5, "subtalker_dosample": False}))
    rest = CodeSampling(greedy=True, temperature=0.5)
    assert load_sampling(tmp_path) == FrameSampling(CodeSampling(top_k=7), rest)
    file.write_text(json.dumps({"top_p": 0}))
    with pytest.raises(ConfigError, match=r"setting top_p: expected a finite number above 0"):
        load_sampling(tmp_path)


def test_random_weights_are_those_of_the_seed(talker_golden: GoldenDir) -> None:
    config = load_qwen3_tts_config(talker_golden.path / "tiny_b")
    one, same, other = (random_qwen3_tts(config, seed=seed).talker.codec_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other) and one.isfinite().all()
