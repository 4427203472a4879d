"""Deaths under live sessions, without processes: figures, rows, options and settings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos.clients import ChaosClient, FaultSign, Fingerprint, Unit
from benchmarks.chaos.figures import Undisturbed
from benchmarks.deaths.__main__ import parse
from benchmarks.deaths.outcome import HEAD, agreement, cells, hit_by, lines, outcome_of
from benchmarks.deaths.programs import ProgramLayout, Programs
from worker.config.service import load_config

AT = 2.5


def unit(number: int, took_s: float | None = 0.25, text: str = "a") -> Unit:
    """A unit sent at its number of seconds, with a second of sound. took_s: None: it got no result."""
    if took_s is None:
        return Unit(number, float(number), error="worker_lost")
    return Unit(number, float(number), 0, number + took_s, Fingerprint(False, text, 1, 10 * number), 1.0)


def client(name: str, *units: Unit, notices: tuple[FaultSign, ...] = ()) -> ChaosClient:
    return ChaosClient("ws://x", name, 0, units=list(units), notices=list(notices))


def expected() -> list[Undisturbed]:
    return [Undisturbed(tuple(unit(number) for number in range(4)))] * 3


def three_clients() -> list[ChaosClient]:
    """One that moves, one that loses a unit, and a neighbour."""
    signs = (FaultSign(2.75, "client", "session_moving"), FaultSign(3.0, "client", "session_moved"))
    early = FaultSign(1.0, "client", "error busy")
    return [
        client("moves", unit(0), unit(1, 1.25), unit(2, 1.5), unit(3, 1.0), notices=signs),
        client("loses", unit(0), unit(1), unit(2, None), unit(3, text="b"), notices=signs[:1]),
        client("neighbour", unit(0), unit(1), unit(2), unit(3, 1.5), notices=(early,)),
    ]


def test_sessions_of_the_process_that_died_are_told_from_neighbours() -> None:
    clients = three_clients()
    assert hit_by(clients, AT) == {0, 1}
    outcome = outcome_of("kill -9", 2, AT, clients, expected(), {0, 1})
    outcome.notices.append(FaultSign(2.625, "gateway_0", "worker_0 is lost"))
    figures = outcome.figures()
    assert (figures["sessions"], figures["hit"], figures["recovered"], figures["moved"]) == (3, 2, 2, 1), figures
    assert figures["noticed_s"] == {"gateway_0": 0.125, "client": 0.25}, figures
    assert figures["next_result_s"]["max"] == 1.0, figures
    assert (figures["lost_units"], figures["lost_text"], figures["lost_sound_s"]["max"]) == (1, 1, 1.0), figures
    assert (figures["late_before"], figures["late_hit"], figures["late_neighbours"]) == (1, 2, 1), figures
    assert figures["hit_same"] == {
        **{"sessions": 2, "same_before": 2, "same_after": 1},
        **{"units": 7, "same_units": 6},
    }, figures
    assert json.loads(json.dumps(outcome.to_json()))["notices"][0] == [0.125, "gateway_0", "worker_0 is lost"]


def test_a_row_has_a_cell_for_each_column() -> None:
    outcome = outcome_of("kill -9", 2, AT, three_clients(), expected(), {0, 1})
    row = dict(zip(HEAD, cells(outcome.figures()), strict=True))
    assert row["sessions"] == "3 at 2 gateways; 2 hit, 1 moved", row
    assert row["lost text"] == "1 characters, 1 units without a result", row
    assert row["neighbours"] == "4 of 4 units the same, 1 late", row
    assert row["worker back"] == "-", row
    assert len(lines(outcome.figures()).splitlines()) == len(HEAD)
    outcome = replace(outcome, hit=[], notices=[], back=4.0)
    row = dict(zip(HEAD, cells(outcome.figures()), strict=True))
    assert (row["noticed by, after"], row["worker back"]) == ("none", "4.0 s"), row


def test_undisturbed_runs_are_compared_as_far_as_both_go() -> None:
    longer, other = expected()[:2], [Undisturbed((unit(0), unit(1, text="b"), unit(2, None)))]
    assert agreement(longer, other) == {"units": 2, "same_units": 1}


def test_one_worker_has_room_for_all_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--gpus", "0,1", "--sessions", "16,32", "--slots", "32"])
    assert (options.gpus, options.sessions, options.parts) == ((0, 1), (16, 32), ("worker", "cluster", "gateway"))
    for arguments, word in (
        (["--slots", "8"], "expected 32 or more"),
        (["--gpus", "0"], "two GPUs or more"),
        (["--parts", "worker,fire"], "got fire"),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert word in capsys.readouterr().err, arguments


def test_settings_load_and_each_worker_has_its_gpu(tmp_path: Path) -> None:
    layout = ProgramLayout((1, 3), tmp_path, 32, 1536, tmp_path / "cache", tmp_path / "logs", 10.0)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(layout.settings()))
    config, notes = load_config(file, flags={}, environ={})
    assert not notes and config.duplex.context_rows == 1536 and config.service.limits.sessions == 1000, config
    window = config.duplex.session.window
    assert window.low_tokens < window.high_tokens <= 1536 - 100, window
    programs = Programs(layout)
    assert programs.workers == ["worker_0", "worker_1"] and len(set(programs.ports.values())) == 6, programs.ports
    assert programs._worker_command("worker_1")[-2:] == ("--gpu-id", "3")
