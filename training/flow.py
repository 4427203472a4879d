"""Training of the flow: speech tokens to mel frames by conditional flow matching.

A piece of speech of one voice starts with a prompt, whose mel the estimator is given, as in serving. Most pieces are
masked as the chunks of a conversation are: a chunk of 25 tokens sees the prompt, the last 50 tokens before it and
itself. A fifth of the pieces lose their condition, for classifier-free guidance.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.conformer import (
    LOOKAHEAD_TAIL,
    UP_TAIL,
    ConformerLayer,
    RelativeAttention,
    UpsampleConformer,
)
from models.token2wav.flow.dit import CONV_TAIL, N_CONVS, DiTContext, Modulation
from models.token2wav.flow.flow import Flow
from models.token2wav.prompt.campplus import CampPlus
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.stream.windows import CHUNK_TOKENS
from training.loop import RunPlan, Trainer, WeightGroup
from training.segments import SegmentSampler
from training.sizes import FLOW
from training.speech.corpus import Corpus
from training.speech.features import FRAMES_16K, fbank_80, mel_80, mel_128, to_16k
from training.tokenizer import tokens_of
from training.utterances import batches
from training.weights import derive, new_flow

TOKENS = 200  # of one piece: 8 s
BATCH = 24
TARGET_SHARE = 0.7
MAX_PROMPT = 125  # tokens
WITHOUT_PROMPT, WHOLE, UNCONDITIONED = 0.15, 0.3, 0.2  # shares of the pieces
SHORTER_CHUNKS, MIN_CHUNK = 0.3, 5  # share of the pieces; tokens
ENCODER_WEIGHT = 0.3  # of the distance between encoder frames and mel


class Visible(NamedTuple):
    """Which keys each query sees, [B, 1, T, T] bool."""

    tokens: Tensor
    frames: Tensor


def visible(prompt: Tensor, whole: Tensor, n_tokens: int, chunk_tokens: Tensor | int = CHUNK_TOKENS) -> Visible:
    """The masks of pieces of `n_tokens`.

    Args:
        prompt: [B] int64 tokens of the prompt.
        chunk_tokens: tokens of a chunk, [B, 1] int64 or one number for all.
        whole: [B] bool: everything sees everything.
        n_tokens: of each piece.
    """

    def mask(rate: int) -> Tensor:
        size, history = chunk_tokens * rate, HISTORY_FRAMES // FRAMES_PER_TOKEN * rate
        position = torch.arange(n_tokens * rate, device=prompt.device) - (prompt * rate)[:, None]
        chunk = torch.where(position < 0, -1, position // size)
        query, key = chunk[:, :, None], chunk[:, None, :]
        recent = position[:, None, :] >= (position - position % size)[:, :, None] - history
        seen = (key <= query) & ((key < 0) | recent | (key == query))
        return (seen | whole[:, None, None])[:, None]

    return Visible(mask(1), mask(FRAMES_PER_TOKEN))


def encode(flow: Flow, tokens: Tensor, masks: Visible) -> Tensor:
    """[B, 2T, 80] encoder frames of tokens [B, T], as `UpsampleConformer.offline` with a mask for each query."""
    encoder: UpsampleConformer = flow.encoder
    B, T = tokens.shape
    n = torch.full((B,), T, device=tokens.device)
    x = F.pad(encoder.embed(flow.input_embedding(tokens)), (0, 0, 0, encoder.lookahead))
    x, _ = encoder.pre_lookahead_layer(x, x.new_zeros(B, LOOKAHEAD_TAIL, encoder.width), n)
    for layer in encoder.encoders:
        x = _conformer_layer(cast(ConformerLayer, layer), x, masks.tokens)
    x, _ = encoder.up_layer(x, x.new_zeros(B, UP_TAIL, encoder.width), n)
    x = encoder.up_embed(x)
    for layer in encoder.up_encoders:
        x = _conformer_layer(cast(ConformerLayer, layer), x, masks.frames)
    mu: Tensor = flow.encoder_proj(encoder.after_norm(x))
    return mu


def velocity(flow: Flow, x: Tensor, times: Tensor, condition: Tensor, mask: Tensor) -> Tensor:
    """[B, T, 80] estimate for noisy mels x [B, T, 80] at times [B]; B even, mask [B, 1, T, T]."""
    estimator, config = flow.estimator, flow.config.estimator
    B, T, _ = x.shape
    blocks, final = estimator.modulation(times)
    modulation = Modulation(blocks.permute(1, 2, 0, 3)[..., None, :], final.transpose(0, 1)[..., None, :])
    n = torch.full((B,), T, device=x.device)
    context = DiTContext(condition, n, n.new_zeros(B // 2, 0), mask)
    cache = x.new_zeros(config.depth, 2, 2, 0, config.heads, config.head_dim)
    tails = x.new_zeros(config.depth, B, N_CONVS, CONV_TAIL, config.width)
    out: Tensor = estimator(x, modulation, context, cache, tails)[0]
    return out


def train_flow(corpus: Corpus, plan: RunPlan, tokenizer: S3Tokenizer, speaker_encoder: CampPlus) -> Trainer:
    """Train for the time of the plan, on the tokens and vectors of trained networks."""
    device, batch = plan.device, plan.batch or BATCH
    wave = torch.from_numpy(corpus.samples).to(device).float() / 32_768
    lengths = torch.from_numpy(corpus.lengths)
    low = to_16k(wave)
    log_mels = mel_128(low, lengths.to(device)).half()
    energies, mels = fbank_80(low), mel_80(wave)
    del wave, low
    plan.log_setup("features")
    tokens = tokens_of(tokenizer, log_mels, lengths)
    plan.log_setup("speech tokens")
    speakers = speaker_vectors(speaker_encoder, energies, lengths)
    plan.log_setup("speaker vectors")
    del log_mels, energies
    owner = torch.arange(len(lengths), device=device).repeat_interleave(lengths.to(device))
    sampler = SegmentSampler(corpus, TOKENS, device, TARGET_SHARE)
    flow = new_flow(FLOW).to(device)
    scale = mels.std()
    with torch.no_grad():
        # The velocity is the mel minus noise, so its mean is the mel's.
        flow.estimator.final_layer.linear.bias.copy_(mels.mean(0))
        flow.encoder_proj.bias.copy_(mels.mean(0))
    trainer = Trainer(plan, {"flow": flow}, {"all": WeightGroup(list(flow.parameters()), 1e-3)}, averaged=("flow",))
    token = torch.arange(TOKENS, device=device)
    frame = torch.arange(TOKENS * FRAMES_PER_TOKEN, device=device)

    def step(phase: str) -> dict[str, Tensor]:
        derive(flow, RelativeAttention)
        start = sampler.draw(batch)
        ids = tokens[start[:, None] + token]
        mel = mels[start[:, None] * FRAMES_PER_TOKEN + frame]
        chance = torch.rand(6, batch, device=device)
        prompt = torch.where(chance[0] < WITHOUT_PROMPT, 0, (chance[1] * MAX_PROMPT).long())
        # Chunks of a turn's start may be shorter, for earlier sound.
        fewer = CHUNK_TOKENS - (chance[3] * (CHUNK_TOKENS - MIN_CHUNK)).long()
        chunk = torch.where(chance[4] < SHORTER_CHUNKS, fewer, CHUNK_TOKENS)[:, None]
        masks = visible(prompt, chance[2] < WHOLE, TOKENS, chunk)
        mu = encode(flow, ids, masks)
        given = torch.where((frame < FRAMES_PER_TOKEN * prompt[:, None])[..., None], mel, 0.0)
        speaker = flow.speaker(speakers[owner[start]])
        keep = (chance[5] >= UNCONDITIONED).float()[:, None, None]
        condition = flow.estimator.condition(mu * keep, speaker * keep[:, 0], given * keep)[:batch]
        times = 1 - torch.cos(torch.rand(batch, device=device) * (torch.pi / 2))
        noise = torch.randn_like(mel)
        x = noise + times[:, None, None] * (mel - noise)
        out = velocity(flow, x, times, condition, masks.frames)
        flow_loss = (out - (mel - noise)).square().mean() / scale.square()
        encoder_loss = (mu - mel).abs().mean() / scale
        norm = trainer.descend("all", flow_loss + ENCODER_WEIGHT * encoder_loss)
        return {"flow": flow_loss.detach(), "encoder": encoder_loss.detach(), "norm": norm}

    trainer.run(step, lambda _: "all")
    return trainer


@torch.no_grad()
def speaker_vectors(encoder: CampPlus, energies: Tensor, lengths: Tensor) -> Tensor:
    """[U, embedding] speaker vector of each utterance.

    Args:
        encoder: ready to run.
        energies: [4 sum(lengths), 80] from `fbank_80`.
        lengths: [U] int64 speech tokens of each utterance, on the CPU.
    """
    device = energies.device
    vectors = torch.empty(len(lengths), encoder.config.embedding, device=device)
    for index, start, n_tokens, length in batches(lengths, device):
        frame, n = torch.arange(FRAMES_16K * length, device=device), FRAMES_16K * n_tokens
        rows = energies[(FRAMES_16K * start[:, None] + frame).clamp(max=len(energies) - 1)]
        inside = (frame < n[:, None])[..., None]
        mean = torch.where(inside, rows, 0.0).sum(1, keepdim=True) / n[:, None, None]
        vectors[index] = encoder(rows - mean, n)
    return vectors


def _conformer_layer(layer: ConformerLayer, x: Tensor, mask: Tensor) -> Tensor:
    x = x + _attend(layer.self_attn, layer.norm_mha(x), mask)
    out: Tensor = x + layer.feed_forward(layer.norm_ff(x))
    return out


def _attend(attention: RelativeAttention, x: Tensor, mask: Tensor) -> Tensor:
    B, T, _ = x.shape
    heads = (B, T, attention.heads, attention.head_dim)
    layers = (attention.linear_q, attention.linear_k, attention.linear_v)
    q, k, v = (layer(x).view(heads) for layer in layers)
    distances = attention.distances(1 - T, T).flip(1)  # column c is the distance T - 1 - c
    by_distance = torch.einsum("bthd,hrd->bhtr", q + attention.pos_bias_v, distances)
    # Row i needs columns T - 1 - i and following: shift each row by its number.
    shifted = F.pad(by_distance, (1, 0)).view(B, attention.heads, 2 * T, T)[:, :, 1:]
    bias = shifted.reshape(B, attention.heads, T, 2 * T - 1)[..., :T] * attention.head_dim**-0.5
    bias = bias.masked_fill(~mask, float("-inf"))
    query = (q + attention.pos_bias_u).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
    attended: Tensor = attention.linear_out(out.transpose(1, 2).flatten(2))
    return attended
