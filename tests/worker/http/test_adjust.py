"""`adjust` over a real socket: what it changes, what it refuses, and its place among other messages."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.worker.http.client_scripts import QUIET, TURNS_QUIET, assert_same_results, chunk
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
