"""A recording whose process is killed: everything up to the last second is complete after the next start."""

import subprocess
import sys
from pathlib import Path

from server.recording.files import read_json
from server.recording.render.folder import begin_completion
from server.recording.timeline import FILE_NAME, RecordSource, TimelineFile
from tests.server.recording import crashing_program
from tests.server.recording.recorded import list_of, recordings_in, wait_done


def test_killed_process_loses_at_most_the_last_second(tmp_path: Path, root: Path) -> None:
    command = [sys.executable, "-m", "tests.server.recording.crashing_program", str(tmp_path)]
    killed_after = 120
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        recording_id = process.stdout.readline().strip()
        while int(process.stdout.readline()) < killed_after:
            pass
        process.kill()
    folder = tmp_path / "sessions" / recording_id
    with (folder / FILE_NAME).open("ab") as file:
        file.write(b"\x01\x01 the beginning of a record")
    meta = read_json(folder / "meta.json")
    assert meta is not None and meta["ended_at"] is None
    with recordings_in(tmp_path) as recordings:
        content = wait_done(recordings, recording_id)
    texts = [chunk["result"].get("text") for chunk in content["chunks"]]
    answered = [text for text in texts if text]
    least = killed_after - round(1 / crashing_program.UNIT_S)
    assert len(answered) >= least, f"expected at least {least} units, got {len(answered)}"
    assert answered == [f"{number} " for number in range(1, len(answered) + 1)]
    assert all((folder / chunk["user_audio"]).stat().st_size == 32_044 for chunk in content["chunks"])
    meta = read_json(folder / "meta.json")
    assert meta is not None and meta["ended_at"] is not None and meta["duration_s"] > 1


def test_completing_again_after_an_interruption_gives_the_same(tmp_path: Path) -> None:
    """The timeline is removed last, so that an interrupted completion starts again."""
    with recordings_in(tmp_path) as recordings:
        recording = recordings.start("chat", "chat")
        assert recording is not None
        recording.from_client('{"messages":[{"role":"user","content":"Hi"}]}')
        recording.end()
        first = wait_done(recordings, recording.recording_id)
        folder = recordings.store.folder_of(recording.recording_id)
    with TimelineFile(folder / FILE_NAME, create=True) as timeline:
        timeline.append(RecordSource.CLIENT, 0.0, '{"messages":[{"role":"user","content":"Hi"}]}')
        timeline.flush()
        assert begin_completion(folder) is None, "expected nothing to be done while the timeline is locked"
    for is_finished in (False, True):  # as if the process ended before the video, and once more
        completion = begin_completion(folder)
        assert completion is not None
        if is_finished:
            completion.finish()
        completion.close()
    assert begin_completion(folder) is None
    assert read_json(folder / "recording.json")["turns"][0]["input"] == first["turns"][0]["input"]
    assert FILE_NAME not in list_of(folder)
