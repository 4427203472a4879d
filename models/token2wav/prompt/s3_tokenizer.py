"""S3 tokenizer: the speech tokens of a prompt, 25 per second.

Contains log-mel frames, rows and tokens. Does not contain sound, files or users of the tokens.

One second has 100 mel frames, 50 rows after the first convolution, and 25 rows and tokens after the second. Padding is
zeroed before every convolution and masked in attention, so the tokens of a sound do not depend on the bucket.
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
LEVELS = 3  # values of one digit
DIGITS = 8
LEVEL_SCALE = 0.999  # moves the boundaries between levels slightly, as in training


class MemoryAttention(nn.Module):
    """Rotary self-attention plus a memory, a depthwise convolution of the values over neighbouring rows.

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
        """[B, R, width]; undefined for rows outside the mask.

        Args:
            x: [B, R, width].
            mask: [B, R] bool valid rows.
            cos: [R, 1, 32].
            sin: [R, 1, 32].
        """
        q, k = (rotate(part(x).unflatten(-1, (-1, HEAD_DIM)), cos, sin) for part in (self.query, self.key))
        v = torch.where(mask[..., None], self.value(x), 0)
        heads: Tensor = v.unflatten(-1, (-1, HEAD_DIM))
        attended: Tensor = self.out(attend(q, k.transpose(1, 2), heads.transpose(1, 2), mask[:, None]))
        memory: Tensor = self.fsmn_block(v.transpose(1, 2)).transpose(1, 2) + v
        return attended + memory


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
        added: Tensor = self.mlp(self.mlp_ln(x))
        return x + added


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
        """Hidden rows [B, ceil(ceil(F / 2) / 2), width] and the number of valid rows [B].

        Args:
            log_mel: [B, n_mels, F].
            n_frames: [B] int64 valid frames.
        """
        x, n = log_mel, n_frames
        for conv in (self.conv1, self.conv2):
            x = F.gelu(conv(torch.where(_valid(n, x.shape[-1])[:, None], x, 0)))
            n = (n + 1) // 2
        x, mask = x.transpose(1, 2), _valid(n, x.shape[-1])
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = (part[:, None] for part in rotary_angles(positions, self.frequencies))  # one axis for the heads
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return x, n


class Codebook(nn.Module):
    """Finite scalar quantization: eight digits of three levels form a token, the first digit is least significant."""

    def __init__(self, width: int):
        super().__init__()
        self.project_down = nn.Linear(width, DIGITS)

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens [...] int64 of hidden [..., width]."""
        digits: Tensor = (self.project_down(hidden).tanh() * LEVEL_SCALE).round().long() + 1
        tokens = sum(digits[..., place] * LEVELS**place for place in range(DIGITS))
        assert isinstance(tokens, Tensor)
        return tokens


class S3Tokenizer(nn.Module):
    def __init__(self, config: S3TokenizerConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quantizer = nn.ModuleDict({"_codebook": Codebook(config.width)})

    def forward(self, log_mel: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Speech tokens of whole sounds.

        Args:
            log_mel: [B, n_mels, F] float32, F the bucket; undefined beyond n_frames.
            n_frames: [B] int64 valid frames of each row.
        Returns: [B, ceil(ceil(F / 2) / 2)] int64 tokens in 0..6560, zero after the end of a row; [B] int64 tokens of
            each row.
        Source: golden `s3tokenizer_*`.
        """
        hidden, n_speech_tokens = self.encoder(log_mel, n_frames)
        speech_tokens = self.codebook(hidden)
        return torch.where(_valid(n_speech_tokens, speech_tokens.shape[1]), speech_tokens, 0), n_speech_tokens

    @property
    def codebook(self) -> Codebook:
        codebook = self.quantizer["_codebook"]
        assert isinstance(codebook, Codebook)
        return codebook


def _valid(n: Tensor, length: int) -> Tensor:
    """[B, length] bool: true before n [B]."""
    return torch.arange(length, device=n.device) < n[:, None]


def config_of(tensors: dict[str, Tensor]) -> S3TokenizerConfig:
    """The sizes that the shapes of the weights determine.

    Raises: CheckpointError if the first convolution is missing or does not belong to a network of this kind.
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
