"""The writer: what it does when the disk is slow, full or missing, and that it never blocks its caller."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from server.recording import writer
from server.recording.files import read_json
from server.recording.ids import is_recording_id
from server.recording.recordings import NoMetrics, Recording, Recordings, recordings_of
from server.recording.timeline import FILE_NAME, RecordSource, TimelineFile
from tests.server.recording.recorded import Conversation, recordings_in, result, tone, wait_done


class CountedMetrics(NoMetrics):
    def __init__(self) -> None:
        self.n_unrecorded = self.n_failures = self.n_bytes = 0

    def record_recorded(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes

    def record_unrecorded(self) -> None:
        self.n_unrecorded += 1

    def record_recording_failure(self) -> None:
        self.n_failures += 1


def wait_until(holds: Callable[[], object], what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"expected {what} within {seconds:g} s"
        time.sleep(0.01)


def begun(recordings: Recordings) -> Recording:
    recording = recordings.start("omni_duplex", "omni_x")
    assert recording is not None
    return recording


def test_slow_disk_leaves_messages_out_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = CountedMetrics()
    recordings = recordings_of(tmp_path, metrics, is_enabled=True)
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 2_000_000)
    monkeypatch.setattr(writer, "BATCH_S", 0.3)
    recordings.open()
    try:
        recording = begun(recordings)
        talk = Conversation(recording)
        user = tone(440, 1, 16_000)
        for number in range(1, 41):
            talk.chunk(user)
            talk.worker(result(number))
        assert recordings.waiting_bytes <= 2_000_000
        wait_until(lambda: recordings.waiting_bytes == 0, "everything to be written")
        talk.chunk(user)
        talk.worker(result(41, text="last"))
        recording.end()
        content = wait_done(recordings, recording.recording_id)
    finally:
        recordings.close()
    assert metrics.n_unrecorded > 10
    assert content["notes"] == [f"{metrics.n_unrecorded} messages are missing: the disk was slower than the session"]
    assert content["chunks"][-1]["result"]["text"] == "last" and content["chunks"][-1]["user_audio"] is not None
    meta = read_json(recordings.store.folder_of(recording.recording_id) / "meta.json")
    assert meta is not None and meta["notes"] == content["notes"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a mistake")])
def test_an_error_ends_one_recording_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    append, metrics = TimelineFile.append, CountedMetrics()

    def until_full(self: TimelineFile, source: RecordSource, at_ms: float, data: str | bytes) -> int:
        if '"current_time":3' in str(data):
            raise error
        return append(self, source, at_ms, data)

    monkeypatch.setattr(TimelineFile, "append", until_full)
    recordings = recordings_of(tmp_path, metrics, is_enabled=True)
    recordings.open()
    try:
        broken, other = begun(recordings), begun(recordings)
        talks = [Conversation(broken), Conversation(other)]
        for number in range(1, 6):
            talks[0].chunk(tone(440, 1, 16_000))
            talks[0].worker(result(number))
        talks[1].chunk(tone(440, 1, 16_000))
        talks[1].worker(result(1))
        broken.end()
        other.end()
        content = wait_done(recordings, broken.recording_id)
        assert len(wait_done(recordings, other.recording_id)["chunks"]) == 1
    finally:
        recordings.close()
    reason = error.strerror if isinstance(error, OSError) else error
    assert content["notes"] == [f"the recording stopped early: {reason}"]
    assert [chunk.get("unanswered", False) for chunk in content["chunks"]] == [False, False, True]
    assert metrics.n_failures == 1 and metrics.n_unrecorded >= 4


def test_unwritable_folder_does_not_disturb_the_session(tmp_path: Path) -> None:
    (tmp_path / "sessions").write_text("a file in place of the folder")
    metrics = CountedMetrics()
    recordings = recordings_of(tmp_path, metrics, is_enabled=True)
    recordings.open()
    recording = begun(recordings)
    recording.from_client("{}")
    recording.end()
    wait_until(lambda: metrics.n_failures == 1 and metrics.n_unrecorded == 1, "a counted failure")
    recordings.close()


def test_close_writes_everything_and_a_new_start_completes_it(tmp_path: Path) -> None:
    recordings = recordings_of(tmp_path, NoMetrics(), is_enabled=True)
    recordings.open()
    recording = begun(recordings)
    talk = Conversation(recording)
    for number in range(1, 21):
        talk.chunk(tone(440, 1, 16_000))
        talk.worker(result(number))
    recordings.close()
    assert recordings.n_active == 0
    with recordings_in(tmp_path, is_enabled=False) as later:
        assert len(wait_done(later, recording.recording_id)["chunks"]) == 20


def test_discarded_recording_leaves_nothing(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = begun(recordings)
        recording.from_client("{}")
        folder = recordings.store.folder_of(recording.recording_id)
        wait_until(lambda: (folder / FILE_NAME).exists(), "a timeline")
        assert recordings.discard(recording.recording_id) and not recordings.discard(recording.recording_id)
        recording.from_client("{}")
        recording.end()
        wait_until(lambda: not os.listdir(recordings.store.root), "no files")


def test_ids_are_unguessable_and_sort_by_time(tmp_path: Path) -> None:
    with recordings_in(tmp_path) as recordings:
        ids = [begun(recordings).recording_id for _ in range(20)]
    assert all(is_recording_id(one) and one[16:23] == "omni_x_" for one in ids)
    tokens = {one.rpartition("_")[2] for one in ids}
    assert len(tokens) == 20 and all(len(token) == 32 for token in tokens)
    assert not any(map(is_recording_id, ("..", "omni_x", ids[0] + "/x", ids[0][:-1], ids[0].upper() + "\n", "")))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"type":"prepared"}', '{"type":"prepared","recording_session_id":"ID"}'),
        ("{}", '{"recording_session_id":"ID"}'),
        ('{"a":1} \n', '{"a":1,"recording_session_id":"ID"}'),
        ("[1]", "[1]"),
        (b"binary", b"binary"),
    ],
)
def test_stamp_adds_the_id(tmp_path: Path, given: str | bytes, expected: str | bytes) -> None:
    with recordings_in(tmp_path) as recordings:
        recording = begun(recordings)
        got = recording.stamped(given)
        if isinstance(expected, str):
            expected = expected.replace("ID", recording.recording_id)
    assert got == expected
