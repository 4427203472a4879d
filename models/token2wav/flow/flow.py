"""Speech tokens to mel: the flow's modules under the checkpoint's names, and one Euler step.

Contains computations on one chunk as functions of weights, tokens and tensors from earlier chunks. Does not contain
slots: row addresses, cached rows and tails are arguments, and new rows and tails are return values.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.flow.conformer import UpsampleConformer, without_cache
from models.token2wav.flow.dit import CONV_TAIL, N_CONVS, DiT, DiTContext, Modulation, linear32
from models.token2wav.flow.solver import time_grid
from models.token2wav.settings import FRAMES_PER_TOKEN, FlowConfig, FrontConfig


class Schedule(NamedTuple):
    """A time grid and the values computed from it; computed once per number of Euler steps."""

    # Separate tensors, not slices of one tensor: a compiled step would copy an unaligned slice.
    steps: tuple[tuple[Tensor, Modulation], ...]  # per step: width [] float32, modulation


class Decoder(nn.Module):
    """A level of the checkpoint's names: the estimator is stored as `decoder.estimator`."""

    def __init__(self, estimator: nn.Module):
        super().__init__()
        self.estimator = estimator


class FlowFront(nn.Module):
    """The modules of a flow that do not depend on the estimator: token embedding, encoder and speaker projection."""

    def __init__(self, config: FrontConfig, estimator: nn.Module):
        super().__init__()
        width = config.encoder.width
        self.input_embedding = nn.Embedding(config.vocab_size, width)
        self.spk_embed_affine_layer = nn.Linear(config.speaker_dim, config.n_mels)
        self.encoder = UpsampleConformer(config.encoder)
        self.encoder_proj = nn.Linear(width, config.n_mels)
        self.decoder = Decoder(estimator)

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.encoder_proj.weight.device

    def speaker(self, embedding: Tensor) -> Tensor:
        """Projected speaker vectors [B, n_mels] float32 for `embedding` [B, speaker_dim]."""
        return linear32(self.spk_embed_affine_layer, F.normalize(embedding.float(), dim=-1))


class Flow(FlowFront):
    """The modules of `flow.pt`."""

    def __init__(self, config: FlowConfig):
        super().__init__(config, DiT(config.estimator, config.n_mels))
        self.config = config

    @property
    def estimator(self) -> DiT:
        estimator = self.decoder.estimator
        assert isinstance(estimator, DiT)
        return estimator

    def schedule(self, n_steps: int) -> Schedule:
        """The cosine grid of `n_steps` Euler steps. Raises: SettingsError below one step."""
        times = time_grid(n_steps)
        widths = times.diff().float().to(self.device)
        blocks, final = self.estimator.modulation(times[:-1].to(self.device))
        steps = zip(widths.unbind(), blocks.unbind(), final.unbind(), strict=True)
        return Schedule(tuple((w.clone(), Modulation(b.clone(), f.clone())) for w, b, f in steps))

    def euler_step(
        self, x: Tensor, width: Tensor, modulation: Modulation, context: DiTContext, cache: Tensor, tails: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x after one Euler step along the guided velocity, and the estimator's new rows and tails.

        Args:
            x: [B, T, n_mels] float32.
            width: [] float32 width of the step.
            modulation: of the time at which the step starts.
            context: as `DiT.forward`; the others too.
        """
        out, new_rows, new_tails = self.estimator(torch.cat((x, x)), modulation, context, cache, tails)
        conditional, unconditional = out.chunk(2)
        rate = self.config.cfg_rate
        return x + width * ((1 + rate) * conditional - rate * unconditional), new_rows, new_tails

    def offline(
        self,
        speech_tokens: Tensor,
        n_speech_tokens: Tensor,
        prompt: Tensor,
        speaker: Tensor,
        noise: Tensor,
        schedule: Schedule,
    ) -> Tensor:
        """Mel of whole sequences, prompt and speech in one pass, as the public offline entry point computes it.

        Args:
            speech_tokens: [B, T] the prompt's tokens, then the tokens of the speech.
            n_speech_tokens: [B] valid tokens, both counted.
            prompt: [B, 2T, n_mels] mel of the prompt, zero after it.
            speaker: [B, n_mels] from `speaker`.
            noise: [B, 2T, n_mels] float32.
            schedule: from `schedule`.
        Returns: [B, 2T, n_mels] float32 including the prompt's frames; undefined beyond 2 n_speech_tokens.
        """
        mu = self.encoder_proj(self.encoder.offline(self.input_embedding(speech_tokens), n_speech_tokens))
        return self.solve_offline(mu, FRAMES_PER_TOKEN * n_speech_tokens, prompt, speaker, noise, schedule)

    def solve_offline(
        self, mu: Tensor, n_frames: Tensor, prompt: Tensor, speaker: Tensor, noise: Tensor, schedule: Schedule
    ) -> Tensor:
        """The Euler solve without cached frames; shapes as `offline`, mu [B, T, n_mels]."""
        B, T, _ = mu.shape
        config = self.config.estimator
        mapping = without_cache(n_frames, T)
        mask, n = mapping.mask[:, None, None].repeat(2, 1, 1, 1), n_frames.repeat(2)
        context = DiTContext(self.estimator.condition(mu, speaker, prompt), n, mapping.cached, mask)
        cache = mu.new_zeros(config.depth, 2, 2, 0, config.heads, config.head_dim)
        tails = mu.new_zeros(config.depth, 2 * B, N_CONVS, CONV_TAIL, config.width)
        x = noise
        for width, modulation in schedule.steps:
            x = self.euler_step(x, width, modulation, context, cache, tails)[0]
        return x
