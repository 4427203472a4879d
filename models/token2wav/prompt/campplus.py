"""CAMPPlus: the speaker vector of a prompt's filter-bank energies.

Knows the network, and how batch norm melts into it. Does not know sound, files, nor who uses the vector.

The module holds no batch norm. One that follows a convolution is part of that convolution, which thereby has a
bias; one that stands before a convolution is an affine map under its own name. `fold_batch_norms` makes these
tensors of those that were trained.

Frames of padding are zeroed before every convolution over time and left out of every mean, so that a row in a
longer bucket equals the row alone.
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

# A convolution's name to that of the batch norm its output goes to, and nowhere else.
_NORM_BEHIND: tuple[tuple[str, str], ...] = (
    (r"(.*\.)conv([12])", r"\1bn\2"),
    (r"(.*\.shortcut)\.0", r"\1.1"),
    (r"(.*\.tdnn)\.linear", r"\1.nonlinear.batchnorm"),
    (r"(.*\.tdnnd\d+)\.linear1", r"\1.nonlinear2.batchnorm"),
    (rf"(.*)\.transit{len(DENSE_BLOCKS)}\.linear", r"\1.out_nonlinear.batchnorm"),
    (r"(.*\.dense)\.linear", r"\1.nonlinear.batchnorm"),
)


class Frames(NamedTuple):
    """Which frames of a batch are valid, and how many; counts are at least 1, to divide by.

    mask: [B, 1, T] bool. count: [B, 1, 1] float32. in_segment: [B, 1, ceil(T / 100)] float32.
    """

    mask: Tensor
    count: Tensor
    in_segment: Tensor

    @classmethod
    def of(cls, n_frames: Tensor, length: int) -> "Frames":
        """n_frames: [B] int64, at most `length`."""
        n = n_frames[:, None, None]
        start = torch.arange(0, length, SEGMENT, device=n_frames.device)
        in_segment = (n - start).clamp(1, SEGMENT).float()
        return cls(torch.arange(length, device=n_frames.device) < n, n.clamp_min(1).float(), in_segment)


class ResidualBlock(nn.Module):
    """Two convolutions over frequency and time beside a shortcut; `stride` is over frequency alone."""

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
    """Energies as a picture of frequency by time; frequency shrinks eightfold."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.layer1 = nn.ModuleList(ResidualBlock(channels, stride) for stride in (2, 1))
        self.layer2 = nn.ModuleList(ResidualBlock(channels, stride) for stride in (2, 1))
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=(2, 1), padding=1)

    def forward(self, fbank: Tensor, mask: Tensor) -> Tensor:
        """fbank: [B, T, n_mels]; mask: [B, 1, T] bool. Returns: [B, channels * n_mels / 8, T], zero behind a row."""
        mask = mask[:, None]
        x = torch.where(mask, fbank.transpose(1, 2)[:, None], 0)
        x = torch.where(mask, F.relu(self.conv1(x)), 0)
        for block in (*self.layer1, *self.layer2):
            x = block(x, mask)
        return torch.where(mask, F.relu(self.conv2(x)), 0).flatten(1, 2)


