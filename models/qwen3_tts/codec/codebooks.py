"""Residual codebooks in both directions: codes to vectors, and vectors to the nearest codes.

The first codebook stands alone; the others quantize what the codebooks of their group before them left over. A stored
codebook is a sum of vectors and their count per entry; entries are their quotients, computed in float32.
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.layers.transformer import Derived

SMALLEST_COUNT = 1e-5


def entries(vectors: Tensor, counts: Tensor) -> Tensor:
    """[K, D] float32 entries of a codebook. vectors: [K, D] sums. counts: [K]."""
    return vectors.float() / counts.float().clamp_min(SMALLEST_COUNT)[:, None]


class _DecoderCodebook(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.empty(size, width))
        self.cluster_usage = nn.Parameter(torch.empty(size))


class _DecoderLayer(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self._codebook = _DecoderCodebook(size, width)


class _DecoderGroup(nn.Module):
    """Codebooks whose entries add up, and their projection."""

    def __init__(self, n: int, size: int, width: int):
        super().__init__()
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(_DecoderLayer(size, width // 2) for _ in range(n))})
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)

    def tables(self) -> list[Tensor]:
        """[K, width] float32 projected entries of each codebook."""
        projection = self.output_proj.weight[:, :, 0].float()
        books = [cast(_DecoderLayer, layer)._codebook for layer in cast(nn.ModuleList, self.vq["layers"])]
        return [entries(book.embedding_sum, book.cluster_usage) @ projection.T for book in books]


class ResidualCodebooks(Derived):
    """Codes to vectors. The tables contain the projections, so that a frame is a sum of 16 rows."""

    table: Tensor
    offsets: Tensor

    def __init__(self, n_groups: int, size: int, width: int):
        """
        Args:
            n_groups: codes of a frame.
            size: entries of a codebook.
            width: of the vectors; a codebook's entries have half of it.
        """
        super().__init__()
        self.n_groups, self.size = n_groups, size
        self.rvq_first = _DecoderGroup(1, size, width)
        self.rvq_rest = _DecoderGroup(n_groups - 1, size, width)
        self.register_buffer("table", torch.empty(n_groups * size, width), persistent=False)
        self.register_buffer("offsets", torch.empty(n_groups, dtype=torch.int64), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.table = torch.cat(self.rvq_first.tables() + self.rvq_rest.tables()).to(device, dtype)
        self.offsets = torch.arange(self.n_groups, device=device) * self.size

    def forward(self, codes: Tensor) -> Tensor:
        """[B, T, width] of codes [B, T, n_groups] int64; summed in float32."""
        rows = nn.functional.embedding(codes + self.offsets, self.table)
        return rows.sum(dim=2, dtype=torch.float32).to(rows.dtype)


class _EncoderCodebook(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.embed_sum = nn.Parameter(torch.empty(size, width))
        self.cluster_usage = nn.Parameter(torch.empty(size))


class _EncoderLayer(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.codebook = _EncoderCodebook(size, width)


class NearestCodes(Derived):
    """Vectors to the codes of one group of residual codebooks, in float32."""

    table: Tensor
    half_norms: Tensor

    def __init__(self, n: int, size: int, width_in: int, width: int):
        """
        Args:
            n: codebooks.
            size: entries of a codebook.
            width_in: of the vectors.
            width: of the entries, to which the vectors are projected.
        """
        super().__init__()
        self.input_proj = nn.Conv1d(width_in, width, 1, bias=False)
        self.layers = nn.ModuleList(_EncoderLayer(size, width) for _ in range(n))
        self.register_buffer("table", torch.empty(n, size, width), persistent=False)
        self.register_buffer("half_norms", torch.empty(n, size), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        books = [cast(_EncoderLayer, layer).codebook for layer in self.layers]
        self.table = torch.stack([entries(book.embed_sum, book.cluster_usage) for book in books]).to(device)
        self.half_norms = self.table.square().sum(2) / 2

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, n] int64 codes of x [B, width_in, T]."""
        left = self.input_proj(x).transpose(1, 2).float()
        codes = []
        for table, half_norms in zip(self.table, self.half_norms, strict=True):
            # |left - entry|^2 is smallest where left . entry - |entry|^2 / 2 is largest.
            code = (left @ table.T - half_norms).argmax(dim=2)
            left = left - table[code]
            codes.append(code)
        return torch.stack(codes, dim=2)


class SplitCodebooks(nn.Module):
    """Vectors to the codes of a frame: the semantic one, then the acoustic ones."""

    def __init__(self, n: int, size: int, width_in: int, width: int):
        """n: codes of a frame. The others as for `NearestCodes`."""
        super().__init__()
        self.semantic_residual_vector_quantizer = NearestCodes(1, size, width_in, width)
        self.acoustic_residual_vector_quantizer = NearestCodes(n - 1, size, width_in, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, n] int64 codes of x [B, width_in, T]."""
        groups = self.semantic_residual_vector_quantizer, self.acoustic_residual_vector_quantizer
        return torch.cat([group(x) for group in groups], dim=2)
