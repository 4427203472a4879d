"""The timeline's file: what is read is what was written, also after a crash."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.recording.timeline import FILE_NAME, RecordingBusyError, RecordSource, TimelineFile, TimelineRecord

RECORDS = st.lists(
    st.builds(
        TimelineRecord,
        st.sampled_from(RecordSource),
        st.floats(0, 1e9),
        st.text(st.characters(exclude_categories=["Cs"])) | st.binary(),
    ),
    max_size=8,
)


def written(path: Path, records: list[TimelineRecord]) -> bytes:
    with TimelineFile(path, create=True) as file:
        sizes = [file.append(*record) for record in records]
        file.flush()
        data = path.read_bytes()
        assert len(data) == sum(sizes), "expected every record on disk after a flush"
        file.sync()
    return data


def read(path: Path) -> list[TimelineRecord]:
    with TimelineFile(path, create=False) as file:
        return list(file.records())


@given(RECORDS)
def test_records_are_read_as_written(records: list[TimelineRecord]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        written(path, records)
        assert read(path) == records


@given(RECORDS, st.data())
def test_a_cut_file_gives_all_complete_records(records: list[TimelineRecord], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        content = written(path, records)
        cut = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:cut])
        found = read(path)
        ends, position = [], 0
        for record in records:
            size = 20 + len(record.data.encode() if isinstance(record.data, str) else record.data)
            position += size
            ends.append(position)
        assert found == records[: sum(end <= cut for end in ends)]


@given(RECORDS.filter(bool), st.data())
def test_a_damaged_byte_ends_the_timeline_before_it(records: list[TimelineRecord], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        content = bytearray(written(path, records))
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(bytes(content))
        found = read(path)
        assert found == records[: len(found)], "expected a beginning of the records"
        assert len(found) < len(records), "expected the damage to be noticed"


def test_a_file_has_one_owner(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with TimelineFile(path, create=True), pytest.raises(RecordingBusyError):
        TimelineFile(path, create=False)
    TimelineFile(path, create=False).close()
