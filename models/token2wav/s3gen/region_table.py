"""S3Gen's table of regions: bucket sizes, example inputs and the compile targets.

Each component is a region or its layers, so that it can have its own compile mode (`s3gen.components`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from models.errors import SettingsError
from models.graphs.captured import Bucket, Example, StaticSettings
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable
from models.token2wav.backends import Kernels, hift_backend
from models.token2wav.flow.conformer import ConformerLayer
from models.token2wav.flow.solver import time_grid
from models.token2wav.hift.hift import Snake
from models.token2wav.hift.source import N_HARMONICS
from models.token2wav.prompt.campplus import CamLayer
from models.token2wav.prompt.s3_tokenizer import TokenizerBlock
from models.token2wav.s3gen import regions
from models.token2wav.s3gen.model import DEFAULT_STEPS, MEANFLOW_STEPS, PROMPT_SECONDS, S3Gen
from models.token2wav.s3gen.regions import DecodeContext, SolveContext
from models.token2wav.s3gen.unet import ResnetBlock, TransformerBlock
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.voice.voice_regions import SECOND_FRAMES, describe_voice, read_tokens

TOKENS_PER_SECOND = 25


@dataclass(frozen=True)
class S3Shapes(ShapeTable):
    """Bucket sizes of S3Gen's axes."""

    batch: tuple[int, ...] = (1, 2, 4)  # utterances, or sounds of voices
    speech_tokens: tuple[int, ...] = (50, 100, 200, 500)  # of an utterance
    prompt: tuple[int, ...] = (TOKENS_PER_SECOND * PROMPT_SECONDS,)  # tokens of a voice's sound
    sound: tuple[int, ...] = (3 * SECOND_FRAMES, PROMPT_SECONDS * SECOND_FRAMES)  # frames of a voice's sound


class S3Regions(RegionTable):
    """All regions of S3Gen. It has no slots, so there is nothing to clear after a warm-up."""

    stacks: ClassVar = {
        "tokenizer": ((TokenizerBlock, ("forward",)),),
        "speaker_encoder": ((CamLayer, ("forward",)),),
        "flow.encoder": ((ConformerLayer, ("forward",)),),
        "flow.decoder.estimator": ((TransformerBlock, ("forward",)), (ResnetBlock, ("forward",))),
        "mel2wav": ((Snake, ("forward",)),),
    }

    def __init__(self, model: S3Gen, shapes: S3Shapes, steps: tuple[int, ...] | None = None):
        """
        Args:
            model: all networks.
            shapes: bucket sizes.
            steps: numbers of Euler steps; None = 10, or 2 for the mean flow.
        Raises: SettingsError for an empty list of steps, or for none below one.
        """
        if steps is None:
            steps = (MEANFLOW_STEPS if model.flow.meanflow else DEFAULT_STEPS,)
        if not steps:
            raise SettingsError("euler steps", expected="at least one number", got=steps)
        self.grids = {n: time_grid(n, model.flow.grid_kind).to(model.device) for n in steps}
        self._decoding = DecodeContext(model, model.mel2wav)
        super().__init__(model, _regions(self._decoding, self.grids), shapes, device=model.device)

    def use_kernels(self, kernels: Kernels) -> bool:
        """Choose how HiFT decodes, under the current settings of torch; graphs of `s3_decode` are deleted.

        A table that is new decodes with the plain module.

        Args:
            kernels: as `Vocoder`. The fused backend copies the weights of residual blocks.
        Returns: whether HiFT decodes on the project's own kernels.
        Raises: SettingsError for "fused" where kernels cannot run.
        """
        backend = hift_backend(self._decoding.model.mel2wav, kernels)
        self.drop_graphs(["s3_decode"])
        self._decoding.backend = backend
        return backend.is_fused

    def clear_scratch(self) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class _Examples:
    """Inputs of the regions at a bucket."""

    model: S3Gen
    steps: StaticSettings

    def tokens(self, bucket: Bucket) -> Example:
        n, length = bucket["batch"], bucket["sound"]
        return (self._random(n, self.model.config.tokenizer.n_mels, length), self._full(n, length)), {}

    def speaker(self, bucket: Bucket) -> Example:
        n, length = bucket["batch"], bucket["sound"]
        return (self._random(n, length, self.model.config.speaker_encoder.n_mels), self._full(n, length)), {}

    def encode(self, bucket: Bucket) -> Example:
        n, length = bucket["batch"], bucket["speech_tokens"] + bucket["prompt"]
        return (torch.zeros(n, length, dtype=torch.int64, device=self.model.device), self._full(n, length)), {}

    def solve(self, bucket: Bucket) -> Example:
        flow, n = self.model.config.flow, bucket["batch"]
        n_prompt, n_new = (FRAMES_PER_TOKEN * bucket[axis] for axis in ("prompt", "speech_tokens"))
        n_frames = n_prompt + n_new
        mu = self._random(n, flow.n_mels, n_frames).to(self.model.flow.dtype)
        prompt, noise = (self._random(n, flow.n_mels, n_frames) for _ in range(2))
        counts = self._full(n, n_prompt), self._full(n, n_frames)
        return (mu, *counts, prompt, self._random(n, flow.speaker_dim), noise), {"n_new": n_new, **self.steps}

    def pitch(self, bucket: Bucket) -> Example:
        n, length = bucket["batch"], FRAMES_PER_TOKEN * bucket["speech_tokens"]
        return (self._random(n, self.model.config.flow.n_mels, length), self._full(n, length)), {}

    def decode(self, bucket: Bucket) -> Example:
        (mel, n_frames), _ = self.pitch(bucket)
        f0 = torch.full((len(mel), mel.shape[2]), 150.0, dtype=torch.float64, device=self.model.device)
        return (mel, f0, n_frames, self._random(len(mel), N_HARMONICS)), {}

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.model.device)

    def _full(self, n: int, value: int) -> Tensor:
        return torch.full((n,), value, dtype=torch.int64, device=self.model.device)


def _regions(decoding: DecodeContext, grids: dict[int, Tensor]) -> Iterator[Region]:
    model = decoding.model
    steps: tuple[StaticSettings, ...] = tuple({"n_steps": n} for n in grids)
    examples = _Examples(model, steps[0])
    sound = {"batch": "batch", "sound": "sound"}
    speech = {"batch": "batch", "speech_tokens": "speech_tokens"}
    both = {**speech, "prompt": "prompt"}
    yield Region("s3_tokens", "tokenizer", read_tokens, (model.tokenizer,), sound, examples.tokens)
    yield Region("s3_speaker", "speaker_encoder", describe_voice, (model.speaker_encoder,), sound, examples.speaker)
    yield Region("s3_encode", "flow.encoder", regions.encode_tokens, (model.flow,), both, examples.encode)
    context = SolveContext(model.flow, grids)
    yield Region("s3_solve", "flow.decoder.estimator", regions.solve_mel, (context,), both, examples.solve, steps)
    yield Region("s3_pitch", "mel2wav.f0_predictor", regions.find_pitch, (model,), speech, examples.pitch)
    yield Region("s3_decode", "mel2wav", regions.decode_mel, (decoding,), speech, examples.decode)
