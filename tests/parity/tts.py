"""Speech-code stage (`tts`): conditioning rows, folded head, greedy steps, and the three ways of speaking."""

import re

import torch

from models.omni import OmniModel
from models.runner import Runner
from models.sampling import TokenSet, TokenSets
from models.sampling_settings import CodeSampling
from models.speaker import STREAM_MAX_CODES, CodeStream, Speaker
from tests.parity.build import slot_cache
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

Tensors = dict[str, torch.Tensor]


def run(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    tensors, meta = golden.tensors("tts"), golden.meta("tts")
    _conditions(tensors, model, report)
    _raw_steps(tensors, model, report)
    runner = Runner(model, TokenSets.build([TokenSet()], model.config.vocab_size), n_slots=2, llm_len=64)
    speaker, sampling = Speaker(runner), meta["sampling"]
    turn = CodeSampling(
        greedy=True,
        temperature=sampling["temperature"],
        repetition_penalty=sampling["repetition_penalty"],
        top_p=sampling["top_p"],
        top_k=sampling["top_k"],
        min_keep=sampling["min_tokens_to_keep"],
    )
    unit = CodeSampling(
        greedy=True,
        temperature=sampling["temperature"],
        repetition_penalty=sampling["repetition_penalty"],
        top_p=1.0,
        top_k=0,
        history_per_call=True,
    )
    _answers(tensors, speaker, turn, report)
    _units(tensors, speaker, unit, report)
    _streams(tensors, speaker, turn, report)


def _conditions(tensors: Tensors, model: OmniModel, report: Report) -> None:
    if "cond.token_ids" not in tensors:
        return
    ids, hidden = tensors["cond.token_ids"][None], tensors["cond.llm_hidden"][None]
    normalize = model.config.tts_config.normalize_projected_hidden
    projected = model.tts.projector_semantic(hidden)[0]
    report.close("tts condition", "projected", projected, tensors["cond.projected"])
    own = model.tts.text_rows(ids, hidden, True)[0] - model.tts.emb_text(ids)[0]
    report.close("tts condition", "normalized", own, tensors["cond.normalized"])
    for name, n_text, text_eos in (
        ("chat_inputs_embeds", ids.shape[1], True),
        ("duplex_inputs_embeds", ids.shape[1], False),
        ("duplex_empty", 0, False),
    ):
        rows, n_rows = model.tts.condition(ids, hidden, torch.tensor([n_text]), torch.tensor([text_eos]), normalize)
        report.close("tts condition", name, rows[:, : n_rows[0]], tensors[f"cond.{name}"])
    for name, expected in tensors.items():
        if found := re.fullmatch(r"head_code\.weight_rows_(\d+)_(\d+)", name):
            report.close("tts head", name, model.tts.head_code[0].weight[int(found[1]) : int(found[2])], expected)


def _raw_steps(tensors: Tensors, model: OmniModel, report: Report) -> None:
    if "raw.greedy_ids" not in tensors:
        return
    length = tensors["cond.chat_inputs_embeds"].shape[1] + tensors["raw.greedy_ids"].shape[1]
    cache = slot_cache(model, "tts", n_slots=2, max_len=length)
    slots, rows = torch.tensor([1]), tensors["cond.chat_inputs_embeds"]
    logits = [model.tts.prefill(rows, cache, slots, torch.tensor([rows.shape[1]]), cache.max_len)]
    ids = [logits[-1].argmax(-1)]
    while len(ids) < tensors["raw.greedy_ids"].shape[1]:
        logits.append(model.tts.decode(ids[-1], cache, slots, torch.tensor([True]), cache.max_len))
        ids.append(logits[-1].argmax(-1))
    report.equal("tts raw", "greedy ids", torch.stack(ids, 1), tensors["raw.greedy_ids"])
    if "raw.logits" in tensors:
        report.close("tts raw", "logits", torch.stack(logits, 1), tensors["raw.logits"])


def _answers(tensors: Tensors, speaker: Speaker, sampling: CodeSampling, report: Report) -> None:
    """`generate.CASE`: one answer. A case with its own end code reaches it, after at least 3 codes; one without
    runs to its limit, after at least 5, and drops the last code drawn.
    """
    for case in sorted({name.split(".")[1] for name in tensors if name.startswith("generate.")}):
        eos, expected = tensors.get(f"generate.{case}.eos_token"), tensors[f"generate.{case}.new_ids"]
        limits = {"min_codes": 5, "max_codes": len(expected) + 1} if eos is None else {"min_codes": 3, "max_codes": 500}
        speaker.start_turn(1, sampling, eos=None if eos is None else int(eos))
        codes = speaker.answer(1, tensors["cond.chat_inputs_embeds"][0], **limits)
        report.equal(f"tts generate {case}", "codes", codes, expected)


def _units(tensors: Tensors, speaker: Speaker, sampling: CodeSampling, report: Report) -> None:
    """`duplex.unitU`: one turn of units; the first may end, the others not, each with the end code of the last."""
    units = sorted({int(m[1]) for name in tensors if (m := re.match(r"duplex\.unit(\d+)\.", name))})
    eos = None
    for unit in units:
        key = f"duplex.unit{unit}"
        if unit == units[0]:
            speaker.start_turn(0, sampling)
        else:
            speaker.state.sampler.configure(0, sampling, eos)
        (codes,) = speaker.unit([0], [tensors[f"{key}.condition"][0]], may_end=[unit == units[0]])
        report.equal(f"tts duplex unit{unit}", "codes", codes, tensors[f"{key}.new_ids"])
        state = [int(speaker.state.cache.lengths[0]), int(speaker.state.cache.positions[0])]
        report.equal(f"tts duplex unit{unit}", "cache, next start", state, tensors[f"{key}.cache_len_and_next_start"])
        eos = int(tensors[f"{key}.eos_for_next"])
    if "duplex.eosstop.eos" in tensors:
        speaker.start_turn(0, sampling, eos=int(tensors["duplex.eosstop.eos"]))
        (codes,) = speaker.unit([0], [tensors["duplex.unit0.condition"][0]], may_end=[True])
        report.equal("tts duplex eosstop", "codes", codes, tensors["duplex.eosstop.new_ids"])
        report.equal("tts duplex eosstop", "cache", speaker.rows(0), int(tensors["duplex.eosstop.cache_len"]))


def _streams(tensors: Tensors, speaker: Speaker, sampling: CodeSampling, report: Report) -> None:
    """`stream.TYPE.callN`: text chunks one after another. state = [batches, codes left, next start, cache length]."""
    types = sorted({m[1] for name in tensors if (m := re.match(r"stream\.(\w+)\.call0\.", name))})
    calls = sorted({int(m[1]) for name in tensors if (m := re.match(r"stream\.condition(\d+)$", name))})
    weights = speaker.runner.model.tts.emb_text.weight
    config = speaker.runner.model.config.tts_config
    eos_row, bos_row = weights[config.text_eos_token_id][None], weights[config.audio_bos_token_id][None]
    for kind in types:
        speaker.start_turn(1, sampling)
        states = [tensors[f"stream.{kind}.call{call}.state"].tolist() for call in calls]
        first_codes = len(tensors[f"stream.{kind}.call0.yielded"]) + states[0][1]
        # A call that ran into its limit left a code unfed, so the next start is ahead of the cache.
        n_rows = len(tensors["stream.condition0"][0]) + 1
        limit = first_codes if states[0][2] == n_rows + first_codes else STREAM_MAX_CODES
        stream = CodeStream(speaker, 1, kind, window=max(state[3] for state in states), max_codes=limit)
        spoken: list[int] = []
        for call in calls:
            final = call == calls[-1]
            rows = [tensors[f"stream.condition{call}"][0], *([eos_row] if final else []), bos_row]
            batches = stream.push(torch.cat(rows), final)
            key = f"stream.{kind}.call{call}"
            codes = [code for batch in batches for code in batch]
            spoken += codes
            report.equal(f"tts stream {kind}", f"call{call} codes", codes, tensors[f"{key}.yielded"])
            cache = speaker.state.cache
            visible = min(int(cache.lengths[1]), int(cache.windows[1]))
            state = [len(batches), len(stream.buffer), int(cache.positions[1]), visible]
            report.equal(f"tts stream {kind}", f"call{call} state", state, tensors[f"{key}.state"])
        if f"stream.{kind}.all_tokens" in tensors:
            report.equal(
                f"tts stream {kind}", "all codes", spoken + stream.flush(), tensors[f"stream.{kind}.all_tokens"]
            )
