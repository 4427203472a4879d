"""A conversation as a person has it: browser, gateway, worker and the embedded model, in real time.

What the page promises holds here on two slow cores that compute the model as well: no hole in a turn, silence at once.
"""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.e2e.browser import Visit
from tests.e2e.serving import gateway
from tests.worker.http.client_scripts import TURNS_ALOUD
from tests.worker.http.processes import running

pytestmark = pytest.mark.alone
SECONDS, MAX_GAP_MS, MAX_FLUSH_MS = 20, 20, 150


def test_twenty_seconds_of_conversation(browser: Browser, tmp_path: Path) -> None:
    worker_folder = tmp_path / "worker"
    worker_folder.mkdir()
    with (
        running(worker_folder, until=None) as worker,
        gateway(tmp_path, [worker.wait_listening().port]) as server,
    ):
        context = browser.new_context(viewport={"width": 1000, "height": 640})
        visit = Visit(context, server.port, config=TURNS_ALOUD)
        visit.start()
        visit.wait_units(SECONDS - 3, timeout=120)
        visit.page.screenshot(path=tmp_path / "page.png")
        visit.wait_state("speaking")
        visit.page.keyboard.press("Space")
        visit.wait(lambda: visit.report["flushes"], "a flush")
        report = visit.wait_units(SECONDS, timeout=60)
        visit.page.click("#stop")
        visit.wait_state("ended")

    replies = sorted(result["reply_ms"] for result in report["results"])
    [flush] = report["flushes"]
    gaps = [gap["ms"] for gap in report["gaps"]]
    print(
        f"{len(replies)} units, reply median {replies[len(replies) // 2]:.0f} ms, worst {replies[-1]:.0f} ms; "
        f"{len(report['turns'])} turns, {report['sound_seconds']:.1f} s of sound, heard after "
        f"{[round(turn['heard_ms'] or 0) for turn in report['turns']]} ms; gaps {gaps} ms, stretched by "
        f"{report['stretched_ms']:.0f} ms; silent {flush['ms']:.0f} ms after the interrupt; "
        f"screenshot {(tmp_path / 'page.png').stat().st_size} bytes"
    )
    assert report["sound_seconds"] >= 5, f"expected at least 5 s of sound, got {report['sound_seconds']:.1f}"
    assert all(result["vision_slices"] == 1 for result in report["results"][1:]), "expected a picture with each second"
    assert any(turn["text"] for turn in report["turns"]), f"expected words, got {report['turns']}"
    assert max(gaps, default=0) <= MAX_GAP_MS, f"expected no gap over {MAX_GAP_MS} ms, got {report['gaps']}"
    assert flush["ms"] <= MAX_FLUSH_MS, f"expected silence within {MAX_FLUSH_MS} ms, got {flush}"
    assert flush["lost_samples"] > 0, f"expected something to be cut off, got {flush}"
    assert visit.text("#turns").strip(), "expected captions"
    assert not visit.errors and not report["errors"], (visit.errors, report["errors"])
