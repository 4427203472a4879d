"""Recorded sessions replayed on the engine, together and alone, and tests that the comparison finds differences."""

import copy
import json
import lzma
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.stages.unit_steps import UnitSteps
from tests.parity.report import Report
from tests.traces.account import SessionRecord
from tests.traces.compare import compare
from tests.traces.copies import GOLDEN, VARIED, altered, make_folder, with_field
from tests.traces.folder import Trace, TraceFolder
from tests.traces.play import play
from tests.traces.run import SNAPSHOTS, run_alone, run_cases
from tests.traces.stage import RecordedModel
from tests.traces.turns import NAME as TURNS
from tests.traces.turns import run_turns

NAMES = sorted(file.parent.name for file in GOLDEN.glob("*/input.json"))
ALONE = ("audio_basic", "omni_hd")  # sound only, and sound with pictures
CHECKS_PER_UNIT = 50
# Fields of the recorder itself, and fields that depend on how rows are split into calls.
NOT_COMPARED = {
    "name",
    "stats",
    "units.unit",
    "units.prefill.reason_given",
    *(f"{phase}.ops.logits" for phase in ("prepare", "units.prefill", "units.generate", "units.finalize")),
}


@pytest.fixture(scope="module")
def folder() -> TraceFolder:
    return TraceFolder(GOLDEN)


@pytest.fixture(scope="module")
def cast(folder) -> RecordedModel:
    return RecordedModel.of(folder)


@pytest.fixture(scope="module")
def traces(folder) -> dict[str, Trace]:
    return {name: folder.trace(name) for name in NAMES}


@pytest.fixture(scope="module")
def batches() -> list[int]:
    """Batch size of each decode step in the run together."""
    return []


@pytest.fixture(scope="module")
def together(cast, traces, batches) -> dict[str, SessionRecord]:
    """Every trace as one session of one engine."""
    step = UnitSteps.step

    def counted(unit_steps: UnitSteps, slots: list[int], *arguments: Any) -> Any:
        batches.append(len(slots))
        return step(unit_steps, slots, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitSteps, "step", counted)
        return dict(zip(NAMES, play(cast, list(traces.values()), snapshots=SNAPSHOTS), strict=True))


@pytest.fixture(scope="module")
def varied(cast, traces) -> SessionRecord:
    """The record of the varied trace, played alone with its prompt fed."""
    (account,) = play(cast, [traces[VARIED]])
    return account


def compared(trace: Trace, account: SessionRecord) -> Report:
    report = Report()
    compare(trace, account, report)
    return report


def misses_text(report: Report) -> str:
    return "\n".join(f"{miss.case} {miss.name}: {miss.detail}" for miss in report.misses)


@pytest.mark.parametrize("name", NAMES)
def test_session_in_one_engine_equals_its_recording(name, traces, together):
    report = compared(traces[name], together[name])
    assert not report.misses, f"{len(report.misses)} of {len(report.checks)}:\n{misses_text(report)}"
    least = CHECKS_PER_UNIT * len(traces[name].given["units"])
    assert len(report.checks) > least, f"expected more than {least} checks, got {len(report.checks)}"


def test_sessions_share_batches_and_prompts(together, batches):
    assert max(batches) >= len(NAMES) // 2, f"expected batches of many sessions, got at most {max(batches)}"
    shared = sum(size > 1 for size in batches)
    assert shared > len(batches) // 2, f"expected most steps to be shared, got {shared} of {len(batches)}"
    copies = [name for name, account in together.items() if account.from_snapshot]
    assert 0 < len(copies) < len(NAMES), f"expected some prompts to be fed and some copied, got copies in {copies}"


@pytest.mark.parametrize("name", ALONE)
def test_session_alone_equals_its_recording(name, cast, together):
    (outcome,) = run_alone(cast, [name])
    assert not outcome.report.misses, misses_text(outcome.report)
    # The same checks, and those of the prompt, which is fed here and may be copied there.
    n_shared = len(compared(cast.folder.trace(name), together[name]).checks)
    assert len(outcome.report.checks) >= n_shared, f"expected {n_shared} or more, got {len(outcome.report.checks)}"


def test_recorded_parts_equal_the_model(cast):
    outcome = run_cases(cast)
    assert outcome.how == "sampler, rope, speech_stream, chunk_generate, turn_streaming"
    assert not outcome.report.misses, misses_text(outcome.report)
    assert len(outcome.report.checks) > 450, f"expected many checks, got {len(outcome.report.checks)}"


# --- the comparison finds differences --------------------------------------------------------------------------


