"""Speech tokenizer and speaker encoder of a checkpoint folder: strict check of names and shapes, and the load itself.

The speech tokenizer is in the folder `speech_tokenizer/` of every checkpoint, and the same is published alone. The
speaker encoder is a part of a Base model's own weights.
"""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from models.checkpoint.config import read_json
from models.checkpoint.files import FLOAT_BYTES, StoredTensor, float_weight, list_tensors, read_tensors
from models.errors import CheckpointError, SettingsError
from models.layers.weights import Mismatch, Tree, assign_weights, on_meta, tensor_shapes
from models.qwen3_tts.codec.config import (
    CODE_GROUPS,
    SpeechTokenizerConfig,
    load_speech_tokenizer_config,
    parse_speaker_encoder_config,
)
from models.qwen3_tts.codec.decoder import SpeechDecoder
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from models.qwen3_tts.codec.speech_encoder import SpeechEncoder

TOKENIZER_FOLDER = "speech_tokenizer"
SPEAKER_PREFIX = "speaker_encoder."
SPEAKER_SECTION = "speaker_encoder_config"

# Released tensors that no forward reads: training flags, projections of the other direction, codebooks beyond those
# whose codes are kept.
_UNUSED = re.compile(
    r"encoder\.quantizer\.\w+\.layers\.\d+\.codebook\.initialized"
    r"|encoder\.quantizer\.\w+\.output_proj\.weight"
    r"|decoder\.quantizer\.rvq_(first|rest)\.input_proj\.weight"
)
_ACOUSTIC = re.compile(r"encoder\.quantizer\.acoustic_residual_vector_quantizer\.layers\.(\d+)\.")
# Tables and rates are computed from these in float32.
_FLOAT32 = re.compile(r"encoder\.|.*(\._codebook\.|\.alpha$|\.beta$)")


class SpeechTokenizer(nn.Module):
    """Encoder and decoder of the speech tokenizer, under the released names."""

    def __init__(self, config: SpeechTokenizerConfig):
        super().__init__()
        self.config = config
        self.encoder = SpeechEncoder(config.encoder_config)
        self.decoder = SpeechDecoder(config.decoder_config)


def load_speech_tokenizer(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> SpeechTokenizer:
    """The speech tokenizer in eval mode.

    Args:
        folder: with `config.json` and `model.safetensors`: `speech_tokenizer/` of a checkpoint, or the tokenizer alone.
        device: of all weights.
        dtype: of the decoder; the encoder is float32, because codes are nearest neighbours.
    Raises: ConfigError, CheckpointError that lists every missing, unexpected and misshapen tensor, SettingsError.
    """
    folder = Path(folder)
    config = load_speech_tokenizer_config(folder)
    with on_meta():
        tokenizer = SpeechTokenizer(config)
    return load_tree(tokenizer, folder, device, dtype, ignored=_is_unused)


def load_speaker_encoder(
    folder: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> SpeakerEncoder:
    """The speaker encoder of a Base checkpoint in eval mode.

    Args:
        folder: of the checkpoint, with `config.json` and its weights, of which those of the speaker encoder are read.
        device, dtype: of the weights.
    Raises: as `load_speech_tokenizer`; ConfigError also for a checkpoint without a speaker encoder.
    """
    folder = Path(folder)
    file = folder / "config.json"
    section = read_json(file).get(SPEAKER_SECTION)
    if not isinstance(section, dict):
        expected, got = f"{SPEAKER_SECTION} of a Base checkpoint", f"{section!r}"
        raise CheckpointError(str(file), expected=expected, got=got)
    with on_meta():
        encoder = SpeakerEncoder(parse_speaker_encoder_config(section, f"{file}: {SPEAKER_SECTION}"))
    return load_tree(encoder, folder, device, dtype, prefix=SPEAKER_PREFIX)


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of the weight `name` of a speech tokenizer whose decoder is `dtype`."""
    return torch.float32 if _FLOAT32.match(name) else dtype


def _is_unused(name: str) -> bool:
    if acoustic := _ACOUSTIC.match(name):
        return int(acoustic[1]) >= CODE_GROUPS - 1 or _UNUSED.fullmatch(name) is not None
    return _UNUSED.fullmatch(name) is not None


def load_tree(
    tree: Tree,
    folder: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    prefix: str = "",
    ignored: Callable[[str], bool] = lambda name: False,
) -> Tree:
    """The tree from the meta device with the weights of a folder.

    Args:
        tree: the modules.
        folder: with safetensors files.
        device, dtype: of the weights.
        prefix: of the tree's tensors; tensors with other names are not looked at.
        ignored: released names that the tree does not have.
    """
    if not dtype.is_floating_point:
        raise SettingsError("dtype", expected="a floating-point type", got=dtype)
    stored = _matched(tree, folder, prefix, ignored)
    names = {tensor: name for name, tensor in stored.items()}
    tensors: dict[str, Tensor] = {}
    for tensor, data in read_tensors(stored.values()):
        name = names[tensor]
        tensors[name] = float_weight(data, device, tensor.name).to(weight_dtype(name, dtype))
    return assign_weights(tree, tensors, device, dtype)


def _matched(tree: nn.Module, folder: Path, prefix: str, ignored: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """Name in the tree -> stored tensor. Raises: CheckpointError."""
    expected = tensor_shapes(tree)
    found, problems = list_tensors(folder)
    mismatch = Mismatch(str(folder), f"the {len(expected)} tensors that its config describes")
    mismatch.add("files", problems)
    stored = {tensor.name[len(prefix) :]: tensor for tensor in found if tensor.name.startswith(prefix)}
    shapes = {name: list(tensor.shape) for name, tensor in stored.items()}
    mismatch.add("missing", (f"{prefix}{name} {list(shape)}" for name, shape in expected.items() if name not in stored))
    extra = [name for name in stored if name not in expected and not ignored(name)]
    mismatch.add("unexpected", (f"{prefix}{name} {shapes[name]}" for name in extra))
    matched = {name: stored[name] for name in expected if name in stored}
    for name, tensor in matched.items():
        if tensor.shape != expected[name]:
            line = f"{prefix}{name}: expected {list(expected[name])}, got {shapes[name]}"
            mismatch.add("wrong shape", [line])
        if not tensor.is_weight:
            line = f"{prefix}{name}: expected one of {sorted(FLOAT_BYTES)}, got {tensor.dtype}"
            mismatch.add("wrong type", [line])
    mismatch.raise_if_any()
    return matched
