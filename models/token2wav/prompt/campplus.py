"""CAMPPlus: the speaker vector of a prompt's filter-bank energies.

Contains the network and the folding of its batch norms. Does not contain sound, files or users of the vector.

The module has no batch norms. A batch norm after a convolution is folded into that convolution, which therefore has a
bias. A batch norm before a convolution is an affine map under its own name. `fold_batch_norms` computes these tensors
from the trained ones.

Frames of padding are zeroed before every convolution over time and excluded from every mean, so the vector of a row
does not depend on the bucket.
"""

import re
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import CheckpointError
from models.layers.weights import on_meta
from models.token2wav.settings import CampPlusConfig

DENSE_BLOCKS = ((12, 1), (24, 2), (16, 2))  # layers and dilation
SEGMENT = 100  # frames that share a gate
BATCH_NORM_EPS = 1e-5

# Pattern of a convolution's name -> name of the batch norm that is the only reader of its output.
_NORM_AFTER: tuple[tuple[str, str], ...] = (
    (r"(.*\.)conv([12])", r"\1bn\2"),
    (r"(.*\.shortcut)\.0", r"\1.1"),
    (r"(.*\.tdnn)\.linear", r"\1.nonlinear.batchnorm"),
    (r"(.*\.tdnnd\d+)\.linear1", r"\1.nonlinear2.batchnorm"),
    (rf"(.*)\.transit{len(DENSE_BLOCKS)}\.linear", r"\1.out_nonlinear.batchnorm"),
    (r"(.*\.dense)\.linear", r"\1.nonlinear.batchnorm"),
)


class Frames(NamedTuple):
    """The valid frames of a batch. Counts are at least 1, so that they can divide."""

    mask: Tensor  # [B, 1, T] bool
    n_valid: Tensor  # [B, 1, 1] float32 valid frames
    n_in_segment: Tensor  # [B, 1, ceil(T / 100)] float32 valid frames per segment

    @classmethod
    def of(cls, n_frames: Tensor, length: int) -> "Frames":
        """The frames of rows with n_frames [B] int64 valid frames of `length`."""
        n = n_frames[:, None, None]
        start = torch.arange(0, length, SEGMENT, device=n_frames.device)
        in_segment = (n - start).clamp(1, SEGMENT).float()
        return cls(torch.arange(length, device=n_frames.device) < n, n.clamp_min(1).float(), in_segment)


class ResidualBlock(nn.Module):
    """Two convolutions over frequency and time, and a shortcut; `stride` is over frequency only."""

    shortcut: nn.Module

    def __init__(self, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride=(stride, 1), padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, channels, 1, stride=(stride, 1)))
        else:
            self.shortcut = nn.Identity()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = torch.where(mask, F.relu(self.conv1(x)), 0)
        return torch.where(mask, F.relu(self.conv2(y) + self.shortcut(x)), 0)


class FrontEnd(nn.Module):
    """Two-dimensional convolutions over frequency and time that reduce the frequency axis eightfold."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.layer1 = nn.ModuleList(ResidualBlock(channels, stride) for stride in (2, 1))
        self.layer2 = nn.ModuleList(ResidualBlock(channels, stride) for stride in (2, 1))
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=(2, 1), padding=1)

    def forward(self, fbank: Tensor, mask: Tensor) -> Tensor:
        """[B, channels * n_mels / 8, T], zero outside the mask.

        Args:
            fbank: [B, T, n_mels].
            mask: [B, 1, T] bool.
        """
        mask = mask[:, None]
        x = torch.where(mask, fbank.transpose(1, 2)[:, None], 0)
        x = torch.where(mask, F.relu(self.conv1(x)), 0)
        for block in (*self.layer1, *self.layer2):
            x = block(x, mask)
        return torch.where(mask, F.relu(self.conv2(x)), 0).flatten(1, 2)


class Affine(nn.Module):
    """x * weight + bias per channel, for x [B, channels, T]."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[:, None] + self.bias[:, None]


class Nonlinear(nn.Module):
    """Affine map and ReLU."""

    def __init__(self, channels: int):
        super().__init__()
        self.batchnorm = Affine(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.batchnorm(x))


