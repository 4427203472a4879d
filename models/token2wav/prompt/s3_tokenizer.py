"""S3 tokenizer: the speech codes of a prompt, 25 a second.

Knows log-mel frames, rows and codes. Does not know sound, files, nor who uses the codes.

A second is 100 mel frames, 50 rows after the first convolution, 25 rows and codes after the second. Padding is zeroed
before every convolution and not looked at in attention, so that a sound in a longer bucket has the codes it has alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import CheckpointError
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from models.layers.transformer import Derived, attend
from models.token2wav.settings import S3TokenizerConfig

HEAD_DIM = 64
ROPE_THETA = 10_000.0
MEMORY_KERNEL = 31
SECOND_NORM_EPS = 1e-5
LEVELS = 3  # values of a digit
DIGITS = 8
LEVEL_SCALE = 0.999  # moves the edges between levels a little, as in training


class MemoryAttention(nn.Module):
    """Rotary self-attention beside a memory: values of the rows around, mixed channel by channel.

    The key projection has no bias, as in Whisper.
    """

    def __init__(self, width: int):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.fsmn_block = nn.Conv1d(width, width, MEMORY_KERNEL, padding=MEMORY_KERNEL // 2, groups=width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, R, width]; mask: [B, R] valid rows, the others come out as anything; cos, sin: [R, 1, 32]."""
        q, k = (rotate(part(x).unflatten(-1, (-1, HEAD_DIM)), cos, sin) for part in (self.query, self.key))
        v = torch.where(mask[..., None], self.value(x), 0)
        looked_up = attend(q, k.transpose(1, 2), v.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2), mask[:, None])
        memory = self.fsmn_block(v.transpose(1, 2)).transpose(1, 2) + v
        return self.out(looked_up) + memory


class TokenizerBlock(nn.Module):
    def __init__(self, config: S3TokenizerConfig):
        super().__init__()
        width = config.width
        self.attn = MemoryAttention(width)
        self.attn_ln = nn.LayerNorm(width, eps=config.first_norm_eps)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.mlp_ln = nn.LayerNorm(width, eps=SECOND_NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask, cos, sin)
        return x + self.mlp(self.mlp_ln(x))


class Encoder(Derived):
    def __init__(self, config: S3TokenizerConfig):
        super().__init__()
        self.conv1 = nn.Conv1d(config.n_mels, config.width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(TokenizerBlock(config) for _ in range(config.n_layers))
        self.register_buffer("frequencies", torch.empty(HEAD_DIM // 2), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.frequencies = rotary_frequencies(HEAD_DIM, ROPE_THETA, device)

    def forward(self, log_mel: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n_mels, F] to hidden rows [B, ceil(ceil(F / 2) / 2), width] and [B] how many of them are valid."""
        x, n = log_mel, n_frames
        for conv in (self.conv1, self.conv2):
            x = F.gelu(conv(torch.where(_valid(n, x.shape[-1])[:, None], x, 0)))
            n = (n + 1) // 2
        x, mask = x.transpose(1, 2), _valid(n, x.shape[-1])
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = (part[:, None] for part in rotary_angles(positions, self.frequencies))  # for all heads
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return x, n


class Codebook(nn.Module):
    """Eight digits of three levels make a code, the first one counting least; nothing is looked up."""

    def __init__(self, width: int):
        super().__init__()
        self.project_down = nn.Linear(width, DIGITS)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., width] to codes [...] int64."""
        digits = (self.project_down(hidden).tanh() * LEVEL_SCALE).round().long() + 1
        return sum(digits[..., place] * LEVELS**place for place in range(DIGITS))


class S3Tokenizer(nn.Module):
    def __init__(self, config: S3TokenizerConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quantizer = nn.ModuleDict({"_codebook": Codebook(config.width)})

    def forward(self, log_mel: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Speech codes of whole sounds.

        Args:
            log_mel: [B, n_mels, F] float32, F the bucket.
            n_frames: [B] int64 valid frames of each row; what lies behind them may be anything.
        Returns: [B, ceil(ceil(F / 2) / 2)] int64 codes in 0..6560, zero behind a row; [B] int64 codes of each row.
        Source: golden `s3tokenizer_*`.
        """
        hidden, n_speech_tokens = self.encoder(log_mel, n_frames)
        speech_tokens = self.codebook(hidden)
        return torch.where(_valid(n_speech_tokens, speech_tokens.shape[1]), speech_tokens, 0), n_speech_tokens

    @property
    def codebook(self) -> Codebook:
        return self.quantizer["_codebook"]


def _valid(n: Tensor, length: int) -> Tensor:
    """[B] counts to [B, length] bool."""
    return torch.arange(length, device=n.device) < n[:, None]


def config_of(tensors: dict[str, Tensor]) -> S3TokenizerConfig:
    """Sizes, read off the shapes of the weights.

    Raises: CheckpointError if the first convolution is missing, or if it belongs to no network of this kind.
    """
    first = "encoder.conv1.weight"
    shape = list(tensors[first].shape) if first in tensors else []
    blocks = {name.split(".")[2] for name in tensors if name.startswith("encoder.blocks.")}
    try:
        width, n_mels, _ = shape
        return S3TokenizerConfig(n_mels=n_mels, width=width, n_layers=len(blocks))
    except ValueError as error:
        expected = f"{first} [a multiple of {HEAD_DIM}, n_mels, 3] and blocks"
        raise CheckpointError("speech tokenizer", expected=expected, got=f"{shape} and {len(blocks)} blocks") from error
