"""Written messages are read back unchanged in every encoding of sound, and fast."""

import time
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.protocol.message_helpers import FORMS, LISTEN
from worker.protocol.adjust_messages import Adjust, Adjusted
from worker.protocol.codec import Message
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Queued, QueueDone, QueueUpdate
from worker.protocol.messages import (
    AudioChunk,
    Error,
    Interrupted,
    Partial,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resumed,
    Spec,
    Stop,
    Stopped,
    Timeout,
    VideoFrame,
    read_binary,
    read_server,
    read_text,
    write,
)

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
COUNT = st.integers(0, 2**53)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SAMPLES = st.none() | st.lists(st.floats(-1, 0.75, width=32), max_size=5).map(lambda got: np.array(got, np.float32))
SPECS = st.builds(
    Spec,
    partial_results=st.booleans(),
    sound_in=st.sampled_from(FORMS),
    sound_out=st.sampled_from(FORMS),
    backlog=st.sampled_from(["keep", "catch_up"]),
)
RESULTS = st.builds(
    Result,
    is_listen=st.booleans(),
    text=TEXT,
    audio_data=SAMPLES,
    current_time=COUNT,
    cost_llm_ms=st.none() | FINITE,
    cost_all_ms=FINITE,
    server_send_ts=FINITE,
    wall_clock_ms=FINITE,
    kv_cache_length=COUNT,
    vision_slices=COUNT,
    stages=st.dictionaries(TEXT, st.none() | FINITE, max_size=3),
    headroom_ms=st.none() | FINITE,
)
SERVERS = st.one_of(
    RESULTS,
    st.builds(Partial, current_time=COUNT, part=st.integers(1, 99), text=TEXT, audio_data=SAMPLES),
    st.builds(Prepared, prompt_length=COUNT, recording_session_id=st.none() | TEXT, spec=SPECS, notes=st.lists(TEXT)),
    st.builds(
        Adjusted,
        applied=st.dictionaries(TEXT, st.booleans() | COUNT | TEXT, max_size=3),
        from_unit=st.integers(1, 2**31),
        notes=st.lists(TEXT, max_size=2),
    ),
    st.builds(Paused, timeout=FINITE),
    st.builds(Timeout, reason=TEXT),
    st.builds(Stopped, session_id=TEXT),
    st.builds(Error, error=st.text(st.characters()), code=st.sampled_from(ErrorCode)),
    st.builds(Queued, position=st.integers(1, 99), estimated_wait_s=FINITE, queue_length=COUNT, ticket_id=TEXT),
    st.builds(QueueUpdate, position=st.integers(1, 99), estimated_wait_s=FINITE, queue_length=COUNT),
    st.sampled_from([Resumed(), Interrupted(), QueueDone()]),
)


def assert_same(got: Any, expected: Any, sound: str | None, step: float) -> None:
    assert type(got) is type(expected)
    exclude = {sound} if sound else set()
    assert got.model_dump(exclude=exclude) == expected.model_dump(exclude=exclude)
    if sound:
        was, now = getattr(expected, sound), getattr(got, sound)
        assert bool(was) == bool(now), f"expected {was}, got {now}"
        if was:
            worst = np.abs(was.samples("was") - now.samples("now")).max()
            assert worst <= step, f"expected samples within {step}, got {worst}"


@given(message=SERVERS, spec=SPECS)
def test_server_messages_round_trip(message: Message, spec: Spec) -> None:
    data = write(message, spec)
    sound = getattr(message, message.sound_field) if message.sound_field else None
    assert isinstance(data, bytes) == (bool(sound) and spec.sound_out != "base64")
    got = read_server(data, spec)
    assert_same(got, message, message.sound_field, 1 / 65536 if spec.sound_out == "pcm16" else 0)
    assert write(got, spec) == data


@given(
    samples=SAMPLES.filter(lambda got: got is not None and got.size),
    pictures=st.lists(st.binary(min_size=1, max_size=5), max_size=3),
    listen=st.booleans(),
    slices=st.none() | COUNT | st.lists(COUNT, max_size=3),
    spec=SPECS,
)
def test_chunks_round_trip(samples: np.ndarray, pictures: list[bytes], listen: bool, slices: Any, spec: Spec) -> None:
    chunk = AudioChunk(audio_base64=samples, frame_base64_list=pictures, force_listen=listen, max_slice_nums=slices)
    data = write(chunk, spec)
    got = read_text(data) if isinstance(data, str) else read_binary(data, spec)
    worst = np.abs(got.samples() - samples).max()
    assert worst <= (1 / 65536 if spec.sound_in == "pcm16" else 0), worst
    assert (got.pictures(), got.force_listen, got.max_slice_nums) == (pictures, listen, slices)


@given(prompt=TEXT, spec=SPECS, config=st.dictionaries(TEXT, st.none() | st.booleans() | COUNT | TEXT, max_size=3))
def test_prepare_round_trips(prompt: str, spec: Spec, config: dict[str, Any]) -> None:
    message = Prepare(system_prompt=prompt, spec=spec, config=config, ref_audio_base64=np.ones(3, np.float32))
    got = read_text(write(message, spec))
    assert got.ref_audio().tolist() == [1, 1, 1]
    assert (got.system_prompt, got.spec, got.config) == (prompt, spec, config)
    for other in (Pause(timeout=2.5), Stop(), VideoFrame(frame=b"abc"), Adjust(config=config)):
        assert read_text(write(other)).model_dump() == other.model_dump()


def test_writing_a_second_of_sound_is_fast() -> None:
    """The best of many runs, since the machine may be busy."""
    pcm = np.linspace(-1, 1, 24_000, dtype=np.float32)
    result, chunk = Result(**LISTEN, audio_data=pcm), write(AudioChunk(audio_base64=pcm[:16_000]))
    data = write(result)
    assert len(data) > 128_000 and len(chunk) > 85_336
    for name, call in (("write", lambda: write(result)), ("read", lambda: read_text(chunk))):
        times = []
        for _ in range(30):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        assert min(times) < 1e-3, f"{name}: expected below 1 ms, got {1e3 * min(times):.2f} ms"
