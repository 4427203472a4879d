"""Chatterbox's checkpoint file to `S3Gen`: sizes from shapes, and the strict check before weights are assigned.

Contains the names in the file and its two formats. Does not contain the networks.
"""

from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint.pt_errors import pt_failure
from models.errors import CheckpointError, SettingsError
from models.layers.weights import Mismatch, assign_weights, on_meta, tensor_shapes
from models.token2wav.load.parts import hift_config_of
from models.token2wav.load.weight_norm import fold_weight_norm
from models.token2wav.prompt import campplus, s3_tokenizer
from models.token2wav.s3gen import unet
from models.token2wav.s3gen.model import S3Gen
from models.token2wav.settings import EncoderConfig, S3FlowConfig, S3GenConfig

FLOW, VOCODER, SPEAKER_ENCODER, TOKENIZER = "flow.", "mel2wav.", "speaker_encoder.", "tokenizer."
_ESTIMATOR = "decoder.estimator."
_RECOMPUTED = {"tokenizer._mel_filters", "tokenizer.window"}  # constants that some checkpoints store
_COUNTER = ".num_batches_tracked"  # of batch norms, used in training only

Shapes = dict[str, tuple[int, ...]]


def load_s3gen(path: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> S3Gen:
    """The model in eval mode. A checkpoint that contains `time_embed_mixer.weight` is the mean-flow variant.

    Args:
        path: `s3gen.safetensors`, `s3gen_meanflow.safetensors` or a `.pt` file with the same names.
        device: of the model.
        dtype: of the flow; vocoder, speaker encoder and tokenizer are float32.
    Raises: CheckpointError that lists every tensor that is missing, unexpected, of a wrong shape or not finite;
        SettingsError.
    """
    if not dtype.is_floating_point:
        raise SettingsError("dtype", expected="a floating-point type", got=dtype)
    path = Path(path)
    stored = {name: tensor for name, tensor in _read(path).items() if not _is_ignored(name)}
    mismatch = Mismatch(str(path), "the tensors of S3Gen")
    mismatch.add("no float tensor", (f"{k}: {_kind(v)}" for k, v in stored.items() if not _is_float(v)))
    mismatch.add("absent part", (prefix for prefix, part in _parts(stored).items() if not part))
    mismatch.raise_if_any()

    tensors = _fold(stored)
    with on_meta():
        model = S3Gen(_config_of(tensors, path))
    _compare(tensors, tensor_shapes(model), mismatch)
    mismatch.raise_if_any()
    placed = {name: tensor.to(device).to(weight_dtype(name, dtype)) for name, tensor in tensors.items()}
    mismatch.add("not finite", (name for name, tensor in placed.items() if not tensor.isfinite().all()))
    mismatch.raise_if_any()
    return assign_weights(model, placed, device, dtype)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(path), expected="a complete safetensors or .pt file", got=error) from None
    except Exception as error:  # the errors of torch.load have no common base class
        raise CheckpointError(str(path), expected="a state dict saved by torch.save", got=pt_failure(error)) from None
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise CheckpointError(str(path), expected="a dict of named tensors", got=type(loaded).__name__)
    return loaded


def _is_ignored(name: str) -> bool:
    return name in _RECOMPUTED or name.endswith(_COUNTER)


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _parts(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by part, without the part's prefix in their names."""
    return {prefix: _below(tensors, prefix) for prefix in (FLOW, VOCODER, SPEAKER_ENCODER, TOKENIZER)}


def _below(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _fold(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with weight norms and batch norms folded into plain weights."""
    parts = _parts(stored)
    other = {name: tensor for name, tensor in stored.items() if not name.startswith(tuple(parts))}
    parts[VOCODER] = fold_weight_norm(parts[VOCODER])
    parts[SPEAKER_ENCODER] = campplus.fold_batch_norms(parts[SPEAKER_ENCODER])
    return other | {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.items()}


def _config_of(tensors: dict[str, Tensor], path: Path) -> S3GenConfig:
    parts = _parts(tensors)
    try:
        return S3GenConfig(
            flow=_flow_config_of(parts[FLOW]),
            vocoder=hift_config_of(parts[VOCODER], path),
            speaker_encoder=campplus.config_of(parts[SPEAKER_ENCODER]),
            tokenizer=s3_tokenizer.config_of(parts[TOKENIZER]),
        )
    except ValidationError as error:
        got = "; ".join(problem["msg"] for problem in error.errors())
        raise CheckpointError(str(path), expected="parts whose sizes fit each other", got=got) from None


def _flow_config_of(tensors: dict[str, Tensor]) -> S3FlowConfig:
    """The sizes that shapes determine. Raises: CheckpointError if one of these tensors is missing or has other axes."""
    first = "encoder.encoders.0."
    names = {
        "input_embedding.weight": 2,
        "spk_embed_affine_layer.weight": 2,
        f"{first}self_attn.pos_bias_u": 2,
        f"{first}feed_forward.w_1.weight": 2,
        "encoder.pre_lookahead_layer.conv1.weight": 3,
    }
    shapes = {name: list(tensors[name].shape) if name in tensors else [] for name in names}
    odd = [f"{name} {shapes[name]}" for name, n_axes in names.items() if len(shapes[name]) != n_axes]
    if odd:
        expected = ", ".join(f"{name} with {n} axes" for name, n in names.items())
        raise CheckpointError("flow", expected=expected, got=", ".join(odd))
    (vocab_size, width), (n_mels, speaker_dim), (heads, _), (inner, _), (*_, taps) = shapes.values()
    encoder = EncoderConfig(
        width=width,
        heads=heads,
        inner=inner,
        n_layers=_count(tensors, "encoder.encoders."),
        n_up_layers=_count(tensors, "encoder.up_encoders."),
        lookahead=taps - 1,
    )
    estimator = unet.config_of(_below(tensors, _ESTIMATOR))
    return S3FlowConfig(
        vocab_size=vocab_size, n_mels=n_mels, speaker_dim=speaker_dim, encoder=encoder, estimator=estimator
    )


def _count(tensors: dict[str, Tensor], prefix: str) -> int:
    return len({name.partition(".")[0] for name in _below(tensors, prefix)})


def _compare(tensors: dict[str, Tensor], expected: Shapes, mismatch: Mismatch) -> None:
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    mismatch.add("missing", (f"{name} {list(expected[name])}" for name in expected if name not in got))
    mismatch.add("unexpected", (f"{name} {list(got[name])}" for name in got if name not in expected))
    wrong = (name for name in expected if name in got and got[name] != expected[name])
    mismatch.add("wrong shape", (f"{name}: expected {list(expected[name])}, got {list(got[name])}" for name in wrong))


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a tensor if the flow has this one; all else is float32."""
    return dtype if name.startswith(FLOW) else torch.float32
