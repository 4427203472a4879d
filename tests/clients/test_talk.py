"""`python -m clients.talk` against a worker without a model, directly and through a gateway."""

import asyncio
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from clients import talk
from clients.duplex import connect
from clients.talk_options import parser
from tests.clients.servers import FakeWorkerThread, fake_worker, gateway
from tests.clients.test_sound_card import Stream
from worker.config.service import ROOT
from worker.protocol.messages import Prepare

WAIT_S = 60.0
VIDEO = ROOT / "assets" / "warmup.mp4"
PAGE = ROOT / "docs" / "client.md"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeWorkerThread]:
    with fake_worker(slots=3, n_listen=1, n_speak=3) as one:
        yield one


@pytest.fixture(scope="module")
def gateway_url(server: FakeWorkerThread) -> Iterator[str]:
    with gateway(server.worker.port) as url:
        yield url


def outputs(folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The transcript and the sound."""
    wave, rate = soundfile.read(folder / "reply.wav", dtype="float32")
    assert rate == 24_000
    return json.loads((folder / "reply.json").read_text()), wave


@pytest.mark.parametrize("form", [(), ("--base64", "--no-partial", "--no-video")])
def test_fast(
    server: FakeWorkerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: tuple[str, ...]
) -> None:
    settings = ["--set", "temperature=0.5", "--set", "window.max_units=12", "--set", "unknown=1", "--force-listen", "1"]
    arguments = [
        "--url",
        server.url,
        "--input",
        str(VIDEO),
        "--fast",
        "--units",
        "7",
        "--out",
        str(tmp_path / "reply.wav"),
    ]
    status = talk.main(
        [*arguments, *settings, *form, "--voice", str(ROOT / "assets/ref_audio/default.wav"), "--prompt", "Hi."]
    )
    out, err = capsys.readouterr()
    assert status == 0, err
    rows = [line for line in out.splitlines() if re.match(r" +\d+ +(LISTEN|SPEAK) ", line)]
    assert [line.split()[1] for line in rows] == 2 * ["LISTEN", "SPEAK", "SPEAK", "SPEAK"]
    assert len({line.index("|") for line in out.splitlines() if "|" in line}) == 1, f"expected columns, got:\n{out}"
    assert "(end of turn)" in rows[3] and "8 units, 6 spoken in 2 turns, 6.0 s of sound, 0 failed" in out
    assert "setting unknown does not exist" in err, f"expected the server's note, got {err}"
    assert f"sound is sent as {'base64' if form else 'pcm16'}" in err
    transcript, wave = outputs(tmp_path)
    assert transcript["config"] == {
        "temperature": 0.5,
        "window": {"max_units": 12},
        "unknown": 1,
        "force_listen_count": 1,
    }
    assert transcript["session_id"].startswith("adx_" if form else "omni_")
    assert [turn["text"] for turn in transcript["turns"]] == [
        "second 2. second 3. second 4. ",
        "second 6. second 7. second 8. ",
    ]
    for start in (1, 5):
        unit = transcript["units"][start]
        expected = round(24_000 * (start + 1 + unit["first_sound_ms"] / 1000 + 0.2))
        assert abs(unit["sound_start"] - expected) < 24, f"expected sound at {expected}, got {unit['sound_start']}"
        begin = unit["sound_start"]
        assert not wave[begin - 4_000 : begin].any(), "expected silence in front of a turn"
        turn = wave[begin : begin + 3 * 24_000]
        assert np.all(np.abs(turn).reshape(-1, 240).max(1) > 0.1), "expected a turn without gaps"


def test_early_units_in_pieces(server: FakeWorkerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second of silence, 300 ms of speech, silence: the worker answers at the pause, 200 ms after the speech."""
    sound = np.zeros(48_000, np.float32)
    sound[16_000:20_800] = 0.1 * np.random.default_rng(0).standard_normal(4_800)
    soundfile.write(tmp_path / "asked.wav", sound, 16_000)
    files = ["--input", str(tmp_path / "asked.wav"), "--out", str(tmp_path / "reply.wav")]
    status = talk.main(["--url", server.url, *files, "--fast", "--set", "early_unit=auto", "--tail", "2"])
    out, err = capsys.readouterr()
    assert status == 0, err
    transcript, _ = outputs(tmp_path)
    units = transcript["units"]
    assert [(one["decision"], one["heard_s"]) for one in units[:3]] == [("LISTEN", 1), ("SPEAK", 1.5), ("SPEAK", 2.5)]
    assert [one.get("shift_ms") for one in units] == [None, 500, None, None], "expected four units in all"
    assert units[1]["early"] and units[1]["wait"]["alignment"] == pytest.approx(200, abs=11)
    assert transcript["summary"]["early"] == 1 and "end of speech to sound" in out


def test_paced_through_gateway(gateway_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "reply.wav"
    begun = time.monotonic()
    status = talk.main(["--url", gateway_url, "--input", str(VIDEO), "--units", "3", "--tail", "0", "--out", str(out)])
    seconds = time.monotonic() - begun
    assert status == 0, capsys.readouterr().err
    assert seconds > 2, f"expected a unit every second, got 3 in {seconds:.2f} s"
    transcript, wave = outputs(tmp_path)
    times = [unit["heard_s"] for unit in transcript["units"]]
    assert all(at >= number + 1 for number, at in enumerate(times)), f"expected a unit every second, got {times}"
    assert transcript["summary"]["spoken"] == 2 and len(wave) >= 3 * 24_000


def test_interrupt_writes_outputs(server: FakeWorkerThread, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clients.talk", "--url", server.url, "--input", str(VIDEO), "--loop"]
    command += ["--out", str(tmp_path / "reply.wav"), "--session-id", "interrupted"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(WAIT_S, process.kill)
        timer.start()
        for line in process.stdout:
            if "LISTEN" in line:
                break
        assert "interrupted" in server.call(lambda: server.worker.sessions)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        timer.cancel()
    assert process.returncode == 0, f"expected status 0, got {process.returncode}: {err}"
    assert "turns" in out and "interrupted" not in server.call(lambda: server.worker.sessions)
    transcript, wave = outputs(tmp_path)
    assert transcript["summary"]["answered"] == transcript["summary"]["units"] and len(wave) >= 24_000


def test_lost_connection_writes_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_worker(n_listen=0) as server:
        units = iter(range(3))

        def count(ms: float) -> None:
            if next(units, None) is None:
                server.worker.crash()

        server.worker.count = count
        status = talk.main(["--url", server.url, "--input", str(VIDEO), "--fast", "--out", str(tmp_path / "reply.wav")])
        err = capsys.readouterr().err
        assert status == 1 and "expected a conversation that goes on, got the end of the connection" in err
        transcript, wave = outputs(tmp_path)
        assert transcript["summary"]["answered"] == 3 and transcript["summary"]["units"] == 4
        assert np.count_nonzero(wave) > 2.5 * 24_000


def test_microphone_as_input(
    server: FakeWorkerThread, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = []

    class Talking(Stream):
        def __enter__(self) -> Stream:
            for _ in range(25):
                self.turn(np.zeros((1_600, 1), np.float32))
            return super().__enter__()

    class Playing(Stream):
        def __exit__(self, *_: object) -> None:
            played.append(self.turn(np.zeros((30_000, 1), np.float32)))

    module = SimpleNamespace(InputStream=Talking, OutputStream=Playing, PortAudioError=OSError)
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    assert talk.main(["--url", server.url, "--mic", "--units", "2"]) == 0, capsys.readouterr().err
    assert np.abs(played[0]).max() > 0.1, "expected the reply on the speakers"


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["--input", "no.mp4"], 2, "error: no.mp4: expected a media file, got no such file"),
        (["--input", str(VIDEO), "--set", "x"], 2, "error: --set: expected KEY=VALUE, got 'x'"),
        (["--input", str(VIDEO), "--out", "/nowhere/x.wav"], 2, "error: /nowhere/x.wav: expected a writable file path"),
        (["--input", str(VIDEO), "--out", str(VIDEO)], 2, "expected a file of its own"),
        (["--mic", "--loop"], 2, "error: --loop: expected --input FILE, got --mic"),
        (["--input", str(VIDEO), "--url", "ftp://x"], 2, "error: url: expected ws://host:port"),
        (["--input", str(VIDEO), "--set", "temperature=99"], 1, "prepare: expected an answer, got error bad_config"),
    ],
)
def test_refuses_invalid_arguments(
    server: FakeWorkerThread, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, error: str
) -> None:
    got = talk.main(["--url", server.url, *arguments])
    err = capsys.readouterr().err
    assert got == status and error in err, f"expected {status} and {error!r}, got {got} and {err!r}"


def test_reports_refused_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with fake_worker() as server:
        server.call(lambda: setattr(server.worker, "state", "LOADING"))
        arguments = ["--url", server.url, "--input", str(VIDEO), "--out", str(tmp_path / "reply.wav")]
        assert talk.main(arguments) == 1
    err = capsys.readouterr().err
    assert "expected a WebSocket handshake, got HTTP 403" in err, err
    assert not list(tmp_path.iterdir()), "expected no files of a refused conversation"


def test_waits_in_queue(server: FakeWorkerThread, gateway_url: str) -> None:
    """Two clients wait for a slot: one gives up, the other is served when a slot becomes free."""
    command = [
        sys.executable,
        "-m",
        "clients.talk",
        "--url",
        gateway_url,
        "--input",
        str(VIDEO),
        "--fast",
        "--units",
        "1",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    async def story() -> None:
        async with AsyncExitStack() as stack:
            for _ in range(server.worker.slots):
                await stack.enter_async_context(connect(gateway_url))
            waits = [subprocess.Popen([*command, "--tail", "0"], cwd=ROOT, **pipes) for _ in range(2)]
            timer = threading.Timer(WAIT_S, lambda: [one.kill() for one in waits])
            timer.start()
            for one in waits:
                line = await asyncio.to_thread(one.stderr.readline)
                assert re.match(r"waiting: place [12] of [12], about \d+ s$", line), f"expected its place, got {line!r}"
            waits[0].send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(waits[0].communicate)
            assert (waits[0].returncode, out) == (0, "") and "interrupted before the first unit" in err, err
        out, err = await asyncio.to_thread(waits[1].communicate)
        timer.cancel()
        assert waits[1].returncode == 0 and "1 units" in out, f"expected a unit, got {out} {err}"

    asyncio.run(story())


# --- docs/client.md----------------------------------------------------------------------------------


def test_documented_commands_parse() -> None:
    page = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"^python -m clients\.talk (.*)$", page, re.MULTILINE)
    assert commands, "expected a command on the page"
    for command in commands:
        parser().parse_args(shlex.split(command))
    named = set(re.findall(r"--[a-z][a-z0-9-]+", page)) - {"--think-ms"}
    held = {name for action in parser()._actions for name in action.option_strings if name.startswith("--")}
    missing = held - named - {"--help", "--partial"}
    assert named <= held and not missing, f"expected the command's options, got {named - held} wrong, {missing} missing"


def test_documented_client_runs(gateway_url: str, tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    program = tmp_path / "client.py"
    hurried = code.replace("ws://localhost:8006", gateway_url).replace("begin + second + 1", "begin + second / 20")
    assert gateway_url in hurried and "second / 20" in hurried
    program.write_text(hurried, encoding="utf-8")
    run = [sys.executable, str(program)]
    done = subprocess.run(run, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("LISTEN") == 2 and sum("SPEAK" in line for line in lines) == 3, done.stdout
    assert lines.count("0.50 s of sound") == 6, done.stdout


# --- defaults -----------------------------------------------------------------------------------


def test_default_prompt_equals_the_protocol_default() -> None:
    assert Prepare().system_prompt == parser().get_default("prompt")
