"""The turns benchmark against a worker without a model: clients in real time, rows, result file."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.turns import __main__ as turns
from benchmarks.turns.clients import AnsweredTurn, TurnLoad, _User, load_of
from benchmarks.turns.questions import Conditions
from tests.clients.servers import FakeWorkerThread, fake_worker
from worker.protocol.messages import Error, Partial, Result
from worker.protocol.wire import Sound


@pytest.fixture(scope="module")
def server() -> Iterator[FakeWorkerThread]:
    """Speaks in one unit, whenever the sound allows it, and listens in the next."""
    with fake_worker(slots=2, n_listen=1, n_speak=1) as one:
        yield one


def test_run_writes_its_rows(
    server: FakeWorkerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's answers do not depend on the questions; which of them are answered depends on the clock."""
    monkeypatch.setattr(turns, "MIN_QUESTIONS", 1)
    file = tmp_path / "turns.json"
    sizes = ["--questions", "1", "--answer-s", "0.3", "--lead-s", "0.2", "--piece-ms", "250", "--modes", "auto"]
    turns.main(["--url", server.url, *sizes, "--json", str(file)])
    result: dict[str, Any] = json.loads(file.read_text())
    assert result.keys() >= {"turn_p50_ms", "turn_p95_ms", "false_starts"} and result["decisions"] == "model"
    [row] = result["rows"]
    assert (row["sessions"], row["early_unit"], row["questions"]) == (1, "auto", 1) and not row["errors"], row
    assert row["units"] >= 1 and row["answered"] in (0, 1) and row["false_starts"] in (0, 1), row
    assert result["false_starts"] == row["false_starts"] and len(capsys.readouterr().out.splitlines()) == 2


def test_load_travels_as_json() -> None:
    load = TurnLoad("ws://x", 1, 2, Conditions(pauses_ms=(1, 2)), {"early_unit": "auto"}, "omni_")
    assert load_of(json.loads(json.dumps(turns.asdict(load)))) == load
    assert AnsweredTurn(1, None, True, 2.0, None, None).sound_at is None


@pytest.mark.parametrize("given", [["--piece-ms", "300"], ["--modes", "on"], ["--decisions", "oracle"]])
def test_bad_options_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        turns.parse(given)
    assert given[0] in capsys.readouterr().err


def test_rows_without_time_are_named(tmp_path: Path) -> None:
    """No server is needed where nothing runs."""
    file = tmp_path / "turns.json"
    turns.main(["--url", "ws://nowhere", "--sessions", "1,8", "--budget-s", "1", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["rows"] == [] and result["turn_p50_ms"] is None
    assert result["left_out"] == [f"{n} sessions, early_unit {mode}" for n in (1, 8) for mode in ("auto", "off")]


def test_playback_is_that_of_each_turn() -> None:
    """Two turns; a unit that fails between them leaves the first one's figure as it is."""

    def sound(seconds: float) -> Sound:
        return Sound.of(np.zeros(round(24_000 * seconds), np.float32))

    def result(**given: Any) -> Result:
        held = {"is_listen": False, "current_time": 1, "cost_all_ms": 1.0, "server_send_ts": 0.0}
        return Result(**{**held, "wall_clock_ms": 1.0, "kv_cache_length": 1, **given})

    def part(seconds: float) -> Partial:
        return Partial(current_time=1, part=1, audio_data=sound(seconds))

    turn = [part(0.1), result(), part(0.1), result(end_of_turn=True)]
    failed = [part(0.5), Error(error="x")]
    messages = [*turn, *failed, result(is_listen=True), part(5.0), result(end_of_turn=True)]

    async def received() -> AsyncIterator[Any]:
        for message in messages:
            await asyncio.sleep(0.02)
            yield message

    async def ran() -> list[AnsweredTurn]:
        load = TurnLoad("ws://x", 1, 1, Conditions(pauses_ms=(1, 2)), {}, "omni_")
        user = _User(load, 0, asyncio.Barrier(1))
        user._begin = asyncio.get_running_loop().time()
        user._sent.extend((n, 0.0) for n in range(10))
        client: Any = received()
        await user._receive(client)
        return user._run.turns

    with mock.patch("benchmarks.turns.clients.needed_delay", lambda pieces: sum(length for _, length in pieces)):
        first, second = asyncio.run(ran())
    assert (first.playback, second.playback) == pytest.approx((200, 5000))
