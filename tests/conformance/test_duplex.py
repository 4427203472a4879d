"""Items 8 to 14 and 16 of the conformance list: what the duplex pages of the public implementation rely on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conformance.servers import Servers, WireClient
from tests.worker.http.client_scripts import ALOUD, QUIET, TURNS_ALOUD, base64_of, chunk, picture_of
from tests.worker.http.small_worker import N_SLOTS

WHOLE = ("current_time", "kv_cache_length", "vision_slices", "vision_tokens", "n_tokens", "n_tts_tokens")
NUMBERS = ("cost_all_ms", "wall_clock_ms", "server_send_ts")
COSTS = ("cost_llm_ms", "cost_tts_prep_ms", "cost_tts_ms", "cost_token2wav_ms")
SECOND = 96_000  # bytes of a second of sound
IDLE_S = 5.0
N_STORMS = 24  # pauses and interrupts share a burst of 50


@contextmanager
def conversation(servers: Servers, name: str, config: dict[str, Any] = QUIET) -> Iterator[WireClient]:
    """A prepared session of the gateway."""
    with servers.open(f"/ws/duplex/{name}") as client:
        client.send(type="prepare", config=config)
        client.until("prepared")
        yield client


def unit(client: WireClient, number: int = 0, **fields: Any) -> dict[str, Any]:
    """Send a chunk. Returns: the next message, checked to be its result."""
    client.send(**chunk(number, **fields))
    result = client.receive()
    assert result["type"] == "result", f"expected a result, got {result}"
    return result


def n_bytes(data: str) -> int:
    return len(data) * 3 // 4 - data[-2:].count("=")


@pytest.fixture(scope="module")
def results(servers: Servers) -> list[dict[str, Any]]:
    """The answers to a burst of chunks, among them turns that end and listening."""
    with conversation(servers, "omni_talk", TURNS_ALOUD) as client:
        for number in range(8):
            client.send(**chunk(number))
        messages = [client.receive() for _ in range(8)]
        client.silence(0.1)
    kinds = {(one["is_listen"], one["end_of_turn"]) for one in messages}
    assert {(True, False), (False, False), (False, True)} <= kinds, f"expected turns and listening, got {kinds}"
    return messages


def test_item_08_one_result_for_each_chunk_in_order(results: list[dict[str, Any]]) -> None:
    assert [one["type"] for one in results] == ["result"] * 8
    assert [one["current_time"] for one in results] == [*range(1, 9)]
    for one in results:
        assert type(one["is_listen"]) is type(one["end_of_turn"]) is bool and type(one["text"]) is str
        assert all(type(one[name]) is int and one[name] >= 0 for name in WHOLE), f"got {one}"
        assert all(type(one[name]) is float and one[name] >= 0 for name in NUMBERS), f"got {one}"
        assert all(one[name] is None or type(one[name]) is float for name in COSTS), f"got {one}"
        assert abs(one["server_send_ts"] - time.time()) < 600, f"expected Unix seconds, got {one['server_send_ts']}"
        assert one["vision_tokens"] == 64 * one["vision_slices"]
    lengths = [one["kv_cache_length"] for one in results]
    assert lengths == sorted(set(lengths)), f"expected a context that grows, got {lengths}"


def test_item_09_sound_of_speech(results: list[dict[str, Any]]) -> None:
    spoken = [one for one in results if not one["is_listen"]]
    for one in spoken:
        size = 0 if one["audio_data"] is None else n_bytes(one["audio_data"])
        assert size % 4 == 0 and (one["end_of_turn"] or size >= SECOND), f"got {size} bytes: {one['text']!r}"
    assert sum(one["audio_data"] is not None for one in spoken) >= 2


def test_item_10_text_of_turns(results: list[dict[str, Any]]) -> None:
    said, was_open = "", False
    for one in results:
        if one["is_listen"]:
            assert (one["text"], one["audio_data"], was_open) == ("", None, False), f"got {one}"
            continue
        assert not said or not one["text"].startswith(said), f"expected new text only, got {one['text']!r}"
        said, was_open = ("" if one["end_of_turn"] else said + one["text"]), not one["end_of_turn"]
    assert any(one["text"] for one in results), "expected some text, got none"


def test_item_11_force_listen_cuts_the_turn(servers: Servers) -> None:
    with conversation(servers, "omni_11", ALOUD) as client:
        spoken = [unit(client, number) for number in range(2)]
        assert not any(one["is_listen"] or one["end_of_turn"] for one in spoken), f"expected an open turn: {spoken}"
        forced = [unit(client, number, force_listen=True) for number in (2, 3)]
        got = [(one["is_listen"], one["end_of_turn"], one["text"], one["audio_data"]) for one in forced]
        assert got == [(True, True, "", None), (True, False, "", None)], f"expected the end of one turn, got {got}"
        new = unit(client, 4)
        assert not new["is_listen"] and new["n_tts_tokens"] > 0, f"expected a new turn, got {new}"


def test_item_12_pause_and_resume(servers: Servers) -> None:
    with conversation(servers, "omni_12") as client:
        for number in range(2):
            client.send(**chunk(number))
        client.send(type="pause")
        messages = client.until("paused")
        assert [one["type"] for one in messages] == ["result", "result", "paused"]
        assert messages[-1]["timeout"] == 60
        client.send(**chunk(2))
        error = client.receive()
        assert error["type"] == "error" and "paused" in error["error"], f"got {error}"
        client.send(type="resume")
        for number in (2, 3):
            client.send(**chunk(number))
        messages = [client.receive() for _ in range(3)]
        assert [one["type"] for one in messages] == ["resumed", "result", "result"]
        assert [one["current_time"] for one in messages[1:]] == [3, 4]


def test_item_13_long_pause_ends_the_session(servers: Servers) -> None:
    with conversation(servers, "omni_13") as client:
        client.send(type="pause", timeout=0.3)
        assert client.receive() == {"type": "paused", "timeout": 0.3}
        timeout = client.receive()
        assert (timeout["type"], timeout["reason"]) == ("timeout", "Pause timeout (0.3s)")
        assert client.close_code() == 1000
        servers.worker.wait_idle(N_SLOTS, IDLE_S)


@pytest.mark.parametrize("leaves", [False, True], ids=["client-waits", "client-closes-at-once"])
def test_item_14_stop_leaves_no_orphan(servers: Servers, leaves: bool) -> None:
    with conversation(servers, "omni_14") as client:
        client.send(**chunk())
        client.send(type="stop")
        if leaves:
            client.connection.socket.close()
        else:
            assert [one["type"] for one in client.until("stopped")] == ["result", "stopped"]
            assert client.close_code() == 1000
    servers.worker.wait_idle(N_SLOTS, IDLE_S)


def test_item_16_slices_of_large_frames(servers: Servers) -> None:
    large = {"frame_base64_list": [base64_of(picture_of(0, 1344, 896))]}
    two = {"frame_base64_list": large["frame_base64_list"] * 2}

    def slices(client: WireClient, *messages: dict[str, Any]) -> list[int]:
        answers = [unit(client, 0, **fields) for fields in messages]
        assert all(one["vision_tokens"] == 64 * one["vision_slices"] for one in answers), f"got {answers}"
        return [one["vision_slices"] for one in answers]

    with conversation(servers, "omni_16") as client:
        got = slices(client, large, {**large, "max_slice_nums": 2}, {**two, "max_slice_nums": [1, 2]})
        assert got == [1, 3, 4], f"expected 1 slice, 3, and 1 + 3, got {got}"
        client.send(type="prepare", config=QUIET, max_slice_nums=2)
        client.until("prepared")
        got = slices(client, large, {**large, "max_slice_nums": 1})
        assert got == [3, 1], f"prepared with 2: expected 3 slices, and 1 for the chunk's own limit, got {got}"


def test_adjust_passes_the_gateway_and_refuses_unknown_fields(servers: Servers) -> None:
    with conversation(servers, "omni_adjusted") as client:
        unit(client)
        client.send(type="adjust", config={"temperature": 0.5}, voice="deep")
        refused = client.receive()
        assert (refused["type"], refused["code"]) == ("error", "bad_message") and "voice" in refused["error"], refused
        client.send(type="adjust", config={"temperature": 0.5}, system_prompt="Be brief.")
        adjusted = client.receive()
        assert adjusted["type"] == "adjusted" and adjusted["from_unit"] == 2, adjusted
        assert unit(client, 1)["current_time"] == 2


def test_storms_of_control_messages_are_answered_in_order(servers: Servers) -> None:
    """As many as the limits allow at once, without waiting for an answer; the session continues."""
    kinds = ("adjust", "pause", "resume", "interrupt")
    answers = ["adjusted", "paused", "resumed", "interrupted"]
    with conversation(servers, "omni_storm") as client:
        for number in range(N_STORMS):
            for kind in kinds:
                client.send(type=kind, **({"config": {"temperature": 0.5 + number / 1000}} if kind == "adjust" else {}))
        got = [client.receive()["type"] for _ in range(N_STORMS * len(kinds))]
        assert got == N_STORMS * answers
        assert unit(client)["current_time"] == 1
