"""The programs of `examples/`, with the stock clients that they show, against a gateway and a worker."""

import re
import subprocess
from pathlib import Path

import pytest
import soundfile

from tests.conformance.servers import Servers
from tests.e2e.serving import free_port

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "clients" / "bin" / "python"
WEBUI_PYTHON = ROOT / ".venv" / "webui" / "bin" / "python"
INPUT = ROOT / "assets" / "ref_audio" / "default.wav"
LIMIT_S = 1.5
TIMEOUT_S = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no stock clients: `setup_stock_clients` of run_tests.sh"),
]


def run_example(name: str, *arguments: object, python: Path = PYTHON, timeout: float = TIMEOUT_S) -> str:
    """What an example prints."""
    command = [str(python), str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{name}: expected exit status 0, got {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("openai_realtime.py", "http://127.0.0.1:{port}/v1"),
        ("livekit_agent.py", "http://127.0.0.1:{port}/v1"),
        ("pipecat_agent.py", "ws://127.0.0.1:{port}/v1/realtime"),
    ],
)
def test_realtime_clients_get_a_spoken_answer(servers: Servers, name: str, address: str, tmp_path: Path) -> None:
    file, url = tmp_path / "reply.wav", address.format(port=servers.gateway)
    printed = run_example(name, INPUT, "--ask", "--limit", LIMIT_S, "--save", file, "--base-url", url)
    sound, rate = soundfile.read(file)
    assert rate == 24_000 and 0.1 < len(sound) / rate < LIMIT_S + 2, f"{len(sound) / rate} s"
    assert abs(sound).max() > 0.01, "expected sound, got silence"
    assert len(printed.splitlines()) >= 2, f"expected a transcript, got {printed!r}"


def test_http_clients_get_speech_and_text(servers: Servers, tmp_path: Path) -> None:
    file = tmp_path / "speech.mp3"
    url = f"http://127.0.0.1:{servers.gateway}/v1"
    printed = run_example("openai_http.py", "Good morning.", "--save", file, "--base-url", url)
    sound, rate = soundfile.read(file)
    assert rate == 24_000 and abs(sound).max() > 0.01
    assert re.search(r"^answer: +\S", printed, re.MULTILINE), f"expected an answer, got {printed!r}"


def test_full_duplex_client_hears_a_given_text(servers: Servers, tmp_path: Path) -> None:
    file, url = tmp_path / "reply.wav", f"http://127.0.0.1:{servers.gateway}/v1"
    run_example(
        "openai_live.py", INPUT, "--say", "Good morning.", "--limit", 2 * LIMIT_S, "--save", file, "--base-url", url
    )
    sound, rate = soundfile.read(file)
    least = soundfile.info(INPUT).duration + LIMIT_S
    assert rate == 24_000 and len(sound) / rate > least, f"expected over {least:.1f} s, got {len(sound) / rate}"
    assert abs(sound).max() > 0.01, "expected speech, got silence"


def test_phone_call_through_an_agent_session_is_answered(servers: Servers, tmp_path: Path) -> None:
    file, url = tmp_path / "reply.wav", f"http://127.0.0.1:{servers.gateway}/v1"
    run_example("livekit_phone.py", "call", INPUT, "--ask", "--limit", LIMIT_S, "--save", file, "--base-url", url)
    sound, rate = soundfile.read(file)
    assert rate == 8_000 and len(sound) / rate > 0.1, f"expected speech, got {len(sound) / rate} s"
    assert abs(sound).max() > 0.01, "expected speech, got silence"


@pytest.mark.skipif(not WEBUI_PYTHON.exists(), reason="no Open WebUI, which takes 7 GB: docs/recipes.md")
@pytest.mark.timeout(420)
def test_open_webui_shows_an_answer_and_speaks(servers: Servers, tmp_path: Path) -> None:
    printed = run_example(
        "open_webui.py",
        *("--check", "--port", free_port(), "--data", tmp_path),
        *("--base-url", f"http://127.0.0.1:{servers.gateway}/v1"),
        python=WEBUI_PYTHON,
        timeout=400,
    )
    assert re.search(r"^tiny: .", printed, re.MULTILINE), f"expected an answer of the model, got {printed[-500:]!r}"
    assert re.search(r"^\d{4,} bytes of audio/mpeg$", printed, re.MULTILINE), f"expected sound, got {printed[-500:]!r}"
