"""Replays turn-based replies (`cases/turn_streaming`) on the engine and compares text and sound as emitted."""

from typing import Any

import torch

from models.stages.message_reader import Content
from tests.parity.golden import GoldenDir
from tests.parity.report import Report
from tests.traces.settings import CODE_TEMPERATURE
from tests.traces.stage import VOICE, RecordedEngine, RecordedModel
from worker.chat.answers import Answers
from worker.chat.config import ReplyConfig
from worker.loop.results import Event, Failure, PartialResult, ReplyResult

NAME = "turn_streaming"
SPARE_ROWS = 64


def run_turns(cast: RecordedModel, report: Report) -> None:
    """Run all cases one by one; a folder without cases adds no checks."""
    recorded = GoldenDir(cast.folder.path / "cases").json(f"{NAME}.json") or {"cases": [], "params": {}}
    for number, case in enumerate(recorded["cases"]):
        config = _config(recorded["params"], case["max_new_tokens"])
        with torch.no_grad():
            _answer(cast, case, config, f"{NAME} {number}", report)


def _config(params: dict[str, Any], max_new_tokens: int) -> ReplyConfig:
    """Convert the recorded settings."""
    known = {name: value for name, value in params.items() if name != "do_sample"}
    mode = "sampling" if params.get("do_sample") else "greedy"
    given = {"tts_temperature": CODE_TEMPERATURE, "decode_mode": mode, "speak": True, "compat": "reference"}
    return ReplyConfig(**given | known, max_new_tokens=max_new_tokens)


def _answer(cast: RecordedModel, case: dict[str, Any], config: ReplyConfig, name: str, report: Report) -> None:
    prompt = cast.tokenizer.encode(case["prompt"])
    report.equal(name, "prompt_ids", prompt, case["prompt_ids"])
    stage = RecordedEngine(cast, n_slots=1, llm_len=case["kv_after_generate"] + SPARE_ROWS)
    opened = stage.language.open_answer(enable_thinking=config.enable_thinking)
    content = Content((*prompt, *opened))
    events: list[Event] = []
    log = stage.watcher.fresh(name)
    answers = Answers(stage.sessions, stage.unit_steps, stage.language, stage.voices, stage.loop)
    session = answers.chat(name, content, config, events.append, voice=VOICE, arrived=0.0)
    stage.watcher.join(name, session.slot)
    while stage.loop.run():
        pass
    result = events[-1]
    if isinstance(result, Failure):
        raise result.error
    assert isinstance(result, ReplyResult), f"{name}: expected a result at the end, got {result}"
    leaving = [event for event in events if isinstance(event, PartialResult) and (event.text or event.pcm is not None)]
    yields = [{"samples": 0 if one.pcm is None else len(one.pcm), "text": one.text} for one in leaving]
    got = {
        "kv_after_prefill": result.n_prompt - len(opened),
        "kv_after_generate": result.context_len,
        "emitted_ids": list(result.tokens),
        "t2w_calls": log.windows,
        "yields": yields,
    }
    for field, own in got.items():
        report.equal_if(name, field, own, case.get(field))
