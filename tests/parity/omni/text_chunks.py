"""Turn-based text (`cases/chunk_generate`): text chunks, emitted text, and the hidden states for speech."""

from dataclasses import replace
from typing import Any

import torch

from models.omni import OmniModel
from models.sampling.settings import HALF_DUPLEX_TEXT
from models.sampling.text import TokenSet, TokenSets
from models.stages.runner import Rows, Runner
from models.stages.unit_steps import UnitSteps
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from worker.chat.reply import TEXT_CHUNK, Reply

STAGE = "chunk_generate"


def run(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    folder = GoldenDir(golden.path / "cases")
    tensors = folder.tensors(STAGE)
    for case in folder.json(f"{STAGE}.json")["cases"]:
        _case(case, tensors, model, report)


def _case(case: dict[str, Any], tensors: dict[str, torch.Tensor], model: OmniModel, report: Report) -> None:
    name, chunks, params = f"{STAGE} {case['case']}", case["chunks"], dict(case["params"])
    forbidden = case["forbidden_ids"] if params.pop("suppress_forbidden_tokens", True) else []
    ends = case["terminator_ids"]
    sets = TokenSets.build([TokenSet(forbidden=forbidden, length_ids=ends)], model.config.vocab_size)
    limit = TEXT_CHUNK * len(chunks)
    runner = Runner(model, sets, n_slots=2, llm_len=len(case["prompt_ids"]) + limit + 1)
    steps = UnitSteps(runner, None)
    reply = Reply(ends, max_new_tokens=limit, compat=True)
    sampled: list[list[int]] = []
    got: list[dict[str, Any]] = []
    hidden: list[torch.Tensor] = []
    with steps.lease() as slot:
        steps.configure_text(slot, replace(HALF_DUPLEX_TEXT, greedy=True, **params), seed=0)
        step = reply.start()
        steps.begin_text_chunk(slot)
        (one,) = steps.feed([slot], [Rows(torch.tensor(case["prompt_ids"]))], [True])
        sampled.append([])
        while step.sample:
            token = one.token
            step = reply.take(token)
            if reply.stopped != "stop":
                sampled[-1].append(token)
            if (complete := reply.take_chunk()) is not None:
                ids, _ = complete
                got.append(
                    {"emitted_ids": ids, "kv_len": runner.context_len(slot), "finished": reply.stopped == "stop"}
                )
                hidden.append(runner.state.hidden[slot, : len(ids)].clone())
            if reply.begins_chunk:
                steps.begin_text_chunk(slot)
                sampled.append([])
            if step.feed is not None:
                (one,) = steps.step([slot], [step.feed], [step.place], [step.sample])
    report.equal(name, "chunks", len(got), len(chunks))
    for number, (expected, own) in enumerate(zip(chunks, got, strict=False)):
        part = f"chunk {number}"
        report.equal(name, f"{part} sampled", sampled[number], expected["chunk_ids"])
        for field in own:
            report.equal_if(name, f"{part} {field}", own[field], expected.get(field))
        report.sums_if(name, f"{part} hidden_chk", hidden[number], expected.get("hidden_chk"))
        report.close_if(name, f"{part} hidden", hidden[number], tensors.get(f"p{case['case']}.hidden.{number}"))
