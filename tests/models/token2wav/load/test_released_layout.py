"""The module trees at released size have the names and shapes of the released files."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models.layers.weights import on_meta, tensor_shapes
from models.token2wav.flow.flow import Flow
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import hift_config_of
from models.token2wav.load.weight_norm import fold_weight_norm
from models.token2wav.prompt.campplus import CampPlus, fold_batch_norms
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer, config_of
from models.token2wav.settings import CampPlusConfig, FlowConfig, HiftConfig, S3TokenizerConfig

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def released(root: Path) -> dict[str, Shapes]:
    parts: dict[str, Shapes] = {}
    for line in (root / "tests/data/token2wav_state_dict.tsv").read_text().splitlines()[1:]:
        part, name, shape = line.split("\t")
        parts.setdefault(part, {})[name] = tuple(map(int, shape.split("x")))
    return parts


def tree(kind: type[nn.Module], config: object) -> Shapes:
    with on_meta():
        return tensor_shapes(kind(config))


def filled(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in shapes.items()}


def shapes_of(tensors: dict[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_flow_matches_the_released_file(released: dict[str, Shapes]) -> None:
    assert len(released["flow"]) == 605
    assert tree(Flow, FlowConfig()) == released["flow"]


def test_hift_matches_the_released_file(released: dict[str, Shapes]) -> None:
    assert len(released["hift"]) == 328
    tensors = fold_weight_norm(filled(released["hift"]))
    assert tree(Hift, HiftConfig()) == shapes_of(tensors)
    assert hift_config_of(tensors, "hift.pt") == HiftConfig()


def test_speaker_encoder_matches_the_released_file(released: dict[str, Shapes]) -> None:
    got = shapes_of(fold_batch_norms(filled(released["campplus"])))
    assert tree(CampPlus, CampPlusConfig()) == got


def test_speech_tokenizer_matches_the_released_file(released: dict[str, Shapes]) -> None:
    assert len(released["speech_tokenizer"]) == 102
    assert tree(S3Tokenizer, S3TokenizerConfig()) == released["speech_tokenizer"]
    meta = {name: torch.empty(shape, device="meta") for name, shape in released["speech_tokenizer"].items()}
    assert config_of(meta) == S3TokenizerConfig()
