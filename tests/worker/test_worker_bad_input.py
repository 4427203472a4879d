"""What a worker says to nonsense: an error with a code to whoever sent it, and nothing to anybody else."""

import io
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.worker.processes import Talker, WorkerProcess, running
from tests.worker.sayings import ALOUD, QUIET, assert_told, base64_of, chunk, jpeg, picture_of, sound_of
from worker.protocol import AudioChunk, Error, Interrupted, Paused, Prepare, Prepared, Result, Resumed
from worker.wire import ErrorCode, pack_frame

N_SLOTS = 3
MIB = 2**20
SMALL = {
    "duplex": {"euler_steps": 1, "context_rows": 4096, "session": {"window": {"high_tokens": 800, "low_tokens": 600}}}
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    flags = ("--max-sessions", str(N_SLOTS), "--max-warmup-chunks", "2")
    with running(tmp_path_factory.mktemp("worker"), *flags, config=SMALL) as process:
        yield process
        assert process.process.poll() is None, f"expected a worker that lives, got:\n{process.log}"
        faults = [line for line in process.lines if " ERROR worker" in line or " ERROR asyncio" in line]
        assert not faults, f"expected no fault of the worker's own, got {faults}"


@pytest.fixture(autouse=True)
def _all_slots(worker: WorkerProcess) -> Iterator[None]:
    """Every test leaves every slot free."""
    yield
    worker.wait_free(N_SLOTS)


@pytest.fixture(scope="module")
def undisturbed(worker: WorkerProcess) -> list[Result]:
    """What a session of good manners gets."""
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        return talker.units(range(4))


# --- nonsense -------------------------------------------------------------------------------------


def noise(**changes: float) -> np.ndarray:
    """A second of sound with a few samples of another value."""
    sound = sound_of(0).copy()
    for place, value in changes.items():
        sound[int(place[1:])] = value
    return sound


def png_header(width: int, height: int) -> bytes:
    """A picture that says it is large, and holds nothing."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


def in_chunk(**fields: Any) -> str:
    return json.dumps(chunk(**fields))


def with_picture(data: bytes | str, **fields: Any) -> str:
    text = data if isinstance(data, str) else base64_of(data)
    return in_chunk(frame_base64_list=[base64_of(picture_of(0)), text], **fields)


def prepare(**fields: Any) -> str:
    return json.dumps({"type": "prepare", **fields})


def setting(**config: Any) -> str:
    return prepare(config={**QUIET, **config})


def deep(n: int) -> str:
    return '{"type":"pause","x":' + "[" * n + "]" * n + "}"


HALF = picture_of(0)[: len(picture_of(0)) // 2]
GIF = io.BytesIO()
Image.new("P", (8, 8)).save(GIF, "GIF")

# What is sent -> the code that comes back. The session goes on as if nothing had been sent.
HARMLESS: dict[str, tuple[str | bytes, str]] = {
    "no-json": ("{", "bad_json"),
    "nothing": ("", "bad_json"),
    "millions-of-values": (prepare(x=[]).replace("[]", "[" + "[]," * 2_000_000 + "0]"), "too_large"),
    "words": ("hello", "bad_json"),
    "nan-in-json": ('{"type":"pause","timeout":NaN}', "bad_json"),
    "deep": (deep(1000), "bad_json"),
    "deeper": (deep(100_000), "too_large"),
    "half-a-character": ('{"type":"prepare","system_prompt":"\\ud800"}', "bad_json"),
    "list": ("[]", "bad_message"),
    "text": ('"audio_chunk"', "bad_message"),
    "number": ("12", "bad_message"),
    "null": ("null", "bad_message"),
    "no-type": ("{}", "bad_message"),
    "type-is-a-number": ('{"type":5}', "bad_message"),
    "unknown-type": ('{"type":"sing"}', "unknown_type"),
    "a-server's-type": ('{"type":"result"}', "unknown_type"),
    "binary": (b"\x00" * 64_000, "binary_not_agreed"),
    "no-sound": ('{"type":"audio_chunk"}', "missing_audio"),
    "empty-sound": (in_chunk(audio_base64=""), "missing_audio"),
    "null-sound": (in_chunk(audio_base64=None), "missing_audio"),
    "sound-is-a-number": (in_chunk(audio_base64=1), "bad_message"),
    "sound-is-a-list": (in_chunk(audio_base64=[0.0, 0.1]), "bad_message"),
    "bad-base64": (in_chunk(audio_base64="*" * 85_336), "bad_base64"),
    "cut-base64": (in_chunk(audio_base64=base64_of(sound_of(0))[:-3]), "bad_base64"),
    "odd-bytes": (in_chunk(audio_base64=base64_of(b"\x00" * 63_999)), "bad_audio"),
    "nan": (in_chunk(sound=noise(_7=np.nan)), "bad_audio"),
    "infinity": (in_chunk(sound=noise(_0=np.inf, _15999=-np.inf)), "bad_audio"),
    "absurd-level": (in_chunk(sound=noise(_1=32_767.0)), "bad_audio"),
    "a-minute": (in_chunk(sound=np.tile(sound_of(0), 60)), "bad_audio"),
    "no-picture": (with_picture(b"This is not a picture."), "bad_image"),
    "broken-jpeg": (with_picture(picture_of(0)[:200] + b"\xff" * 2000), "bad_image"),
    "half-a-jpeg": (with_picture(HALF), "bad_image"),
    "picture-bomb": (with_picture(png_header(50_000, 50_000)), "bad_image"),
    "lying-picture": (with_picture(png_header(4000, 4000)), "bad_image"),
    "line-of-a-picture": (with_picture(jpeg(Image.new("RGB", (1, 60_000)))), "bad_image"),
    "empty-picture": (with_picture(""), "bad_image"),
    "picture-no-base64": (with_picture("*" * 1000), "bad_base64"),
    "picture-is-a-number": (in_chunk(frame_base64_list=[5]), "bad_message"),
    "pictures-are-text": (in_chunk(frame_base64_list="abc"), "bad_message"),
    "no-slices": (with_picture(picture_of(0), max_slice_nums=0), "bad_config"),
    "many-slices": (with_picture(picture_of(0), max_slice_nums=10), "bad_config"),
    "slices-of-others": (with_picture(picture_of(0), max_slice_nums=[1, 1, 1]), "bad_config"),
    "slices-are-text": (with_picture(picture_of(0), max_slice_nums="2"), "bad_message"),
    "too-many-pictures": (in_chunk(frame_base64_list=[base64_of(GIF.getvalue())] * 100), "context_full"),
    "yes-for-true": (in_chunk(force_listen="yes"), "bad_message"),
    "pause-below-zero": ('{"type":"pause","timeout":-1}', "bad_message"),
    "pause-for-ever": ('{"type":"pause","timeout":1e999}', "bad_message"),
    "pause-is-text": ('{"type":"pause","timeout":"60"}', "bad_message"),
    "frame-without-picture": ('{"type":"video_frame"}', "bad_message"),
    "prompt-of-a-book": (prepare(system_prompt="Map of a sea. " * 400_000), "context_full"),
    "prompt-is-a-number": (prepare(system_prompt=5), "bad_message"),
    "content-of-nothing": (prepare(system_content=[{"type": "video"}]), "bad_message"),
    "config-is-a-list": (prepare(config=[]), "bad_message"),
    "no-such-spec": (prepare(spec={"version": 2}), "bad_message"),
    "no-such-form": (prepare(spec={"sound_in": "mp3"}), "bad_message"),
    "slices-of-the-session": (prepare(max_slice_nums=0), "bad_message"),
    "more-slices-of-the-session": (prepare(max_slice_nums=10), "bad_config"),
    "temperature": (setting(temperature=2.1), "bad_config"),
    "temperature-below": (setting(temperature=-0.1), "bad_config"),
    "temperature-is-text": (setting(temperature="hot"), "bad_config"),
    "temperature-too-large-for-a-float": (prepare(config={}).replace("{}", '{"temperature":1e999}'), "bad_config"),
    "top_k": (setting(top_k=-1), "bad_config"),
    "top_k-is-true": (setting(top_k=True), "bad_config"),
    "top_k-of-many-digits": (setting(top_k=10**300), "bad_config"),
    "top_p": (setting(top_p=1.5), "bad_config"),
    "length_penalty": (setting(length_penalty=0), "bad_config"),
    "text_repetition_penalty": (setting(text_repetition_penalty=0), "bad_config"),
    "text_repetition_window_size": (setting(text_repetition_window_size=-1), "bad_config"),
    "listen_prob_scale": (setting(listen_prob_scale=0), "bad_config"),
    "listen_top_k": (setting(listen_top_k=0), "bad_config"),
    "tts_temperature": (setting(tts_temperature=0), "bad_config"),
    "force_listen_count": (setting(force_listen_count=-1), "bad_config"),
    "max_new_speak_tokens_per_chunk": (setting(max_new_speak_tokens_per_chunk=0), "bad_config"),
    "chunk_ms": (setting(chunk_ms=500), "bad_config"),
    "sample_rate": (setting(sample_rate=8000), "bad_config"),
    "ls_mode": (setting(ls_mode="loud"), "bad_config"),
    "decode_mode": (setting(decode_mode="beam"), "bad_config"),
    "generate_audio": (setting(generate_audio=1), "bad_config"),
    "seed": (setting(seed=-1), "bad_config"),
    "window": (setting(window={"mode": "moving"}), "bad_config"),
    "window-upside-down": (setting(window={"high_tokens": 100, "low_tokens": 200}), "bad_config"),
    "window-of-more-than-there-is": (setting(window={"high_tokens": 5000}), "bad_config"),
    "another-solver": (setting(euler_steps=7), "bad_config"),
    "voice-too-short": (prepare(ref_audio_base64=base64_of(sound_of(0)[:1000])), "bad_audio"),
    "voice-too-long": (prepare(ref_audio_base64=base64_of(np.tile(sound_of(0), 31))), "bad_audio"),
    "voice-of-nan": (prepare(ref_audio_base64=base64_of(np.full(32_000, np.nan, np.float32))), "bad_audio"),
    "voice-no-base64": (prepare(ref_audio_base64="*"), "bad_base64"),
    "voice-of-odd-bytes": (prepare(ref_audio_base64=base64_of(b"\x00" * 64_001)), "bad_audio"),
    "other-voice-of-infinity": (prepare(tts_ref_audio_base64=base64_of(noise(_5=np.inf))), "bad_audio"),
    "voice-outside": (prepare(ref_audio_path="../../../../../etc/passwd"), "bad_config"),
    "voice-far-outside": (prepare(ref_audio_path="/etc/passwd"), "bad_config"),
    "voice-of-the-folder": (prepare(ref_audio_path=".."), "bad_config"),
    "voice-with-a-zero": (prepare(ref_audio_path="default.wav\x00.txt"), "bad_config"),
    "voice-is-a-list": (prepare(ref_audio_path=["default.wav"]), "bad_message"),
}


def test_codes_are_those_of_the_protocol() -> None:
    unknown = {code for _, code in HARMLESS.values()} - set(ErrorCode)
    assert not unknown, f"expected codes of the protocol, got {unknown}"


@pytest.mark.parametrize("kind", HARMLESS)
def test_nonsense_is_answered_and_forgotten(worker: WorkerProcess, undisturbed: list[Result], kind: str) -> None:
    """With an error, once; the conversation goes on as if it had not been sent."""
    message, code = HARMLESS[kind]
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        results = [talker.unit(0)]
        talker.send(message)
        error = talker.expect_error(code)
        assert 0 < len(error.error) <= 2000 and error.message == error.error, f"expected a few words, got {error!r}"
        results.append(talker.unit(1))
        assert_told(results, undisturbed[:2], f"around {kind}")


def test_neighbours_hear_nothing_of_it(worker: WorkerProcess) -> None:
    """All of it, in one session, while another one talks."""

    def talk(talker: Talker, n: int = 6) -> list[Result]:
        talker.prepare(ALOUD)
        return talker.burst(range(n))

    with Talker(worker) as talker:
        expected = talk(talker)
    with Talker(worker) as talker, Talker(worker) as rude:
        talker.prepare(ALOUD)
        rude.prepare(QUIET)
        sent = list(HARMLESS.values())
        share, results = len(sent) // 6 + 1, []
        for number in range(6):
            talker.send(chunk(number))
            for message, _ in sent[number * share : (number + 1) * share]:
                rude.send(message)
            results.append(talker.expect(Result))
        for _, code in sent:
            rude.expect_error(code)
        rude.unit(0)
    assert_told(results, expected, "beside a rude neighbour")


# --- before there is a context --------------------------------------------------------------------


def test_chunk_before_prepare(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    with Talker(worker) as talker:
        for message in (chunk(0), chunk(0, audio_base64="*")):
            talker.send(message)
            error = talker.expect_error("not_prepared")
            assert error.error == "Not prepared yet", f"expected what clients look for, got {error!r}"
        talker.send({"type": "interrupt"})
        talker.expect(Interrupted)
        talker.send(setting(temperature=3))
        talker.expect_error("bad_config")
        talker.send(chunk(0))
        talker.expect_error("not_prepared")
        talker.prepare(QUIET)
        assert_told(talker.units(range(2)), undisturbed[:2], "after a late prepare")


def test_prompt_that_does_not_fit(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """The next `prepare` that fits makes up for it."""
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        talker.unit(0)
        talker.send({"type": "prepare", "config": QUIET, "system_prompt": "Map of a sea. " * 2000})
        talker.expect_error("context_full")
        talker.prepare(QUIET)
        assert_told(talker.units(range(2)), undisturbed[:2], "after a prompt that did not fit")


# --- size, frames, bytes --------------------------------------------------------------------------


def test_130_mib(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """More than is allowed and less than ends the connection."""
    with Talker(worker) as talker, Talker(worker) as neighbour:
        talker.prepare(QUIET)
        neighbour.prepare(QUIET)
        results = [talker.unit(0)]
        talker.send('{"type":"audio_chunk","audio_base64":"' + "A" * (130 * MIB) + '"}')
        talker.expect_error("too_large")
        results.append(talker.unit(1))
        assert_told(results, undisturbed[:2], "around 130 MiB")
        assert_told(neighbour.units(range(2)), undisturbed[:2], "beside 130 MiB")


def test_more_than_a_connection_takes(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    with Talker(worker) as talker, Talker(worker) as neighbour:
        neighbour.prepare(QUIET)
        results = [neighbour.unit(0)]
        talker.send("A" * (161 * MIB))
        code = talker.close_code()
        # What was not read yet may make the close frame go missing.
        assert code in (1009, 1006), f"expected close code 1009, too large, got {code}"
        worker.wait_free(N_SLOTS - 1)
        results.append(neighbour.unit(1))
        assert_told(results, undisturbed[:2], "beside 161 MiB")


def test_text_that_is_none(worker: WorkerProcess) -> None:
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        talker.send_raw_text(b'{"type":"\xff\xfe"}')
        code = talker.close_code()
        assert code == 1007, f"expected close code 1007, no UTF-8, got {code}"


def test_frames_of_the_transport(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """Pings are answered, in the middle of a message too, and messages may come in pieces."""
    with Talker(worker) as talker:
        talker.ping(b"before")
        opcode, data = talker.receive_frame()
        assert (opcode.name, data) == ("PONG", b"before"), f"expected a pong, got {opcode.name} {data!r}"
        talker.prepare(QUIET)
        text = json.dumps(chunk(0)).encode()
        talker.send_parts(text[:10], b"", text[10:50_000], text[50_000:])
        assert_told([talker.expect(Result)], undisturbed[:1], "in pieces")


BINARY: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "bad_message"),
    "garbage": (bytes(range(256)) * 20, "bad_message"),
    "long-header": (struct.pack("<I", 2**31) + b"{}", "bad_message"),
    "no-json": (struct.pack("<I", 2) + b"{{", "bad_json"),
    "no-text": (struct.pack("<I", 2) + b"\xff\xff", "bad_json"),
    "other-length": (pack_frame({"type": "audio_chunk"}, b"\x00" * 64)[:-1], "bad_message"),
    "length-below-zero": (struct.pack("<I", 41) + b'{"type":"audio_chunk","audio_bytes":  -1}', "bad_message"),
    "odd-bytes": (pack_frame({"type": "audio_chunk"}, b"\x00" * 63), "bad_audio"),
    "no-sound": (pack_frame({"type": "audio_chunk"}, b""), "missing_audio"),
    "nan": (pack_frame({"type": "audio_chunk"}, noise(_0=np.nan).tobytes()), "bad_audio"),
    "no-picture": (pack_frame({"type": "audio_chunk"}, sound_of(0).tobytes(), [b"no picture"]), "bad_image"),
    "unknown-type": (pack_frame({"type": "sing"}, b"\x00" * 64), "unknown_type"),
    "without-sound": (pack_frame({"type": "pause"}, b""), "bad_message"),
}


def test_binary_nonsense(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    with Talker(worker) as talker:
        talker.prepare(QUIET, spec={"sound_in": "float32"})
        results = [talker.unit(0)]
        for kind, (data, code) in BINARY.items():
            talker.send(data)
            error = talker.expect(Error)
            assert error.code == code, f"{kind}: expected {code}, got {error!r}"
        results.append(talker.unit(1))
        assert_told(results, undisturbed[:2], "around binary nonsense")


# --- anything in any order ------------------------------------------------------------------------


class Expected:
    """What the protocol says must come back, message by message."""

    def __init__(self) -> None:
        self.prepared = self.paused = self.bad_frame = False

    def answer(self, what: str) -> list[Any]:
        """Types or error codes that follow."""
        if what in CHUNKS:
            bad_frame, self.bad_frame = self.bad_frame, False
            if not self.prepared or self.paused:
                return ["paused" if self.prepared else "not_prepared"]
            return [CHUNKS[what][1] or ("bad_image" if bad_frame else Result)]
        if what == "prepare":
            self.__init__()
            self.prepared = True
            return [Prepared]
        if what == "prepare-overflow":
            self.prepared = False
            return ["context_full"]
        if what in ("pause", "resume"):
            self.paused = what == "pause"
            return [Paused if self.paused else Resumed]
        if what == "bad-frame":
            self.bad_frame = True
        return OTHERS.get(what, (None, []))[1]


CHUNKS: dict[str, tuple[Any, str | None]] = {
    "chunk": (chunk(0), None),
    "short": (chunk(sound=sound_of(0)[:4000]), None),
    "long": (chunk(sound=np.concatenate([sound_of(0), sound_of(1)])), None),
    "forced": (chunk(1, force_listen=True), None),
    "base64": (chunk(audio_base64="*"), "bad_base64"),
    "nan": (chunk(sound=noise(_3=np.nan)), "bad_audio"),
}
OTHERS: dict[str, tuple[Any, list[Any]]] = {
    "prepare": ({"type": "prepare", "config": QUIET}, []),
    "prepare-overflow": ({"type": "prepare", "config": QUIET, "system_prompt": "sea map " * 5000}, []),
    "prepare-bad": ({"type": "prepare", "config": {"top_p": 9}}, ["bad_config"]),
    "pause": ({"type": "pause", "timeout": 60}, []),
    "resume": ({"type": "resume"}, []),
    "interrupt": ({"type": "interrupt"}, [Interrupted]),
    "frame": ({"type": "video_frame", "frame": base64_of(picture_of(0, 64, 64))}, []),
    "bad-frame": ({"type": "video_frame", "frame": base64_of(b"no picture")}, []),
    "diagnostic": ({"type": "client_diagnostic", "event": "gap"}, []),
    "json": ("{'type':'stop'}", ["bad_json"]),
    "unknown": ({"type": "sing"}, ["unknown_type"]),
    "binary": (b"\x01\x02", ["binary_not_agreed"]),
}
SEQUENCES = st.lists(st.sampled_from([*CHUNKS, *CHUNKS, *OTHERS, "prepare", "resume"]), max_size=16)
FEW = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)


@FEW
@given(sequence=SEQUENCES, catch_up=st.booleans())
def test_any_order(worker: WorkerProcess, sequence: list[str], catch_up: bool) -> None:
    """Each message gets what is due to it, in order, whatever came before."""
    expected, wanted = Expected(), []
    spec = {"spec": {"backlog": "catch_up"}} if catch_up else {}
    with Talker(worker) as talker:
        for what in ["prepare", *sequence, "prepare", "chunk"]:
            message = (CHUNKS.get(what) or OTHERS[what])[0]
            talker.send({**message, **spec} if what == "prepare" else message)
            wanted += expected.answer(what)
        got = [talker.receive() for _ in wanted]
        told = [one.code if isinstance(one, Error) else type(one) for one in got]
        assert told == wanted, f"{sequence}: expected {wanted}, got {told}"
        talker.stop()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted(
    {*Prepare.model_fields, *AudioChunk.model_fields, "frame", "audio", "video_frames", "system_content"} - {"type"}
)
TYPES = ("prepare", "audio_chunk", "video_frame", "interrupt", "resume", "client_diagnostic")
MESSAGES = st.builds(
    lambda kind, fields: {"type": kind, **fields},
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)


@FEW
@given(messages=st.lists(MESSAGES | st.text(max_size=40) | st.binary(max_size=80), max_size=10))
def test_anything_at_all(worker: WorkerProcess, messages: Sequence[Any]) -> None:
    """Whatever comes, the session answers what comes next; a message is answered once at most."""
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        for message in messages:
            talker.send(message)
        talker.send({"type": "pause", "timeout": 60})
        got = []
        while not isinstance(message := talker.receive(), Paused):
            got.append(message)
        assert len(got) <= len(messages), f"expected {len(messages)} answers at most, got {got}"
        silent = sum(isinstance(one, dict) and one["type"] in ("video_frame", "client_diagnostic") for one in messages)
        assert len(got) >= len(messages) - silent, f"expected {len(messages) - silent} answers at least, got {got}"
        faults = [one for one in got if isinstance(one, Error) and one.code in ("internal", "engine")]
        assert not faults, f"expected no fault of the worker's own, got {faults}"
        talker.prepare(QUIET)
        talker.unit(0)


def test_it_still_works(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """After all of this."""
    with Talker(worker) as talker:
        talker.prepare(QUIET)
        assert_told(talker.units(range(4)), undisturbed, "at the end")
    assert worker.ask("/livez")[0] == 200
