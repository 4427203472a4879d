"""Decoder stacks, audio encoder and vision encoder against the classes of `transformers`, with the same random weights.

Tolerance: 1e-4 on hidden states of size about 1. Both sides compute in float32 on a CPU and differ in the order of sums
(fused attention, slot caches, packed heads); the differences measured are below 1e-5, and an error in a formula, a mask
or a position is above 1e-2.
"""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.checkpoint.config import OmniConfig, load_config
from models.layers.apm import UNIT_ROWS, Apm
from models.layers.backend import TORCH
from models.layers.kv_cache import KVCache
from models.layers.transformer import Backbone, DecoderConfig
from models.layers.vpm import Vpm
from tests.models.compare import assert_close

# The tests import the classes: importing them takes seconds, which every process of a parallel run would spend.
TOLERANCE = 1e-4
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 50, "rms_norm_eps": 1e-6}
HEADS = {"num_attention_heads": 4, "head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 5e4}


@pytest.fixture(scope="module")
def config(tiny: Path) -> OmniConfig:
    return load_config(tiny)


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with random weights that keep hidden states near size 1: no norm is the identity, no bias is zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() > 1:
            weight.data = noise / math.sqrt(weight[0].numel()) if "embed" not in name else noise
        else:
            weight.data = 0.1 * noise + ("norm" in name and name.endswith("weight"))
    return module.requires_grad_(False).eval()


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoders(name: str) -> tuple[Backbone, nn.Module, int]:
    """A stack of each side with the same weights, and the number of key-value heads."""
    from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

    kv_heads = {"qwen3": 2, "llama": 4}[name]
    shared = {
        **SIZES,
        **HEADS,
        "num_key_value_heads": kv_heads,
        "rope_parameters": ROPE,
        "attn_implementation": "eager",
    }
    theirs = Qwen3Model(Qwen3Config(**shared)) if name == "qwen3" else LlamaModel(LlamaConfig(**shared))
    ours = Backbone(
        DecoderConfig(
            vocab_size=SIZES["vocab_size"],
            width=SIZES["hidden_size"],
            inner=SIZES["intermediate_size"],
            n_layers=SIZES["num_hidden_layers"],
            heads=HEADS["num_attention_heads"],
            kv_heads=kv_heads,
            head_dim=HEADS["head_dim"],
            eps=SIZES["rms_norm_eps"],
            rope_theta=ROPE["rope_theta"],
            qk_norm=name == "qwen3",
        )
    )
    ours.load_state_dict(randomized(theirs).state_dict())
    ours.derive("cpu", torch.float32)
    return ours.requires_grad_(False), theirs, kv_heads


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_decoder_stack_equals_transformers(name: str) -> None:
    """Two slots, filled in steps of several rows and of one row, with padding, against one pass over each sequence."""
    ours, theirs, kv_heads = decoders(name)
    lengths, n_layers = {1: 19, 0: 14}, SIZES["num_hidden_layers"]
    embeds = {slot: draw(n, SIZES["hidden_size"], seed=slot) for slot, n in lengths.items()}
    cache = KVCache(
        n_layers=n_layers, n_slots=2, max_len=32, kv_heads=kv_heads, head_dim=16, dtype=torch.float32, device="cpu"
    )
    slots, hidden = torch.tensor(list(lengths)), {slot: [] for slot in lengths}
    while any(cache.lengths[slot] < n for slot, n in lengths.items()):
        starts = cache.lengths[slots].tolist()
        width = 8 if starts[0] < 16 else 1
        counts = [min(width, n - start) for n, start in zip(lengths.values(), starts, strict=True)]
        rows = torch.full((2, width, SIZES["hidden_size"]), 3.0)
        for row, (slot, start, count) in enumerate(zip(lengths, starts, counts, strict=True)):
            rows[row, :count] = embeds[slot][start : start + count]
        out = ours(rows, cache, slots, torch.tensor(counts), 32, TORCH)
        for row, (slot, count) in enumerate(zip(lengths, counts, strict=True)):
            hidden[slot].append(out[row, :count])
    for slot in lengths:
        expected = theirs(inputs_embeds=embeds[slot][None]).last_hidden_state[0]
        assert_close(torch.cat(hidden[slot]), expected, TOLERANCE, f"{name}, slot {slot}")


@pytest.fixture(scope="module")
def whisper(config: OmniConfig) -> tuple[Apm, nn.Module]:
    """Encoders of each side with the same weights and a table of two seconds."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    audio = config.audio_config.model_copy(update={"max_source_positions": 2 * UNIT_ROWS})
    theirs = WhisperEncoder(
        WhisperConfig(
            d_model=audio.d_model,
            encoder_layers=audio.encoder_layers,
            encoder_attention_heads=audio.encoder_attention_heads,
            encoder_ffn_dim=audio.encoder_ffn_dim,
            num_mel_bins=audio.num_mel_bins,
            max_source_positions=audio.max_source_positions,
            attn_implementation="eager",
        )
    )
    ours = Apm(audio)
    ours.load_state_dict(randomized(theirs).state_dict())
    return ours.requires_grad_(False), theirs


def test_audio_encoder_equals_transformers(whisper: tuple[Apm, nn.Module]) -> None:
    ours, theirs = whisper
    mel = draw(2, ours.conv1.in_channels, 4 * UNIT_ROWS)
    n_frames = torch.tensor([4 * UNIT_ROWS] * 2)
    got = ours.encode(mel, n_frames, n_frames // 2, chunk=0)
    assert_close(got, theirs(mel).last_hidden_state, TOLERANCE, "apm")


def test_chunked_audio_layers_equal_transformers_with_a_mask(whisper: tuple[Apm, nn.Module]) -> None:
    """A row attends to its own chunk and all earlier ones; in `transformers` that is an attention mask per layer."""
    ours, theirs = whisper
    mel, chunk = draw(1, ours.conv1.in_channels, 4 * UNIT_ROWS, seed=2), UNIT_ROWS // 2
    n_frames = torch.tensor([4 * UNIT_ROWS])
    x = nn.functional.gelu(theirs.conv2(nn.functional.gelu(theirs.conv1(mel)))).transpose(1, 2)
    x = x + theirs.embed_positions.weight
    index = torch.arange(x.shape[1]) // chunk
    mask = torch.zeros(1, 1, len(index), len(index)).masked_fill(index > index[:, None], torch.finfo(x.dtype).min)
    for layer in theirs.layers:
        out = layer(x, attention_mask=mask)
        x = out[0] if isinstance(out, tuple) else out
    got = ours.encode(mel, n_frames, n_frames // 2, chunk)
    assert_close(got, theirs.layer_norm(x), TOLERANCE, "apm in chunks")


def test_vision_encoder_equals_transformers(config: OmniConfig) -> None:
    """A batch of two images, each followed by padding patches, which are masked."""
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    side, patch = 6, config.vision_config.patch_size
    vision = config.vision_config.model_copy(update={"image_size": side * patch})
    theirs = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=vision.hidden_size,
            intermediate_size=vision.intermediate_size,
            num_hidden_layers=vision.num_hidden_layers,
            num_attention_heads=vision.num_attention_heads,
            image_size=vision.image_size,
            patch_size=patch,
            layer_norm_eps=vision.layer_norm_eps,
            vision_use_head=False,
            attn_implementation="eager",
        )
    )
    weights = {name.removeprefix("vision_model."): weight for name, weight in randomized(theirs).state_dict().items()}
    ours = Vpm(vision).requires_grad_(False)
    ours.load_state_dict(weights)

    images, n_patches, n_padding = draw(2, 3, side * patch, side * patch), side * side, 5
    patches = nn.functional.unfold(images, patch, stride=patch).transpose(1, 2)
    patches = torch.cat((patches, torch.full((2, n_padding, patches.shape[2]), 7.0)), dim=1)
    ids = torch.cat((torch.arange(n_patches), torch.zeros(n_padding, dtype=torch.int64))).expand(2, -1)
    mask = (torch.arange(n_patches + n_padding) < n_patches).expand(2, -1)
    got = ours(patches, ids, mask, TORCH)[:, :n_patches]
    assert_close(got, theirs(images).last_hidden_state, TOLERANCE, "vpm")
