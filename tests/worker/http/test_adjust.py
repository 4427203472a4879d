"""`adjust` over a real socket: what it changes, what it refuses, and its place among other messages."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.worker.http.client_scripts import (
    QUIET,
    TURNS_QUIET,
    assert_same_results,
    base64_of,
    chunk,
    picture_of,
    sound_of,
)
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from worker.protocol.adjust_messages import Adjusted
from worker.protocol.messages import Paused, Result, Resumed

pytestmark = pytest.mark.usefixtures("all_slots_free")


def adjust(client: ScriptedClient, **fields: Any) -> Adjusted:
    client.send({"type": "adjust", **fields})
    answer: Adjusted = client.expect(Adjusted)
    return answer


def test_settings_change_and_the_context_stays(worker: WorkerProcess) -> None:
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        first = client.unit(0)
        answer = adjust(client, config={"force_listen_count": 1000, "window": {"low_tokens": 900}})
        assert answer.from_unit == first.current_time + 1 == 2
        assert answer.applied["config"]["force_listen_count"] == 1000
        assert answer.applied["config"]["window"]["low_tokens"] == 900 and answer.notes == []
        second = client.unit(1)
        assert not first.is_listen and second.is_listen, f"expected the second unit to listen, got {second}"
        assert second.kv_cache_length > first.kv_cache_length, "expected the context to go on"
        assert adjust(client).applied == {}


def test_refused_changes_change_nothing(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """Not even their valid part."""
    refused = [
        ({"config": {"force_listen_count": 1000, "temprature": 1}}, "bad_config", "temperature"),
        ({"config": {"force_listen_count": 1000, "seed": 5}}, "bad_config", "seed: expected 2, as prepared"),
        ({"config": {"force_listen_count": 1000}, "voice": "x"}, "bad_message", "adjust.voice: expected no field but"),
        ({"config": {"force_listen_count": 1000}, "max_slice_nums": 10}, "bad_config", "max_slice_nums: expected"),
    ]
    with ScriptedClient(worker) as client:
        client.send({"type": "adjust", "config": {}})
        assert client.expect_error("not_prepared").error == "Not prepared yet"
        client.prepare(TURNS_QUIET)
        results = []
        for number in range(6):
            if number < len(refused):
                fields, code, text = refused[number]
                client.send({"type": "adjust", **fields})
                error = client.expect_error(code).error
                assert text in error, f"expected {text!r}, got {error!r}"
            results.append(client.unit(number))
    assert_same_results(results, alone(TURNS_QUIET, 6), "after refused changes")


def test_is_answered_in_order_and_while_paused(worker: WorkerProcess) -> None:
    with ScriptedClient(worker) as client:
        client.prepare(QUIET)
        for number in range(2):
            client.send(chunk(number))
        client.send({"type": "pause"})
        client.send({"type": "adjust", "config": {"force_listen_count": 1000}})
        client.send({"type": "resume"})
        client.send(chunk(2))
        kinds: tuple[type, ...] = (Result, Result, Paused, Adjusted, Resumed, Result)
        got = [client.expect(kind) for kind in kinds]
        assert got[3].from_unit == 3, f"expected the change from the third unit on, got {got[3]}"
        assert [one.is_listen for one in got if isinstance(one, Result)] == [False, False, True]


def test_one_conversation_that_changes_everything(worker: WorkerProcess) -> None:
    """Units go on counting, the context keeps its rows, and each change shows in what the model does next."""
    voice, other = base64_of(np.tile(sound_of(2), 2)), base64_of(np.tile(sound_of(5), 3))
    with ScriptedClient(worker) as client:
        client.prepare({**QUIET, "generate_audio": True, "drain_s": 1}, ref_audio_base64=voice)
        results = client.units(range(2))
        rows = results[-1].kv_cache_length
        answer = adjust(client, system_prompt="You are a pirate. Answer in one short sentence.")
        assert answer == Adjusted(applied={"system_prompt": True}, from_unit=3)
        results.append(client.unit(2))
        grown = results[-1].kv_cache_length - rows
        answer = adjust(client, ref_audio_base64=other, config={"tts_temperature": 0.5}, max_slice_nums=2)
        assert answer.applied == {
            "config": {"tts_temperature": 0.5, "max_slice_nums": 2},
            "ref_audio_base64": True,
        }, answer
        results.append(client.unit(3, frame_base64_list=[base64_of(picture_of(0, 1344, 896))]))
        assert results[-1].vision_slices == 3, f"expected two slices and the whole picture, got {results[-1]}"
        assert client.unit(4).kv_cache_length > rows + grown, "expected ten more rows for the longer voice"
        for fields in ({"ref_audio_path": "high.wav"}, {"tts_ref_audio_base64": voice}):
            answer = adjust(client, **fields)
            assert answer.applied == dict.fromkeys(fields, True), answer
        client.send({"type": "pause"})
        client.expect(Paused)
        answer = adjust(client, config={"generate_audio": False})
        client.send({"type": "resume"})
        client.expect(Resumed)
        refused = [
            ({"ref_audio_path": "../../etc/passwd"}, "bad_config"),
            ({"system_prompt": "so " * 9000}, "context_full"),
            ({"ref_audio_base64": "*"}, "bad_base64"),
            ({"ref_audio_base64": base64_of(sound_of(0)[:100])}, "bad_audio"),
            ({"system_prompt": 5}, "bad_message"),
        ]
        for number, (fields, code) in enumerate(refused):
            client.send({"type": "adjust", "config": {"force_listen_count": 1000}, **fields})
            client.expect_error(code)
            results.append(client.unit(5 + number))
        assert [result.current_time for result in results] == [1, 2, 3, 4, *range(6, 11)], results
        assert not any(result.is_listen for result in results), "expected no refused setting in force"
        client.stop()


def test_another_prompt_gives_other_tokens(worker: WorkerProcess, alone: Callable[..., list[Result]]) -> None:
    """From the next unit on; the same prompt again changes nothing but rounding."""
    plain = alone(QUIET, 6)
    texts = {}
    for prompt in ("You are a helpful assistant.", "You speak about the sea, and about nothing else."):
        with ScriptedClient(worker) as client:
            client.prepare(QUIET)
            results = client.units(range(3))
            adjust(client, system_prompt=prompt)
            results += client.units(range(3, 6))
            texts[prompt] = [result.text for result in results]
    same, other = texts.values()
    expected = [result.text for result in plain]
    assert same == expected, f"the same prompt: expected {expected}, got {same}"
    assert other[:3] == expected[:3] and other[3:] != expected[3:], f"another prompt: got {other} and {expected}"
