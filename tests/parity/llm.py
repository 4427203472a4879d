"""Language model stage (`llm`): prefill, greedy steps, keys and values, and a prompt fed in two parts."""

import re

import torch

from models.omni import OmniModel
from tests.parity.build import slot_cache
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

PADDING = 5  # rows of noise behind the valid ones: must not show anywhere


def run(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    tensors, llm = golden.tensors("llm"), model.llm
    longest = tensors["prompt_ids"].shape[1] + tensors["step_logits"].shape[1]
    if "embeds_in" in tensors:
        longest = max(longest, tensors["embeds_in"].shape[1])
    cache = slot_cache(model, "llm", n_slots=2, max_len=longest + PADDING)
    slots, active = torch.tensor([1]), torch.tensor([True])

    def feed(embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = embeds.shape[1]
        padded = torch.cat((embeds, torch.randn(1, PADDING, embeds.shape[2])), dim=1)
        hidden, logits = llm.prefill(padded, cache, slots, torch.tensor([n]), cache.max_len)
        return hidden[:, :n], logits

    hidden, logits = feed(llm.model.embed_tokens(tensors["prompt_ids"]))
    report.close("llm prefill", "hidden", hidden, tensors["prefill_last_hidden"])
    report.close("llm prefill", "logits", llm.logits(hidden), tensors["prefill_logits"])
    ids, steps = [logits.argmax(-1)], ([], [])
    for _ in range(tensors["step_logits"].shape[1]):
        hidden, logits = llm.decode(ids[-1], cache, slots, active, cache.max_len)
        steps[0].append(hidden)
        steps[1].append(logits)
        ids.append(logits.argmax(-1))
    report.equal("llm decode", "greedy ids", torch.stack(ids, 1), tensors["greedy_ids"])
    report.close("llm decode", "hidden", torch.stack(steps[0], 1), tensors["step_hidden"])
    report.close("llm decode", "logits", torch.stack(steps[1], 1), tensors["step_logits"])
    for name, expected in tensors.items():
        if found := re.fullmatch(r"cache\.layer(\d+)\.([kv])", name):
            buffer = getattr(cache, found[2])[int(found[1])]
            report.close("llm cache", name, buffer[1:2, :, : cache.lengths[1]], expected)

    if "embeds_in" in tensors:
        cache.reset(slots)
        second = tensors["embeds_logits_part2"].shape[1]
        embeds = tensors["embeds_in"]
        _, logits = feed(embeds[:, : embeds.shape[1] - second])
        report.close("llm embeds", "part 1 last logits", logits, tensors["embeds_logits_part1_last"])
        hidden, _ = feed(embeds[:, -second:])
        report.close("llm embeds", "part 2 hidden", hidden, tensors["embeds_hidden_part2"])
        report.close("llm embeds", "part 2 logits", llm.logits(hidden), tensors["embeds_logits_part2"])
