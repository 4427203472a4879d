"""A plain reference of the speech-token model: one turn, unrotated keys with their positions, no preallocation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.rotary import rotary_angles, rotate
from models.layers.tts import TTS
from models.sampling.settings import SpeechSampling
from models.sampling.speech import SpeechSamplerState, sample_speech_tokens

ONLY = torch.tensor([0])


class PlainSpeech:
    """Keys and values of each layer, [n, heads, head_dim] each, and each row's position.

    window: rows from before a feed that its rows still see; None = all.
    """

    def __init__(self, tts: TTS, window: int | None = None):
        self.tts, self.window = tts, window
        self.reset()

    def reset(self) -> None:
        self.keys: list[Tensor | None] = [None] * len(self.tts.model.layers)
        self.values = list(self.keys)
        self.positions: list[int] = []
        self.next_position = 0

    def feed(self, rows: Tensor) -> Tensor:
        """Append rows [n, D]. Returns: logits after the last row, [speech tokens]."""
        held = len(self.positions)
        self.positions += range(self.next_position, self.next_position + len(rows))
        self.next_position += len(rows)
        oldest = 0 if self.window is None else max(held - self.window, 0)
        cos, sin = rotary_angles(torch.tensor(self.positions), self.tts.model.frequencies)
        x = rows
        for number, layer in enumerate(self.tts.model.layers):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(y).unflatten(-1, (-1, attention.head_dim))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            old_k, old_v = self.keys[number], self.values[number]
            k = self.keys[number] = k if old_k is None else torch.cat((old_k, k))
            v = self.values[number] = v if old_v is None else torch.cat((old_v, v))
            seen = []
            for row in range(len(rows)):
                at = held + row
                query = rotate(q[row], cos[at], sin[at])
                key = rotate(k[oldest : at + 1], cos[oldest : at + 1, None], sin[oldest : at + 1, None])
                weights = torch.einsum("hd,nhd->hn", query, key) / attention.head_dim**0.5
                seen.append(torch.einsum("hn,nhd->hd", weights.softmax(-1), v[oldest : at + 1]).flatten())
            x = x + attention.o_proj(torch.stack(seen))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(self.tts.model.norm(x)[-1], self.tts.head_code[0].weight)

    def feed_token(self, token: int) -> Tensor:
        return self.feed(self.token_rows([token]))

    def token_rows(self, speech_tokens: list[int]) -> Tensor:
        return self.tts.emb_code[0].weight[speech_tokens]

    def close_up(self, keep: int, drop: int) -> None:
        """Drop rows [keep, keep + drop); positions of later rows decrease by `drop`."""
        for rows in (self.keys, self.values):
            rows[:] = [torch.cat((tensor[:keep], tensor[keep + drop :])) for tensor in rows]
        self.positions = self.positions[:keep] + [place - drop for place in self.positions[keep + drop :]]
        self.next_position -= drop


class PlainSpeaker:
    """Calls in a plain loop that reads every token on the host; has its own sampler."""

    def __init__(self, tts: TTS, settings: SpeechSampling, *, seed: int, eos: int, window: int | None = None):
        self.model, self.eos = PlainSpeech(tts, window), eos
        self.sampler = SpeechSamplerState.allocate(1)
        self.sampler.configure(0, settings, eos, seed)

    def call(self, rows: Tensor, *, min_speech_tokens: int, max_speech_tokens: int) -> tuple[list[int], bool]:
        """The tokens of a call without the end token, and whether the end token was drawn."""
        self.sampler.begin_call(ONLY, torch.tensor([min_speech_tokens]), torch.tensor([True]))
        logits = self.model.feed(rows)
        speech_tokens: list[int] = []
        for n_drawn in range(1, max_speech_tokens + 1):
            token = int(sample_speech_tokens(logits[None], ONLY, torch.tensor([True]), self.sampler).ids)
            if token == self.eos:
                return speech_tokens, True
            speech_tokens.append(token)
            if n_drawn < max_speech_tokens:
                logits = self.model.feed_token(token)
        return speech_tokens, False


class PlainStream:
    """Text chunks in, batches of 25 speech tokens out, for the four attention types between chunks."""

    def __init__(self, speaker: PlainSpeaker, kind: str, max_speech_tokens: int, batch: int):
        self.speaker, self.kind, self.max_speech_tokens, self.batch = speaker, kind, max_speech_tokens, batch
        self.texts: list[Tensor] = []
        self.spoken: list[list[int]] = []
        self.left: list[int] = []
        self.held: list[int] = []  # rows of each chunk in the cache

    def push(self, rows: Tensor, final: bool) -> list[list[int]]:
        model, fed = self.speaker.model, rows
        if self.texts and self.kind == "sliding_recompute":
            model.reset()
            fed = torch.cat((self.texts[-1], model.token_rows(self.spoken[-1]), rows))
        if self.kind == "reindex" and len(self.held) > 2:
            first, *middle, last = self.held
            model.close_up(first, sum(middle))
            self.held = [first, last]
        before = len(model.positions)
        speech_tokens, ended = self.speaker.call(fed, min_speech_tokens=0, max_speech_tokens=self.max_speech_tokens)
        if not ended:
            model.next_position += 1  # the last token is voiced but never fed
        self.held.append(len(model.positions) - before)
        self.texts.append(rows)
        self.spoken.append(speech_tokens)
        self.left += speech_tokens
        out = []
        while len(self.left) >= self.batch:
            out.append(self.left[: self.batch])
            self.left = self.left[self.batch :]
        if final and ended:
            out.append(self.left)
            self.left = []
        return out
