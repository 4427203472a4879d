"""Files of a checkpoint in the released layout: tokenizer, configuration, chat template, random weights.

Does not contain dimensions or text: `build_tiny` and `training` have their own.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from assets.byte_bpe import Vocabulary, byte_spelling, write_files, write_json
from assets.draw import draw
from models.checkpoint.checksums import INDEX
from models.checkpoint.config import parse_config
from models.load import expected_tensors

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


@dataclass(frozen=True)
class Stack:
    """A stack of transformer layers. inner: hidden width of the MLP."""

    width: int
    inner: int
    n_layers: int
    heads: int


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a checkpoint.

    Args:
        llm, vision, audio, speech: stacks of `llm`, `vpm`, `apm` and `tts`; `audio.inner` is four times its width.
        kv_heads, head_dim: of `llm`.
        n_text_tokens: rows of the speech model's table of text tokens, at least the vocabulary.
        image_side: side of the vision encoder's position table in pixels.
    """

    llm: Stack
    kv_heads: int
    head_dim: int
    vision: Stack
    audio: Stack
    speech: Stack
    n_text_tokens: int
    image_side: int = 980


@dataclass(frozen=True)
class Lexicon:
    """A vocabulary with the released tokenizer's added tokens. ids: all entries."""

    base: Vocabulary
    added: dict[str, int]
    ids: dict[str, int]

    @classmethod
    def of(cls, trained: Vocabulary) -> "Lexicon":
        vocabulary = Vocabulary([*trained.tokens, *UNREACHABLE], trained.merges)
        base = {token: i for i, token in enumerate(vocabulary.tokens)}
        added = {token: len(base) + i for i, token in enumerate(ADDED)}
        return cls(vocabulary, {"<unk>": base["<unk>"]} | added, base | added)


def config_json(ids: dict[str, int], sizes: Sizes, dtype: str = "float32") -> dict[str, Any]:
    """`config.json`. The audio position table and the vocabulary of speech tokens have the released sizes."""
    llm, vision, audio, speech = sizes.llm, sizes.vision, sizes.audio, sizes.speech
    return {
        "architectures": ["MiniCPMO"],
        "model_type": "minicpmo",
        "version": "4.5",
        "torch_dtype": dtype,
        "hidden_size": llm.width,
        "intermediate_size": llm.inner,
        "num_hidden_layers": llm.n_layers,
        "num_attention_heads": llm.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
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
            "hidden_size": vision.width,
            "intermediate_size": vision.inner,
            "num_hidden_layers": vision.n_layers,
            "num_attention_heads": vision.heads,
            "num_channels": 3,
            "patch_size": 14,
            "image_size": sizes.image_side,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
        "audio_config": {
            "d_model": audio.width,
            "encoder_layers": audio.n_layers,
            "encoder_attention_heads": audio.heads,
            "encoder_ffn_dim": audio.inner,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "activation_function": "gelu",
            "scale_embedding": False,
        },
        "tts_config": {
            "backbone_model": "llama",
            "llm_dim": llm.width,
            "hidden_size": speech.width,
            "intermediate_size": speech.inner,
            "num_hidden_layers": speech.n_layers,
            "num_attention_heads": speech.heads,
            "num_key_value_heads": speech.heads,
            "max_position_embeddings": 4096,
            "vocab_size": 32,
            "num_audio_tokens": 6562,
            "num_text_tokens": sizes.n_text_tokens,
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

    trained = vocabulary.tokens[: -len(UNREACHABLE)]
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


def random_weights(config: dict[str, Any], lexicon: Lexicon) -> dict[str, Tensor]:
    """All tensors of a model whose samples are text and decisions."""
    ids, silent = lexicon.ids, unspeakable(lexicon.base)
    tensors = {name: weight(name, shape) for name, shape in expected_tensors(parse_config(config)).items()}
    gain = torch.full((len(ids), 1), 0.25)
    gain[[i for token, i in ids.items() if token not in UNREACHABLE + ADDED or token in DECISIONS]] = 4.0
    gain[silent] = 0.25
    tensors["llm.lm_head.weight"] *= gain
    return tensors


def write_weights(out: Path, tensors: dict[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write shards of at most `shard_bytes`, filled in the order of the module tree, and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_text_files(out: Path, lexicon: Lexicon, config: dict[str, Any]) -> None:
    """Write everything of a checkpoint but its weights: tokenizer, configuration and chat template."""
    special = {"<unk>", *ADDED} - set(ORDINARY)
    write_files(out, lexicon.base, added=lexicon.added, special=special, extra=tokenizer_extra(lexicon.base))
    write_json(out / "config.json", config)
    write_json(out / "preprocessor_config.json", preprocessor_json())
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
