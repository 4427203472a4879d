"""Completes one recording: media files, `recording.json`, the replay, `meta.json`; then the timeline is removed.

May run any number of times on the same folder: the timeline stays until everything else is written.
"""

import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from server.recording.files import META, RECORDING, REPLAY_SOUND, REPLAY_VIDEO, read_json, write_json
from server.recording.render.built import Builder, BuiltRecording
from server.recording.render.duplex import DuplexBuilder
from server.recording.render.half_duplex import HalfDuplexBuilder
from server.recording.render.media_files import MediaFiles
from server.recording.render.replay_sound import ReplaySound
from server.recording.render.replay_video import VideoError, write_video
from server.recording.render.requests import RequestBuilder
from server.recording.timeline import FILE_NAME, RecordingBusyError, RecordSource, TimelineFile

LOG = logging.getLogger(__name__)


class Completion:
    """A recording that is complete except for its video. Its timeline stays locked until `finish` or `close`."""

    def __init__(self, folder: Path, meta: dict[str, Any], timeline: TimelineFile):
        """Write everything except the video. Raises: OSError."""
        self._folder, self._meta, self._timeline = folder, meta, timeline
        self._built = _build(folder, str(meta.get("app_type")), timeline)
        self._built.notes = list(dict.fromkeys([*_notes(meta), *self._built.notes]))
        _write(folder, meta, self._built, video=None)

    def finish(self) -> None:
        """Write the video, if there are pictures, and remove the timeline. Raises: OSError."""
        if self._built.slides:
            video: str | None = REPLAY_VIDEO
            try:
                write_video(self._folder, self._built)
            except VideoError as error:
                LOG.warning("recording %s: %s", self._folder.name, error)
                self._built.notes.append(f"no video was made: {error}")
                video = None
            _write(self._folder, self._meta, self._built, video)
        (self._folder / FILE_NAME).unlink()
        self.close()

    def close(self) -> None:
        """Give up the lock."""
        self._timeline.close()


def begin_completion(folder: Path) -> Completion | None:
    """Complete the recording in a folder except for its video.

    Returns: None if there is nothing to do: it is complete, deleted, or in the hands of another process.
    Raises: OSError.
    """
    meta = read_json(folder / META)
    if meta is None:
        return None
    try:
        timeline = TimelineFile(folder / FILE_NAME, create=False)
    except (FileNotFoundError, RecordingBusyError):
        return None
    try:
        return Completion(folder, meta, timeline)
    except BaseException:
        timeline.close()
        raise


def _build(folder: Path, kind: str, timeline: TimelineFile) -> BuiltRecording:
    with ReplaySound(folder / REPLAY_SOUND) as replay:
        builder, n_missing = _builder(kind, MediaFiles(folder), replay), 0
        for record in timeline.records():
            if record.source is RecordSource.GAP:
                n_missing += int(record.data)
            builder.add(record)
        built = builder.finish()
    built.replay_s = replay.seconds
    if n_missing:
        built.notes.append(f"{n_missing} messages are missing: the disk was slower than the session")
    return built


def _builder(kind: str, media: MediaFiles, replay: ReplaySound) -> Builder:
    if kind == "half_duplex_audio":
        return HalfDuplexBuilder(media, replay)
    return RequestBuilder(kind, media, replay) if kind in ("chat", "streaming") else DuplexBuilder(media, replay)


def _write(folder: Path, meta: dict[str, Any], built: BuiltRecording, video: str | None) -> None:
    """Write `recording.json`, and `meta.json` with the end of the recording."""
    content: dict[str, Any] = {
        "session_id": meta["session_id"],
        "mode": built.mode,
        "worker_id": meta.get("worker_id"),
        "start_ts": meta.get("created_at"),
        "config": built.config,
        built.entries_key: built.entries,
        "merged_replay": REPLAY_SOUND,
        "merged_replay_video": video,
        "notes": built.notes,
    }
    write_json(folder / RECORDING, content)
    seconds = round(built.seconds, 3)
    ended_at = _time_of(meta) + timedelta(seconds=seconds)
    ended = {"ended_at": ended_at.isoformat(timespec="milliseconds"), "duration_s": seconds}
    write_json(folder / META, {**meta, **ended, "config": built.config, "notes": built.notes})


def _time_of(meta: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(str(meta["created_at"]))


def _notes(meta: dict[str, Any]) -> list[str]:
    notes = meta.get("notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []
