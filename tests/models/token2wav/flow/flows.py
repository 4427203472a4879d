"""Small random flows, voices and sessions for the tests of the flow."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.layers.weights import assign_weights, on_meta, tensor_shapes
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.flow.flow_state import (
    ChunkSlots,
    ChunkTokens,
    FlowRules,
    FlowSizes,
    FlowState,
    SolveInputs,
    count_synthesized,
    encode,
    solve,
)
from models.token2wav.settings import FRAMES_PER_TOKEN, SILENCE_TOKEN, DiTConfig, EncoderConfig, FlowConfig
from tests.parity.token2wav.build import set_up_voice

# Different sizes for all axes, so that a swapped axis has the wrong length.
ENCODER = EncoderConfig(width=16, heads=2, inner=24, n_layers=2, n_up_layers=1)
ESTIMATOR = DiTConfig(width=12, heads=3, head_dim=6, depth=2, mlp_ratio=2.0)
CONFIG = FlowConfig(vocab_size=SILENCE_TOKEN + 1, n_mels=5, speaker_dim=7, encoder=ENCODER, estimator=ESTIMATOR)
LOOKAHEAD = ENCODER.lookahead
N_STEPS = 2

Chunk = tuple[Tensor, bool]  # tokens with the lookahead, and whether the turn ends


def random_flow(seed: int = 0, config: FlowConfig = CONFIG) -> Flow:
    """A flow with activations near 1: weights 1 / sqrt(fan in), norms near 1, biases near 0."""
    with on_meta():
        flow = Flow(config)
    generator = torch.Generator().manual_seed(seed)

    def weight(name: str, shape: tuple[int, ...]) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return 0.1 * drawn + (0 if name.endswith("bias") else 1)
        return drawn / math.sqrt(math.prod(shape[1:]))

    weights = {name: weight(name, shape) for name, shape in tensor_shapes(flow).items()}
    return assign_weights(flow, weights, "cpu", torch.float32)


def random_tokens(seed: int, n: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


def split(speech_tokens: Tensor, counts: list[int]) -> list[Chunk]:
    """Chunks that synthesize `counts` tokens each, with their lookahead, and a last chunk with the rest."""
    chunks, first = [], 0
    for n in counts:
        chunks.append((speech_tokens[first : first + n + LOOKAHEAD], False))
        first += n
    return [*chunks, (speech_tokens[first:], True)]


@dataclass
class Rig:
    """A flow with its state, its noise and two prepared voices of different length."""

    flow: Flow
    rules: FlowRules = field(default_factory=FlowRules)
    prompts: tuple[int, ...] = (24, 60)  # tokens of each voice: less and more mel than the history of a turn
    n_sessions: int = 4
    n_steps: int = N_STEPS
    max_chunk: int = 28
    voice_seed: int = 0

    def __post_init__(self) -> None:
        frames = [FRAMES_PER_TOKEN * n for n in self.prompts]
        sizes = FlowSizes(
            n_sessions=self.n_sessions,
            n_voices=len(frames),
            max_steps=self.n_steps,
            max_chunk=self.max_chunk,
            max_prompt=max(frames),
            voice_frames=sum(frames),
        )
        generator = torch.Generator().manual_seed(99)
        self.state = FlowState(self.flow, sizes, self.rules)
        n_columns, n_mels = max(frames) + 200, self.flow.config.n_mels
        self.noise = torch.randn(n_columns, n_mels, generator=generator)
        self.schedule: Schedule = self.flow.schedule(self.n_steps)
        self.set_up_voices(self.voice_seed)

    def set_up_voices(self, seed: int) -> None:
        """Prepare random voices in the voice slots, replacing their content."""
        first = 0
        for voice, n_speech_tokens in enumerate(self.prompts):
            generator = torch.Generator().manual_seed(100 * seed + voice)
            mel = torch.randn(FRAMES_PER_TOKEN * n_speech_tokens, self.flow.config.n_mels, generator=generator)
            speaker = torch.randn(self.flow.config.speaker_dim, generator=generator)
            speech_tokens, slot = random_tokens(100 * seed + voice, n_speech_tokens), self.voice_slot(voice)
            set_up_voice(self.flow, self.state, slot, speech_tokens, mel, speaker, self.noise, self.schedule, first)
            first += len(mel)

    def voice_slot(self, voice: int) -> int:
        return self.state.scratch + 1 + voice

    def begin(self, voices: dict[int, int]) -> None:
        """Start a turn in each slot of `voices` (slot -> voice)."""
        voice_slots = torch.tensor([self.voice_slot(voice) for voice in voices.values()])
        self.state.begin(torch.tensor(list(voices)), voice_slots)

    def step(
        self,
        chunks: dict[int, Chunk],
        bucket: int = 28,
        n_scratch: int = 0,
        pad_token: int = 17,
        targets: dict[int, int] | None = None,
    ) -> dict:
        """One chunk of each slot, in one call padded to `bucket` tokens: slot -> mel [T, n_mels].

        Args:
            targets: slot -> slot that the call writes.
        """
        slots = torch.tensor([*chunks, *[self.state.scratch] * n_scratch])
        if targets is not None:
            targets = torch.tensor([targets.get(slot, slot) for slot in slots.tolist()])
        speech_tokens = torch.full((len(slots), bucket + LOOKAHEAD), pad_token)
        n_speech_tokens, last = torch.zeros(len(slots), dtype=torch.int64), torch.zeros(len(slots), dtype=torch.bool)
        for row, (given, ends) in enumerate(chunks.values()):
            speech_tokens[row, : len(given)] = given
            n_speech_tokens[row], last[row] = len(given), ends
        mel, n_frames = self.call(slots, speech_tokens, n_speech_tokens, last, targets)
        lengths = n_frames.tolist()
        return {slot: mel[row, : lengths[row]] for row, slot in enumerate(chunks)}

    def call(
        self, slots: Tensor, speech_tokens: Tensor, n_speech_tokens: Tensor, last: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`encode` and `solve` on padded tensors. Returns: mel [B, 2T, n_mels] and its valid frames [B]."""
        n_frames = FRAMES_PER_TOKEN * count_synthesized(n_speech_tokens, last, LOOKAHEAD)
        chunk = ChunkSlots(slots, self.state.dit_table.width, targets)
        mu = encode(self.flow, self.state, chunk, ChunkTokens(speech_tokens, n_speech_tokens, last))
        mel = solve(self.flow, self.state, chunk, SolveInputs(self.schedule, self.noise, mu, n_frames))
        return mel, n_frames

    def turn(self, slot: int, chunks: list[Chunk], **options: int) -> list[Tensor]:
        return [self.step({slot: chunk}, **options)[slot] for chunk in chunks]

    def copies(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.state.tensors()]
