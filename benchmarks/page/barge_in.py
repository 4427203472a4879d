"""False stops and stop times of the page's voice detector, in Chromium: python -m benchmarks.page.barge_in.

Runs the page's own modules over sounds (`sounds`, `recordings`, `held_out`). The stop time is audio time: from the
onset of the user's speech to the end of the window that confirms it, whatever the machine's load. Playback stops one
message to the audio thread later. `window_ms` is elapsed time, and depends on the load.
"""

import argparse
import base64
import json
import shutil
import threading
from datetime import date
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Page, sync_playwright

from benchmarks.page.held_out import held_out_cases
from benchmarks.page.recordings import TUNING, SpeechArchive
from benchmarks.page.sounds import RATE, VoiceCase, tuning_cases
from server.routes.speech_weights import packed_weights

ROOT = Path(__file__).parents[2]
WINDOW = 512
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOAD = """async (weights) => {
    const at = "/static/shared/audio/";
    const [network, speech] = [await import(`${at}speech-network.js`), await import(`${at}user-speech.js`)];
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const read = network.readWeights(bytes(weights).buffer);
    window.detect = ({ mic, played, confirmMs, isCancelled }) => {
        const detector = new speech.UserSpeech(read);
        detector.onset.confirmMs = confirmMs;
        detector.isCancelled = isCancelled;
        const [a, b] = [mic, played].map((text) => new Float32Array(bytes(text).buffer));
        const stops = [];
        const began = performance.now();
        for (let i = 0; i + 512 <= a.length; i += 512) {
            if (!detector.add(a.subarray(i, i + 512), b.subarray(i, i + 512), true)) continue;
            stops.push(i + 512);
            detector.onset.reset();
        }
        return { stops, ms: (performance.now() - began) / (a.length / 512) };
    };
}"""


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def run(page: Page, case: VoiceCase, confirm_ms: int) -> dict[str, Any]:
    sounds = [base64.b64encode(sound.astype("<f4").tobytes()).decode() for sound in (case.mic, case.played)]
    given = {"mic": sounds[0], "played": sounds[1], "confirmMs": confirm_ms, "isCancelled": case.is_cancelled}
    found = page.evaluate("(given) => detect(given)", given)
    before = [at for at in found["stops"] if case.onset is None or at < case.onset]
    after = [] if case.onset is None else [at for at in found["stops"] if at >= case.onset]
    stop_ms = 1000 * (after[0] - case.onset) / RATE if after and case.onset is not None else None
    return {"kind": case.kind, "name": case.name, "seconds": len(case.mic) / RATE, "false_stops": len(before),
            "stop_ms": stop_ms, "window_ms": found["ms"]}  # fmt: skip


def summary(kind: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = sum(one["seconds"] for one in results)
    stops = sorted(one["stop_ms"] for one in results if one["stop_ms"] is not None)
    row: dict[str, Any] = {"sounds": len(results), "minutes": round(seconds / 60, 1)}
    row["sounds_with_false_stop"] = sum(one["false_stops"] > 0 for one in results)
    row["window_ms"] = round(float(np.median([one["window_ms"] for one in results])), 3)
    if kind != "noise" and not kind.startswith("echo"):
        row["missed"] = len(results) - len(stops)
        for name, share in (("median", 50), ("p95", 95), ("max", 100)):
            row[f"stop_ms_{name}"] = round(float(np.percentile(stops, share)), 1) if stops else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "page-barge-in.json")
    parser.add_argument("--confirm-ms", type=int, default=200)
    parser.add_argument("--half", choices=("held-out", "tuning"), default="held-out")
    parser.add_argument("--speech", type=Path, required=True, help="pocketsphinx-5.1.1.tar.gz; see recordings.py")
    args = parser.parse_args()
    recordings = SpeechArchive(args.speech)
    if args.half == "held-out":
        cases = held_out_cases(recordings)
    else:
        cases = [*tuning_cases(), *recordings.cases(TUNING, np.random.default_rng(2))]
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    handler = partial(_Files, directory=ROOT / "server")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/static/icon.svg")
        page.evaluate(LOAD, base64.b64encode(packed_weights()).decode())
        results = [run(page, case, args.confirm_ms) for case in cases]
        browser.close()
        server.shutdown()
    kinds = {
        kind: [one for one in results if one["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in results)
    }
    report = {
        "command": f"python -m benchmarks.page.barge_in --half {args.half} --confirm-ms {args.confirm_ms}",
        "date": date.today().isoformat(),
        "summary": {kind: summary(kind, found) for kind, found in kinds.items()},
        "sounds": results,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report["summary"], indent=1))


if __name__ == "__main__":
    main()
