"""Builds `assets/tiny`: a complete checkpoint in the released layout with random weights, small enough to commit.

Run `python -m assets.build_tiny` from the root. The result depends only on this file, its corpus and the module tree,
not on the machine: values are made of integer bit streams and exact float operations.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from assets.byte_bpe import Vocabulary, byte_spelling, train, write_files, write_json
from assets.draw import draw
from models.checkpoint.config import parse_config
from models.checkpoint.files import INDEX
from models.load import expected_tensors

HERE = Path(__file__).parent
N_TRAINED_TOKENS = 638
SHARD_BYTES = 3_000_000

# Base vocabulary entries that no merge produces, as in the released tokenizer.
UNREACHABLE = ("</s>", "<unk>")
# Added tokens that are not special: decoding never skips them.
ORDINARY = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
# The released tokenizer's added tokens in their order.
ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *ORDINARY,
    *(f"<{close}{name}>" for name in ("image", "ref", "box", "quad", "point", "slice") for close in ("", "/")),
    *(f"<{close}{name}>" for name in ("image_id", "unit", "answer", "focus", "line") for close in ("", "/")),
    *(f"<{close}{name}>" for name in ("perception", "source_image", "image_save_to") for close in ("", "/")),
    *("<|audio_start|>", "<|audio|>", "<|audio_end|>", "<|spk_bos|>", "<|spk|>", "<|spk_eos|>"),
    *("<|tts_bos|>", "<|tts_eos|>", "<|listen|>", "<|speak|>", "<|interrupt|>", "<|vad_start|>", "<|vad_end|>"),
    *(f"<|{name}_{edge}|>" for name in ("emotion", "speed", "pitch") for edge in ("start", "end")),
    *("<|turn_bos|>", "<|turn_eos|>", "<|chunk_eos|>", "<|chunk_bos|>", "<|chunk_tts_bos|>", "<|chunk_tts_eos|>"),
    "<|tts_pad|>",
    *(f"<|timbre_{i}|>" for i in range(7, 32)),
)
# Tokens that steer a conversation. The output rows of all other added tokens are small, so that samples are text.
DECISIONS = ("<|endoftext|>", "<|im_end|>", "<|tts_eos|>", "<|listen|>", "<|speak|>", "<|turn_eos|>", "<|chunk_eos|>")

# Conversations with tools, in the form of the released template: calls and results are JSON between markers.
CHAT_TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nA call is <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if loop.first and message.role == 'system' %}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- if use_tts_template %}{{ '<|tts_bos|>' }}{% endif %}
{%- endif %}"""


def config_json(ids: dict[str, int]) -> dict[str, Any]:
    """`config.json`. Position tables and the vocabulary of speech tokens have the required released sizes."""
    return {
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "version": "4.5",
        "torch_dtype": "float32",
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": len(ids),
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "query_num": 64,
        "image_size": 448,
        "drop_vision_last_layer": False,
        "batch_vision_input": True,
        "use_image_id": True,
        "vision_batch_size": 16,
        "slice_config": {"patch_size": 14, "scale_resolution": 448, "max_slice_nums": 1},
        "audio_pool_step": 5,
        "audio_chunk_length": 1.0,
        "stream_input": True,
        "init_vision": True,
        "init_audio": True,
        "init_tts": True,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_channels": 3,
            "patch_size": 14,
            "image_size": 980,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 256,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "activation_function": "gelu",
            "scale_embedding": False,
        },
        "tts_config": {
            "backbone_model": "llama",
            "llm_dim": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": 32,
            "num_audio_tokens": 6562,
            "num_text_tokens": 768,
            "num_vq": 1,
            "projector_type": "mlp",
            "condition_type": "hidden_text_merge",
            "normalize_projected_hidden": True,
            "attention_type": "full_attention",
            "audio_bos_token_id": ids["<focus>"],
            "text_eos_token_id": ids["</perception>"],
        },
    }


def preprocessor_json() -> dict[str, Any]:
    return {
        "max_slice_nums": 9,
        "scale_resolution": 448,
        "patch_size": 14,
        "use_image_id": True,
        "image_feature_size": 64,
        "slice_mode": True,
        "im_start": "<image>",
        "im_end": "</image>",
        "slice_start": "<slice>",
        "slice_end": "</slice>",
        "unk": "<unk>",
        "im_id_start": "<image_id>",
        "im_id_end": "</image_id>",
        "audio_pool_step": 5,
        "norm_mean": [0.5, 0.5, 0.5],
        "norm_std": [0.5, 0.5, 0.5],
        "version": 4.5,
    }


def tokenizer_extra(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<unk>",
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "bad_token_ids": unspeakable(vocabulary),
    }


def unspeakable(vocabulary: Vocabulary) -> list[int]:
    """Ids of trained tokens that are not whole characters or contain control characters; they cannot be voiced."""
    byte_of = {character: byte for byte, character in byte_spelling().items()}

    def speakable(token: str) -> bool:
        try:
            return bytes(byte_of[character] for character in token).decode().isprintable()
        except UnicodeDecodeError:
            return False

    trained = vocabulary.tokens[:N_TRAINED_TOKENS]
    return [i for i, token in enumerate(trained) if not speakable(token)]


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """One tensor without trivial values, so that ignoring a bias or a norm changes the output."""
    if name.endswith("original0"):
        return draw(
            name, shape, std=0.3, mean=3.0
        )  # row norms of the speech head: they set how peaked its distribution is
    if len(shape) == 1:
        return draw(name, shape, std=0.1, mean=0.0 if name.endswith("bias") else 1.0)
    if name.endswith(("embed_tokens.weight", "emb_text.weight", "emb_code.0.weight", "resampler.query")):
        return draw(name, shape, std=1.0)
    if name.endswith(("position_embedding.weight", "embed_positions.weight")):
        return draw(name, shape, std=0.3)
    return draw(name, shape, std=1 / math.sqrt(math.prod(shape[1:])))


def weights(config: dict[str, Any], ids: dict[str, int], silent: list[int]) -> dict[str, Tensor]:
    tensors = {name: weight(name, shape) for name, shape in expected_tensors(parse_config(config)).items()}
    gain = torch.full((len(ids), 1), 0.25)
    gain[[i for token, i in ids.items() if token not in UNREACHABLE + ADDED or token in DECISIONS]] = 4.0
    gain[silent] = 0.25
    tensors["llm.lm_head.weight"] *= gain
    return tensors


def write_weights(out: Path, tensors: dict[str, Tensor]) -> None:
    """Write shards of at most SHARD_BYTES, filled in the order of the module tree, and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def build(out: Path) -> None:
    """Write the checkpoint folder; files of an earlier build are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("*.safetensors"):
        stale.unlink()
    trained = train((HERE / "tiny_corpus.txt").read_text(encoding="utf-8"), N_TRAINED_TOKENS)
    vocabulary = Vocabulary([*trained.tokens, *UNREACHABLE], trained.merges)
    base = {token: i for i, token in enumerate(vocabulary.tokens)}
    added = {token: len(base) + i for i, token in enumerate(ADDED)}
    ids = base | added
    write_files(
        out,
        vocabulary,
        added={"<unk>": base["<unk>"]} | added,
        special={"<unk>", *ADDED} - set(ORDINARY),
        extra=tokenizer_extra(vocabulary),
    )
    config = config_json(ids)
    write_json(out / "config.json", config)
    write_json(out / "preprocessor_config.json", preprocessor_json())
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_weights(out, weights(config, ids, unspeakable(vocabulary)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "tiny")
    build(parser.parse_args().out)
