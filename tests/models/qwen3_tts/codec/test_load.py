"""Strict loading of the speech tokenizer and the speaker encoder, and the names and shapes of the released files."""

import json
from pathlib import Path

import pytest
import torch

from models.errors import CheckpointError, ConfigError, SettingsError
from models.layers.weights import on_meta, tensor_shapes
from models.qwen3_tts.codec.config import parse_speaker_encoder_config
from models.qwen3_tts.codec.load import SpeechTokenizer, _is_unused, load_speaker_encoder, load_speech_tokenizer
from models.qwen3_tts.codec.random_weights import RELEASED_TOKENIZER, random_codec
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from tests.parity.golden import GoldenDir, read_tensors
from tests.parity.qwen3_tts.codec import checkpoint

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def released(root: Path) -> dict[str, Shapes]:
    files: dict[str, Shapes] = {}
    for line in (root / "tests/data/qwen3_tts_codec_state_dict.tsv").read_text().splitlines()[1:]:
        file, name, _, shape = line.split("\t")
        files.setdefault(file, {})[name] = tuple(map(int, shape.split("x")))
    return files


@pytest.fixture(scope="module")
def stored(codec_golden: GoldenDir) -> tuple[dict[str, torch.Tensor], dict]:
    folder = codec_golden.path / "speech_tokenizer"
    return read_tensors(folder, "model")[0], json.loads((folder / "config.json").read_text())


def test_speech_tokenizer_matches_the_released_file(released: dict[str, Shapes]) -> None:
    with on_meta():
        tokenizer = SpeechTokenizer(RELEASED_TOKENIZER)
    shapes = released["speech_tokenizer"]
    used = {name: shape for name, shape in shapes.items() if not _is_unused(name)}
    assert tensor_shapes(tokenizer) == used
    # 16 acoustic codebooks more than are kept, 32 flags, the projections of the other direction.
    assert len(shapes) - len(used) == 16 * 3 + 16 + 4
    state = tokenizer.decoder.new_state(1, 8)
    n_values = tokenizer.decoder.n_columns + 8 * 2 * 16 * 64 * 71
    assert round(n_values / 1e6, 3) == 1.298
    assert state.n_rows == 80 and state.k[0].is_meta


@pytest.mark.parametrize(("file", "dim"), [("0b6.base", 1024), ("1b7.base", 2048)])
def test_speaker_encoder_matches_the_released_file(released: dict[str, Shapes], file: str, dim: int) -> None:
    with on_meta():
        encoder = SpeakerEncoder(parse_speaker_encoder_config({"enc_dim": dim}))
    got = {f"speaker_encoder.{name}": shape for name, shape in tensor_shapes(encoder).items()}
    assert got == released[file]


def test_types_of_weights(stored) -> None:
    with checkpoint(*stored) as folder:
        tokenizer = load_speech_tokenizer(folder, dtype=torch.bfloat16)
        with pytest.raises(SettingsError, match=r"expected a floating-point type, got torch\.int64"):
            load_speech_tokenizer(folder, dtype=torch.int64)
    decoder = tokenizer.decoder
    assert {p.dtype for p in tokenizer.encoder.parameters()} == {torch.float32}
    assert decoder.quantizer.rvq_first.vq["layers"][0]._codebook.embedding_sum.dtype is torch.float32
    assert decoder.decoder[1].block[0].rate.dtype is torch.float32
    assert decoder.dtype is decoder.quantizer.table.dtype is torch.bfloat16
    state = decoder.new_state(2, 4)
    wave = decoder(state, torch.tensor([1, 2]), torch.ones(2, 4, 16, dtype=torch.int64), torch.tensor([4, 0]))
    assert wave.dtype is torch.float32 and wave.isfinite().all() and state.positions.tolist() == [0, 4, 0]


