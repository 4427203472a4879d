"""A worker's socket: interrupts, forced listening and the options of a session."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.worker.http.client_scripts import (
    ALOUD,
    QUIET,
    TURNS_ALOUD,
    TURNS_QUIET,
    assert_result,
    assert_same_results,
    base64_of,
    chunk,
    picture_of,
    samples,
    sound_of,
)
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from worker.config.service import ROOT
from worker.loop.results import SOUND_RATE
from worker.protocol.messages import Interrupted, Partial, Result
from worker.protocol.wire import pack_frame
from worker.start.voices import ReferenceSound

pytestmark = pytest.mark.usefixtures("all_slots_free")


# --- control of turns -----------------------------------------------------------------------------


def test_interrupt_ends_open_turn(worker: WorkerProcess) -> None:
    with ScriptedClient(worker) as client:
        client.prepare(ALOUD)
        last = client.units(range(2))[-1]
        assert not last.is_listen and not last.end_of_turn, f"expected a turn that goes on, got {last!r}"
        client.send({"type": "interrupt"})
        client.expect(Interrupted)
        cut = client.unit(2)
        assert (cut.is_listen, cut.end_of_turn) == (True, True), f"expected the turn to end in silence, got {cut!r}"
        assert_result(cut)
        later = client.units(range(3, 5))
        assert all(not result.is_listen for result in later), f"expected a new turn, got {later}"
        assert later[0].n_tts_tokens > 0, f"expected sound of the new turn, got {later[0]!r}"


def test_interrupt_stops_running_unit(worker: WorkerProcess) -> None:
    """It takes effect before earlier chunks are processed; its answer comes after theirs."""
    with ScriptedClient(worker) as client:
        client.prepare(ALOUD)
        client.unit(0)
        for number in range(1, 6):
            client.send(chunk(number))
        client.send({"type": "interrupt"})
        results = [client.expect(Result) for _ in range(5)]
        client.expect(Interrupted)
        got = [result.end_of_turn for result in results]
        assert sum(got) == 1 and not got[-1], f"expected one of the first units to end the turn, got {got}"
        for result in results:
            assert_result(result)


def test_interrupt_while_listening_has_no_effect(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """Neither between units nor during a unit; the next turn is not affected."""
    config = {**QUIET, "force_listen_count": 3}
    expected = alone(config, 6)
    assert [result.is_listen for result in expected] == [True] * 3 + [False] * 3, "expected listening, then speech"
    with ScriptedClient(worker) as client:
        client.prepare(config)
        client.send({"type": "interrupt"})
        client.expect(Interrupted)
        results = client.units(range(2))
        client.send(chunk(2))
        client.send({"type": "interrupt"})
        results.append(client.expect(Result))
        client.expect(Interrupted)
        client.send({"type": "interrupt"})
        client.expect(Interrupted)
        results += client.units(range(3, 6))
        assert_same_results(results, expected, "with interrupts while listening")


# --- options --------------------------------------------------------------------------------------


def test_partial_results_add_up_to_the_unit(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    expected = alone(TURNS_ALOUD, 8)
    with ScriptedClient(worker) as client:
        prepared = client.prepare(TURNS_ALOUD, spec={"partial_results": True})
        assert prepared.spec.partial_results and not expected[0].n_parts
        most = 0
        for number, whole in enumerate(expected):
            client.send(chunk(number))
            parts, message = [], client.receive()
            while isinstance(message, Partial):
                parts.append(message)
                message = client.receive()
            assert isinstance(message, Result), f"expected the result, got {message!r}"
            got = [(part.part, part.current_time) for part in parts]
            wanted = [(part, whole.current_time) for part in range(1, len(parts) + 1)]
            assert got == wanted and message.n_parts == len(parts), f"expected {wanted}, got {got}, {message!r}"
            for name in ("text", "is_listen", "end_of_turn", "kv_cache_length", "n_tts_tokens"):
                assert getattr(message, name) == getattr(whole, name), f"unit {number}: expected the same {name}"
            if parts:
                assert "".join(part.text for part in parts) == whole.text, f"unit {number}: expected {whole.text!r}"
                assert message.audio_data is None, "expected sound in the parts alone"
            sounds = [sound for sound in map(samples, parts or [message]) if sound is not None]
            sound, plain = np.concatenate([np.zeros(0, np.float32), *sounds]), samples(whole)
            n_filled = 0 if plain is None else len(plain) - len(sound)
            # Without parts, a short first second is padded in front with silence.
            filled = None if plain is None else np.concatenate((np.zeros(n_filled, np.float32), sound))
            assert (plain is None and not len(sound)) or np.array_equal(plain, filled), f"unit {number}: other sound"
            most = max(most, sum(part.audio_data is not None for part in parts))
        assert most >= 2, f"expected sound in several parts, got {most}"


def frame(number: int, form: str, **fields: Any) -> bytes:
    """An `audio_chunk` with its picture as a binary frame."""
    sound = sound_of(number)
    data = sound.astype("<f4") if form == "float32" else np.rint(sound * 32768).clip(-32768, 32767).astype("<i2")
    return pack_frame({"type": "audio_chunk", **fields}, data.tobytes(), [picture_of(number)])


@pytest.mark.parametrize("form", ["float32", "pcm16"])
def test_binary_frames(worker: WorkerProcess, alone: Callable[..., list[Result]], form: str) -> None:
    """In both directions; base64 is still accepted. With float32 all samples are equal."""
    n = 4
    expected = alone(ALOUD, 6, picture=True)[:n]
    with ScriptedClient(worker) as client:
        client.prepare(ALOUD, spec={"sound_in": form, "sound_out": form})
        results = []
        for number in range(n):
            client.send(frame(number, form) if number != 1 else chunk(number, picture=True))
            opcode, data = client.receive_frame()
            assert opcode.name == "BINARY", f"expected a binary frame, got {opcode.name}"
            results.append(client.read(opcode, data))
            size = {"float32": 4, "pcm16": 2}[form] * SOUND_RATE
            assert len(data) >= size and len(data) < size + 2000, f"expected a second of {form}, got {len(data)} bytes"
    if form == "float32":
        assert_same_results(results, expected, form)
    else:
        got, wanted = ([(one.is_listen, one.text) for one in all_of] for all_of in (results, expected))
        assert got == wanted, f"expected the same decisions as from base64, {wanted}, got {got}"
        got, wanted = samples(results[0]), samples(expected[0])
        assert np.abs(got - wanted).max() < 0.02, f"expected the same sound, off by {np.abs(got - wanted).max()}"


def test_catch_up_listens_while_chunks_wait(worker: WorkerProcess) -> None:
    """Waiting chunks only listen. Each chunk still gets one result, in order."""
    with ScriptedClient(worker) as client:
        client.prepare({**QUIET, "force_listen_count": 1}, spec={"backlog": "catch_up"})
        # The first unit is slow, so that the others wait when it is answered.
        large = {"frame_base64_list": [base64_of(picture_of(0, 1344, 1344))] * 2, "max_slice_nums": 9}
        for message in [chunk(0, **large), *(chunk(number) for number in range(1, 12))]:
            client.send(message)
        client.send(chunk(sound=np.zeros(0, np.float32), audio_base64="!"))
        client.send(chunk(12))
        results = [client.expect(Result) for _ in range(12)]
        client.expect_error("bad_base64")
        results.append(client.expect(Result))
        got = [result.current_time for result in results]
        assert got == list(range(1, 14)), f"expected units in order, got {got}"
        got = [result.is_listen for result in results]
        assert all(got[1:4]) and not got[12], f"expected listening until nothing waits, got {got}"
        for result in results:
            assert_result(result, voiced=False)


def test_accepts_aliases_and_ignores_unknown_fields(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """Aliases of fields; unknown fields are ignored, and unknown settings are named in `notes`."""
    expected = alone(TURNS_QUIET, 4, picture=True)
    with ScriptedClient(worker) as client:
        config = {**TURNS_QUIET, "max_kv_tokens": 8000, "window": {"color": "red"}}
        prepared = client.prepare(config, prefix_system_prompt="You are a helpful assistant.", mood="good")
        notes = " ".join(prepared.notes)
        assert "max_kv_tokens" in notes and "window.color" in notes, f"expected notes on both, got {prepared.notes}"
        results = []
        for number in range(4):
            client.send({"type": "video_frame", "frame": base64_of(picture_of(number)), "id": 1})
            client.send({"type": "client_diagnostic", "event": "gap", "ms": 12.5})
            client.send({"type": "audio_chunk", "audio": base64_of(sound_of(number)), "seq": number})
            results.append(client.expect(Result))
        assert_same_results(results, expected, "by other names")
        content = [{"type": "text", "text": "You are kind."}, {"type": "audio", "data": base64_of(sound_of(0))}]
        client.prepare(QUIET, system_content=content)
        given = {"type": "audio_chunk", "audio": base64_of(sound_of(0)), "video_frames": [base64_of(picture_of(0))]}
        client.send(given)
        assert client.expect(Result).vision_slices == 1


def test_named_voices(worker: WorkerProcess) -> None:
    """A voice of the server is selected by file name, with any path in front, and overrides one that is sent."""

    def run(**fields: Any) -> list[Result]:
        with ScriptedClient(worker) as client:
            client.prepare(ALOUD, **fields)
            return client.units(range(2))

    high = base64_of(ReferenceSound.read(ROOT / "assets" / "ref_audio" / "high.wav").audio_16k())
    sent = run(ref_audio_base64=high)
    assert_same_results(
        run(ref_audio_path="some/where/high.wav", ref_audio_base64=base64_of(sound_of(0))), sent, "by its name"
    )
    spoken = run(tts_ref_audio_base64=high)
    assert spoken[0].kv_cache_length == run()[0].kv_cache_length, "expected the default voice"
    default = samples(run()[0])
    assert not np.array_equal(samples(spoken[0]), default) and default.any(), "expected another voice to speak"
