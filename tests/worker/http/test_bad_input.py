"""Invalid input: the sender gets an error with a code, and other sessions are not affected."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.http.client_scripts import ALOUD, QUIET, assert_same_results, base64_of, chunk, picture_of, sound_of
from tests.worker.http.conftest import Undisturbed
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from tests.worker.http.small_worker import N_SLOTS
from tests.worker.protocol.invalid_messages import BINARY, HARMLESS, noise, setting
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import AudioChunk, Error, Interrupted, Paused, Prepare, Prepared, Result, Resumed

MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def _no_faults(worker: WorkerProcess) -> Iterator[None]:
    """Check that the worker runs on and logs no fault of its own."""
    first = len(worker.lines)
    yield
    assert worker.process.poll() is None, f"expected a running worker, got:\n{worker.log}"
    faults = [line for line in worker.lines[first:] if " ERROR worker" in line or " ERROR asyncio" in line]
    assert not faults, f"expected no fault of the worker's own, got {faults}"


@pytest.fixture(autouse=True)
def _all_slots(all_slots_free: None) -> None:
    """Every test leaves all slots free."""


@pytest.fixture(scope="module")
def undisturbed(worker: WorkerProcess) -> list[Result]:
    """The results of a session with valid messages only."""
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        return client.units(range(4))


# --- invalid messages----------------------------------------------------------------------------------

PER_SESSION = 12  # invalid messages of one session, with a unit after each
N_SHARES = -(-len(HARMLESS) // PER_SESSION)


def test_invalid_messages_cover_protocol_codes() -> None:
    unknown = {code for _, code in HARMLESS.values()} - set(ErrorCode)
    assert not unknown, f"expected codes of the protocol, got {unknown}"


@pytest.mark.parametrize("share", range(N_SHARES))
def test_answers_invalid_message_and_continues(worker: WorkerProcess, alone: Undisturbed, share: int) -> None:
    """One error for each message; the units between them have the results of a session without the messages."""
    kinds = list(HARMLESS)[share::N_SHARES]
    expected = alone(QUIET, PER_SESSION + 1)
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        assert_same_results([client.unit(0)], expected[:1], f"before {kinds[0]}")
        for number, kind in enumerate(kinds, 1):
            message, code = HARMLESS[kind]
            client.send(message)
            error = client.receive()
            assert isinstance(error, Error) and error.code == code, f"{kind}: expected {code}, got {error!r}"
            assert 0 < len(error.error) <= 2000 and error.message == error.error, (
                f"{kind}: expected a few words, got {error!r}"
            )
            assert_same_results([client.unit(number)], [expected[number]], f"after {kind}")


def test_other_sessions_are_not_affected(worker: WorkerProcess) -> None:
    """One session sends all invalid messages while another one speaks."""

    def talk(client: ScriptedClient, n: int = 6) -> list[Result]:
        client.prepare(ALOUD)
        return client.burst(range(n))

    with ScriptedClient(worker) as client:
        expected = talk(client)
    with ScriptedClient(worker) as client, ScriptedClient(worker) as rude:
        client.prepare(ALOUD)
        rude.prepare(QUIET)
        sent = list(HARMLESS.values())
        share, results = len(sent) // 6 + 1, []
        for number in range(6):
            client.send(chunk(number))
            for message, _ in sent[number * share : (number + 1) * share]:
                rude.send(message)
            results.append(client.expect(Result))
        for _, code in sent:
            rude.expect_error(code)
        rude.unit(0)
    assert_same_results(results, expected, "beside a rude neighbour")


# --- before there is a context --------------------------------------------------------------------


def test_refuses_chunk_before_prepare(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    with ScriptedClient(worker) as client:
        for message in (chunk(0), chunk(0, audio_base64="*")):
            client.send(message)
            error = client.expect_error("not_prepared")
            assert error.error == "Not prepared yet", f"expected what clients look for, got {error!r}"
        client.send({"type": "interrupt"})
        client.expect(Interrupted)
        client.send(setting(temperature=3))
        client.expect_error("bad_config")
        client.send(chunk(0))
        client.expect_error("not_prepared")
        client.prepare(QUIET)
        assert_same_results(client.units(range(2)), undisturbed[:2], "after a late prepare")


def test_refuses_prompt_that_exceeds_the_context(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """A later, shorter `prepare` succeeds."""
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        client.unit(0)
        client.send({"type": "prepare", "config": QUIET, "system_prompt": "Map of a sea. " * 2000})
        client.expect_error("context_full")
        client.prepare(QUIET)
        assert_same_results(client.units(range(2)), undisturbed[:2], "after a prompt that did not fit")


# --- size, frames, bytes --------------------------------------------------------------------------


def test_refuses_message_of_130_mib(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """Above the message limit, below the limit that closes the connection."""
    with ScriptedClient(worker) as client, ScriptedClient(worker) as neighbour:
        client.prepare(QUIET)
        neighbour.prepare(QUIET)
        results = [client.unit(0)]
        client.send('{"type":"audio_chunk","audio_base64":"' + "A" * (130 * MIB) + '"}')
        client.expect_error("too_large")
        results.append(client.unit(1))
        assert_same_results(results, undisturbed[:2], "around 130 MiB")
        assert_same_results(neighbour.units(range(2)), undisturbed[:2], "beside 130 MiB")


def test_closes_connection_above_the_frame_limit(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    with ScriptedClient(worker) as client, ScriptedClient(worker) as neighbour:
        neighbour.prepare(QUIET)
        results = [neighbour.unit(0)]
        client.send("A" * (161 * MIB))
        code = client.close_code()
        # Unread data may reset the connection before the close frame is read.
        assert code in (1009, 1006), f"expected close code 1009, too large, got {code}"
        worker.wait_free(N_SLOTS - 1)
        results.append(neighbour.unit(1))
        assert_same_results(results, undisturbed[:2], "beside 161 MiB")


def test_closes_connection_on_invalid_utf8(worker: WorkerProcess) -> None:
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        client.send_raw_text(b'{"type":"\xff\xfe"}')
        code = client.close_code()
        assert code == 1007, f"expected close code 1007, no UTF-8, got {code}"


def test_pings_and_fragmented_messages(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """Pings are answered, also inside a fragmented message."""
    with ScriptedClient(worker) as client:
        client.ping(b"before")
        opcode, data = client.receive_frame()
        assert (opcode.name, data) == ("PONG", b"before"), f"expected a pong, got {opcode.name} {data!r}"
        client.prepare(QUIET)
        text = json.dumps(chunk(0)).encode()
        client.send_parts(text[:10], b"", text[10:50_000], text[50_000:])
        assert_same_results([client.expect(Result)], undisturbed[:1], "fragmented")


def test_refuses_invalid_binary_frames(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    with ScriptedClient(worker) as client:
        client.prepare(QUIET, spec={"sound_in": "float32"})
        results = [client.unit(0)]
        for kind, (data, code) in BINARY.items():
            client.send(data)
            error = client.expect(Error)
            assert error.code == code, f"{kind}: expected {code}, got {error!r}"
        results.append(client.unit(1))
        assert_same_results(results, undisturbed[:2], "around binary nonsense")


# --- random sequences -----------------------------------------------------------------------------


class Expected:
    """A model of the protocol: the answers that each message must get."""

    def __init__(self) -> None:
        self.prepared = self.paused = self.bad_frame = False

    def answer(self, what: str) -> list[Any]:
        """The types or error codes of the answers."""
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
def test_answers_any_sequence_in_order(worker: WorkerProcess, sequence: list[str], catch_up: bool) -> None:
    """Each message gets the answers of the model, in order."""
    expected, wanted = Expected(), []
    spec = {"spec": {"backlog": "catch_up"}} if catch_up else {}
    with ScriptedClient(worker) as client:
        for what in ["prepare", *sequence, "prepare", "chunk"]:
            message = (CHUNKS.get(what) or OTHERS[what])[0]
            client.send({**message, **spec} if what == "prepare" else message)
            wanted += expected.answer(what)
        got = [client.receive() for _ in wanted]
        kinds = [one.code if isinstance(one, Error) else type(one) for one in got]
        assert kinds == wanted, f"{sequence}: expected {wanted}, got {kinds}"
        client.stop()


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
def test_survives_arbitrary_messages(worker: WorkerProcess, messages: Sequence[Any]) -> None:
    """The session answers the next message; each message gets at most one answer."""
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        for message in messages:
            client.send(message)
        client.send({"type": "pause", "timeout": 60})
        got = []
        while not isinstance(message := client.receive(), Paused):
            got.append(message)
        assert len(got) <= len(messages), f"expected {len(messages)} answers at most, got {got}"
        silent = sum(isinstance(one, dict) and one["type"] in ("video_frame", "client_diagnostic") for one in messages)
        assert len(got) >= len(messages) - silent, f"expected {len(messages) - silent} answers at least, got {got}"
        faults = [one for one in got if isinstance(one, Error) and one.code in ("internal", "engine")]
        assert not faults, f"expected no fault of the worker's own, got {faults}"
        client.prepare(QUIET)
        client.unit(0)


def test_still_works_after_all_tests(worker: WorkerProcess, undisturbed: list[Result]) -> None:
    """A new session gets the same results as before."""
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        assert_same_results(client.units(range(4)), undisturbed, "at the end")
    assert worker.ask("/livez")[0] == 200
