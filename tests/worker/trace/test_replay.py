"""A traced session runs again with the same ids and samples, and differences are named by unit and stage."""

import copy
import itertools
import json
from pathlib import Path

import pytest

from tests.worker.loop.engines import TINY
from tests.worker.trace.scenes import CONFIG, CORPUS, PROMPT, SCENES, SESSION, play_moved, tone, traced
from worker.early.trial import EarlyEnd
from worker.loop.results import Event, UnitResult
from worker.offline.__main__ import main
from worker.offline.replay import replay_config, run_again
from worker.trace.compare import STAGES, differences, first_of_each_stage
from worker.trace.recorder import TraceRecorder
from worker.trace.records import CONTENT, Record, Trace, pack, read_records, to_line

pytestmark = pytest.mark.usefixtures("loaded_once")
EVERYTHING = CORPUS / "everything.trace.jsonl"


@pytest.fixture(scope="module")
def recorded() -> tuple[list[Record], list[Event]]:
    return traced()


@pytest.fixture(scope="module")
def again(recorded: tuple[list[Record], list[Event]]) -> Trace:
    trace = Trace.of(recorded[0])
    return run_again(trace, replay_config(trace, str(TINY), None, "auto"))


def test_replay_equals_the_session(recorded: tuple[list[Record], list[Event]], again: Trace) -> None:
    """To the last bit, with an interrupt inside a unit, an early unit, a picture, a text and other settings."""
    trace = Trace.of(recorded[0])
    kinds = {command["kind"] for command in trace.commands}
    assert kinds == {"prepare", "unit", "interrupt", "text", "pause", "resume", "adjust"}, kinds
    [cut] = [command for command in trace.commands if command["kind"] == "interrupt"]
    before, after = trace.outcomes[1]["at"], trace.outcomes[2]["at"]
    assert before < cut["at"] < after, f"expected an interrupt inside unit 3, got {cut['at']}, {before} to {after}"
    assert EarlyEnd.COMMITTED in [outcome.get("early") for outcome in trace.outcomes]
    assert differences(trace.outcomes, again.outcomes) == []
    wanted = [(outcome["ids"], outcome["samples"]) for outcome in trace.outcomes if outcome["kind"] == "result"]
    got = [(outcome["ids"], outcome["samples"]) for outcome in again.outcomes if outcome["kind"] == "result"]
    assert got == wanted, f"expected {wanted}, got {got}"
    assert again.header == trace.header, f"expected {trace.header}, got {again.header}"


def test_recorded_values_are_those_of_the_events(recorded: tuple[list[Record], list[Event]]) -> None:
    records, events = recorded
    outcomes = [record for record in records[1:] if record["kind"] == "result"]
    for record, event in zip(outcomes, events, strict=True):
        assert isinstance(event, UnitResult)
        got = record["ids"], record["text"], record["n_samples"], record["n_speech_tokens"]
        n_samples = 0 if event.pcm is None else len(event.pcm)
        assert got == (list(event.tokens), event.text, n_samples, event.n_speech_tokens), f"got {got}, event {event}"


def test_units_that_were_taken_back_or_decided_elsewhere_run_again() -> None:
    """An early unit that changed nothing, and after it the context of a session that has moved."""

    records, _ = traced(play=play_moved)
    trace = Trace.of(json.loads(json.dumps(records)))
    assert [one["early"] for one in trace.outcomes[:4]] == [None, EarlyEnd.TAKEN_BACK, None, None], trace.outcomes
    assert trace.outcomes[1]["decision"] == "incomplete" and trace.outcomes[1]["at"] == trace.outcomes[0]["at"]
    decided = [command["decided"] is not None for command in trace.commands if command["kind"] == "unit"]
    assert decided == [False] * 4 + [True, True, False], decided
    again = run_again(trace, CONFIG)
    assert differences(trace.outcomes, again.outcomes) == []


def test_only_sessions_that_ask_are_traced() -> None:
    opened: list[str] = []
    recorder = TraceRecorder(lambda name: opened.append(name) or opened.append, is_on=True, asked_only=True)  # type: ignore[func-returns-value,arg-type,return-value]
    assert [recorder.ask("a", False), recorder.ask("b", True)] == [False, True]
    for name in "ab":
        recorder.prepared(name, PROMPT, SESSION, 1)
    assert [one for one in opened if isinstance(one, str)] == ["b"] and recorder.computed("b") is not None
    assert not recorder.ask("b", False)
    recorder.prepared("b", PROMPT, SESSION, 1)
    assert recorder.computed("b") is None and opened[-1] is None, "expected the end of the trace"


def test_changed_input_is_found_in_its_unit(recorded: tuple[list[Record], list[Event]]) -> None:
    """First in the rows of its sound."""
    trace = Trace.of(copy.deepcopy(recorded[0]))
    changed = [command for command in trace.commands if command["kind"] == "unit"][4]
    changed["sound"] = pack(tone(40, changed["n_samples"]))
    found = differences(trace.outcomes, run_again(trace, CONFIG).outcomes)
    # The fourth outcome is that of the inserted text.
    assert found and (found[0].unit, found[0].stage) == (6, "sound rows"), f"got {[*map(str, found)]}"
    [first, *_] = [one.unit for one in found if not one.is_rounding]
    ended = run_again(trace, CONFIG, only_first=True).outcomes
    assert first <= len(ended) <= len(trace.outcomes), f"expected unit {first} and no more than all, got {len(ended)}"
    assert differences(trace.outcomes[: len(ended)], ended) == [one for one in found if one.unit <= len(ended)]


