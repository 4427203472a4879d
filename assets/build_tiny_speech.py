"""Builds a complete Qwen3-TTS checkpoint in the released layout with random weights, for tests and trials; 0.5 MB.

Run `python -m assets.build_tiny_speech --out FOLDER` from the root. It speaks noise. The values do not depend on the
machine. The vocabulary is that of `assets/tiny`.
"""

import argparse
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from safetensors.torch import save_file
from torch import Tensor

from assets.draw import draw
from models.layers.weights import on_meta, tensor_shapes
from models.qwen3_tts.codec.config import SpeechTokenizerConfig, parse_speaker_encoder_config
from models.qwen3_tts.codec.load import SPEAKER_PREFIX, TOKENIZER_FOLDER, SpeechTokenizer
from models.qwen3_tts.codec.random_weights import mean_and_std
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from models.qwen3_tts.config import ModelKind, parse_qwen3_tts_config
from models.qwen3_tts.load import talker_tensors

HERE = Path(__file__).parent
N_TEXT_TOKENS, WIDTH = 704, 32
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
PREDICTOR = {**HEADS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 32}
TALKER = {
    **HEADS,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 1056,
    "text_vocab_size": N_TEXT_TOKENS,
    "text_hidden_size": 32,
    "num_code_groups": 16,
    "rope_scaling": {"interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"},
    "codec_pad_id": 164,
    "codec_bos_id": 165,
    "codec_eos_token_id": 166,
    "codec_think_id": 170,
    "codec_nothink_id": 171,
    "codec_think_bos_id": 172,
    "codec_think_eos_id": 173,
    "codec_language_id": {"chinese": 119, "english": 114, "german": 117},
    "code_predictor_config": PREDICTOR,
}
IDS = ("im_start", "im_end", "assistant", "tts_pad", "tts_bos", "tts_eos")
SPEAKERS = {"serena": 964, "ryan": 965, "vivian": 966}
SPEAKER_ENCODER = {
    "enc_dim": WIDTH,
    "enc_channels": [8, 8, 8, 8, 24],
    "enc_attention_channels": 8,
    "enc_res2net_scale": 4,
    "enc_se_channels": 8,
}
CODEC = {
    "model_type": "qwen3_tts_tokenizer_12hz",
    "encoder_config": {
        **{"num_filters": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1, "num_quantizers": 16},
        **{"codebook_size": 32, "codebook_dim": 16},
    },
    "decoder_config": {
        **{"latent_dim": 32, "codebook_dim": 32, "codebook_size": 32, "decoder_dim": 32, "hidden_size": 32},
        **{"intermediate_size": 48, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
        **{"num_hidden_layers": 1, "sliding_window": 9},
    },
}


def build(out: Path, kind: ModelKind = "custom_voice") -> Path:
    """Write a checkpoint folder. Returns: the folder.

    kind: `base` has a speaker encoder, `custom_voice` three speakers, `voice_design` neither.
    """
    out.mkdir(parents=True, exist_ok=True)
    config: dict[str, object] = {
        "tts_model_type": kind,
        "tts_model_size": "1b7",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "talker_config": {**TALKER, **({"spk_id": SPEAKERS} if kind == "custom_voice" else {})},
        **text_ids(),
    }
    weights = {
        name: _talker_weight(name, shape) for name, shape in talker_tensors(parse_qwen3_tts_config(config)).items()
    }
    if kind == "base":
        config["speaker_encoder_config"] = SPEAKER_ENCODER
        with on_meta():
            speaker = SpeakerEncoder(parse_speaker_encoder_config(SPEAKER_ENCODER))
        weights |= {SPEAKER_PREFIX + name: _codec_weight(name, shape) for name, shape in tensor_shapes(speaker).items()}
    write_folder(out, config, weights)
    with on_meta():
        tokenizer = SpeechTokenizer(SpeechTokenizerConfig.model_validate(CODEC))
    codec = {name: _codec_weight(name, shape) for name, shape in tensor_shapes(tokenizer).items()}
    write_folder(out / TOKENIZER_FOLDER, CODEC, codec)
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(HERE / "tiny" / name, out / name)
    return out


def text_ids() -> dict[str, int]:
    """Keys of the configuration with the text tokens that frame a prompt, behind the vocabulary of `assets/tiny`."""
    return {f"{name}_token_id": N_TEXT_TOKENS - len(IDS) + index for index, name in enumerate(IDS)}


def write_folder(folder: Path, config: Mapping[str, object], weights: dict[str, Tensor]) -> None:
    """Write a configuration and weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")


def _talker_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1:
        return draw(name, shape, 0.02, 0.0 if name.endswith("bias") else 1.0)
    return draw(name, shape, 1 / math.sqrt(shape[1]))


def _codec_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    mean, std = mean_and_std(name, shape)
    return draw(f"codec.{name}", shape, std, mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=get_args(ModelKind), default="custom_voice")
    options = parser.parse_args()
    build(options.out, options.kind)
