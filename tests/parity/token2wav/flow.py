"""The mel of whole sessions (`e2e_*`): a voice, its turn chunk by chunk under two sets of rules, and offline.

Does not compare the sound in the same files; `vocode` does.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.weights import on_meta
from models.token2wav.flow.block_table import HISTORY_FRAMES
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import (
    REFERENCE_FLOW,
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
from models.token2wav.settings import FRAMES_PER_TOKEN
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.parity.token2wav.build import (
    encoder_rows,
    filled,
    flow_config,
    packed_encoder_rows,
    packed_encoder_tails,
    packed_estimator_tails,
    seen_rows,
    set_up_voice,
    weights_under,
)

# The reference's session unchanged, and with the intended trimming of the encoder.
RULES = {"mel": REFERENCE_FLOW, "mel_fixedtrim": FlowRules(dit="newest_first")}
SESSION, VOICE = 0, 3
_PROMPT = ("in.prompt_tokens", "in.prompt_mel", "in.spk_emb", "in.rand_noise")


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("e2e_"):
        tensors, settings = golden.tensors(stem), golden.config(stem)
        if not report.has_inputs(stem, tensors, *_PROMPT):
            continue
        with on_meta():
            flow = Flow(flow_config(settings["config"]))
        flow = filled(flow, weights_under(tensors, "w.flow."))
        for name, rules in RULES.items():
            _session(stem, flow, rules, name, tensors, settings, report)
        _offline(stem, flow, tensors, settings["n_timesteps"], report)


def _session(
    stem: str,
    flow: Flow,
    rules: FlowRules,
    name: str,
    tensors: dict[str, Tensor],
    settings: dict[str, Any],
    report: Report,
) -> None:
    schedule, noise = flow.schedule(settings["n_timesteps"]), tensors["in.rand_noise"][0].T.contiguous()
    speech_tokens, mel = tensors["in.prompt_tokens"][0], tensors["in.prompt_mel"][0]
    lasts = [last == "last" for _, last in settings["schedule"]]
    chunks = [f"in.chunk{i}_tokens" for i in range(len(lasts))]
    if not report.has_inputs(stem, tensors, *chunks):
        return
    most = max(len(tensors[chunk]) for chunk in chunks)
    n_prompt, n_steps = len(mel), settings["n_timesteps"]
    sizes = FlowSizes(
        n_sessions=1, n_voices=1, max_steps=n_steps, max_chunk=most, max_prompt=n_prompt, voice_frames=n_prompt
    )
    state = FlowState(flow, sizes, rules)
    set_up_voice(flow, state, VOICE, speech_tokens, mel, tensors["in.spk_emb"][0], noise, schedule)
    if name == "mel":
        _base(stem, state, tensors, report)
    slots = torch.tensor([SESSION])
    state.begin(slots, torch.tensor([VOICE]))
    for i, (chunk, last) in enumerate(zip(chunks, lasts, strict=True)):
        n = len(tensors[chunk])
        padded, n_speech_tokens = F.pad(tensors[chunk], (0, most + flow.encoder.lookahead - n))[None], torch.tensor([n])
        one_chunk, last = ChunkSlots(slots, state.dit_table.width), torch.tensor([last])
        n_new = count_synthesized(n_speech_tokens, last, flow.encoder.lookahead)
        untrimmed = _untrimmed_token_rows(state, slots, n_new, most)
        mu = encode(flow, state, one_chunk, ChunkTokens(padded, n_speech_tokens, last))
        n_frames = FRAMES_PER_TOKEN * n_new
        got = solve(flow, state, one_chunk, SolveInputs(schedule, noise, mu, n_frames))[:, : int(n_frames)]
        report.close_if(f"{stem} chunk {i}", name, got.transpose(1, 2), tensors.get(f"out.chunk{i}_{name}"))
        if name == "mel":
            _after(f"{stem} chunk {i}", f"out.chunk{i}", state, untrimmed, tensors, report)


def _base(stem: str, state: FlowState, tensors: dict[str, Tensor], report: Report) -> None:
    """The state of a prepared voice; of the estimator, that of the first step."""
    results = {
        "conformer_att": packed_encoder_rows(state, VOICE),
        "conformer_cnn": packed_encoder_tails(state, VOICE),
        "estimator_att": seen_rows(state.dit_rows[0], state.dit_table, VOICE),
        "estimator_cnn": packed_estimator_tails(state.dit_tails[0][VOICE]),
    }
    for name, got in results.items():
        file = f"out.base_{name}_cache" + ("_step0" if name.startswith("estimator") else "")
        report.close_if(f"{stem} voice", name, got, tensors.get(file))


def _untrimmed_token_rows(state: FlowState, slots: Tensor, n_new: Tensor, n_rows: int) -> Tensor:
    """The rows at token rate after the next chunk without trimming, oldest first."""
    mapping = state.token_table.slot_mapping(slots, n_new, n_rows, state.token_table.width)
    return torch.cat((mapping.cached[0, : int(mapping.n_cached)], mapping.fresh[0, : int(n_new)]))


def _after(
    case: str, prefix: str, state: FlowState, untrimmed: Tensor, tensors: dict[str, Tensor], report: Report
) -> None:
    """Means over the caches after a chunk and the trimming.

    The reference's mean at token rate is over rows that are repeated twice and trimmed at any position. It continues
    with the first half, so the first half is compared with the rows of the session here.
    """
    estimator = torch.stack([seen_rows(rows, state.dit_table, SESSION).mean(-2) for rows in state.dit_rows])
    report.close_if(case, "estimator's mean", estimator, tensors.get(f"{prefix}_estimator_att_mean"))
    n_prompt, twice = int(state.prompt[SESSION]), untrimmed.repeat(2)
    if len(twice) > n_prompt + HISTORY_FRAMES:
        twice = torch.cat((twice[:n_prompt], twice[-HISTORY_FRAMES:]))
    seen = state.token_table.rows[SESSION, : int(state.token_table.length[SESSION])]
    report.equal(case, "rows at token rate", seen, twice[: len(twice) // 2])
    tokens = torch.cat(state.token_rows.index_select(-3, twice).unbind(1), dim=-1).transpose(-2, -3)
    encoder = torch.cat([rows.mean(-2) for rows in (tokens, encoder_rows(state, SESSION)[1])])[:, None]
    report.close_if(case, "encoder's mean", encoder, tensors.get(f"{prefix}_conformer_att_mean"))


def _offline(stem: str, flow: Flow, tensors: dict[str, Tensor], n_steps: int, report: Report) -> None:
    """Prompt and speech in one pass; compares the speech."""
    if not report.has_inputs(stem, tensors, "in.offline_tokens"):
        return
    speech_tokens = torch.cat((tensors["in.prompt_tokens"], tensors["in.offline_tokens"]), dim=1)
    n_frames, n_prompt = FRAMES_PER_TOKEN * speech_tokens.shape[1], tensors["in.prompt_mel"].shape[1]
    prompt = F.pad(tensors["in.prompt_mel"], (0, 0, 0, n_frames - n_prompt))
    noise, speaker = tensors["in.rand_noise"].transpose(1, 2)[:, :n_frames], flow.speaker(tensors["in.spk_emb"])
    mel = flow.offline(
        speech_tokens, torch.tensor([speech_tokens.shape[1]]), prompt, speaker, noise, flow.schedule(n_steps)
    )
    report.close_if(stem, "offline mel", mel[:, n_prompt:].transpose(1, 2), tensors.get("out.offline_mel"))