def test_first_difference_of_each_stage_is_named(recorded: tuple[list[Record], list[Event]], again: Trace) -> None:
    def change(outcome: Record, stage: str) -> None:
        rows = {"sound rows": "sound", "picture rows": "pictures", "hidden rows": "hidden"}
        if stage in rows:
            outcome["rows"][rows[stage]] = "other"
        elif stage == "sound":
            outcome["samples"], outcome["levels"] = "other", [level + 0.01 for level in outcome["levels"]]
        else:
            name = {"decision": "decision", "text ids": "ids", "speech tokens": "speech_tokens"}[stage]
            outcome[name] = "other"

    expected = Trace.of(recorded[0]).outcomes
    for stage in STAGES:
        got = copy.deepcopy(again.outcomes)
        for number in (2, 7):
            change(got[number - 1], stage)
        assert [(one.unit, one.stage) for one in differences(expected, got)] == [(2, stage), (7, stage)]
        [first] = first_of_each_stage(differences(expected, got))
        assert first.unit == 2 and first.is_rounding == stage.endswith("rows"), first
    got = copy.deepcopy(again.outcomes)
    got[1]["samples"] = "other"
    assert differences(expected, got) == [], "expected the tolerance of sounds with equal levels"
    assert differences(expected, got[:-1])[-1].unit == len(expected)


# --- the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.trace.jsonl")), ids=lambda file: file.name.partition(".")[0])
def test_corpus_gives_the_same_ids(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, n_units = main(["--replay", str(file), "--model", str(TINY)]), len(Trace.of(read_records(file)).outcomes)
    out = capsys.readouterr().out
    assert status == 0 and f"{n_units} units: ids and sound are the same" in out, f"expected 0, got {status}: {out}"


def test_corpus_has_the_scenes() -> None:
    """Also one with evictions, after which the context is shorter than before."""
    assert {f"{name}.trace.jsonl" for name in SCENES} <= {file.name for file in CORPUS.iterdir()}
    outcomes = Trace.of(read_records(CORPUS / "long.trace.jsonl")).outcomes
    lengths = [outcome["context_len"] for outcome in outcomes]
    assert any(after < before for before, after in itertools.pairwise(lengths)), lengths


def test_command_names_differences_and_returns_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged, records = Trace.of(read_records(EVERYTHING)), read_records(EVERYTHING)
    monkeypatch.setattr("worker.offline.replay.run_again", lambda *_, **__: unchanged)
    [*_, last] = [record for record in records[1:] if record["kind"] == "result"]
    last["ids"] = [*last["ids"], 5]
    file = tmp_path / "changed.jsonl"
    file.write_text("".join(map(to_line, records)), encoding="utf-8")
    status = main(["--replay", str(file)])
    out = capsys.readouterr().out
    assert status == 1 and "first difference of text ids: unit 8, text ids: expected" in out, f"got {status}: {out}"
    assert "8 units: 1 differ" in out, out
    assert main(["--replay", str(file), "--first"]) == 1
    assert "8 units: unit 8 differs, later ones are not compared" in capsys.readouterr().out


def test_stripped_copy_has_no_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "stripped.jsonl"
    assert main(["--replay", str(EVERYTHING), "--strip", str(copied)]) == 0
    whole, left = read_records(EVERYTHING), read_records(copied)
    assert [record.get("kind") for record in left] == [record.get("kind") for record in whole]
    assert not [name for record in left for name in CONTENT if name in record]
    assert [record.get("decision") for record in left] == [record.get("decision") for record in whole]
    assert len(copied.read_bytes()) < 0.2 * len(EVERYTHING.read_bytes())
    assert main(["--replay", str(copied)]) == 2
    assert "expected one with content" in capsys.readouterr().err


def test_unusable_arguments_and_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = EVERYTHING.read_text(encoding="utf-8").splitlines()
    for name, content, text in (
        ("empty", "", "expected a first line with duologue-trace 1"),
        ("other", '{"format": "x"}\n', "expected a first line with duologue-trace 1"),
        ("broken", f"{lines[0]}\nnonsense\n{lines[1]}\n", "line 2"),
        ("array", "\n".join([lines[0], lines[1].replace('"float32"', '"object"')]), "array of a trace"),
    ):
        file = tmp_path / name
        file.write_text(content, encoding="utf-8")
        assert main(["--replay", str(file)]) == 2, name
        assert text in capsys.readouterr().err, f"{name}: expected {text!r}"
    for arguments, text in (
        (["--replay", str(tmp_path / "none")], "expected a trace file"),
        ([], "expected a media file or --replay, got neither"),
        (["a.wav", "--replay", "x"], "got both"),
        (["a.wav", "--strip", "x"], "--strip: expected --replay with it"),
        (["a.wav", "--first"], "--first: expected --replay with it"),
    ):
        assert main(arguments) == 2, arguments
        assert text in capsys.readouterr().err, f"{arguments}: expected {text!r}"
