"""Language model stage (`llm`): prefill, greedy steps, keys and values, and a prompt fed in two parts."""

import re

import torch

from models.omni import OmniModel
from tests.parity.build import slot_cache
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

HEAD = "llm.lm_head.weight"
PADDING = 5  # rows of noise after the valid ones, which must not affect any output


def run(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    tensors, llm = golden.tensors("llm"), model.llm
    if not report.has_inputs("llm", tensors, "prompt_ids"):
        return
    n_steps = _n_steps(tensors)
    longest = tensors["prompt_ids"].shape[1] + n_steps
    if "embeds_in" in tensors:
        longest = max(longest, tensors["embeds_in"].shape[1])
    cache = slot_cache(model, "llm", n_slots=2, max_len=longest + PADDING)
    slots, active = torch.tensor([1]), torch.tensor([True])
    columns = golden.kept_rows(HEAD)

    def feed(embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = embeds.shape[1]
        padded = torch.cat((embeds, torch.randn(1, PADDING, embeds.shape[2])), dim=1)
        hidden, logits = llm.prefill(padded, cache, slots, torch.tensor([n]), cache.max_len, model.backend)
        return hidden[:, :n], logits

    hidden, logits = feed(llm.model.embed_tokens(tensors["prompt_ids"]))
    report.close_if("llm prefill", "hidden", hidden, tensors.get("prefill_last_hidden"))
    report.close_if(
        "llm prefill", "logits", llm.logits(hidden, model.backend)[..., columns], tensors.get("prefill_logits")
    )
    ids, states, scores = [logits.argmax(-1)], [], []
    for _ in range(n_steps):
        hidden, logits = llm.decode(ids[-1], cache, slots, active, cache.max_len, model.backend)
        states.append(hidden)
        scores.append(logits)
        ids.append(logits.argmax(-1))
    report.equal_if("llm decode", "greedy ids", torch.stack(ids, 1), tensors.get("greedy_ids"))
    if n_steps:
        report.close_if("llm decode", "hidden", torch.stack(states, 1), tensors.get("step_hidden"))
        report.close_if("llm decode", "logits", torch.stack(scores, 1)[..., columns], tensors.get("step_logits"))
    for name, expected in tensors.items():
        if found := re.fullmatch(r"cache\.layer(\d+)\.([kv])", name):
            buffer = getattr(cache, found[2])[int(found[1])]
            report.close("llm cache", name, buffer[1:2, :, : cache.lengths[1]], expected)

    second = next((tensors[name] for name in ("embeds_logits_part2", "embeds_hidden_part2") if name in tensors), None)
    if "embeds_in" in tensors and second is not None:
        cache.reset(slots)
        embeds, n_second = tensors["embeds_in"], second.shape[1]
        _, logits = feed(embeds[:, : embeds.shape[1] - n_second])
        expected = tensors.get("embeds_logits_part1_last")
        report.close_if("llm embeds", "part 1 last logits", logits[..., columns], expected)
        hidden, _ = feed(embeds[:, -n_second:])
        report.close_if("llm embeds", "part 2 hidden", hidden, tensors.get("embeds_hidden_part2"))
        expected = tensors.get("embeds_logits_part2")
        report.close_if("llm embeds", "part 2 logits", llm.logits(hidden, model.backend)[..., columns], expected)


def _n_steps(tensors: dict[str, torch.Tensor]) -> int:
    """Tokens fed one by one after the prompt, from the stored tensors."""
    for name, more in (("step_logits", 0), ("step_hidden", 0), ("greedy_ids", 1)):
        if name in tensors:
            return tensors[name].shape[1] - more
    held = [tensor.shape[2] for name, tensor in tensors.items() if name.startswith("cache.")]
    return held[0] - tensors["prompt_ids"].shape[1] if held else 0
