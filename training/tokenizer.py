"""Training of the speech tokenizer: 25 tokens a second that carry phonemes, and a little of pitch and loudness.

A head behind the quantiser predicts the phoneme of each 20 ms frame, its pitch relative to the voice and its loudness
relative to the utterance. The head is not exported. Silence is trained to be the token that the program uses for it.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.prompt.s3_tokenizer import DIGITS, LEVEL_SCALE, LEVELS, S3Tokenizer
from models.token2wav.settings import FRAMES_PER_TOKEN, SILENCE_TOKEN
from training.edits import edit_distance
from training.loop import RunPlan, Trainer, WeightGroup
from training.segments import SegmentSampler
from training.sizes import TOKENIZER
from training.speech.corpus import NO_PHONE, PHONES, Corpus
from training.speech.features import FRAMES_16K, mel_128, pitch, to_16k
from training.speech.voices import TOKEN_SAMPLES
from training.utterances import batches
from training.weights import derive, new_tokenizer

TOKENS = 150  # of one piece: 6 s
BATCH = 32
TARGET_SHARE = 0.4
HEAD_WIDTH = 256
QUIET = 0.004  # root mean square of a silent token
PITCH_WEIGHT, LOUDNESS_WEIGHT, SILENCE_WEIGHT = 0.5, 0.3, 1.0
GAIN, NOISE = 0.25, 0.03  # of the log-mel in training


class PhonemeHead(nn.Module):
    """Quantised digits to phoneme, pitch and loudness of both frames of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIGITS, HEAD_WIDTH)
        self.convs = nn.ModuleList(nn.Conv1d(HEAD_WIDTH, HEAD_WIDTH, 3, padding=1) for _ in range(2))
        self.last = nn.Linear(HEAD_WIDTH, FRAMES_PER_TOKEN * (len(PHONES) + 2))

    def forward(self, digits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, 2T, phones], pitch [B, 2T] and loudness [B, 2T] for digits [B, T, 8] in -1, 0, 1."""
        x = self.first(digits)
        for conv in self.convs:
            x = x + conv(F.gelu(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = self.last(F.gelu(x)).unflatten(-1, (FRAMES_PER_TOKEN, -1)).flatten(1, 2)
        return out[..., :-2], out[..., -2], out[..., -1]


def quantised(tokenizer: S3Tokenizer, log_mel: Tensor) -> tuple[Tensor, Tensor]:
    """Digits [B, T, 8] in -1, 0, 1 with gradients straight through, and the values before rounding.

    Args:
        tokenizer: the module.
        log_mel: [B, 4 T, 128].
    """
    n_frames = torch.full((len(log_mel),), log_mel.shape[1], device=log_mel.device)
    hidden, _ = tokenizer.encoder(log_mel.transpose(1, 2), n_frames)
    soft = tokenizer.codebook.project_down(hidden).tanh()
    return soft + ((soft * LEVEL_SCALE).round() - soft).detach(), soft


def silence_digits(device: torch.device) -> Tensor:
    """[8] digits of the silence token in -1, 0, 1."""
    return torch.tensor([SILENCE_TOKEN // LEVELS**place % LEVELS - 1.0 for place in range(DIGITS)], device=device)


def train_tokenizer(corpus: Corpus, plan: RunPlan) -> Trainer:
    """Train for the time of the plan and log the errors on held-out speech."""
    device, batch = plan.device, plan.batch or BATCH
    wave = torch.from_numpy(corpus.samples).to(device).float() / 32_768
    lengths = torch.from_numpy(corpus.lengths).to(device)
    log_mels = mel_128(to_16k(wave), lengths).half()
    levels = wave.view(-1, TOKEN_SAMPLES).square().mean(1).sqrt()
    silent = levels < QUIET
    tones, louds = _relative(corpus, pitch(wave), wave.view(-1, TOKEN_SAMPLES // FRAMES_PER_TOKEN))
    del wave
    phones = torch.from_numpy(corpus.phones).to(device).long()
    plan.log_setup("features")
    sampler = SegmentSampler(corpus, TOKENS, device, TARGET_SHARE)
    tokenizer, head = new_tokenizer(TOKENIZER).to(device), PhonemeHead().to(device)
    with torch.no_grad():
        derive(tokenizer)
    groups = {"all": WeightGroup([*tokenizer.parameters(), *head.parameters()], 1e-3, betas=(0.9, 0.98), decay=0.01)}
    trainer = Trainer(plan, {"tokenizer": tokenizer, "head": head}, groups, averaged=("tokenizer", "head"))
    row_16k = torch.arange(TOKENS * FRAMES_16K, device=device)
    row = torch.arange(TOKENS * FRAMES_PER_TOKEN, device=device)
    token = torch.arange(TOKENS, device=device)
    wanted = silence_digits(device)

    def step(phase: str) -> dict[str, Tensor]:
        start = sampler.draw(batch)[:, None]
        log_mel = log_mels[start * FRAMES_16K + row_16k].float()
        log_mel = log_mel + GAIN * (2 * torch.rand(batch, 1, 1, device=device) - 1)
        log_mel = log_mel + NOISE * torch.randn_like(log_mel)
        digits, soft = quantised(tokenizer, log_mel)
        logits, tone, loud = head(digits)
        at = start * FRAMES_PER_TOKEN + row
        label, wanted_tone = phones[at], tones[at]
        voiced = wanted_tone.isfinite()
        labelled = label != NO_PHONE
        errors = F.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=NO_PHONE, reduction="sum")
        phone_loss = errors / labelled.sum().clamp_min(1)
        tone_loss = (torch.where(voiced, wanted_tone - tone, 0.0).abs().sum()) / voiced.sum().clamp_min(1)
        loud_loss = (louds[at] - loud).abs().mean()
        quiet = silent[start + token]
        distance = (soft - wanted).square().mean(-1)
        silence_loss = torch.where(quiet, distance, 0.0).sum() / quiet.sum().clamp_min(1)
        total = phone_loss + PITCH_WEIGHT * tone_loss + LOUDNESS_WEIGHT * loud_loss + SILENCE_WEIGHT * silence_loss
        norm = trainer.descend("all", total)
        right = ((logits.argmax(-1) == label) & labelled).sum() / labelled.sum().clamp_min(1)
        losses = {"phone": phone_loss, "tone": tone_loss, "loud": loud_loss, "silence": silence_loss}
        return {**{name: loss.detach() for name, loss in losses.items()}, "right": right, "norm": norm}

    trainer.run(step, lambda _: "all")
    for name in ("tokenizer", "head"):
        trainer.modules[name].load_state_dict(trainer.averaged_weights(name))
    plan.write_log({"held_out": held_out_errors(corpus, tokenizer, head, log_mels)})
    return trainer


@torch.no_grad()
def tokens_of(tokenizer: S3Tokenizer, log_mels: Tensor, lengths: Tensor) -> Tensor:
    """[sum(lengths)] int64 speech tokens of all utterances, each on its own.

    Args:
        tokenizer: ready to run.
        log_mels: [4 sum(lengths), 128].
        lengths: [U] int64 speech tokens of each utterance, on the CPU.
    """
    device = log_mels.device
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int64, device=device)
    for _, start, n, length in batches(lengths, device):
        frame = torch.arange(FRAMES_16K * length, device=device)
        at = (FRAMES_16K * start[:, None] + frame).clamp(max=len(log_mels) - 1)
        found, _ = tokenizer(log_mels[at].float().transpose(1, 2), FRAMES_16K * n)
        token = torch.arange(length, device=device)
        valid = token < n[:, None]
        tokens[(start[:, None] + token)[valid]] = found[valid]
    return tokens


@torch.no_grad()
def held_out_errors(
    corpus: Corpus, tokenizer: S3Tokenizer, head: PhonemeHead, log_mels: Tensor
) -> dict[str, float | int]:
    """Errors of the head on held-out speech, and how the tokens are used.

    `frame_error` is the share of 20 ms frames, `phone_error` the edits per phoneme of the sequence without repeats.
    """
    tokens = tokens_of(tokenizer, log_mels, torch.from_numpy(corpus.lengths))
    wrong = frames = edits = total = 0
    used = []
    for index in corpus.held_out.nonzero()[0].tolist():
        start, n = int(corpus.starts[index]), int(corpus.lengths[index])
        own = tokens[start : start + n]
        digits = torch.stack([own // LEVELS**place % LEVELS - 1.0 for place in range(DIGITS)], dim=-1)
        label = torch.from_numpy(corpus.phones[FRAMES_PER_TOKEN * start : FRAMES_PER_TOKEN * (start + n)]).long()
        if label[0] == NO_PHONE:
            continue
        used.append(own)
        guess = head(digits[None])[0][0].argmax(-1).cpu()
        wrong, frames = wrong + int((guess != label).sum()), frames + len(label)
        expected = _without_repeats(label)
        edits, total = edits + edit_distance(_without_repeats(guess), expected), total + len(expected)
    counts = torch.cat(used).bincount(minlength=LEVELS**DIGITS).double()
    share = counts[counts > 0] / counts.sum()
    return {
        "frame_error": round(wrong / frames, 4),
        "phone_error": round(edits / total, 4),
        "tokens_used": len(share),
        "perplexity": round(float((-(share * share.log()).sum()).exp()), 1),
        "silence_share": round(float(counts[SILENCE_TOKEN] / counts.sum()), 4),
    }


def _without_repeats(frames: Tensor) -> list[int]:
    return [int(phone) for phone, _ in itertools.groupby(frames.tolist()) if phone != 0]


def _relative(corpus: Corpus, f0: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Pitch in octaves above the voice's median, NaN where unvoiced, and log loudness over the utterance's mean."""
    device = f0.device
    owner = torch.from_numpy(corpus.voices.repeat(FRAMES_PER_TOKEN * corpus.lengths)).to(device)
    tones = torch.where(f0 > 0, f0.clamp_min(1).log2(), torch.nan)
    for voice in owner.unique().tolist():
        tones = torch.where(owner == voice, tones - tones[owner == voice].nanmedian(), tones)
    louds = frames.square().mean(1).clamp_min(1e-8).log10()
    return tones.clamp(-1, 1), louds + 2.5
