"""Speech token sampler against recorded chains: scores after the penalty, kept tokens, greedy history."""

from dataclasses import fields

import torch

from models.sampling.settings import SpeechSampling
from models.sampling.speech import PENALTY_WINDOW, SpeechSamplerState, final_speech_scores, penalise_speech_tokens
from tests.parity.golden import GoldenDir
from tests.parity.report import Report


def run(golden: GoldenDir, report: Report) -> None:
    if "tts" not in golden.stems("tts"):
        return
    tensors = golden.tensors("tts")
    constants, settings = golden.meta("tts").get("sampling", {}), greedy_tokens(golden.meta("tts").get("sampling", {}))
    if "window" in constants:
        report.equal("code_sampling", "penalty window", PENALTY_WINDOW, constants["window"])
    if {"chain.logits", "chain.prev_tokens"} <= tensors.keys():
        _chain(tensors, settings, report)
    if {"raw.logits", "raw.greedy_ids"} <= tensors.keys():
        _raw(tensors, settings, report)


def greedy_tokens(constants: dict[str, float]) -> SpeechSampling:
    """The recorded settings with greedy choice; settings that were not recorded have our defaults."""
    names = {"min_keep": "min_tokens_to_keep"}
    known = {entry.name: names.get(entry.name, entry.name) for entry in fields(SpeechSampling)}
    given = {name: constants[stored] for name, stored in known.items() if stored in constants}
    return SpeechSampling(**{**given, "greedy": True})


def _chain(tensors: dict[str, torch.Tensor], settings: SpeechSampling, report: Report) -> None:
    logits, previous = tensors["chain.logits"].float(), tensors["chain.prev_tokens"]
    rows, steps = previous.shape
    state, slots = _state(rows, settings, eos_id=logits.shape[1] - 1)
    for step in range(steps):
        state.remember(slots, previous[:, step], torch.ones(rows, dtype=torch.bool))
    if "chain.after_penalty_prev" in tensors:
        penalised = penalise_speech_tokens(logits, slots, state).gather(1, previous)
        report.close("code_sampling.chain", "after penalty", penalised, tensors["chain.after_penalty_prev"])
    kept = final_speech_scores(logits, slots, state).isfinite()
    if "chain.keep_mask_count" in tensors:
        report.equal("code_sampling.chain", "kept codes", kept.sum(1), tensors["chain.keep_mask_count"])
    if "chain.kept_ids" in tensors:
        for row, ids in enumerate(tensors["chain.kept_ids"]):
            report.equal(
                f"code_sampling.chain.{row}", "kept ids", kept[row].nonzero()[:, 0], ids[ids >= 0].sort().values
            )


def _raw(tensors: dict[str, torch.Tensor], settings: SpeechSampling, report: Report) -> None:
    """The recorded history is greedy on the raw logits; it is replayed, not resampled."""
    logits, chosen = tensors["raw.logits"][0].float(), tensors["raw.greedy_ids"][0]
    state, slots = _state(1, settings, eos_id=logits.shape[1] - 1)
    counts, ids, values = (tensors.get(f"raw.processed_{n}") for n in ("keep_count", "top25_ids", "top25_vals"))
    for step, code in enumerate(chosen):
        name = f"code_sampling.raw.{step}"
        scores = final_speech_scores(logits[step : step + 1], slots, state)
        if counts is not None:
            report.equal(name, "kept codes", scores.isfinite().sum(), counts[0, step])
        if step > 0 and ids is not None:
            n_shown = min(ids.shape[2], int(scores.isfinite().sum()))
            best = scores[0].topk(n_shown)
            report.equal(name, "best kept ids", best.indices, ids[0, step - 1, :n_shown])
            if values is not None:
                report.close(name, "best kept values", best.values, values[0, step - 1, :n_shown])
        state.remember(slots, code[None], torch.tensor([True]))


def _state(rows: int, settings: SpeechSampling, eos_id: int) -> tuple[SpeechSamplerState, torch.Tensor]:
    state = SpeechSamplerState.allocate(rows)
    for slot in range(rows):
        state.configure(slot, settings, eos_id=eos_id)
    return state, torch.arange(rows)
