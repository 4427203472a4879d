"""Speech token stage (`tts`): conditioning rows, folded head, greedy steps, and the three speech modes."""

import itertools
import re
from dataclasses import replace

import torch

from models.omni import OmniModel
from models.sampling.settings import SpeechSampling
from models.sampling.text import TokenSet, TokenSets
from models.stages.runner import Runner
from models.stages.speech_stream import STREAM_MAX_SPEECH_TOKENS
from tests.models.stages.speech_calls import BatchedStream, WholeCallSpeaker
from tests.parity.build import slot_cache
from tests.parity.golden import GoldenDir
from tests.parity.omni.speech_sampling import greedy_tokens
from tests.parity.omni.speech_stream import cache_state, chunk_rows
from tests.parity.report import Report

Tensors = dict[str, torch.Tensor]

HEAD = "tts.head_code.0.parametrizations.weight.original1"
CONDITION = "cond.chat_inputs_embeds"  # input of the raw steps and of whole answers


def run(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    tensors, meta = golden.tensors("tts"), golden.meta("tts")
    _conditions(tensors, model, report)
    _raw_steps(tensors, model, golden.kept_rows(HEAD), report)
    runner = Runner(model, TokenSets.build([TokenSet()], model.config.vocab_size), n_slots=2, llm_len=64)
    speaker, turn = WholeCallSpeaker(runner), greedy_tokens(meta.get("sampling", {}))
    unit = replace(turn, top_p=1.0, top_k=0, history_per_call=True)
    _answers(tensors, speaker, turn, report)
    _units(tensors, speaker, unit, report)
    _streams(tensors, speaker, turn, report)


def _conditions(tensors: Tensors, model: OmniModel, report: Report) -> None:
    for name, expected in tensors.items():
        if found := re.fullmatch(r"head_code\.weight_rows_(\d+)_(\d+)", name):
            report.close("tts head", name, model.tts.head_code[0].weight[int(found[1]) : int(found[2])], expected)
    if not {"cond.token_ids", "cond.llm_hidden"} <= tensors.keys():
        return
    ids, hidden = tensors["cond.token_ids"][None], tensors["cond.llm_hidden"][None]
    normalize = model.config.tts_config.normalize_projected_hidden
    projected = model.tts.projector_semantic(hidden)[0]
    report.close_if("tts condition", "projected", projected, tensors.get("cond.projected"))
    own = model.tts.text_rows(ids, hidden, True, model.backend)[0] - model.tts.emb_text(ids)[0]
    report.close_if("tts condition", "normalized", own, tensors.get("cond.normalized"))
    for name, n_text, text_eos in (
        ("chat_inputs_embeds", ids.shape[1], True),
        ("duplex_inputs_embeds", ids.shape[1], False),
        ("duplex_empty", 0, False),
    ):
        rows, n_rows = model.tts.condition(
            ids, hidden, torch.tensor([n_text]), torch.tensor([text_eos]), normalize, model.backend
        )
        report.close_if("tts condition", name, rows[:, : n_rows[0]], tensors.get(f"cond.{name}"))


def _raw_steps(tensors: Tensors, model: OmniModel, columns: list[int] | slice, report: Report) -> None:
    """Greedy steps from the stored condition; skipped if it or the speech tokens are missing.

    Logits of all codes are stored for the sampler's comparison; a trimmed head has rows for some codes only, and only
    those columns are compared.
    """
    if not {"raw.greedy_ids", CONDITION} <= tensors.keys():
        return
    length = tensors[CONDITION].shape[1] + tensors["raw.greedy_ids"].shape[1]
    cache = slot_cache(model, "tts", n_slots=2, max_len=length)
    slots, rows = torch.tensor([1]), tensors[CONDITION]
    logits = [model.tts.prefill(rows, cache, slots, torch.tensor([rows.shape[1]]), cache.max_len, model.backend)]
    ids = [logits[-1].argmax(-1)]
    while len(ids) < tensors["raw.greedy_ids"].shape[1]:
        rows = model.tts.emb_code[0](ids[-1][:, None])
        logits.append(model.tts.decode(rows, cache, slots, torch.ones_like(slots), cache.max_len, model.backend))
        ids.append(logits[-1].argmax(-1))
    report.equal("tts raw", "greedy ids", torch.stack(ids, 1), tensors["raw.greedy_ids"])
    if (expected := tensors.get("raw.logits")) is not None:
        report.close("tts raw", "logits", torch.stack(logits, 1)[..., columns], expected[..., columns])


def _answers(tensors: Tensors, speaker: WholeCallSpeaker, sampling: SpeechSampling, report: Report) -> None:
    """`generate.CASE`: one answer.

    A case with `eos_token` ends at that code, after at least 3 codes. A case without it runs to its limit, with a
    minimum of 5 codes, and drops the last code drawn.
    """
    if CONDITION not in tensors:
        return
    for case in sorted({m[1] for name in tensors if (m := re.fullmatch(r"generate\.(\w+)\.new_ids", name))}):
        eos, expected = tensors.get(f"generate.{case}.eos_token"), tensors[f"generate.{case}.new_ids"]
        limits = (
            {"min_speech_tokens": 5, "max_speech_tokens": len(expected) + 1}
            if eos is None
            else {"min_speech_tokens": 3, "max_speech_tokens": 500}
        )
        speaker.start_turn(1, sampling, eos=None if eos is None else int(eos))
        speech_tokens = speaker.answer(1, tensors[CONDITION][0], **limits)
        report.equal(f"tts generate {case}", "codes", speech_tokens, expected)


def _units(tensors: Tensors, speaker: WholeCallSpeaker, sampling: SpeechSampling, report: Report) -> None:
    """`duplex.unitU`: the units of one turn.

    Only the first may end. Each unit uses the end code that the one before stores. Each unit depends
    on the units before it, so the comparison stops at the first missing condition or end code.
    """
    eos = None
    for unit in itertools.count():
        key, case = f"duplex.unit{unit}", f"tts duplex unit{unit}"
        if f"{key}.condition" not in tensors or (unit and eos is None):
            break
        if unit:
            speaker.state.sampler.configure(0, sampling, int(eos))
        else:
            speaker.start_turn(0, sampling)
        (call,) = speaker.unit([0], [tensors[f"{key}.condition"][0]], may_end=[unit == 0])
        report.equal_if(case, "codes", call.speech_tokens, tensors.get(f"{key}.new_ids"))
        state = [int(speaker.state.cache.lengths[0]), int(speaker.state.cache.positions[0])]
        report.equal_if(case, "cache, next start", state, tensors.get(f"{key}.cache_len_and_next_start"))
        eos = tensors.get(f"{key}.eos_for_next")
    if {"duplex.eosstop.eos", "duplex.unit0.condition"} <= tensors.keys():
        speaker.start_turn(0, sampling, eos=int(tensors["duplex.eosstop.eos"]))
        (call,) = speaker.unit([0], [tensors["duplex.unit0.condition"][0]], may_end=[True])
        report.equal_if("tts duplex eosstop", "codes", call.speech_tokens, tensors.get("duplex.eosstop.new_ids"))
        report.equal_if("tts duplex eosstop", "cache", [speaker.rows(0)], tensors.get("duplex.eosstop.cache_len"))


def _streams(tensors: Tensors, speaker: WholeCallSpeaker, sampling: SpeechSampling, report: Report) -> None:
    """`stream.TYPE.callN`: successive text chunks. state = [batches, codes left, next start, cache length].

    The limits are derived from the states, so a type that lacks a condition or a state is skipped.
    """
    found = [re.match(r"stream\.(?:condition|\w+\.call)(\d+)", name) for name in tensors]
    calls = range(max((int(m[1]) + 1 for m in found if m), default=0))
    for kind in sorted({m[1] for name in tensors if (m := re.match(r"stream\.(\w+)\.call0\.", name))}):
        keys = [f"stream.{kind}.call{call}" for call in calls]
        needed = {f"{keys[0]}.yielded", *(f"{key}.state" for key in keys), *(f"stream.condition{n}" for n in calls)}
        if not needed <= tensors.keys():
            continue
        states = [tensors[f"{key}.state"].tolist() for key in keys]
        first_codes = len(tensors[f"{keys[0]}.yielded"]) + states[0][1]
        # A call that reached its limit leaves one token unfed, so the next start is ahead of the cache.
        n_rows = len(tensors["stream.condition0"][0]) + 1
        limit = first_codes if states[0][2] == n_rows + first_codes else STREAM_MAX_SPEECH_TOKENS
        window = max(state[3] for state in states)
        speaker.start_turn(1, sampling)
        stream = BatchedStream(speaker, 1, kind, window=window, max_speech_tokens=limit, compat="reference")
        spoken: list[int] = []
        for call, key in enumerate(keys):
            final = call == calls[-1]
            rows = chunk_rows(speaker.runner.model, tensors[f"stream.condition{call}"][0], final)
            batches = stream.push(rows, final)
            speech_tokens = [code for batch in batches for code in batch]
            spoken += speech_tokens
            report.equal_if(f"tts stream {kind}", f"call{call} codes", speech_tokens, tensors.get(f"{key}.yielded"))
            visible, start = cache_state(speaker, 1)
            state = [len(batches), len(stream.buffer), start, visible]
            report.equal(f"tts stream {kind}", f"call{call} state", state, tensors[f"{key}.state"])
        all_tokens = tensors.get(f"stream.{kind}.all_tokens")
        report.equal_if(f"tts stream {kind}", "all codes", spoken + stream.flush(), all_tokens)
