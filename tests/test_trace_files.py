"""Folders of recorded sessions: what is missing or cannot be played is named, and the command's exit code."""

from dataclasses import replace

import pytest

from tests.traces.__main__ import main
from tests.traces.copies import GOLDEN, VARIED, altered, given_with, make_folder, with_field, without_units
from tests.traces.folder import TraceError, TraceFolder
from tests.traces.run import run_alone
from tests.traces.settings import session_config, slice_limits
from tests.traces.stage import RecordedModel


@pytest.fixture(scope="module")
def folder() -> TraceFolder:
    return TraceFolder(GOLDEN)


@pytest.fixture(scope="module")
def cast(folder) -> RecordedModel:
    return RecordedModel.of(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"expected": None}, "mixed_modes/expected.json: expected an object, got no file"),
        ({"expected": "{"}, "mixed_modes/expected.json: expected JSON, got"),
        ({"expected": {"units": []}}, "mixed_modes/expected.json: expected 7 units, as in input.json, got 0"),
        ({"input": without_units()}, "mixed_modes/input.json: expected a field units, got"),
        ({"tensors": None}, "mixed_modes: expected tensors.safetensors with tensors, got none"),
    ],
)
def test_missing_or_invalid_file_is_named(files, message, tmp_path):
    folder = TraceFolder(make_folder(tmp_path / "traces", **files))
    with pytest.raises(TraceError) as raised:
        folder.trace(VARIED)
    assert message in str(raised.value)


def test_folders_that_are_none(tmp_path, folder):
    with pytest.raises(TraceError, match="expected a folder with traces, got no such folder"):
        TraceFolder(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"expected folders with input\.json, got none"):
        TraceFolder(tmp_path)
    with pytest.raises(TraceError, match="trace unknown: expected one of audio_basic, "):
        folder.trace("unknown")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "input.json").write_text("{}")
    with pytest.raises(TraceError, match=r"expected one folder with config\.json, got none or several"):
        _ = TraceFolder(tmp_path).checkpoint
    with pytest.raises(TraceError, match=r"frame_99\.png: expected a file, got none"):
        folder.frame(99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio": {"pool": [10_000]}}, "audio.pool: expected indices below 44, got [10000]"),
        ({"frames": [77]}, "frame_77.png: expected a file"),
        ({"frames": [0], "max_slice_nums": [1, 2]}, "max_slice_nums: expected 1 values, got 2"),
        ({"before": ["sing"]}, "before: expected one of set_break_event, "),
        ({"constructor": {"colour": 1}}, "constructor.colour: expected a setting that exists"),
        ({"generate": {"colour": 1}}, "generate.colour: expected a setting that exists"),
        ({"generate": {"length_penalty": "much"}}, "length_penalty"),
    ],
)
def test_unplayable_step_is_reported_as_a_miss(changes, message, tmp_path, cast):
    own = replace(cast, folder=TraceFolder(make_folder(tmp_path / "traces", input=given_with(**changes))))
    (outcome,) = run_alone(own, [VARIED])
    assert [miss.name for miss in outcome.report.misses] == ["run"]
    assert message in outcome.report.misses[0].detail


def test_recorded_settings_map_to_ours():
    given = {
        "constructor": {"sliding_window_mode": "context", "context_max_units": 7, "force_listen_count": 2},
        "generate": {"length_penalty": 2.0},
    }
    config = session_config(given, {"generate": {"length_penalty": 3.0, "listen_top_k": 4}})
    assert (config.window.mode, config.window.max_units, config.force_listen_count) == ("context", 7, 2)
    assert (config.length_penalty, config.listen_top_k, session_config(given).length_penalty) == (3.0, 4, 2.0)
    ignored = session_config({"constructor": {"max_new_speak_tokens_per_chunk": 5}})
    assert ignored.max_new_speak_tokens_per_chunk == 20, "expected what the public engine does: nothing"
    assert (config.compat, config.decode_mode, session_config({}).window.mode) == ("reference", "greedy", "off")
    assert slice_limits({"frames": [1, 2], "max_slice_nums": 3}) == [3, 3] and slice_limits({"frames": None}) == []


def test_exit_code_of_the_command(tmp_path, capsys, folder):
    good = make_folder(tmp_path / "good")
    assert main([str(good), "--trace", VARIED]) == 0
    assert f"{VARIED} (alone): " in (shown := capsys.readouterr().out) and "everything agrees" in shown
    wrong = with_field(folder.trace(VARIED), ("units", 2, "generate", "text"), altered).expected
    assert main([str(make_folder(tmp_path / "wrong", expected=wrong)), "--trace", VARIED]) == 1
    shown = capsys.readouterr().out
    assert "MISS mixed_modes u2 generate" in shown and "expected ixbe Ix, got ixbe I" in shown, shown
    assert main([str(tmp_path / "nowhere")]) == 1
    assert "no such folder" in capsys.readouterr().out
