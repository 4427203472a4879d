"""What a worker says to nonsense: an error with a code to whoever sent it, and nothing to anybody else."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.http.client_scripts import ALOUD, QUIET, assert_told, base64_of, chunk, picture_of, sound_of
from tests.worker.http.processes import Talker, WorkerProcess, running
from tests.worker.protocol.invalid_messages import BINARY, HARMLESS, noise, setting
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import AudioChunk, Error, Interrupted, Paused, Prepare, Prepared, Result, Resumed

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
