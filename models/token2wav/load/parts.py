"""A vocoder folder to modules: files, names, and the strict check before any weight is assigned.

Supports both layouts of the folder. The older one has HiFT in `hift.pt`. The newer one has a vocoder of another design
there and HiFT in `hift_original.pt`, whose presence identifies the layout. Does not contain file formats (`checkpoint`,
`onnx_container`, `flow_yaml`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.checkpoint.files import read_pt, read_stored_pt
from models.checkpoint.precision import UNQUANTIZED, Kind, Precision
from models.checkpoint.quantized import QuantizedMatrix, quantize
from models.errors import CheckpointError, SettingsError
from models.layers.quantized import Weight
from models.layers.weights import Mismatch, Tree, assign_each, on_meta, tensor_shapes
from models.token2wav.flow.flow import Flow
from models.token2wav.hift import hift
from models.token2wav.hift.hift import Hift
from models.token2wav.load.flow_yaml import load_flow_config
from models.token2wav.load.onnx_container import read_onnx
from models.token2wav.load.onnx_names import first_norm_eps, speaker_tensors, tokenizer_tensors
from models.token2wav.load.weight_norm import fold_weight_norm
from models.token2wav.prompt import campplus, s3_tokenizer
from models.token2wav.prompt.campplus import CampPlus, fold_batch_norms
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.settings import FlowConfig, HiftConfig

FLOW_YAML, FLOW, HIFT = "flow.yaml", "flow.pt", "hift.pt"
HIFT_ORIGINAL = "hift_original.pt"  # only in the newer layout
SPEAKER_ENCODER, SPEECH_TOKENIZER = "campplus.onnx", "speech_tokenizer_v2_25hz.onnx"

_HIFT_PREFIX = "generator."  # some checkpoints store HiFT under this name

DtypeOf = Callable[[str], torch.dtype]
KindOf = Callable[[str, tuple[int, ...]], Kind | None]  # by name and shape


@dataclass(frozen=True)
class FlowAndHift:
    """The modules that turn speech tokens into sound, given a prepared voice."""

    flow: Flow
    hift: Hift


@dataclass(frozen=True)
class VoiceParts:
    """The modules that prepare a voice."""

    speaker_encoder: CampPlus
    speech_tokenizer: S3Tokenizer


@dataclass(frozen=True)
class Token2WavParts:
    """All modules of the folder."""

    flow: Flow
    hift: Hift
    speaker_encoder: CampPlus
    speech_tokenizer: S3Tokenizer

    @property
    def config(self) -> FlowConfig:
        """The flow's settings; the other modules have their own."""
        return self.flow.config


def load_token2wav(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    hift_dtype: torch.dtype = torch.float32,
) -> Token2WavParts:
    """All modules of a vocoder folder in eval mode.

    Args:
        folder: path of the folder.
        device: of all modules.
        dtype: of the flow. On the CPU in float32 its weights stay mapped to their file.
        hift_dtype: of HiFT's convolutions. Its sensitive modules and the modules that prepare voices are float32.
    Raises: ConfigError; CheckpointError that lists every missing file, or else every tensor that is missing,
        unexpected, of a wrong shape or not finite.
    """
    folder = Path(folder)
    _require(folder, [*_flow_and_hift_files(folder), SPEAKER_ENCODER, SPEECH_TOKENIZER])
    voice = load_voice_parts(folder, device=device)
    sound = load_flow_and_hift(folder, device=device, dtype=dtype, hift_dtype=hift_dtype)
    expected, got = sound.flow.config.speaker_dim, voice.speaker_encoder.config.embedding
    if got != expected:
        raise CheckpointError(f"{folder / SPEAKER_ENCODER}: speaker vector", expected=f"{expected} values", got=got)
    return Token2WavParts(sound.flow, sound.hift, voice.speaker_encoder, voice.speech_tokenizer)


def load_flow_and_hift(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    hift_dtype: torch.dtype = torch.float32,
    precision: Precision = UNQUANTIZED,
) -> FlowAndHift:
    """The modules from tokens to sound, without the 0.5 GB that only preparing a voice needs; as `load_token2wav`.

    precision: of the flow's layers. A matrix that the file stores in the same kind is used as it is.
    """
    for name, value in (("dtype", dtype), ("hift_dtype", hift_dtype)):
        if not value.is_floating_point:
            raise SettingsError(name, expected="a floating-point type", got=value)
    folder = Path(folder)
    files = _flow_and_hift_files(folder)
    _require(folder, files)
    config = load_flow_config(folder / FLOW_YAML)
    loader = _Loader(folder, device)
    flow_tensors = read_stored_pt(folder / FLOW)
    flow = loader.check(FLOW, flow_tensors, lambda: Flow(config), lambda _: dtype, precision.flow_kind_of)
    tensors = _read_hift(folder / files[-1])
    hift_config = hift_config_of(tensors, folder / files[-1])
    if hift_config.n_mels != config.n_mels:
        what = f"{folder / files[-1]}: mel bins"
        raise CheckpointError(what, expected=f"{config.n_mels} as in {FLOW_YAML}", got=hift_config.n_mels)
    vocoder = loader.check(
        files[-1], tensors, lambda: Hift(hift_config), lambda name: hift.weight_dtype(name, hift_dtype)
    )
    loader.assign()
    return FlowAndHift(flow, vocoder)


