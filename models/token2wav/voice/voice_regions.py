"""The networks that prepare voices as regions: speech tokens and speaker vectors of sounds at bucketed lengths."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.graphs.captured import Bucket, Example
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable
from models.token2wav.prompt.campplus import CamLayer, CampPlus
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer, TokenizerBlock

SECOND_FRAMES = 100  # of the tokenizer's log-mel and of the speaker encoder's energies


def read_tokens(tokenizer: S3Tokenizer, log_mel: Tensor, n_frames: Tensor) -> Tensor:
    """Speech tokens [B, T] of sounds; arguments as `S3Tokenizer.forward`."""
    speech_tokens: Tensor = tokenizer(log_mel, n_frames)[0]
    return speech_tokens


def describe_voice(encoder: CampPlus, energies: Tensor, n_frames: Tensor) -> Tensor:
    """Speaker vectors [B, speaker_dim] of sounds; arguments as `CampPlus.forward`."""
    vectors: Tensor = encoder(energies, n_frames)
    return vectors


@dataclass(frozen=True)
class VoiceShapes(ShapeTable):
    """Bucket sizes of prompt sounds."""

    batch: tuple[int, ...] = (1,)
    sound: tuple[int, ...] = (3 * SECOND_FRAMES, 10 * SECOND_FRAMES, 30 * SECOND_FRAMES)  # frames


class _Networks(nn.Module):
    """Both networks under the names of the compile targets."""

    def __init__(self, tokenizer: S3Tokenizer, speaker_encoder: CampPlus):
        super().__init__()
        self.tokenizer, self.speaker_encoder = tokenizer, speaker_encoder


class VoiceRegions(RegionTable):
    """Tokenizer and speaker encoder of a vocoder. There are no slots, so there is nothing to clear after a warm-up."""

    stacks: ClassVar = {
        "tokenizer": ((TokenizerBlock, ("forward",)),),
        "speaker_encoder": ((CamLayer, ("forward",)),),
    }

    def __init__(self, tokenizer: S3Tokenizer, speaker_encoder: CampPlus, shapes: VoiceShapes | None = None):
        shapes, device = shapes or VoiceShapes(), tokenizer.encoder.conv1.weight.device
        networks = _Networks(tokenizer, speaker_encoder)
        super().__init__(networks, _regions(tokenizer, speaker_encoder, device), shapes, device=device)

    def clear_scratch(self) -> None:
        """Does nothing."""

    def tokens(self, log_mel: Tensor) -> Tensor:
        """Speech tokens [n] of one sound, on the device. log_mel: [n_mels, F]. Raises: ShapeError if it is too long."""
        length, n_frames = self.shapes.fit("voice_tokens", "sound", log_mel.shape[1]), log_mel.shape[1]
        padded = F.pad(log_mel, (0, length - n_frames))[None].to(self._device)
        tokens = self.run(read_tokens, padded.contiguous(), torch.tensor([n_frames], device=self._device))
        return tokens[0, : ((n_frames + 1) // 2 + 1) // 2].clone()

    def speaker(self, energies: Tensor) -> Tensor:
        """Speaker vector of one sound, on the device. energies: [T, n_mels]. Raises: ShapeError if it is too long."""
        length, n_frames = self.shapes.fit("voice_speaker", "sound", len(energies)), len(energies)
        padded = F.pad(energies, (0, 0, 0, length - n_frames))[None].to(self._device)
        vectors = self.run(describe_voice, padded.contiguous(), torch.tensor([n_frames], device=self._device))
        return vectors[0].clone()


def _regions(tokenizer: S3Tokenizer, encoder: CampPlus, device: torch.device) -> Iterator[Region]:
    axes = {"batch": "batch", "sound": "sound"}

    def counts(bucket: Bucket) -> Tensor:
        return torch.full((bucket["batch"],), bucket["sound"], dtype=torch.int64, device=device)

    def log_mel(bucket: Bucket) -> Example:
        return (
            torch.randn(bucket["batch"], tokenizer.config.n_mels, bucket["sound"], device=device),
            counts(bucket),
        ), {}

    def energies(bucket: Bucket) -> Example:
        shape = bucket["batch"], bucket["sound"], encoder.config.n_mels
        return (torch.randn(shape, device=device), counts(bucket)), {}

    yield Region("voice_tokens", "tokenizer", read_tokens, (tokenizer,), axes, log_mel)
    yield Region("voice_speaker", "speaker_encoder", describe_voice, (encoder,), axes, energies)
