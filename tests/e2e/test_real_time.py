"""Conversations in real time with gateway, worker and the embedded model, on two slow cores: of a client whose units
must all keep their deadlines, and of the page, which promises no gap in a turn and silence at once after an interrupt.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.e2e.browser import OpenPage
from tests.e2e.serving import ServerProcess, gateway
from tests.worker.http.client_scripts import TURNS_ALOUD, VIDEO, assert_audible
from tests.worker.http.processes import running

pytestmark = pytest.mark.alone
TALK_S, SECONDS, MAX_GAP_MS, MAX_FLUSH_MS = 120.0, 13, 20, 150


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A gateway with a worker."""
    folder = tmp_path_factory.mktemp("gateway")
    with (
        running(tmp_path_factory.mktemp("worker"), "--max-sessions", "4", until=None) as worker,
        gateway(folder, [worker.wait_listening().port]) as program,
    ):
        yield program


@contextmanager
def talking(server: ServerProcess, root: Path, out: Path) -> Iterator[None]:
    """A client that talks beside the block, and whose units must all keep their deadlines."""
    command = [sys.executable, "-m", "clients.talk", "--url", f"ws://127.0.0.1:{server.port}", "--input", str(VIDEO)]
    begun = time.monotonic()
    with subprocess.Popen(
        [*command, "--out", str(out), "--tail", "0"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as client:
        try:
            yield
            printed, _ = client.communicate(timeout=TALK_S)
        finally:
            client.kill()
    seconds = time.monotonic() - begun
    assert client.returncode == 0, f"expected exit status 0, got {client.returncode}:\n{printed}"
    talk = json.loads(out.with_suffix(".json").read_text())
    numbers = [unit["index"] for unit in talk["units"]]
    assert numbers == list(range(12)), f"expected one result for each of 12 units in order, got {numbers}"
    assert talk["summary"]["deadline_misses"] == 0, f"expected no late unit, got {talk['summary']}"
    assert seconds > 11, f"expected 12 units to take 11 s at least, got {seconds:.1f} s"
    assert_audible(out)


def test_page_has_no_gap_and_interrupts_at_once_beside_a_client(
    server: ServerProcess, browser: Browser, root: Path, tmp_path: Path
) -> None:
    with talking(server, root, tmp_path / "reply.wav"):
        page_talks(server, browser, tmp_path)


def page_talks(server: ServerProcess, browser: Browser, tmp_path: Path) -> None:
    """A conversation of the page without a gap in a turn, in which an interrupt silences it at once."""
    context = browser.new_context(viewport={"width": 1000, "height": 640})
    page = OpenPage(context, server.port, config=TURNS_ALOUD)
    page.start()
    page.wait_units(SECONDS - 3, timeout=120)
    assert "random weights" in page.text("#random"), "expected a warning that the checkpoint is a test model"
    page.page.screenshot(path=tmp_path / "page.png")
    page.wait_state("speaking")
    page.page.keyboard.press("Space")
    page.wait(lambda: page.report["flushes"], "a flush")
    report = page.wait_units(SECONDS, timeout=60)
    page.page.fill("#type-text", "What do you see?")
    page.page.press("#type-text", "Enter")
    page.wait(lambda: any(header.get("force_speak") for header, _, _ in page.sent_units()), "a unit that answers")
    page.page.click("#stop")
    page.wait_state("ended")

    replies = sorted(result["reply_ms"] for result in report["results"])
    [flush] = report["flushes"]
    gaps = [gap["ms"] for gap in report["gaps"]]
    print(
        f"{len(replies)} units, reply median {replies[len(replies) // 2]:.0f} ms, worst {replies[-1]:.0f} ms; "
        f"{len(report['turns'])} turns, {report['sound_seconds']:.1f} s of sound, played after "
        f"{[round(turn['heard_ms'] or 0) for turn in report['turns']]} ms; gaps {gaps} ms, stretched by "
        f"{report['stretched_ms']:.0f} ms; silent {flush['ms']:.0f} ms after the interrupt; "
        f"screenshot {(tmp_path / 'page.png').stat().st_size} bytes"
    )
    assert report["sound_seconds"] >= 5, f"expected at least 5 s of sound, got {report['sound_seconds']:.1f}"
    assert all(result["vision_slices"] == 1 for result in report["results"][1:]), "expected a picture with each second"
    assert any(turn["text"] for turn in report["turns"]), f"expected text, got {report['turns']}"
    assert max(gaps, default=0) <= MAX_GAP_MS, f"expected no gap over {MAX_GAP_MS} ms, got {report['gaps']}"
    assert flush["ms"] <= MAX_FLUSH_MS, f"expected silence within {MAX_FLUSH_MS} ms, got {flush}"
    assert flush["lost_samples"] > 0, f"expected some sound to be cut off, got {flush}"
    assert page.text("#turns").strip(), "expected captions"
    assert not page.errors and not report["errors"], (page.errors, report["errors"])