class Affine(nn.Module):
    """x * weight + bias, channel by channel. x: [B, channels, T]."""

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
    """Context-aware masking: a convolution whose output is gated by means over the sound and over a segment."""

    def __init__(self, width: int, growth: int, dilation: int):
        super().__init__()
        self.linear_local = nn.Conv1d(width, growth, 3, padding=dilation, dilation=dilation, bias=False)
        self.linear1 = nn.Conv1d(width, width // 2, 1)
        self.linear2 = nn.Conv1d(width // 2, growth, 1)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        """x: [B, width, T], zero behind a row. Returns: [B, growth, T], anything behind a row."""
        T, n_segments = x.shape[-1], frames.in_segment.shape[-1]
        local = self.linear_local(x)
        segments = F.pad(x, (0, n_segments * SEGMENT - T)).unflatten(-1, (n_segments, SEGMENT))
        context = x.sum(-1, keepdim=True) / frames.count + segments.sum(-1) / frames.in_segment
        # Frames of a segment share their context, so the gate is computed once for each.
        gate = self.linear2(F.relu(self.linear1(context))).sigmoid()
        return local * gate.repeat_interleave(SEGMENT, dim=-1, output_size=n_segments * SEGMENT)[..., :T]


class DenseLayer(nn.Module):
    """The `growth` channels that one layer adds to its input."""

    def __init__(self, channels: int, width: int, growth: int, dilation: int):
        super().__init__()
        self.nonlinear1 = Nonlinear(channels)
        self.linear1 = nn.Conv1d(channels, width, 1)
        self.cam_layer = CamLayer(width, growth, dilation)

    def forward(self, x: Tensor, frames: Frames) -> Tensor:
        x = F.relu(self.linear1(self.nonlinear1(x)))
        return self.cam_layer(torch.where(frames.mask, x, 0), frames)


class Transit(nn.Module):
    """Half the channels of a dense block."""

    def __init__(self, channels: int, bias: bool):
        super().__init__()
        self.nonlinear = Nonlinear(channels)
        self.linear = nn.Conv1d(channels, channels // 2, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.nonlinear(x))


class XVector(nn.Module):
    """Frames to one vector: densely connected layers over time, then mean and deviation."""

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
        """x: [B, channels, T], zero behind a row; n_frames: [B] int64. Returns: [B, embedding]."""
        x = F.relu(self.tdnn["linear"](x))
        frames = Frames.of((n_frames + 1) // 2, x.shape[-1])
        for number in range(1, len(DENSE_BLOCKS) + 1):
            for layer in self.get_submodule(f"block{number}").values():
                x = torch.cat((x, layer(x, frames)), dim=1)
            x = self.get_submodule(f"transit{number}")(x)
        return self.dense["linear"](_statistics(F.relu(x), frames))[..., 0]


class CampPlus(nn.Module):
    def __init__(self, config: CampPlusConfig):
        super().__init__()
        self.config = config
        self.head = FrontEnd(config.front_channels)
        self.xvector = XVector(config)

    def forward(self, fbank: Tensor, n_frames: Tensor | None = None) -> Tensor:
        """The speaker vector of each row.

        Args:
            fbank: [B, T, n_mels] float32, mean over time removed; T the bucket.
            n_frames: [B] int64, valid frames of each row; what lies behind them may be anything. None: all T.
                A row with one or two frames has no deviation over time and counts as constant.
        Returns: [B, embedding] float32, not normalised.
        Source: golden `campplus_*`.
        """
        B, T, _ = fbank.shape
        if n_frames is None:
            n_frames = torch.full((B,), T, device=fbank.device)
        mask = torch.arange(T, device=fbank.device) < n_frames[:, None, None]
        return self.xvector(self.head(fbank, mask), n_frames)


def _statistics(x: Tensor, frames: Frames) -> Tensor:
    """Mean and unbiased standard deviation over valid frames. x: [B, C, T]. Returns: [B, 2 C, 1]."""
    mean = torch.where(frames.mask, x, 0).sum(-1, keepdim=True) / frames.count
    squares = torch.where(frames.mask, x - mean, 0).square().sum(-1, keepdim=True)
    return torch.cat((mean, (squares / (frames.count - 1).clamp_min(1)).sqrt()), dim=1)


def conv_order() -> list[str]:
    """Names of all convolutions in the order in which they run, at any size; each has a weight `NAME.weight`."""
    with on_meta():
        model = CampPlus(CampPlusConfig())
    return [name for name, module in model.named_modules() if isinstance(module, (nn.Conv1d, nn.Conv2d))]


def fold_batch_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's tensors, from names and values as they were trained.

    A batch norm (`running_mean` and `running_var`, with or without `weight` and `bias`) goes into the convolution
    before it, or stays as an affine map. What is folded already passes unchanged, so half-folded files work too.
    Counters of batches are dropped; all else is kept.
    Raises: CheckpointError for a batch norm without its variance.
    """
    norms = [name.removesuffix(".running_mean") for name in tensors if name.endswith(".running_mean")]
    convolutions = {_norm_behind(name): name for name in (key.removesuffix(".weight") for key in tensors)}
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


def _norm_behind(convolution: str) -> str | None:
    for pattern, norm in _NORM_BEHIND:
        if match := re.fullmatch(pattern, convolution):
            return match.expand(norm)
    return None


def _scale_and_shift(tensors: dict[str, Tensor], norm: str) -> tuple[Tensor, Tensor]:
    """What a batch norm multiplies by and then adds, in float64."""
    mean, variance = tensors[f"{norm}.running_mean"].double(), tensors.get(f"{norm}.running_var")
    if variance is None:
        raise CheckpointError(f"speaker encoder {norm}", expected="running_mean and running_var", got="no running_var")
    scale = (variance.double() + BATCH_NORM_EPS).rsqrt() * tensors.get(f"{norm}.weight", torch.ones(())).double()
    return scale, tensors.get(f"{norm}.bias", torch.zeros(())).double() - mean * scale


def config_of(tensors: dict[str, Tensor]) -> CampPlusConfig:
    """Sizes, read off the shapes of folded tensors.

    Raises: CheckpointError if a tensor that tells one is missing, or if they tell no network of this kind.
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
