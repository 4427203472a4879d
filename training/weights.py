"""Modules of the program with weights to train: first values, and the constants that depend on weights."""

import math
from typing import cast

import torch
from torch import Tensor, nn

from models.layers.transformer import Derived
from models.token2wav.flow.conformer import RelativeAttention
from models.token2wav.flow.dit import AdaLN, DiT
from models.token2wav.flow.flow import Flow
from models.token2wav.hift.f0 import WideConv
from models.token2wav.hift.hift import Hift, ResBlock, Snake
from models.token2wav.hift.spectral import N_BINS
from models.token2wav.prompt.campplus import Affine, CampPlus
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from models.token2wav.settings import CampPlusConfig, FlowConfig, HiftConfig, S3TokenizerConfig

RESIDUAL_STD = 0.01  # of a residual branch's last convolution: blocks start close to the identity
FIRST_LOG_MAGNITUDE = -2.0  # of the vocoder's spectrum: quiet at first


def new_flow(config: FlowConfig, seed: int = 0) -> Flow:
    """A flow whose estimator starts at zero velocity and zero gates."""
    torch.manual_seed(seed)
    flow = Flow(config)
    with torch.no_grad():
        nn.init.normal_(flow.input_embedding.weight, std=1 / math.sqrt(config.encoder.width))
        for module in flow.modules():
            if isinstance(module, RelativeAttention):
                module.pos_bias_u.zero_()
                module.pos_bias_v.zero_()
            if isinstance(module, AdaLN):
                nn.init.zeros_(cast(nn.Linear, module[1]).weight)
                nn.init.zeros_(cast(nn.Linear, module[1]).bias)
            if isinstance(module, DiT):
                nn.init.zeros_(module.final_layer.linear.weight)
                nn.init.zeros_(module.final_layer.linear.bias)
    return flow


def new_hift(config: HiftConfig, seed: int = 0) -> Hift:
    """A vocoder with almost linear residual blocks and a quiet output."""
    torch.manual_seed(seed)
    hift = Hift(config)
    with torch.no_grad():
        for module in hift.modules():
            if isinstance(module, Snake):
                module.alpha.fill_(1.0)
            if isinstance(module, ResBlock):
                for conv in module.convs2:
                    nn.init.normal_(cast(nn.Conv1d, conv).weight, std=RESIDUAL_STD)
        for layer in (part for part in hift.f0_predictor.condnet if isinstance(part, WideConv)):
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5))
            nn.init.zeros_(layer.bias)
        assert hift.conv_post.bias is not None
        hift.conv_post.bias[:N_BINS].fill_(FIRST_LOG_MAGNITUDE)
    return hift


def new_tokenizer(config: S3TokenizerConfig, seed: int = 0) -> S3Tokenizer:
    torch.manual_seed(seed)
    return S3Tokenizer(config)


def new_speaker_encoder(config: CampPlusConfig, seed: int = 0) -> CampPlus:
    torch.manual_seed(seed)
    encoder = CampPlus(config)
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, Affine):
                module.weight.fill_(1.0)
                module.bias.zero_()
            if isinstance(module, nn.Conv1d | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return encoder


def derive(module: nn.Module, kinds: type | tuple[type, ...] = Derived) -> None:
    """Compute the constants of all parts of these kinds again, with gradients to the weights they come from."""
    for part in module.modules():
        if isinstance(part, kinds) and isinstance(part, Derived):
            weight: Tensor = next(part.parameters(), next(module.parameters()))
            part.derive(weight.device, torch.float32)


def count(module: nn.Module) -> int:
    """Number of weights."""
    return sum(weight.numel() for weight in module.parameters())
