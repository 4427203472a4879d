"""The flow's state over slots, and one chunk of tokens to mel over that state.

Contains the tensors that sessions and voices own (cached rows, convolution tails, block tables), and which noise a
frame starts from. Does not contain the vocoder that follows the flow, nor the host's token counts.

Schema (n slots: 2 S of sessions, the scratch slot, V of voices; slots and rows are numbered as in `block_table`; N =
the largest number of Euler steps):
    token_rows  [n_layers, 2, rows, H, hd]       keys and values at token rate; model dtype, as the next four
    mel_rows    [n_up_layers, 2, rows, H, hd]    keys and values at mel rate
    dit_rows    N x [depth, 2, 2, rows, H, hd]   keys and values per Euler step, conditional and unconditional; each is
                                                 a view of a block of memory in the order [rows, depth, 2, 2, H, hd]
    lookahead_tail [n, 2, D], up_tail [n, 4, D]  inputs of the encoder's causal convolutions
    dit_tails   N x [n, depth, 2, 2, 2, width]   inputs of the estimator's convolutions, per Euler step: conditional or
                                                 not, first or second convolution, frame
    speaker     [n, n_mels] float32
    prompt      [n] int64                        mel frames of the voice's prompt
    token_table, mel_table, dit_table            one `BlockTable` per pool of rows
`encode` advances the token and mel tables and the encoder's tails; `solve` advances the estimator's table and tails.
Both read the slots that sessions are in and write the slots that sessions move to.

`dit_rows` are by far the largest tensors. Their blocks hold memory for all rows of sessions from the start, and for
rows of voices from `grow_voices` on. Code that reads whole tensors, such as compiled graphs that copy their inputs,
needs memory for all rows. On a GPU an access to a row without memory is an error that ends the process.
`encode` and `solve` access the rows that tables list, the rows of a slot's ring or voice that receive new frames,
ZERO_ROW and SPILL_ROW, and no others.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.errors import SettingsError
from models.graphs.growing_memory import GrowingMemory
from models.token2wav.flow.block_table import HISTORY_FRAMES, BlockTable, SlotMapping, Trim
from models.token2wav.flow.conformer import LOOKAHEAD_TAIL, UP_TAIL, RunLayers, Tails
from models.token2wav.flow.dit import CONV_TAIL, N_CONVS, DiTContext
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.settings import FRAMES_PER_TOKEN


@dataclass(frozen=True)
class FlowRules:
    """How the three block tables are trimmed. Defaults: keep the whole prompt and the last 100 frames everywhere."""

    token: Trim = "windowed"
    mel: Trim = "windowed"
    dit: Trim = "windowed"


REFERENCE_FLOW = FlowRules(token="doubled", dit="newest_first")


@dataclass(frozen=True)
class FlowSizes:
    """Capacity of the state."""

    n_sessions: int
    n_voices: int
    max_steps: int = 10  # Euler steps
    max_chunk: int = 28  # tokens synthesized in one chunk
    max_prompt: int = 1500  # mel frames of one voice's prompt
    voice_frames: int = 3000  # mel frames of all voices together

    def __post_init__(self) -> None:
        for name in ("n_sessions", "n_voices", "max_steps", "max_chunk", "max_prompt", "voice_frames"):
            if (value := getattr(self, name)) < 1:
                raise SettingsError(f"token2wav sizes: {name}", expected="at least 1", got=value)
        if self.max_prompt % FRAMES_PER_TOKEN or self.voice_frames % FRAMES_PER_TOKEN:
            got = (self.max_prompt, self.voice_frames)
            raise SettingsError("token2wav sizes: max_prompt, voice_frames", expected="even counts", got=got)

    @property
    def scratch(self) -> int:
        """The slot for padding: it follows the two slots of each session and precedes the slots of voices."""
        return 2 * self.n_sessions


@dataclass(frozen=True)
class ChunkSlots:
    """The slots of one call and the cached frames that it attends to."""

    slots: Tensor  # [B] int64 slots to read, distinct except for the scratch slot
    width: int  # cached mel frames to attend to, even (static)
    targets: Tensor | None = None  # [B] slots to write, `slots` stay unchanged; None = write `slots`
    ring: int | None = None  # rows of the slots' rings in mel frames; None = the ring of a session

    @property
    def written(self) -> Tensor:
        """[B] slots that the call writes."""
        return self.slots if self.targets is None else self.targets


@dataclass(frozen=True)
class ChunkTokens:
    """The speech tokens of one call."""

    ids: Tensor  # [B, T + lookahead] int64 in range, left-aligned; no row synthesizes more than T
    n: Tensor  # [B] int64 valid tokens of each row, the lookahead included; 0 leaves the slot unchanged
    last: Tensor  # [B] bool: the turn ends, so the lookahead is synthesized too


@dataclass(frozen=True)
class SolveInputs:
    """Inputs of one Euler solve."""

    schedule: Schedule  # with as many steps as the slots' voices were prepared with
    noise: Tensor  # [columns, n_mels] float32; a chunk starts at the column numbered by the slot's cached frames
    mu: Tensor  # [B, T, n_mels] encoder frames
    n_frames: Tensor  # [B] int64 valid frames of T
    prompt: Tensor | None = None  # [B, T, n_mels] mel of a voice's own prompt; None = zero, for speech


class FlowState:
    """The tensors that the flow keeps between chunks, for all slots; see the schema at the head of the module."""

    def __init__(self, flow: Flow, sizes: FlowSizes, rules: FlowRules | None = None):
        self.sizes, self.rules = sizes, rules or FlowRules()
        self.scratch = sizes.scratch
        config, device, dtype = flow.config, flow.device, flow.dtype
        encoder, dit = config.encoder, config.estimator
        n_slots = sizes.scratch + 1 + sizes.n_voices

        def table(rate: int, trim: Trim) -> BlockTable:
            # Trimmed newest first, a turn keeps as many frames as the prompt has instead of the fixed history.
            kept = max(sizes.max_prompt, HISTORY_FRAMES) if trim == "newest_first" else HISTORY_FRAMES
            return BlockTable(
                n_sessions=sizes.n_sessions,
                n_voices=sizes.n_voices,
                ring=(kept + FRAMES_PER_TOKEN * sizes.max_chunk) // rate,
                width=(sizes.max_prompt + HISTORY_FRAMES) // rate,
                n_voice_rows=sizes.voice_frames // rate,
                device=device,
            )

        self.token_table = table(FRAMES_PER_TOKEN, self.rules.token)
        self.mel_table, self.dit_table = table(1, self.rules.mel), table(1, self.rules.dit)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        head = (encoder.heads, encoder.width // encoder.heads)
        self.token_rows = zeros(encoder.n_layers, 2, self.token_table.n_rows, *head)
        self.mel_rows = zeros(encoder.n_up_layers, 2, self.mel_table.n_rows, *head)
        rows = (self.dit_table.n_rows, dit.depth, 2, 2, dit.heads, dit.head_dim)
        self._dit_row_bytes = math.prod(rows[1:]) * dtype.itemsize
        n_bytes, own_bytes = (n * self._dit_row_bytes for n in (rows[0], self.dit_table.first_voice_row))
        # A block for each step: a compiled graph must not have inputs that share memory.
        self._dit_memory = [GrowingMemory(n_bytes, own_bytes, device) for _ in range(sizes.max_steps)]
        self.dit_rows = [memory.tensor.view(dtype).view(rows).permute(1, 2, 3, 0, 4, 5) for memory in self._dit_memory]
        self.lookahead_tail = zeros(n_slots, LOOKAHEAD_TAIL, encoder.width)
        self.up_tail = zeros(n_slots, UP_TAIL, encoder.width)
        tails = (n_slots, dit.depth, 2, N_CONVS, CONV_TAIL, dit.width)
        self.dit_tails = [zeros(*tails) for _ in range(sizes.max_steps)]
        self.speaker = zeros(n_slots, config.n_mels, dtype=torch.float32)
        self.prompt = zeros(n_slots, dtype=torch.int64)

    @property
    def tables(self) -> tuple[BlockTable, BlockTable, BlockTable]:
        """The block tables at token rate, at mel rate and of the estimator."""
        return self.token_table, self.mel_table, self.dit_table

    def tensors(self) -> Iterator[Tensor]:
        """All tensors. Rows of voices that `dit_rows` has no memory for must not be read."""
        for table in self.tables:
            yield from table.tensors()
        yield from (self.token_rows, self.mel_rows, *self.dit_rows, *self.slot_tensors())

    def slot_tensors(self) -> list[Tensor]:
        """The tensors with one entry per slot, besides the block tables; a session copies them from its voice."""
        return [self.lookahead_tail, self.up_tail, *self.dit_tails, self.speaker, self.prompt]

    @property
    def n_bytes(self) -> int:
        """Size of all tensors, rows of voices without memory included."""
        return sum(tensor.nbytes for tensor in self.tensors())

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the tensors hold now."""
        return self.n_bytes + sum(memory.held_bytes - memory.tensor.nbytes for memory in self._dit_memory)

    def grow_voices(self, n_frames: int) -> None:
        """Let `dit_rows` hold the first `n_frames` rows of all voices, for work on the current stream. Never shrinks.

        Raises: torch.OutOfMemoryError; any other error of the device. The rows of some steps may have grown then.
        """
        for memory in self._dit_memory:
            memory.grow((self.dit_table.first_voice_row + n_frames) * self._dit_row_bytes)

    def copy_voice_facts(self, slots: Tensor, targets: Tensor) -> None:
        """Copy speaker and prompt length, which a chunk does not change, from `slots` [B] to `targets` [B]."""
        for tensor in (self.speaker, self.prompt):
            tensor.index_copy_(0, targets, tensor[slots])

    def place_voices(self, voices: Tensor, starts: Tensor, n_frames: Tensor, speaker: Tensor) -> None:
        """Empty voice slots and assign rows to them.

        Args:
            voices: [B] voice slots.
            starts: [B] first row of each voice among the rows of all voices, in mel frames.
            n_frames: [B] mel frames of each prompt.
            speaker: [B, n_mels] from `Flow.speaker`.
        """
        for table, rate in zip(self.tables, (FRAMES_PER_TOKEN, 1, 1), strict=True):
            table.length.index_fill_(0, voices, 0)
            table.start.index_copy_(0, voices, table.first_voice_row + starts // rate)
        for tensor in self.slot_tensors():
            tensor.index_fill_(0, voices, 0)
        self.prompt.index_copy_(0, voices, n_frames)
        self.speaker.index_copy_(0, voices, speaker)

    def begin(self, slots: Tensor, voices: Tensor) -> None:
        """Set `slots` [B] to the state after their voices' prompts, stored in the voice slots `voices` [B]."""
        for table in self.tables:
            table.copy(slots, voices)
        for tensor in self.slot_tensors():
            tensor.index_copy_(0, slots, tensor[voices])


def encode(
    flow: Flow, state: FlowState, slots: ChunkSlots, tokens: ChunkTokens, run: RunLayers | None = None
) -> Tensor:
    """Encoder frames of one chunk of tokens; advances the encoder's caches.

    Args:
        flow: the modules.
        state: updated in place.
        slots: the slots to read and write.
        tokens: the chunk.
        run: replaces `conformer.run_layers`.
    Returns: [B, 2T, n_mels], of which twice the number of synthesized tokens are valid.
    """
    encoder = flow.encoder
    T = tokens.ids.shape[1] - encoder.lookahead
    n_new = count_synthesized(tokens.n, tokens.last, encoder.lookahead)
    ring = slots.ring and slots.ring // FRAMES_PER_TOKEN
    mappings = (
        state.token_table.slot_mapping(slots.slots, n_new, T, slots.width // FRAMES_PER_TOKEN, ring),
        state.mel_table.slot_mapping(
            slots.slots, FRAMES_PER_TOKEN * n_new, FRAMES_PER_TOKEN * T, slots.width, slots.ring
        ),
    )
    tails = Tails(state.lookahead_tail[slots.slots], state.up_tail[slots.slots])
    caches = (state.token_rows, state.mel_rows)
    embedded = flow.input_embedding(tokens.ids)
    hidden, tails, rows = encoder(embedded, tokens.n, n_new, tails, mappings, caches, run)
    mu: Tensor = flow.encoder_proj(hidden)
    prompt = state.prompt[slots.slots]
    for pool, mapping, new in zip(caches, mappings, rows, strict=True):
        if new is not None:
            _store(pool, mapping, new)
    targets = slots.written
    n_history = HISTORY_FRAMES // FRAMES_PER_TOKEN
    state.token_table.commit(mappings[0], targets, prompt // FRAMES_PER_TOKEN, n_history, state.rules.token)
    state.mel_table.commit(mappings[1], targets, prompt, HISTORY_FRAMES, state.rules.mel)
    state.lookahead_tail.index_copy_(0, targets, tails.lookahead)
    state.up_tail.index_copy_(0, targets, tails.up)
    state.copy_voice_facts(slots.slots, targets)
    return mu


def solve(flow: Flow, state: FlowState, slots: ChunkSlots, inputs: SolveInputs) -> Tensor:
    """Mel of encoder frames after all Euler steps; advances the estimator's caches.

    Args:
        flow: the modules.
        state: updated in place.
        slots: the slots to read and write.
        inputs: encoder frames, noise and schedule.
    Returns: [B, T, n_mels] float32.
    """
    mu, n_frames, noise = inputs.mu, inputs.n_frames, inputs.noise
    B, T, _ = mu.shape
    mapping = state.dit_table.slot_mapping(slots.slots, n_frames, T, slots.width, slots.ring)
    column = mapping.n_cached[:, None] + torch.arange(T, device=mu.device)
    x = noise[column.clamp(max=len(noise) - 1)]
    prompt = torch.zeros_like(mu) if inputs.prompt is None else inputs.prompt
    condition = flow.estimator.condition(mu, state.speaker[slots.slots], prompt.to(mu.dtype))
    mask, n = mapping.mask[:, None, None].repeat(2, 1, 1, 1), n_frames.repeat(2)
    context = DiTContext(condition, n, mapping.cached, mask)
    for k, (step_width, modulation) in enumerate(inputs.schedule.steps):
        tails = state.dit_tails[k][slots.slots].permute(1, 2, 0, 3, 4, 5).flatten(1, 2)  # [depth, 2B, convs, 2, width]
        x, rows, tails = flow.euler_step(x, step_width, modulation, context, state.dit_rows[k], tails)
        _store(state.dit_rows[k], mapping, rows)
        tails = tails.unflatten(1, (2, B)).permute(2, 0, 1, 3, 4, 5)
        state.dit_tails[k].index_copy_(0, slots.written, tails)
    state.dit_table.commit(mapping, slots.written, state.prompt[slots.slots], HISTORY_FRAMES, state.rules.dit)
    return x


def count_synthesized(n_speech_tokens: Tensor, last: Tensor, lookahead: int) -> Tensor:
    """How many of n_speech_tokens [B] a chunk synthesizes: all of them if `last` [B], else all but the lookahead."""
    return torch.where(last, n_speech_tokens, (n_speech_tokens - lookahead).clamp(min=0))


def _store(pool: Tensor, mapping: SlotMapping, rows: Tensor) -> None:
    """Write rows [..., B, T, H, hd] to the pool's rows `mapping.fresh`, in place."""
    pool.index_copy_(pool.ndim - 3, mapping.fresh.flatten(), rows.flatten(-4, -3))
