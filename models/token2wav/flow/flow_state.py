"""What sessions and voices own of the flow: cached rows, convolution tails, views; and one chunk over slots.

Knows slots, trimming and which noise a frame starts from. Does not know the vocoder behind it, nor the host that
counts codes.

Schema (n = 2 S session slots + scratch + V voice slots; slots and rows as `arena` numbers them; N = the most Euler
steps):
    code_rows   [n_layers, 2, rows, H, hd]       keys and values at code rate; model dtype, as the three next
    mel_rows    [n_up_layers, 2, rows, H, hd]    at mel rate
    dit_rows    N x [depth, 2, 2, rows, H, hd]   keys and values, with and without condition, per Euler step
    lookahead_tail [n, 2, D], up_tail [n, 4, D]  inputs of the encoder's causal convolutions
    dit_tails   N x [n, depth, 2, 2, 2, width]   inputs of the estimator's: condition or not, which one, frames
    speaker     [n, n_mels] float32
    prompt      [n] int64                        mel frames of the voice's prompt
Advanced by `encode` (code and mel views, encoder tails) and `solve` (estimator views and tails), both from the slots
where sessions stand to those where they will.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import SettingsError
from models.token2wav.flow.block_table import HISTORY_FRAMES, BlockTable, SlotMapping, Trim
from models.token2wav.flow.conformer import LOOKAHEAD_TAIL, UP_TAIL, RunLayers, Tails
from models.token2wav.flow.dit import CONV_TAIL, N_CONVS
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.settings import FRAMES_PER_TOKEN


@dataclass(frozen=True)
class FlowRules:
    """How the three views are cut. Defaults: the whole prompt and the last 100 frames, everywhere."""

    code: Trim = "windowed"
    mel: Trim = "windowed"
    dit: Trim = "windowed"


REFERENCE_FLOW = FlowRules(code="doubled", dit="newest_first")


@dataclass(frozen=True)
class FlowSizes:
    """How much the state holds.

    n_sessions, n_voices: how many there may be. max_steps: most Euler steps. max_chunk: most codes voiced in one chunk.
    max_prompt: most mel frames of one voice. voice_frames: mel frames of all voices together.
    """

    n_sessions: int
    n_voices: int
    max_steps: int = 10
    max_chunk: int = 28
    max_prompt: int = 1500
    voice_frames: int = 3000

    def __post_init__(self) -> None:
        for name in ("n_sessions", "n_voices", "max_steps", "max_chunk", "max_prompt", "voice_frames"):
            if (value := getattr(self, name)) < 1:
                raise SettingsError(f"token2wav sizes: {name}", expected="at least 1", got=value)
        if self.max_prompt % FRAMES_PER_TOKEN or self.voice_frames % FRAMES_PER_TOKEN:
            got = (self.max_prompt, self.voice_frames)
            raise SettingsError("token2wav sizes: max_prompt, voice_frames", expected="even counts", got=got)

    @property
    def scratch(self) -> int:
        """The slot of padding, behind two for each session; the voices' slots follow."""
        return 2 * self.n_sessions


