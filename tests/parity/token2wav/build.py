"""Builders for the cases of the flow: settings and modules, a prepared voice, the rows that a block table lists."""

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.weights import assign_weights, on_meta
from models.token2wav.flow.block_table import BlockTable
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, FlowState, SolveInputs, encode, solve
from models.token2wav.settings import FRAMES_PER_TOKEN, SILENCE_TOKEN, DiTConfig, EncoderConfig, FlowConfig

Tree = TypeVar("Tree", bound=nn.Module)


def flow_config(sizes: dict[str, Any]) -> FlowConfig:
    """Settings of the flow from the short names in the golden files."""
    return FlowConfig(
        vocab_size=sizes["vocab"],
        n_mels=sizes["mel"],
        speaker_dim=sizes["spk"],
        encoder=EncoderConfig(
            width=sizes["D"], heads=sizes["H"], inner=sizes["ff"], n_layers=sizes["nb"], n_up_layers=sizes["nu"]
        ),
        estimator=DiTConfig(
            width=sizes["hid"], heads=sizes["nh"], head_dim=sizes["hd"], depth=sizes["depth"], mlp_ratio=sizes["mlp"]
        ),
    )


def weights_under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def filled(tree: Tree, weights: dict[str, Tensor]) -> Tree:
    """The module with exactly these weights, float32 on the CPU."""
    return assign_weights(tree, weights, "cpu", torch.float32)


def flow_around(config: FlowConfig, weights: dict[str, Tensor]) -> Flow:
    """A flow with `weights`, given by their names in the flow, and zeros everywhere else."""
    with on_meta():
        flow = Flow(config)
    unknown = sorted(weights.keys() - flow.state_dict().keys())
    assert not unknown, f"expected names of the flow, got {unknown}"
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in flow.state_dict().items()}
    return filled(flow, zeros | weights)


def set_up_voice(
    flow: Flow,
    state: FlowState,
    slot: int,
    speech_tokens: Tensor,
    mel: Tensor,
    speaker: Tensor,
    noise: Tensor,
    schedule: Schedule,
    first_frame: int = 0,
) -> None:
    """Run a voice's prompt through the flow into voice slot `slot`.

    Args:
        speech_tokens: [P / 2].
        mel: [P, n_mels].
        speaker: [speaker_dim].
        first_frame: first row of the voice among the rows of all voices, in mel frames.
    """
    n_frames, slots = len(mel), torch.tensor([slot])
    state.grow_voices(first_frame + n_frames)
    state.place_voices(slots, torch.tensor([first_frame]), torch.tensor([n_frames]), flow.speaker(speaker[None]))
    speech_tokens = F.pad(speech_tokens, (0, flow.encoder.lookahead), value=SILENCE_TOKEN)[None]
    n_speech_tokens, more_follows = torch.tensor([speech_tokens.shape[1]]), torch.tensor([False])
    chunk = ChunkSlots(slots, 0, ring=n_frames)
    mu = encode(flow, state, chunk, ChunkTokens(speech_tokens, n_speech_tokens, more_follows))
    solve(flow, state, chunk, SolveInputs(schedule, noise, mu, torch.tensor([n_frames]), mel[None]))


def seen_rows(rows: Tensor, table: BlockTable, slot: int) -> Tensor:
    """Keys and values that a slot attends to, in the order of its table: [..., 2, L, H, hd] -> [..., H, L, 2 hd]."""
    seen = rows.index_select(-3, table.rows[slot, : int(table.length[slot])])
    keys, values = seen.unbind(1)
    return torch.cat((keys, values), dim=-1).transpose(-2, -3)


def encoder_rows(state: FlowState, slot: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the encoder's layers at token and at mel rate, each [layers, H, L, 2 hd]."""
    return seen_rows(state.token_rows, state.token_table, slot), seen_rows(state.mel_rows, state.mel_table, slot)


def packed_encoder_rows(state: FlowState, slot: int) -> Tensor:
    """[layers, 1, H, L, 2 hd] as in the reference, which repeats the rows at token rate to the length at mel rate."""
    tokens, mel = encoder_rows(state, slot)
    return torch.cat((tokens.repeat(1, 1, FRAMES_PER_TOKEN, 1), mel))[:, None]


def packed_encoder_tails(state: FlowState, slot: int) -> Tensor:
    """[1, D, 6]: the frames of the lookahead, then those of the upsampling."""
    return torch.cat((state.lookahead_tail[slot], state.up_tail[slot])).T[None]


def packed_estimator_tails(tails: Tensor) -> Tensor:
    """[..., convs, frames, D] -> [..., convs D, frames]."""
    return tails.transpose(-1, -2).flatten(-3, -2)
