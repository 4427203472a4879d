"""Training of the speaker encoder: vectors that tell the voices of the corpus apart."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.prompt.campplus import CampPlus, Frames
from training.loop import RunPlan, Trainer, WeightGroup
from training.segments import SegmentSampler
from training.sizes import SPEAKER
from training.speech.corpus import Corpus
from training.speech.features import FRAMES_16K, fbank_80, to_16k
from training.speech.voices import VOICES
from training.weights import new_speaker_encoder

TOKENS = 50  # of one piece: 2 s
BATCH = 48
TARGET_SHARE = 0.15
SHARPNESS = 12.0  # of the scores of normalised vectors
FRAME_GAIN = 0.2  # standard deviation of a random gain of each frame


def vectors(encoder: CampPlus, fbank: Tensor, n_frames: Tensor) -> Tensor:
    """[B, embedding] as `CampPlus.forward`, with a gradient where a channel is constant over time."""
    T = fbank.shape[1]
    valid = torch.arange(T, device=fbank.device) < n_frames[:, None, None]
    part = encoder.xvector
    x = F.relu(part.tdnn["linear"](encoder.head(fbank, valid)))
    frames = Frames.of((n_frames + 1) // 2, x.shape[-1])
    for number in range(1, 4):
        for layer in part.get_submodule(f"block{number}").children():
            x = torch.cat((x, layer(x, frames)), dim=1)
        x = part.get_submodule(f"transit{number}")(x)
    x = F.relu(x)
    mean = torch.where(frames.mask, x, 0).sum(-1, keepdim=True) / frames.n_valid
    squares = torch.where(frames.mask, x - mean, 0).square().sum(-1, keepdim=True)
    deviation = (squares / (frames.n_valid - 1).clamp_min(1) + 1e-8).sqrt()
    out: Tensor = part.dense["linear"](torch.cat((mean, deviation), dim=1))
    return out[..., 0]


def train_speaker(corpus: Corpus, plan: RunPlan) -> Trainer:
    """Train for the time of the plan."""
    device, batch = plan.device, plan.batch or BATCH
    wave = torch.from_numpy(corpus.samples).to(device).float() / 32_768
    energies = fbank_80(to_16k(wave)).half()
    del wave
    owner = torch.from_numpy(corpus.voices.repeat(corpus.lengths)).to(device)
    plan.log_setup("features")
    sampler = SegmentSampler(corpus, TOKENS, device, TARGET_SHARE)
    encoder = new_speaker_encoder(SPEAKER).to(device)
    head = nn.Linear(SPEAKER.embedding, len(VOICES), bias=False, device=device)
    groups = {"all": WeightGroup([*encoder.parameters(), *head.parameters()], 5e-4, decay=0.01)}
    trainer = Trainer(plan, {"speaker": encoder, "head": head}, groups, averaged=("speaker",))
    row = torch.arange(TOKENS * FRAMES_16K, device=device)
    n_frames = torch.full((batch,), len(row), device=device)

    def step(phase: str) -> dict[str, Tensor]:
        start = sampler.draw(batch)
        fbank = energies[start[:, None] * FRAMES_16K + row].float()
        fbank = fbank + FRAME_GAIN * torch.randn(batch, len(row), 1, device=device)
        fbank = fbank - fbank.mean(1, keepdim=True)
        found = F.normalize(vectors(encoder, fbank, n_frames), dim=-1)
        scores = SHARPNESS * found @ F.normalize(head.weight, dim=-1).T
        label = owner[start]
        loss = F.cross_entropy(scores, label)
        norm = trainer.descend("all", loss)
        return {"loss": loss.detach(), "right": (scores.argmax(-1) == label).float().mean(), "norm": norm}

    trainer.run(step, lambda _: "all")
    return trainer
