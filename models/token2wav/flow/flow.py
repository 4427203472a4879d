"""Speech codes to mel: the flow's parts under the checkpoint's names, and the Euler solve.

Knows one chunk as a function of weights, codes and what came before. Does not know slots: addresses come as plans,
cached rows and tails as tensors, and what is new goes back to the caller.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.flow.conformer import UpsampleConformer, without_cache
from models.token2wav.flow.dit import CONV_TAIL, N_CONVS, DiT, Modulation, linear32
from models.token2wav.flow.solver import time_grid
from models.token2wav.settings import FRAMES_PER_TOKEN, FlowConfig, FrontConfig


class Schedule(NamedTuple):
    """A time grid and all that follows from it; computed once per number of steps."""

    # Tensors of their own, not slices of one: a compiled step takes any of them without a copy to align it.
    steps: tuple[tuple[Tensor, Modulation], ...]  # per step its width [] float32 and its modulation


class Decoder(nn.Module):
    """Only a name: the checkpoint keeps the estimator one level down."""

    def __init__(self, estimator: nn.Module):
        super().__init__()
        self.estimator = estimator


class FlowFront(nn.Module):
    """What a flow has whichever estimator it asks: codes and speaker on their way to it."""

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
        """Speaker vectors [B, speaker_dim] as the estimator takes them: [B, n_mels] float32."""
        return linear32(self.spk_embed_affine_layer, F.normalize(embedding.float(), dim=-1))


class Flow(FlowFront):
    """`flow.pt`."""

    def __init__(self, config: FlowConfig):
        super().__init__(config, DiT(config.estimator, config.n_mels))
        self.config = config

    def schedule(self, n_steps: int) -> Schedule:
        """The cosine grid of `n_steps`. Raises: SettingsError below one."""
        times = time_grid(n_steps)
        widths = times.diff().float().to(self.device)
        blocks, final = self.decoder.estimator.modulation(times[:-1].to(self.device))
        steps = zip(widths.unbind(), blocks.unbind(), final.unbind(), strict=True)
        return Schedule(tuple((w.clone(), Modulation(b.clone(), f.clone())) for w, b, f in steps))

    def euler_step(
        self,
        x: Tensor,
        width: Tensor,
        modulation: Modulation,
        condition: Tensor,
        n: Tensor,
        rows: Tensor,
        mask: Tensor,
        cache: Tensor,
        tails: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, n_mels] float32 one step further along the guided velocity; the rest as `DiT.forward`."""
        out, new_rows, new_tails = self.decoder.estimator(
            torch.cat((x, x)), condition, modulation, n, rows, mask, cache, tails
        )
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
        """Whole sequences at once: prompt and speech in one pass, as the public offline entry does.

        Args:
            codes: [B, T] prompt codes, then speech codes; n_codes: [B] how many of both.
            prompt: [B, 2T, n_mels] mel of the prompt, zero behind it. speaker: [B, n_mels] from `speaker`.
            noise: [B, 2T, n_mels] float32.
        Returns: [B, 2T, n_mels] float32 including the prompt's frames; rows beyond 2 n_codes are meaningless.
        """
        mu = self.encoder_proj(self.encoder.offline(self.input_embedding(speech_tokens), n_speech_tokens))
        return self.solve_offline(mu, FRAMES_PER_TOKEN * n_speech_tokens, prompt, speaker, noise, schedule)

    def solve_offline(
        self, mu: Tensor, n_frames: Tensor, prompt: Tensor, speaker: Tensor, noise: Tensor, schedule: Schedule
    ) -> Tensor:
        """The solve without cached frames; shapes as `offline`, mu [B, T, n_mels]."""
        B, T, _ = mu.shape
        config = self.config.estimator
        plan = without_cache(n_frames, T)
        mask, n = plan.mask[:, None, None].repeat(2, 1, 1, 1), n_frames.repeat(2)
        condition = self.decoder.estimator.condition(mu, speaker, prompt)
        cache = mu.new_zeros(config.depth, 2, 2, 0, config.heads, config.head_dim)
        tails = mu.new_zeros(config.depth, 2 * B, N_CONVS, CONV_TAIL, config.width)
        x = noise
        for width, modulation in schedule.steps:
            x = self.euler_step(x, width, modulation, condition, n, plan.cached, mask, cache, tails)[0]
        return x
