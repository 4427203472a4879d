"""Half-duplex speech (`cases/tts_stream`): from text chunks to batches of speech tokens and cache state."""

from typing import Any

import torch

from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.runner import Runner
from tests.models.stages.speech_calls import BatchedStream, WholeCallSpeaker
from tests.parity.golden import GoldenDir
from tests.parity.omni.speech_sampling import greedy_tokens
from tests.parity.report import Report


def run(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    """Recorded at a temperature so low that every draw is the most likely token."""
    folder = GoldenDir(golden.path / "cases")
    description, tensors = folder.json("tts_stream.json"), folder.tensors("tts_stream")
    runner = Runner(model, TokenSets.build([TokenSet()], model.config.vocab_size), n_slots=2, llm_len=64)
    speaker = WholeCallSpeaker(runner)
    for case in description["cases"]:
        speaker.start_turn(1, greedy_tokens(description))
        _turn(case, description["token_window_size"], tensors, speaker, report)


def _turn(
    case: dict[str, Any], window: int, tensors: dict[str, torch.Tensor], speaker: WholeCallSpeaker, report: Report
) -> None:
    """One turn, up to the first text chunk whose rows are missing."""
    kind, number, batches = case["attention_type"], case["case"], case["yields"]
    stream = BatchedStream(
        speaker,
        1,
        kind,
        window=window,
        max_speech_tokens=case["max_new_token"],
        batch=case["chunk_size"],
        compat="reference",
    )
    n_spoken, states = 0, case.get("state_after_chunk", [{}] * len(batches))
    for chunk, (expected, state) in enumerate(zip(batches, states, strict=True)):
        text = tensors.get(f"{kind}.{number}.cond.{chunk}")
        if text is None:
            return
        final = chunk == len(batches) - 1
        got = stream.push(chunk_rows(speaker.runner.model, text[0], final), final)
        n_spoken += sum(map(len, got))
        name = f"speech_stream {kind}.{number}"
        report.equal(name, f"chunk {chunk} batches", got, [speech_tokens for speech_tokens, _ in expected])
        visible, start = cache_state(speaker, 1)
        own = {
            "kv_len": visible,
            "next_pos": start,
            "buffer": stream.buffer,
            "codes_total": n_spoken + len(stream.buffer),
        }
        report.equal_if(name, f"chunk {chunk} state", {key: own[key] for key in state if key in own}, state or None)


def chunk_rows(model: OmniModel, text: torch.Tensor, final: bool) -> torch.Tensor:
    """Rows [n, D] of a text chunk and its markers: end of text after the last chunk, start of speech."""
    config, rows = model.config.tts_config, model.tts.emb_text.weight
    marks = [config.text_eos_token_id, config.audio_bos_token_id]
    return torch.cat((text, rows[marks if final else marks[1:]]))


def cache_state(speaker: WholeCallSpeaker, slot: int) -> tuple[int, int]:
    """Rows of a slot that the next row attends to, and its position."""
    cache = speaker.state.cache
    return min(int(cache.lengths[slot]), int(cache.windows[slot])), int(cache.positions[slot])