def fields_of(held: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to all leaves, empty lists included."""
    if isinstance(held, dict):
        for name, value in held.items():
            yield from fields_of(value, (*path, name))
    elif isinstance(held, list) and held:
        for number, value in enumerate(held):
            yield from fields_of(value, (*path, number))
    else:
        yield path


def kinds_of_fields() -> dict[str, tuple]:
    """The last path of each field, by its path without indices."""
    expected = json.loads(lzma.decompress((GOLDEN / VARIED / "expected.json.xz").read_bytes()))
    kinds = {".".join(part for part in path if isinstance(part, str)): path for path in fields_of(expected)}
    # An empty list of objects is not a field.
    return {kind: path for kind, path in kinds.items() if not any(other.startswith(f"{kind}.") for other in kinds)}


KINDS = kinds_of_fields()


@pytest.mark.parametrize("kind", KINDS)
def test_altered_field_is_a_miss(kind, traces, varied):
    report = compared(with_field(traces[VARIED], KINDS[kind], altered), varied)
    ignored = any(kind == one or kind.startswith(f"{one}.") for one in NOT_COMPARED)
    assert bool(report.misses) != ignored, f"{KINDS[kind]}: {misses_text(report) or 'no miss'}"
    unit = KINDS[kind][1] if KINDS[kind][0] == "units" else KINDS[kind][0]
    assert all(str(unit) in miss.case for miss in report.misses), misses_text(report)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("long_off", ("units", 29, "prefill", "mel_window_samples")),
        ("long_off", ("units", 39, "prefill", "mel_base_frame")),
        ("long_off", ("units", 29, "prefill", "audio_encoder_kv_len")),
        ("long_context", ("units", 40, "finalize", "window", "previous_text")),
        ("long_context", ("units", 40, "finalize", "window", "previous_ids", 3)),
        ("long_context", ("prepare", "marker_ids", 0)),
        ("long_basic", ("units", 43, "finalize", "window", "position_offset")),
        ("long_basic", ("units", 43, "finalize", "kv", "k", 2, 0)),
        ("ragged_audio", ("units", 3, "finalize", "consistent")),
        ("break_and_stop", ("units", 4, "generate", "end_of_turn")),
        ("implicit_mode", ("units", 1, "generate", "terminator_id")),
        ("force_listen_override", ("units", 3, "generate", "ops", 0, "ids", 0)),
        ("knobs", ("units", 0, "generate", "history_added", 0)),
        ("audio_text_only", ("units", 2, "generate", "t2w_buffer")),
    ],
)
def test_altered_field_of_a_specific_trace_is_a_miss(name, path, traces, together):
    report = compared(with_field(traces[name], path, altered), together[name])
    assert report.misses and all(f" u{path[1]} " in f"{miss.case} " or path[0] in miss.case for miss in report.misses)


def first(trace: Trace, part: str) -> str:
    return next(name for name in sorted(trace.tensors) if part in name)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("audio_basic", "pending_logits"),
        ("audio_basic", "audio_embeds"),
        ("omni_hd", "vision_embeds"),
        ("audio_basic", "tts_condition"),
        ("long_context", "after_evict.key"),
        ("long_context", "after_evict.value"),
    ],
)
def test_altered_tensor_is_a_miss(name, part, traces, together):
    trace = traces[name]
    tensor = first(trace, part)
    wrong = trace.tensors[tensor].clone()
    wrong.view(-1)[wrong.numel() // 2] += 0.1
    report = compared(replace(trace, tensors=trace.tensors | {tensor: wrong}), together[name])
    assert [miss.name for miss in report.misses] == [tensor] and "max abs 0.1 " in misses_text(report), misses_text(
        report
    )


def test_missing_and_unknown_results_are_misses(traces, varied):
    trace = traces[VARIED]
    extra = replace(trace, tensors=trace.tensors | {"u0.vision_embeds.0": torch.zeros(64, 8)})
    assert [miss.name for miss in compared(extra, varied).misses] == ["u0.vision_embeds.0"]
    invented = with_field(trace, ("units", 1, "generate"), lambda fields: fields | {"invented": 1})
    assert [(m.case, m.name) for m in compared(invented, varied).misses] == [(f"{VARIED} u1 generate", "invented")]
    shorter = with_field(trace, ("units", 2, "generate", "steps"), lambda steps: steps[:-1])
    assert [miss.detail for miss in compared(shorter, varied).misses] == ["expected 4 entries, got 5"]
    unfinished = with_field(trace, ("units", 2, "finalize"), lambda fields: None)
    assert [miss.name for miss in compared(unfinished, varied).misses] == ["whether it happened"]


def test_trimmed_fields_are_not_compared(traces, varied):
    trace, whole = traces[VARIED], len(compared(traces[VARIED], varied).checks)
    for path, gone in ((("units", 0, "generate"), "steps"), (("units", 0, "finalize"), "kv"), ((), "final")):
        expected = copy.deepcopy(trace.expected)
        place = expected
        for part in path:
            place = place[part]
        del place[gone]
        report = compared(replace(trace, expected=expected), varied)
        assert not report.misses and 0 < len(report.checks) < whole, f"{gone}: {misses_text(report)}"


def test_unequal_counters_of_host_and_device_are_a_miss(traces, varied):
    account = replace(varied, units=copy.deepcopy(varied.units))
    host, _ = account.units[2]["counts"]
    host["context_len"] += 1
    report = compared(traces[VARIED], account)
    assert [miss.name for miss in report.misses] == ["counts of host and device"], misses_text(report)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("emitted_ids", lambda ids: [*ids[:-1], ids[-1] + 1]),
        ("kv_after_generate", lambda rows: rows + 1),
        ("t2w_calls", lambda calls: calls[:-1]),
        ("yields", lambda yields: [yields[0] | {"samples": yields[0]["samples"] + 960}, *yields[1:]]),
        ("max_new_tokens", lambda most: most - 10),
    ],
)
def test_altered_field_of_a_reply_is_a_miss(field, change, cast, tmp_path):
    recorded = json.loads((GOLDEN / "cases" / f"{TURNS}.json").read_text())
    case = recorded["cases"][0]
    folder = make_folder(tmp_path / "traces")
    (folder / "cases").mkdir()
    (folder / "cases" / f"{TURNS}.json").write_text(
        json.dumps(recorded | {"cases": [case | {field: change(case[field])}]})
    )
    report = Report()
    run_turns(replace(cast, folder=TraceFolder(folder)), report)
    missed = {miss.name for miss in report.misses}
    assert field in missed or (field == "max_new_tokens" and "emitted_ids" in missed), f"got misses in {missed}"
