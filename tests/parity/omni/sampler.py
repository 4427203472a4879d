"""Text sampler against the recorded decoding cases: chosen token, history change, both distributions.

All cases run as one batch, each in its own slot with its own parameters, so a parameter that leaks
into a neighbouring row shows as a miss.
"""

import torch

from models.sampling.settings import TextSampling
from models.sampling.text import SamplerState, TokenSet, TokenSets, sample_text, stop_probability
from tests.models.sampling.final_probs import final_probs
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

SETTING_NAMES = {
    "text_repetition_penalty": "repetition_penalty",
    "text_repetition_window_size": "repetition_window",
    "listen_prob_scale": "listen_scale",
}
REFERENCE = {
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.05,
    "repetition_window": 512,
    "length_penalty": 1.1,
    "sign_blind": True,
    "stop_probe": True,
}


def run(golden: GoldenDir, report: Report) -> None:
    folder = GoldenDir(golden.path / "cases")
    description = folder.json("sampler.json")
    if description is None or "sampler" not in folder.stems("sampler"):
        return
    tensors = folder.tensors("sampler")
    cases = [case for case in description["cases"] if f"c{case['id']}.logits" in tensors]
    if not cases:
        return
    logits = torch.stack([tensors[f"c{case['id']}.logits"] for case in cases]).float()
    special = description["special_ids"]
    duplex = TokenSet(
        forbidden=description["forbidden_ids"],
        length_ids=[special["<|turn_eos|>"]],
        listen_id=description["bias_listen_id"],
        stop_id=special["<|chunk_eos|>"],
    )
    sets = TokenSets.build([duplex], logits.shape[1])
    slots = torch.arange(len(cases))

    drawn = _state(cases, greedy=False)
    distribution = final_probs(logits, slots, drawn, sets)
    stop = stop_probability(logits, sets.stop_id.expand(len(cases)))

    state = _state(cases, greedy=True)
    before = state.count.clone()
    ids, bad, _ = sample_text(logits, slots, torch.ones(len(cases), dtype=torch.bool), state, sets)

    for row, case in enumerate(cases):
        name = f"sampler.c{case['id']}"
        report.equal(name, "bad row", bool(bad[row]), False)
        report.equal(name, "greedy token", ids[row], case["greedy_token"])
        places = torch.arange(int(before[row]), int(state.count[row])) % state.history.shape[1]
        report.equal(name, "greedy history added", state.history[row, places], case["greedy_history_added"])
        probe = tensors.get(f"c{case['id']}.probe_probs")
        if probe is not None:
            report.close(name, "stop probability", stop[row], probe[duplex.stop_id])
        final = tensors.get(f"c{case['id']}.final_probs")
        if final is not None:
            report.close(name, "final distribution", distribution[row], final)
            report.equal(name, "kept ids", (distribution[row] > 0).sum(), (final > 0).sum())
            report.equal(name, "likeliest token", distribution[row].argmax(), case["sampling_argmax_token"])


def _state(cases: list[dict], greedy: bool) -> SamplerState:
    state = SamplerState.allocate(len(cases), history_length=max(512, *(len(case["history"]) for case in cases)))
    for slot, case in enumerate(cases):
        values = {SETTING_NAMES.get(key, key): value for key, value in case["params"].items() if value is not None}
        state.configure(slot, TextSampling(**{**REFERENCE, **values, "greedy": greedy}), seed=slot)
        for token in case["history"]:
            state.remember(torch.tensor([slot]), torch.tensor([token]), torch.tensor([True]))
    return state