def test_differences_are_listed_together(stored) -> None:
    tensors, config = stored
    wrong = dict(tensors)
    gone = wrong.pop("decoder.pre_conv.conv.bias")
    wrong["decoder.other"] = gone.clone()
    wrong["encoder.downsample.conv.weight"] = gone.clone()
    wrong["decoder.quantizer.rvq_first.input_proj.weight"] = gone.clone()  # of released files, not read
    with checkpoint(wrong, config) as folder, pytest.raises(CheckpointError) as raised:
        load_speech_tokenizer(folder)
    for line in (
        "missing (1):\n  decoder.pre_conv.conv.bias [48]",
        "unexpected (1):\n  decoder.other [48]",
        "wrong shape (1):\n  encoder.downsample.conv.weight: expected [48, 48, 4], got [48]",
    ):
        assert line in str(raised.value), f"expected {line}, got {raised.value}"
    assert "input_proj" not in str(raised.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("decoder_config", "upsample_rates", [8, 5, 4, 2], "product of the ratios: expected 1920, got 1280"),
        ("encoder_config", "upsampling_ratios", [8, 6, 5], "stride of the ratios: expected 1920, got 480"),
        ("decoder_config", "decoder_dim", 40, "decoder_dim: expected a multiple of 16, got 40"),
        ("decoder_config", "num_key_value_heads", 3, "num_attention_heads: expected a multiple of 3, got 4"),
        ("encoder_config", "num_key_value_heads", 3, "num_attention_heads: expected a multiple of 3, got 4"),
        ("encoder_config", "num_quantizers", 12, "num_quantizers: expected at least 16, got 12"),
        ("encoder_config", "codebook_size", 65, r"codebook_size: expected 64 \(decoder_config\), got 65"),
        ("encoder_config", "use_causal_conv", False, r"encoder_config.use_causal_conv .*got False"),
        ("decoder_config", "latent_dim", None, r"decoder_config.latent_dim .*got None"),
    ],
)
def test_wrong_settings_are_named(stored, section, key, value, message) -> None:
    _, config = stored
    wrong = config | {section: config[section] | {key: value}}
    with checkpoint({"x": torch.ones(1)}, wrong) as folder, pytest.raises(ConfigError, match=message):
        load_speech_tokenizer(folder)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "enc_dim"),
        ({"enc_dim": 8, "enc_channels": [8, 8, 4, 8, 24]}, "expected 8 in the first four"),
        ({"enc_dim": 8, "enc_channels": [8, 8, 8, 8, 32]}, "expected 24 in the last, got 32"),
        ({"enc_dim": 8, "enc_res2net_scale": 7}, "expected a multiple of 7, got 512"),
        ({"enc_dim": 8, "enc_kernel_sizes": [5, 3, 4, 3, 1]}, "expected odd sizes"),
    ],
)
def test_wrong_speaker_settings_are_named(section, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_speaker_encoder_config(section)


def test_checkpoint_without_a_speaker_encoder_is_refused() -> None:
    expected = "expected speaker_encoder_config of a Base checkpoint, got None"
    config = {"tts_model_type": "custom_voice"}
    with checkpoint({"x": torch.ones(1)}, config) as folder, pytest.raises(CheckpointError, match=expected):
        load_speaker_encoder(folder)


def test_random_weights_make_sound(tokenizer: SpeechTokenizer, speaker_encoder: SpeakerEncoder) -> None:
    random, speaker = random_codec(tokenizer.config, speaker_encoder.config, seed=3)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 64, (1, 6, 16), generator=generator)
    wave = random.decoder(random.decoder.new_state(1, 6), torch.tensor([0]), codes, torch.tensor([6]))
    assert 0.01 < wave.std() < 0.5 and (wave.abs() < 1).float().mean() > 0.99
    noise, n_samples = 0.1 * torch.randn(1, 9600, generator=generator), torch.tensor([9600])
    assert len(random.encoder(noise, n_samples).unique()) > 10
    assert speaker(noise, n_samples).isfinite().all()
    again, _ = random_codec(tokenizer.config, speaker_encoder.config, seed=3)
    assert torch.equal(again.decoder.quantizer.table, random.decoder.quantizer.table)
