"""A plain implementation of the U-Net estimator and its solve, for one row without padding and a dict of weights."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def velocity(
    w: Weights, heads: int, x: Tensor, mu: Tensor, t: float, spk: Tensor, cond: Tensor, r: float | None = None
) -> Tensor:
    """The velocity [n_mels, T] for x, mu, cond [n_mels, T] and spk [C]."""
    n_frames = x.shape[1]
    h = torch.stack([torch.cat((x[:, i], mu[:, i], spk, cond[:, i])) for i in range(n_frames)])
    time = _time(w, t, h.shape[1])
    if r is not None:
        time = w["time_embed_mixer.weight"] @ torch.cat((time, _time(w, r, h.shape[1])))
    h = skip = _stage(w, "down_blocks.0", heads, h, time)
    h = _conv(w, "down_blocks.0.2", h)
    for i in range(1 + max(int(name.split(".")[1]) for name in w if name.startswith("mid_blocks."))):
        h = _stage(w, f"mid_blocks.{i}", heads, h, time)
    h = _stage(w, "up_blocks.0", heads, torch.cat((h, skip), dim=1), time)
    h = _conv(w, "up_blocks.0.2", h)
    return _conv(w, "final_proj", _conv_norm(w, "final_block", h)).T


def solve(
    w: Weights, heads: int, z: Tensor, mu: Tensor, spk: Tensor, cond: Tensor, times: list[float], cfg_rate: float
) -> Tensor:
    """Guided Euler steps, or mean-flow steps if the weights contain a mixer."""
    x = z
    for t, r in pairwise(times):
        if "time_embed_mixer.weight" in w:
            x = x + (r - t) * velocity(w, heads, x, mu, t, spk, cond, r)
        else:
            guided = velocity(w, heads, x, mu, t, spk, cond)
            free = velocity(w, heads, x, mu * 0, t, spk * 0, cond * 0)
            x = x + (r - t) * (guided + cfg_rate * (guided - free))
    return x


def _time(w: Weights, t: float, width: int) -> Tensor:
    n = width // 2
    angles = torch.tensor([1000 * t / 10_000 ** (m / (n - 1)) for m in range(n)])
    hidden = F.silu(_linear(w, "time_mlp.linear_1", torch.cat((angles.sin(), angles.cos()))))
    return _linear(w, "time_mlp.linear_2", hidden)


def _stage(w: Weights, name: str, heads: int, h: Tensor, time: Tensor) -> Tensor:
    inner = _conv_norm(w, f"{name}.0.block1", h) + _linear(w, f"{name}.0.mlp.1", F.mish(time))
    h = _conv_norm(w, f"{name}.0.block2", inner) + _conv(w, f"{name}.0.res_conv", h)
    n_blocks = sum(key.startswith(f"{name}.1.") and key.endswith("norm1.weight") for key in w)
    for i in range(n_blocks):
        block = f"{name}.1.{i}"
        rows = _norm(w, f"{block}.norm1", h)
        q, k, v = (rows @ w[f"{block}.attn1.to_{part}.weight"].T for part in "qkv")
        out = []
        for one_q, one_k, one_v in zip(*(part.chunk(heads, dim=1) for part in (q, k, v)), strict=True):
            out.append(torch.softmax(one_q @ one_k.T / math.sqrt(one_q.shape[1]), dim=1) @ one_v)
        h = h + _linear(w, f"{block}.attn1.to_out.0", torch.cat(out, dim=1))
        inner = _linear(w, f"{block}.ff.net.0.proj", _norm(w, f"{block}.norm3", h))
        inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
        h = h + _linear(w, f"{block}.ff.net.2", inner)
    return h


def _conv_norm(w: Weights, name: str, h: Tensor) -> Tensor:
    return F.mish(_norm(w, f"{name}.block.2", _conv(w, f"{name}.block.0", h)))


def _conv(w: Weights, name: str, h: Tensor) -> Tensor:
    weight = w[f"{name}.weight"]
    size = weight.shape[2]
    past = torch.cat((h.new_zeros(size - 1, h.shape[1]), h))
    return w[f"{name}.bias"] + sum(past[i : i + len(h)] @ weight[:, :, i].T for i in range(size))


def _norm(w: Weights, name: str, h: Tensor) -> Tensor:
    centred = h - h.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(w: Weights, name: str, h: Tensor) -> Tensor:
    return h @ w[f"{name}.weight"].T + w[f"{name}.bias"]
