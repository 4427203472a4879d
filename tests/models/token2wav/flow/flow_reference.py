"""The flow's networks by their formulas: float64, one sequence, caches as lists, loops over queries and keys."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.layers import transformer_reference as slow
from tests.models.layers.transformer_reference import Weights

Rows = list[tuple[Tensor, Tensor]]  # keys and values [heads x hd], oldest first


def distance_wave(distance: int, width: int) -> Tensor:
    angles = [distance * 10_000 ** (-2 * m / width) for m in range(width // 2)]
    return torch.tensor([part for a in angles for part in (math.sin(a), math.cos(a))], dtype=torch.float64)


def relative_attention(x: Tensor, w: Weights, name: str, heads: int, cached: Rows) -> tuple[Tensor, Rows]:
    """Attention of x [T, D] to the cached rows and to itself. Returns: [T, D] and the new rows."""
    q, k, v = (slow.linear(x, w, f"{name}.linear_{part}") for part in "qkv")
    width = x.shape[1]
    n = width // heads
    rows = [*cached, *zip(k, v, strict=True)]
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for h in range(heads):
            part = slice(h * n, (h + 1) * n)
            u, p = w(f"{name}.pos_bias_u")[h], w(f"{name}.pos_bias_v")[h]
            scores = []
            for j, (key, _) in enumerate(rows):
                place = w(f"{name}.linear_pos.weight") @ distance_wave(len(cached) + i - j, width)
                scores.append(((q[i, part] + u) @ key[part] + (q[i, part] + p) @ place[part]) / math.sqrt(n))
            weights = torch.stack(scores).softmax(0)
            out[i, part] = sum(a * value[part] for a, (_, value) in zip(weights, rows, strict=True))
    return slow.linear(out, w, f"{name}.linear_out"), rows[len(cached) :]


def causal(x: Tensor, tail: Tensor, w: Weights, name: str) -> Tensor:
    """The convolution of `tail` and x [T, C], without padding."""
    return F.conv1d(torch.cat((tail, x)).T[None], w(f"{name}.weight"), w(f"{name}.bias"))[0].T


@dataclass
class Conformer:
    """One session's encoder, chunk by chunk, without trimming."""

    encoder: nn.Module
    heads: int
    rows: dict[str, Rows] = field(default_factory=dict)
    tails: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        """[2 n_synthesized, D] for embedded tokens x [n, D], the lookahead included."""
        w, D = slow.weights_of(self.encoder), x.shape[1]
        x = self._embed(x.double(), w, "embed")
        ahead = len(w("pre_lookahead_layer.conv1.weight")[0, 0]) - 1
        if last:
            x = torch.cat((x, x.new_zeros(ahead, D)))
        hidden = causal(x, x.new_zeros(0, D), w, "pre_lookahead_layer.conv1")
        hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
        x = x[: len(hidden)] + self._convolve(hidden, w, "pre_lookahead_layer.conv2")
        x = self._layers(x, w, "encoders")
        x = self._convolve(torch.stack((x, x), dim=1).flatten(0, 1), w, "up_layer.conv")
        x = self._layers(self._embed(x, w, "up_embed"), w, "up_encoders")
        return slow.layer_norm(x, w, "after_norm", 1e-5)

    def _embed(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return math.sqrt(x.shape[1]) * slow.layer_norm(slow.linear(x, w, f"{name}.out.0"), w, f"{name}.out.1", 1e-5)

    def _convolve(self, x: Tensor, w: Weights, name: str) -> Tensor:
        n = w(f"{name}.weight").shape[2] - 1
        tail = self.tails.get(name, x.new_zeros(n, x.shape[1]))
        self.tails[name] = torch.cat((tail, x))[-n:]
        return causal(x, tail, w, name)

    def _layers(self, x: Tensor, w: Weights, stack: str) -> Tensor:
        for i in range(len(self.encoder.get_submodule(stack))):
            name = f"{stack}.{i}"
            cached = self.rows.setdefault(name, [])
            h = slow.layer_norm(x, w, f"{name}.norm_mha", 1e-12)
            attended, new = relative_attention(h, w, f"{name}.self_attn", self.heads, cached)
            x, self.rows[name] = x + attended, cached + new
            h = slow.linear(slow.layer_norm(x, w, f"{name}.norm_ff", 1e-12), w, f"{name}.feed_forward.w_1")
            x = x + slow.linear(h * h.sigmoid(), w, f"{name}.feed_forward.w_2")
        return x


@dataclass
class Estimator:
    """One session's estimator at one time, one half, chunk by chunk."""

    dit: nn.Module
    rows: dict[str, Rows] = field(default_factory=dict)
    tails: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, time: float, x: Tensor, mu: Tensor, speaker: Tensor, prompt: Tensor) -> Tensor:
        """[T, n_mels] for x, mu, prompt [T, n_mels] and speaker [n_mels]."""
        w = slow.weights_of(self.dit)
        c = self._time(time, w)
        given = (x, mu, speaker.expand_as(mu), prompt)
        h = slow.linear(torch.cat([part.double() for part in given], dim=1), w, "in_proj")
        for i in range(len(self.dit.blocks)):
            name = f"blocks.{i}"
            shifts = slow.linear(c * c.sigmoid(), w, f"{name}.adaLN_modulation.1").chunk(9)
            h = h + shifts[2] * self._attend(_modulated(h, *shifts[0:2]), w, f"{name}.attn")
            h = h + shifts[8] * self._convolve(_modulated(h, *shifts[6:8]), w, f"{name}.conv")
            inner = slow.linear(_modulated(h, *shifts[3:5]), w, f"{name}.mlp.fc1")
            h = h + shifts[5] * slow.linear(slow.gelu_tanh(inner), w, f"{name}.mlp.fc2")
        final = slow.linear(c * c.sigmoid(), w, "final_layer.adaLN_modulation.1").chunk(2)
        return slow.linear(_modulated(h, *final), w, "final_layer.linear")

    def _time(self, time: float, w: Weights) -> Tensor:
        angles = [1000 * time * math.exp(-math.log(10_000) * m / 128) for m in range(128)]
        waves = torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=torch.float64)
        hidden = slow.linear(waves, w, "t_embedder.mlp.0")
        return slow.linear(hidden * hidden.sigmoid(), w, "t_embedder.mlp.2")

    def _attend(self, x: Tensor, w: Weights, name: str) -> Tensor:
        n = len(w(f"{name}.q_norm.weight"))
        q, k, v = (slow.linear(x, w, f"{name}.to_{part}").unflatten(1, (-1, n)) for part in "qkv")
        q, k = (slow.layer_norm(part, w, f"{name}.{which}_norm", 1e-5) for part, which in ((q, "q"), (k, "k")))
        rows = self.rows[name] = self.rows.get(name, []) + list(zip(k, v, strict=True))
        keys, values = (torch.stack(part) for part in zip(*rows, strict=True))
        heads = [slow.attention(q[:, h], keys[:, h], values[:, h]) for h in range(q.shape[1])]
        return slow.linear(torch.cat(heads, dim=1), w, f"{name}.proj")

    def _convolve(self, x: Tensor, w: Weights, name: str) -> Tensor:
        for number in ("1", "6"):
            conv = f"{name}.block.{number}"
            tail = self.tails.get(conv, x.new_zeros(2, x.shape[1]))
            self.tails[conv] = torch.cat((tail, x))[-2:]
            x = causal(x, tail, w, conv)
            if number == "1":
                x = slow.layer_norm(x, w, f"{name}.block.3", 1e-5)
                x = x * torch.tanh(torch.log1p(x.exp()))
        return x


def _modulated(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + scale) + shift