def load_voice_parts(folder: str | Path, *, device: torch.device | str = "cpu") -> VoiceParts:
    """The modules that prepare voices, in float32; as `load_token2wav`."""
    folder = Path(folder)
    _require(folder, [SPEAKER_ENCODER, SPEECH_TOKENIZER])
    loader = _Loader(folder, device)
    graph = read_onnx(folder / SPEAKER_ENCODER)
    with _naming(folder / SPEAKER_ENCODER):
        tensors = fold_batch_norms(speaker_tensors(graph))
        speaker_config = campplus.config_of(tensors)
    speaker_encoder = loader.check(SPEAKER_ENCODER, tensors, lambda: CampPlus(speaker_config), _float32)
    graph = read_onnx(folder / SPEECH_TOKENIZER)
    with _naming(folder / SPEECH_TOKENIZER):
        tensors = tokenizer_tensors(graph)
        tokenizer_config = s3_tokenizer.config_of(tensors).model_copy(update={"first_norm_eps": first_norm_eps(graph)})
    speech_tokenizer = loader.check(SPEECH_TOKENIZER, tensors, lambda: S3Tokenizer(tokenizer_config), _float32)
    loader.assign()
    return VoiceParts(speaker_encoder, speech_tokenizer)


def hift_config_of(tensors: dict[str, Tensor], file: str | Path) -> HiftConfig:
    """The sizes that the shapes of folded tensors determine.

    Raises: CheckpointError if one of these tensors is missing, empty or not a kernel.
    """
    shapes = {}
    for name in ("conv_pre.weight", "f0_predictor.condnet.0.weight"):
        if name not in tensors or tensors[name].ndim != 3 or not tensors[name].numel():
            got = list(tensors[name].shape) if name in tensors else "nothing"
            raise CheckpointError(f"{file}: {name}", expected="a kernel [out, in, taps] with values", got=got)
        shapes[name] = tensors[name].shape
    (base, n_mels, _), (f0_channels, *_) = shapes.values()
    if base % 8:
        raise CheckpointError(f"{file}: conv_pre.weight", expected="a multiple of 8 channels", got=base)
    return HiftConfig(n_mels=n_mels, base_channels=base, f0_channels=f0_channels)


class _Loader:
    """Checks the files of one folder, then assigns all weights or raises one error."""

    def __init__(self, folder: Path, device: torch.device | str):
        self.device = device
        self.mismatch = Mismatch(str(folder), "the tensors of the networks that its files describe")
        self.checked: list[tuple[str, nn.Module, Mapping[str, Weight], DtypeOf, KindOf]] = []

    def check(
        self,
        file: str,
        tensors: Mapping[str, Weight],
        build: Callable[[], Tree],
        dtype_of: DtypeOf,
        kind_of: KindOf = UNQUANTIZED.kind_of,
    ) -> Tree:
        """The module, still without data; differences from `tensors` are collected."""
        with on_meta():
            module = build()
        expected = tensor_shapes(module)
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        both = expected.keys() & got.keys()
        add = self.mismatch.add
        add(f"missing in {file}", (f"{name} {list(expected[name])}" for name in expected if name not in got))
        add(f"unexpected in {file}", (f"{name} {list(got[name])}" for name in got if name not in expected))
        wrong = (name for name in expected if name in both and got[name] != expected[name])
        lines = (f"{name}: expected {list(expected[name])}, got {list(got[name])}" for name in wrong)
        add(f"wrong shape in {file}", lines)
        self.checked.append((file, module, tensors, dtype_of, kind_of))
        return module

    def assign(self) -> None:
        self.mismatch.raise_if_any()
        placed = []
        for file, module, tensors, dtype_of, kind_of in self.checked:
            ready = {
                name: self._placed(tensor, dtype_of(name), kind_of(name, tuple(tensor.shape)))
                for name, tensor in tensors.items()
            }
            plain = ((name, one) for name, one in ready.items() if isinstance(one, Tensor))
            bad = (f"{name} as {tensor.dtype}" for name, tensor in plain if not tensor.isfinite().all())
            self.mismatch.add(f"not finite in {file}", bad)
            placed.append((module, ready, dtype_of("")))
        self.mismatch.raise_if_any()
        for module, ready, dtype in placed:
            assign_each(module, _taken(ready), self.device, dtype)

    def _placed(self, stored: Weight, dtype: torch.dtype, kind: Kind | None) -> Weight:
        """A weight on the device: quantised as `kind`, or in `dtype` if `kind` is None or values are not finite."""
        # The device first: the type is converted there, and on the CPU an unchanged tensor is not copied.
        weight = stored.to(self.device)
        if isinstance(weight, QuantizedMatrix):
            if weight.kind == kind:
                return weight
            weight = weight.dequantized()
        return quantize(weight, kind) if kind is not None and weight.isfinite().all() else weight.to(dtype)


def _taken(weights: dict[str, Weight]) -> Iterator[tuple[str, Weight]]:
    """All weights, each removed from the dict when it is yielded: its memory is free once a layer has packed it."""
    while weights:
        name = next(iter(weights))
        yield name, weights.pop(name)


def _read_hift(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in read_pt(path).items():
        name = stored_name.removeprefix(_HIFT_PREFIX)
        if name in tensors:
            raise CheckpointError(f"{path}: {name}", expected="once", got=f"with and without {_HIFT_PREFIX}")
        tensors[name] = tensor
    with _naming(path):
        return fold_weight_norm(tensors)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefix errors about tensors with the file's path."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.what}", expected=error.expected, got=error.got) from None


def _flow_and_hift_files(folder: Path) -> list[str]:
    return [FLOW_YAML, FLOW, HIFT_ORIGINAL if (folder / HIFT_ORIGINAL).exists() else HIFT]


def _require(folder: Path, files: list[str]) -> None:
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise CheckpointError(str(folder), expected=f"the files {', '.join(files)}", got=f"no {', no '.join(missing)}")


def _float32(name: str) -> torch.dtype:
    return torch.float32
