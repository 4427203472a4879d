"""A conversation in real time with browser, gateway, worker and the embedded model.

Checks the page's guarantees on two slow cores that also run the model: no gap in a turn, silence at once after an
interrupt.
"""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.e2e.browser import OpenPage
from tests.e2e.serving import gateway
from tests.worker.http.client_scripts import TURNS_ALOUD
from tests.worker.http.processes import running

pytestmark = pytest.mark.alone
SECONDS, MAX_GAP_MS, MAX_FLUSH_MS = 15, 20, 150


def test_conversation_has_no_gap_and_interrupt_is_immediate(browser: Browser, tmp_path: Path) -> None:
    worker_folder = tmp_path / "worker"
    worker_folder.mkdir()
    with (
        running(worker_folder, until=None) as worker,
        gateway(tmp_path, [worker.wait_listening().port]) as server,
    ):
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
