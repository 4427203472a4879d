"""Checkpoint to modules: renames of tensors, the strict check of names and shapes, and the load itself.

File formats are in `models.checkpoint`.
"""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from models.checkpoint.config import OmniConfig, load_config
from models.checkpoint.files import (
    ALONE_BYTES,
    FLOAT_BYTES,
    Stored,
    StoredTensor,
    list_tensors,
    on_device,
    read_pt,
    read_tensors,
)
from models.checkpoint.precision import UNQUANTIZED, Kind, Precision
from models.checkpoint.quantized import QuantizedMatrix, quantize
from models.errors import SettingsError
from models.layers.weights import Mismatch, assign_each, on_meta, tensor_shapes
from models.omni import OmniModel

# Patterns of other spellings and their replacements, applied in this order to every stored name.
RENAMES: tuple[tuple[str, str], ...] = (
    # Wrappers that add a segment to names: data parallel, torch.compile, sharded training.
    (r"(^|\.)(?:(?:module|_orig_mod|_fsdp_wrapped_module)\.)+", r"\1"),
    # Weight norm before it became a parametrization.
    (r"^(tts\.head_code\.\d+)\.weight_g$", r"\1.parametrizations.weight.original0"),
    (r"^(tts\.head_code\.\d+)\.weight_v$", r"\1.parametrizations.weight.original1"),
)

_PROGRESS_FROM_BYTES = 1_000_000_000
_MIN_MAPPED_BYTES = 1 << 16


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision = UNQUANTIZED,
    pt_path: str | Path | None = None,
    progress: bool | None = None,
) -> OmniModel:
    """The model of a checkpoint folder in eval mode, every weight on `device`, quantised or as `dtype`.

    Tensors are moved one by one from the memory-mapped file to the device, without a second full copy on the host. On
    the CPU, a large weight stored as `dtype` stays mapped to its file. A matrix that is stored in the kind that
    `precision` asks for is used as it is; others are rounded, or become `dtype`, on the device.

    Args:
        path: folder with `config.json`, and `model.safetensors` or its shards and index.
        precision: which linear layers are quantised, and how.
        pt_path: a `.pt` state dict with any subset of the tensors, which replace those of the checkpoint.
        progress: show a progress bar on stderr; None shows it for loads above 1 GB.
    Raises:
        ConfigError: `config.json` is invalid.
        CheckpointError: lists every missing, unexpected and misshapen tensor and every damaged file at once.
        SettingsError: `dtype` is not a floating-point type.
    """
    if not dtype.is_floating_point:
        raise SettingsError("dtype", expected="a floating-point type", got=dtype)
    path = Path(path)
    config = load_config(path)
    model = build_on_meta(config)
    overrides = {} if pt_path is None else _overrides(Path(pt_path), config, tensor_shapes(model))
    stored = _match(path, config, tensor_shapes(model), overrides)

    # A tensor that stays mapped keeps the pages of all tensors around it, which a quantised model does not use.
    copied = _MIN_MAPPED_BYTES if precision == UNQUANTIZED else ALONE_BYTES

    def place(name: str, data: Stored) -> Tensor | QuantizedMatrix:
        return _place(
            f"{path}: {name}", data, device, weight_dtype(name, dtype), precision.kind_of(name, expected[name]), copied
        )

    expected = tensor_shapes(model)
    n_bytes = sum(tensor.n_bytes for tensor in stored.values())
    show = n_bytes > _PROGRESS_FROM_BYTES if progress is None else progress
    names = {tensor: name for name, tensor in stored.items()}

    def weights() -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        while overrides:
            name, override = overrides.popitem()
            yield name, place(name, override)
        with tqdm(total=n_bytes, desc=f"load {path.name}", unit="B", unit_scale=True, disable=not show) as bar:
            for tensor, data in read_tensors(stored.values()):
                placed = place(names[tensor], data)
                del data  # pages of the file that are mapped
                yield names[tensor], placed
                del placed
                bar.update(tensor.n_bytes)

    return assign_each(model, weights(), device, dtype)


def build_on_meta(config: OmniConfig) -> OmniModel:
    """The module tree on the meta device: names and shapes without memory."""
    with on_meta():
        return OmniModel(config)