class FlowState:
    """Everything the flow keeps between chunks, over all slots; see the module's schema."""

    def __init__(self, flow: Flow, sizes: FlowSizes, rules: FlowRules | None = None):
        self.sizes, self.rules = sizes, rules or FlowRules()
        self.scratch = sizes.scratch
        config, device, dtype = flow.config, flow.device, flow.dtype
        encoder, dit = config.encoder, config.estimator
        n_slots = sizes.scratch + 1 + sizes.n_voices

        def views(rate: int, trim: Trim) -> BlockTable:
            # Cut by its own rule, a turn keeps as many frames as the prompt has instead of the fixed history.
            kept = max(sizes.max_prompt, HISTORY_FRAMES) if trim == "newest_first" else HISTORY_FRAMES
            return BlockTable(
                n_sessions=sizes.n_sessions,
                n_voices=sizes.n_voices,
                ring=(kept + FRAMES_PER_TOKEN * sizes.max_chunk) // rate,
                width=(sizes.max_prompt + HISTORY_FRAMES) // rate,
                n_voice_rows=sizes.voice_frames // rate,
                device=device,
            )

        self.code, self.mel, self.dit = views(2, self.rules.code), views(1, self.rules.mel), views(1, self.rules.dit)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        head = (encoder.heads, encoder.width // encoder.heads)
        self.code_rows = zeros(encoder.n_layers, 2, self.code.n_rows, *head)
        self.mel_rows = zeros(encoder.n_up_layers, 2, self.mel.n_rows, *head)
        rows = (dit.depth, 2, 2, self.dit.n_rows, dit.heads, dit.head_dim)
        self.dit_rows = [zeros(*rows) for _ in range(sizes.max_steps)]
        self.lookahead_tail = zeros(n_slots, LOOKAHEAD_TAIL, encoder.width)
        self.up_tail = zeros(n_slots, UP_TAIL, encoder.width)
        tails = (n_slots, dit.depth, 2, N_CONVS, CONV_TAIL, dit.width)
        self.dit_tails = [zeros(*tails) for _ in range(sizes.max_steps)]
        self.speaker = zeros(n_slots, config.n_mels, dtype=torch.float32)
        self.prompt = zeros(n_slots, dtype=torch.int64)

    def tensors(self) -> Iterator[Tensor]:
        for views in (self.code, self.mel, self.dit):
            yield from views.tensors()
        yield from (self.code_rows, self.mel_rows, *self.dit_rows, *self.copied())

    def copied(self) -> list[Tensor]:
        """What a session takes over from its voice, beside the views."""
        return [self.lookahead_tail, self.up_tail, *self.dit_tails, self.speaker, self.prompt]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def carry(self, slots: Tensor, targets: Tensor) -> None:
        """Take to `targets` [B] what a chunk in `slots` [B] leaves as it is."""
        for tensor in (self.speaker, self.prompt):
            tensor.index_copy_(0, targets, tensor[slots])

    def place(self, voices: Tensor, starts: Tensor, n_frames: Tensor, speaker: Tensor) -> None:
        """Empty voice slots [B] and give them rows: `n_frames` [B] from `starts` [B] on among all voices' rows."""
        for views, rate in ((self.code, FRAMES_PER_TOKEN), (self.mel, 1), (self.dit, 1)):
            views.length.index_fill_(0, voices, 0)
            views.start.index_copy_(0, voices, views.first_voice_row + starts // rate)
        for tensor in self.copied():
            tensor.index_fill_(0, voices, 0)
        self.prompt.index_copy_(0, voices, n_frames)
        self.speaker.index_copy_(0, voices, speaker)

    def begin(self, slots: Tensor, voices: Tensor) -> None:
        """Put `slots` [B] where their voices' prompts ended; `voices` [B] are voice slots. Nothing else is left."""
        for views in (self.code, self.mel, self.dit):
            views.copy(slots, voices)
        for tensor in self.copied():
            tensor.index_copy_(0, slots, tensor[voices])


def encode(
    flow: Flow,
    state: FlowState,
    slots: Tensor,
    speech_tokens: Tensor,
    n_speech_tokens: Tensor,
    last: Tensor,
    width: int,
    ring: int | None = None,
    targets: Tensor | None = None,
    run: RunLayers | None = None,
) -> Tensor:
    """Codes to encoder frames, and the encoder's caches one chunk further.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        codes: [B, T + lookahead] in range, left-aligned. n_codes: [B] how many are given, the look-ahead included;
            0 changes nothing, and no row voices more than T. last: [B] bool: nothing follows, so the look-ahead is
            voiced too.
        width: cached mel frames to look at (static, even). ring: see `BlockTable.plan`, in mel frames.
        targets: [B] where to leave what comes next; None = in `slots`. If they are others, `slots` stay as they were.
        run: see `UpsampleConformer`.
    Returns: [B, 2T, n_mels], of which 2 * n_voiced frames count.
    """
    encoder = flow.encoder
    T = speech_tokens.shape[1] - encoder.lookahead
    n_new = voiced(n_speech_tokens, last, encoder.lookahead)
    plans = (
        state.code.plan(slots, n_new, T, width // 2, ring and ring // 2),
        state.mel.plan(slots, FRAMES_PER_TOKEN * n_new, FRAMES_PER_TOKEN * T, width, ring),
    )
    tails = Tails(state.lookahead_tail[slots], state.up_tail[slots])
    caches = (state.code_rows, state.mel_rows)
    targets = slots if targets is None else targets
    hidden, tails, rows = encoder(
        flow.input_embedding(speech_tokens), n_speech_tokens, n_new, tails, plans, caches, run
    )
    mu = flow.encoder_proj(hidden)
    prompt = state.prompt[slots]
    for pool, plan, new in zip(caches, plans, rows, strict=True):
        if new is not None:
            _store(pool, plan, new)
    state.code.commit(plans[0], targets, prompt // 2, HISTORY_FRAMES // 2, state.rules.code)
    state.mel.commit(plans[1], targets, prompt, HISTORY_FRAMES, state.rules.mel)
    state.lookahead_tail.index_copy_(0, targets, tails.lookahead)
    state.up_tail.index_copy_(0, targets, tails.up)
    state.carry(slots, targets)
    return mu


def solve(
    flow: Flow,
    state: FlowState,
    schedule: Schedule,
    noise: Tensor,
    slots: Tensor,
    mu: Tensor,
    n_frames: Tensor,
    width: int,
    prompt: Tensor | None = None,
    ring: int | None = None,
    targets: Tensor | None = None,
) -> Tensor:
    """Encoder frames to mel by all Euler steps, and the estimator's caches one chunk further.

    Args:
        schedule: of as many steps as the slots' voices were prepared with.
        noise: [columns, n_mels] float32; a chunk starts at the column that counts the frames its slot sees.
        mu: [B, T, n_mels]. n_frames: [B] valid of T. width: cached frames to look at (static).
        prompt: [B, T, n_mels] mel to hold on to, for a voice's own prompt; None = zero, for speech.
        ring: see `BlockTable.plan`. targets: see `encode`.
    Returns: [B, T, n_mels] float32.
    """
    B, T, _ = mu.shape
    targets = slots if targets is None else targets
    plan = state.dit.plan(slots, n_frames, T, width, ring)
    column = plan.n_cached[:, None] + torch.arange(T, device=mu.device)
    x = noise[column.clamp(max=len(noise) - 1)]
    prompt = torch.zeros_like(mu) if prompt is None else prompt
    estimator = flow.decoder.estimator
    condition = estimator.condition(mu, state.speaker[slots], prompt.to(mu.dtype))
    mask, n = plan.mask[:, None, None].repeat(2, 1, 1, 1), n_frames.repeat(2)
    for k, (step_width, modulation) in enumerate(schedule.steps):
        tails = state.dit_tails[k][slots].permute(1, 2, 0, 3, 4, 5).flatten(1, 2)  # [depth, 2B, convs, 2, width]
        x, rows, tails = flow.euler_step(
            x, step_width, modulation, condition, n, plan.cached, mask, state.dit_rows[k], tails
        )
        _store(state.dit_rows[k], plan, rows)
        tails = tails.unflatten(1, (2, B)).permute(2, 0, 1, 3, 4, 5)
        state.dit_tails[k].index_copy_(0, targets, tails)
    state.dit.commit(plan, targets, state.prompt[slots], HISTORY_FRAMES, state.rules.dit)
    return x


def voiced(n_speech_tokens: Tensor, last: Tensor, lookahead: int) -> Tensor:
    """How many of n_codes [B] given codes are voiced: all at the end, else all but the look-ahead."""
    return torch.where(last, n_speech_tokens, (n_speech_tokens - lookahead).clamp(min=0))


def _store(pool: Tensor, plan: SlotMapping, rows: Tensor) -> None:
    """Put rows [..., B, T, H, hd] where the plan says, in place."""
    pool.index_copy_(pool.ndim - 3, plan.fresh.flatten(), rows.flatten(-4, -3))