class CamLayer(nn.Module):
    """Context-aware masking: a convolution, gated by the means over the whole sound and over the segment."""

    def __init__(self, width: int, growth: int, dilation: int):
        super().__init__()
        self.linear_local = nn.Conv1d(width, growth, 3, padding=dilation, dilation=dilation, bias=False)
        self.linear1 = nn.Conv1d(width, width // 2, 1)
        self.linear2 = nn.Conv1d(width // 2, growth, 1)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        """[B, growth, T], undefined outside the mask, for x [B, width, T], zero outside the mask."""
        T, n_segments = x.shape[-1], frames.n_in_segment.shape[-1]
        local: Tensor = self.linear_local(x)
        padded = F.pad(x, (0, n_segments * SEGMENT - T))
        segments: Tensor = padded.unflatten(-1, (n_segments, SEGMENT))
        context = x.sum(-1, keepdim=True) / frames.n_valid + segments.sum(-1) / frames.n_in_segment
        # All frames of a segment share their context, so the gate is computed once per segment.
        gate: Tensor = self.linear2(F.relu(self.linear1(context))).sigmoid()
        return local * gate.repeat_interleave(SEGMENT, dim=-1, output_size=n_segments * SEGMENT)[..., :T]


class DenseLayer(nn.Module):
    """One layer of a dense block; its `growth` output channels are appended to its input."""

    def __init__(self, channels: int, width: int, growth: int, dilation: int):
        super().__init__()
        self.nonlinear1 = Nonlinear(channels)
        self.linear1 = nn.Conv1d(channels, width, 1)
        self.cam_layer = CamLayer(width, growth, dilation)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        x = F.relu(self.linear1(self.nonlinear1(x)))
        out: Tensor = self.cam_layer(torch.where(frames.mask, x, 0), frames)
        return out


class Transit(nn.Module):
    """The layer between dense blocks, which halves the channels."""

    def __init__(self, channels: int, bias: bool):
        super().__init__()
        self.nonlinear = Nonlinear(channels)
        self.linear = nn.Conv1d(channels, channels // 2, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.nonlinear(x))
        return out


class XVector(nn.Module):
    """Frames to one vector: densely connected layers over time, then mean and standard deviation."""

    def __init__(self, config: CampPlusConfig):
        super().__init__()
        width, channels = config.growth * config.bottleneck, config.channels
        self.tdnn = nn.ModuleDict(
            {"linear": nn.Conv1d(config.front_channels * config.n_mels // 8, channels, 5, stride=2, padding=2)}
        )
        for number, (n_layers, dilation) in enumerate(DENSE_BLOCKS, start=1):
            block = nn.ModuleDict()
            for layer in range(1, n_layers + 1):
                block[f"tdnnd{layer}"] = DenseLayer(channels, width, config.growth, dilation)
                channels += config.growth
            self.add_module(f"block{number}", block)
            self.add_module(f"transit{number}", Transit(channels, bias=number == len(DENSE_BLOCKS)))
            channels //= 2
        self.dense = nn.ModuleDict({"linear": nn.Conv1d(2 * channels, config.embedding, 1)})

    def forward(self, x: Tensor, n_frames: Tensor) -> Tensor:
        """[B, embedding] for x [B, channels, T], zero beyond n_frames [B] int64."""
        x = F.relu(self.tdnn["linear"](x))
        frames = Frames.of((n_frames + 1) // 2, x.shape[-1])
        for number in range(1, len(DENSE_BLOCKS) + 1):
            for layer in self.get_submodule(f"block{number}").children():
                x = torch.cat((x, layer(x, frames)), dim=1)
            x = self.get_submodule(f"transit{number}")(x)
        vectors: Tensor = self.dense["linear"](_statistics(F.relu(x), frames))
        return vectors[..., 0]


class CampPlus(nn.Module):
    def __init__(self, config: CampPlusConfig):
        super().__init__()
        self.config = config
        self.head = FrontEnd(config.front_channels)
        self.xvector = XVector(config)

    def forward(self, fbank: Tensor, n_frames: Tensor | None = None) -> Tensor:
        """The speaker vector of each row.

        Args:
            fbank: [B, T, n_mels] float32, mean over time removed; T the bucket. Undefined beyond n_frames.
            n_frames: [B] int64 valid frames of each row; None = T. A row with one or two frames has no deviation over
                time and is treated as constant.
        Returns: [B, embedding] float32, not normalised.
        Source: golden `campplus_*`.
        """
        B, T, _ = fbank.shape
        if n_frames is None:
            n_frames = torch.full((B,), T, device=fbank.device)
        mask = torch.arange(T, device=fbank.device) < n_frames[:, None, None]
        vectors: Tensor = self.xvector(self.head(fbank, mask), n_frames)
        return vectors


def _statistics(x: Tensor, frames: Frames) -> Tensor:
    """Mean and unbiased standard deviation over valid frames, [B, 2 C, 1] for x [B, C, T]."""
    mean = torch.where(frames.mask, x, 0).sum(-1, keepdim=True) / frames.n_valid
    squares = torch.where(frames.mask, x - mean, 0).square().sum(-1, keepdim=True)
    return torch.cat((mean, (squares / (frames.n_valid - 1).clamp_min(1)).sqrt()), dim=1)


def conv_order() -> list[str]:
    """Names of all convolutions in execution order, the same at any size; each has a weight `NAME.weight`."""
    with on_meta():
        model = CampPlus(CampPlusConfig())
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Conv1d, nn.Conv2d))]


def fold_batch_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's tensors, computed from the trained tensors.

    A batch norm (`running_mean` and `running_var`, with or without `weight` and `bias`) is folded into the convolution
    before it, or becomes an affine map. Folded tensors stay unchanged, so partly folded files are supported. Batch
    counters are dropped.
    Raises: CheckpointError for a batch norm without its variance.
    """
    norms = [name.removesuffix(".running_mean") for name in tensors if name.endswith(".running_mean")]
    convolutions = {_norm_after(name): name for name in (key.removesuffix(".weight") for key in tensors)}
    folded = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] not in norms}
    for norm in norms:
        scale, shift = _scale_and_shift(tensors, norm)
        target, weight = norm, scale
        if norm in convolutions:
            target = convolutions[norm]
            kernel = tensors[f"{target}.weight"].double()
            weight = kernel * scale.view(-1, *[1] * (kernel.ndim - 1))
            if (bias := tensors.get(f"{target}.bias")) is not None:
                shift = shift + bias.double() * scale
        folded[f"{target}.weight"], folded[f"{target}.bias"] = weight.float(), shift.float()
    return folded


def _norm_after(convolution: str) -> str | None:
    for pattern, norm in _NORM_AFTER:
        if match := re.fullmatch(pattern, convolution):
            return match.expand(norm)
    return None


def _scale_and_shift(tensors: dict[str, Tensor], norm: str) -> tuple[Tensor, Tensor]:
    """The factor and the summand of a batch norm, in float64."""
    mean, variance = tensors[f"{norm}.running_mean"].double(), tensors.get(f"{norm}.running_var")
    if variance is None:
        raise CheckpointError(f"speaker encoder {norm}", expected="running_mean and running_var", got="no running_var")
    scale = (variance.double() + BATCH_NORM_EPS).rsqrt() * tensors.get(f"{norm}.weight", torch.ones(())).double()
    return scale, tensors.get(f"{norm}.bias", torch.zeros(())).double() - mean * scale


def config_of(tensors: dict[str, Tensor]) -> CampPlusConfig:
    """The sizes that the shapes of folded tensors determine.

    Raises: CheckpointError if one of these tensors is missing, or if the shapes do not belong to a network of this
        kind.
    """
    names = (
        "head.conv1",
        "xvector.tdnn.linear",
        "xvector.block1.tdnnd1.cam_layer.linear_local",
        "xvector.dense.linear",
    )
    shapes = {f"{name}.weight": list(tensors[f"{name}.weight"].shape) for name in names if f"{name}.weight" in tensors}
    try:
        (front, *_), (channels, front_out, _), (growth, width, _), (embedding, *_) = shapes.values()
        return CampPlusConfig(
            n_mels=front_out * 8 // front,
            embedding=embedding,
            growth=growth,
            bottleneck=width // growth,
            channels=channels,
            front_channels=front,
        )
    except (ValueError, ZeroDivisionError) as error:
        expected = f"weights of {', '.join(names)} that fit each other"
        raise CheckpointError("speaker encoder", expected=expected, got=shapes or "none of them") from error