def expected_tensors(config: OmniConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint with this config must contain."""
    return tensor_shapes(build_on_meta(config))


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight: the model's, or float32 for the parts of a parametrized weight."""
    return torch.float32 if ".parametrizations." in name else dtype


def _place(
    name: str, data: Stored, device: torch.device | str, dtype: torch.dtype, kind: Kind | None, copied: int
) -> Tensor | QuantizedMatrix:
    """The weight on the device.

    Args:
        name: for errors.
        copied: tensors of fewer bytes do not stay mapped.
    Raises: CheckpointError for values that are not finite, of those that are rounded here or stored as fp8.
    """
    # Device first: the smaller stored type crosses the bus. On the CPU, a tensor of the right type is not copied.
    placed = on_device(data, device, name)
    if isinstance(placed, QuantizedMatrix) and placed.kind == kind:
        return placed
    weight = placed.dequantized() if isinstance(placed, QuantizedMatrix) else placed
    if kind is not None:
        return quantize(weight, kind, name)
    return weight.to(dtype, copy=weight.nbytes < copied)


def renamed(name: str) -> str:
    """The name in the model of a stored name."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _ignored_prefixes(config: OmniConfig) -> tuple[str, ...]:
    """Prefixes of tensors that a full checkpoint contains and the config excludes from the model."""
    last_vision_layer = config.vision_config.num_hidden_layers - 1
    rules = (
        (config.drop_vision_last_layer, (f"vpm.encoder.layers.{last_vision_layer}.",)),
        (not config.init_vision, ("vpm.", "resampler.")),
        (not config.init_audio, ("apm.", "audio_projection_layer.")),
        (not config.init_tts, ("tts.",)),
    )
    return tuple(chain.from_iterable(prefixes for applies, prefixes in rules if applies))


def _expectation(expected: dict[str, tuple[int, ...]]) -> str:
    return f"the {len(expected)} tensors that config.json describes"


def _match(
    path: Path, config: OmniConfig, expected: dict[str, tuple[int, ...]], overrides: dict[str, Tensor]
) -> dict[str, StoredTensor]:
    """Name in the model -> stored tensor, without those that are overridden. Raises: CheckpointError."""
    found, file_problems = list_tensors(path)
    mismatch = Mismatch(str(path), _expectation(expected))
    mismatch.add("files", file_problems)

    ignored = _ignored_prefixes(config)
    matched: dict[str, StoredTensor] = {}
    for tensor in found:
        name = renamed(tensor.name)
        if name not in expected:
            if not name.startswith(ignored):
                mismatch.add("unexpected", [f"{tensor.name} {list(tensor.shape)} in {tensor.file.name}"])
        elif name in matched:
            mismatch.add("stored twice", [f"{name} as {matched[name].name} and {tensor.name}"])
        else:
            matched[name] = tensor

    missing = [name for name in expected if name not in matched and name not in overrides]
    mismatch.add("missing", (f"{name} {list(expected[name])}" for name in missing))
    for name, tensor in matched.items():
        if tensor.shape != expected[name]:
            mismatch.add("wrong shape", [f"{name}: expected {list(expected[name])}, got {list(tensor.shape)}"])
        if not tensor.is_weight:
            mismatch.add("wrong type", [f"{name}: expected one of {sorted(FLOAT_BYTES)}, got {tensor.dtype}"])
    mismatch.raise_if_any()
    return {name: tensor for name, tensor in matched.items() if name not in overrides}


def _overrides(path: Path, config: OmniConfig, expected: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Name in the model -> tensor of the `.pt` file. Raises: CheckpointError."""
    mismatch = Mismatch(str(path), _expectation(expected))
    ignored = _ignored_prefixes(config)
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in read_pt(path).items():
        name = renamed(stored_name)
        if name not in expected:
            if not name.startswith(ignored):
                mismatch.add("unexpected", [f"{stored_name} {list(tensor.shape)}"])
        elif name in tensors:
            mismatch.add("stored twice", [name])
        elif tuple(tensor.shape) != expected[name]:
            mismatch.add("wrong shape", [f"{name}: expected {list(expected[name])}, got {list(tensor.shape)}"])
        else:
            tensors[name] = tensor
    mismatch.raise_if_any()
    return tensors
