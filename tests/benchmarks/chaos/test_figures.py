"""The chaos benchmark without its processes: comparisons, tables, the proxy and the command line."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos.clients import ChaosClient, FaultSign, Fingerprint, LiveGroup, Unit
from benchmarks.chaos.figures import FaultRow, SessionFigures, Undisturbed, cells, session_figures
from benchmarks.chaos.network import FaultyProxy
from benchmarks.chaos.run import _summary
from benchmarks.serve.fake_worker import FakeWorker
from tests.server.live_gateway import running_gateway, wait_until


def unit(number: int, text: str, took_s: float | None = 0.25, sound_s: float = 1.0, n_begun: int = 0) -> Unit:
    """A unit sent at its number of seconds. took_s: None: it got no result."""
    answered_at = None if took_s is None else number + took_s
    fingerprint = None if took_s is None else Fingerprint(False, text, 1, 10 * number)
    error = "" if fingerprint else "worker_lost"
    return Unit(number, float(number), n_begun, answered_at, fingerprint, sound_s if fingerprint else 0.0, error)


def figures(*units: Unit, at: float = 2.0) -> SessionFigures:
    """Of a session with these units, whose undisturbed run says `a`, `bb`, `ccc` and `dddd`."""
    undisturbed = Undisturbed(tuple(unit(number, letter * (number + 1)) for number, letter in enumerate("abcd")))
    client = ChaosClient("ws://x", "adx", 0, units=list(units), n_begun=max(one.n_begun for one in units))
    return session_figures(client, undisturbed, at)


def test_a_session_is_compared_with_its_undisturbed_run() -> None:
    whole = figures(unit(0, "a"), unit(1, "bb"), unit(2, "ccc", 1.5, sound_s=0.25), unit(3, "dddd"))
    assert (whole.n_same_before, whole.n_before, whole.n_same_after, whole.n_after) == (2, 2, 2, 2), whole
    assert (whole.recovery, whole.silence, whole.late, whole.difference) == (1.25, 2.0, 1, ""), whole
    assert (whole.lost_units, whole.lost_text, whole.lost_sound) == (0, 0, 0.75), whole
    ends = replace(unit(1, "bb"), end_of_turn=True)
    sooner = figures(unit(0, "a"), ends, unit(2, "ccc", sound_s=0.25), unit(3, "dddd"))
    assert (sooner.lost_sound, sooner.shorter_sound, sooner.n_same_after) == (0, 0.75, 2), sooner
    lost = figures(unit(0, "a"), unit(1, "x"), unit(2, "ccc", None), unit(3, "e"), unit(4, "f", n_begun=1))
    assert (lost.lost_units, lost.lost_text, lost.lost_sound, lost.begun_again) == (1, 3, 1.0, 1), lost
    assert (lost.n_same_before, lost.n_before, lost.n_same_after, lost.n_after) == (1, 2, 0, 1), lost
    assert "unit 1: expected" in lost.difference and "text='x'" in lost.difference, lost.difference
    waits = figures(unit(0, "a"), unit(1, "bb"), Unit(2, 2.0))
    assert (waits.recovery, waits.lost_units, waits.late) == (None, 0, 1), waits


def test_rows_name_who_noticed_and_what_is_lost() -> None:
    ends = figures(unit(0, "a"), unit(1, "bb"), unit(2, "ccc", None))
    goes_on = figures(unit(0, "a"), unit(1, "bb"), unit(2, "ccc", 1.5))
    notices = [FaultSign(2.5, "launcher", "b"), FaultSign(2.25, "gateway", "a"), FaultSign(1.5, "worker", "c")]
    row = FaultRow("kill", "kill -9", notices, [goes_on, ends], [goes_on], at=2.0, back_s=4.0)
    expected = [
        *("kill -9", "gateway 0.25 s, launcher 0.50 s", "1.50 s; 1 without; 1 of 6 units late; process 4.0 s", "1.0 s"),
        *("3 characters, 1 units without a result", "3 of 3 units the same, 1 late"),
    ]
    assert cells(row) == expected, f"expected {expected}, got {cells(row)}"
    row.folder_at = 1.0
    assert cells(row)[1] == "folder: worker 0.50 s; kill: gateway 0.25 s, launcher 0.50 s", cells(row)[1]
    assert cells(FaultRow("x", "y", reason="no right to mount"))[1] == "left out: no right to mount"


def test_tables_replace_those_of_the_page(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "reliability.md"
    shutil.copy(root / "docs/reliability.md", page)
    session = {
        "is_same_before": True,
        "is_same_after": False,
        "lost_units": 1,
        "lost_sound_s": 0.5,
        "shorter_sound_s": 0.25,
    }
    kills = [{"at": 0.0, "back_s": 5.0, "sessions": {"a": {"next_result_s": seconds, **session}}} for seconds in (1, 3)]
    environment = {"date": "2026-01-02T00:00:00", "cpu": "two cores", "load_average": 0.5, "python": "3", "torch": "2"}
    result = {"command": ["python"], "condition": "Quiet.", "environment": environment, "kill": _summary(kills)}
    for word in ("first", "second"):
        chaos.write_markdown(page, {**result, "table": [[word, *"bcdef"]]})
    text = page.read_text()
    assert text.count("| second | b | c | d | e | f |") == 1 and "| first |" not in text, text
    assert "| kills after which all sessions went on | 2 of 2 |" in text
    assert "| time to the next result, p50 / p95 / maximum | 2.00 / 2.90 / 3.00 s |" in text, text
    assert text.count("`python`, 2026-01-02, two cores, load average 0.5 before the run") == 2
    page.write_text("nothing")
    with pytest.raises(ValueError, match="expected the lines"):
        chaos.write_markdown(page, {**result, "table": [["a"]]})


def test_unknown_faults_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chaos.parse(["--faults", "kill,fire"])
    assert "got fire" in capsys.readouterr().err


def n_replaced(client: ChaosClient) -> int:
    return sum(one.text == "connection replaced" for one in client.notices)


def test_a_session_goes_on_through_a_connection_that_swallows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy delays, loses and swallows; the client gets each result once, in order."""
    monkeypatch.setattr("clients.connection.PING_S", 0.1)
    monkeypatch.setattr("clients.connection.PONG_S", 1.5)

    async def scenario() -> None:
        async with (
            FakeWorker(slots=2) as worker,
            running_gateway(worker) as gateway,
            FaultyProxy(gateway.port) as proxy,
        ):
            proxy.delay_s, proxy.loss = 0.01, 0.1
            async with LiveGroup([f"ws://127.0.0.1:{proxy.port}"], "proxied", 0.05) as group:
                [client] = group.clients
                await wait_until(lambda: sum(one.fingerprint is not None for one in client.units) > 2, "results", 30)
                proxy.delay_s, proxy.loss = 0.0, 0.0
                n_before = n_replaced(client)
                proxy.blackhole()
                await wait_until(lambda: n_replaced(client) > n_before, "another connection", 60)
                n_sent = len(client.units)
                await wait_until(
                    lambda: client.units[n_sent].fingerprint if len(client.units) > n_sent else None, "results", 60
                )
            assert not client.n_begun and all(one.fingerprint for one in client.units), client.units

    asyncio.run(scenario())
