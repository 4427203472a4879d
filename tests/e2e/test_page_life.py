"""The page on good and bad days: in line, paused, muted, cut off, without permission, with settings of one's own."""

import io
import itertools
import json
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, WebSocketRoute

from tests.e2e.browser import Visit
from tests.e2e.serving import Program, gateway, null_worker, served
from worker.protocol.wire import Sound

ROOT = Path(__file__).parents[2]
# The null worker's way to talk: a second of listening, then eight of speech.
TALKATIVE = ("--slots", "4", "--listen", "1", "--speak", "8")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with served(tmp_path_factory.mktemp("gateway"), *TALKATIVE) as one:
        yield one


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Somebody's browser: its own storage."""
    one = browser.new_context(viewport={"width": 1280, "height": 800})
    yield one
    one.close()


@pytest.fixture
def visit(context: BrowserContext, server: Program) -> Callable[..., Visit]:
    return lambda *args, **query: Visit(context, server.port, *args, **query)


def test_every_second_goes_out_whole_with_its_picture(visit: Callable[..., Visit]) -> None:
    page = visit().start()
    page.wait_units(2)
    units = page.sent_units()
    assert all(len(samples) == 16000 for _, samples, _ in units), [len(samples) for _, samples, _ in units]
    assert max(np.abs(samples).max() for _, samples, _ in units) > 0.01, "expected the microphone's sound, got silence"
    for number, (_, _, pictures) in enumerate(units[1:], 2):
        assert len(pictures) == 1, f"unit {number}: expected one picture, got {len(pictures)}"
        image = Image.open(io.BytesIO(pictures[0]))
        assert (image.format, image.size) == ("JPEG", (320, 240)), (image.format, image.size)
    assert "/ws/duplex/omni_" in page.addresses[0]

    for button in ("#mute", "#listen", "#camera"):
        page.page.click(button)
    n = page.report["units"]
    page.wait_units(n + 2)  # of the first one a part was heard before
    header, samples, pictures = page.sent_units()[n + 1]
    assert np.abs(samples).max() == 0, f"muted: expected silence, got a peak of {np.abs(samples).max()}"
    assert header["force_listen"] is True, f"holding: expected force_listen, got {header}"
    assert not pictures, f"camera off: expected no picture, got {len(pictures)}"
    assert "muted" in page.text("#badge")
    assert not page.errors, page.errors


def test_voice_only_has_no_camera(visit: Callable[..., Visit]) -> None:
    page = visit("/audio_duplex").start()
    page.wait_units(1)
    assert "/ws/duplex/adx_" in page.addresses[0]
    assert page.sent_units()[0][2] == [] and not page.page.is_visible("#camera")
    page.page.click("#stop")
    page.wait_state("ended")
    page.wait_text("#card-title", "Until next time")
    [summary] = [one for one in page.sent_kind("client_diagnostic") if one["event"] == "session_summary"]
    assert summary["units"] >= 1 and summary["gaps"] == 0, summary
    assert page.sent[-1] == {"type": "stop"}


def test_interrupt_is_silent_and_stays_silent(context: BrowserContext, server: Program) -> None:
    """What still comes of a turn that was cut is not heard, what comes behind it is."""
    got = stand_in(context, ends=(3, 5))
    page = Visit(context, server.port).start()
    page.wait_state("speaking")
    page.page.keyboard.press("Escape")
    page.wait(lambda: page.report["flushes"], "a flush")
    [flush] = page.report["flushes"]
    assert flush["why"] == "interrupt" and flush["lost_samples"] > 0, flush
    assert '{"type":"interrupt"}' in got, "expected an interrupt to be sent"
    assert page.text(".turn.cut .mark") == "interrupted"
    page.wait_units(3)
    [cut] = page.report["turns"]
    assert cut["cut"] and cut["over"] and cut["sound_ms"] < 3000 and page.report["dropped_ms"] >= 1000, page.report
    assert page.state == "listening", f"expected the rest of the turn to stay silent, got {page.state}"
    page.wait_state("speaking")
    assert page.report["turns"][1]["sound_ms"] > 0, page.report["turns"]


def test_pause_and_resume(visit: Callable[..., Visit]) -> None:
    page = visit().start()
    page.wait_units(1)
    page.page.click("#pause")
    page.wait_state("paused")
    page.wait_text("#card-text", "The line is kept for another")
    n = page.report["units"]
    page.page.wait_for_timeout(1300)  # time for a second that should not be sent
    assert page.report["units"] == n, f"paused: expected no more than {n} units, got {page.report['units']}"
    page.page.click("#card-action")
    page.wait_units(n + 1)
    assert page.state in ("listening", "speaking") and not page.report["errors"], page.report["errors"]


def test_settings_are_remembered_and_sent(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.page.click("#open-settings")
    page.page.fill("#set-prompt", "Be brief.")
    page.page.select_option("#set-voice", "own")
    page.page.set_input_files("#voice-file", ROOT / "assets" / "ref_audio" / "high.wav")
    page.wait_text("#voice-state", "high.wav")
    page.page.click("#settings summary")
    page.page.fill("#set-extra", '{"seed": 5}')
    page.page.press("#set-extra", "Tab")

    again = visit(config={"temperature": 0.5}, lang="zh")
    assert again.text("#card-action") == "开始对话"
    again.page.click("#open-settings")
    assert again.page.input_value("#set-prompt") == "Be brief."
    again.page.keyboard.press("Escape")
    again.start()
    [prepare] = again.sent_kind("prepare")
    assert prepare["system_prompt"] == "Be brief." and prepare["config"] == {"seed": 5, "temperature": 0.5}, prepare
    assert prepare["spec"] == {"version": 1, "partial_results": True, "sound_in": "pcm16", "sound_out": "pcm16"}
    voice = Sound.of(prepare["ref_audio_base64"]).samples("voice")
    assert 16000 < len(voice) <= 20 * 16000 and np.abs(voice).max() > 0.05, (
        f"expected a voice, got {len(voice)} samples"
    )


def test_a_plain_server_is_obeyed(context: BrowserContext, server: Program) -> None:
    """Without `spec` in `prepared` nothing is binary, and whole results are heard."""
    got = stand_in(context, ends=(2,))
    page = Visit(context, server.port).start()
    report = page.wait_units(2)
    assert not any(isinstance(one, bytes) for one in got), "expected text only, got a binary frame"
    chunk = json.loads(next(one for one in got if '"audio_chunk"' in one))
    assert len(Sound.of(chunk["audio_base64"]).samples("sound")) == 16000
    assert report["sound_seconds"] >= 2 and report["turns"][0]["text"] == "plain plain ", report["turns"]


Answers = dict[str, list[dict[str, Any]]]


def test_an_error_stands_for_its_own_second(context: BrowserContext, server: Program) -> None:
    """In place of a result it is one; about something else it is not; after an answer that is none nothing goes on."""
    refused = {"type": "error", "code": "bad_image", "error": "no picture"}
    beside = {"type": "error", "code": "unknown_type", "error": "Unknown message type: news"}
    broken = {"type": "partial", "current_time": 3, "part": 1, "audio_data": "no sound!"}
    stand_in(context, ends=(2,), instead={"unit 1": [refused], "before 2": [beside], "after 2": [broken]})
    page = Visit(context, server.port).start()
    page.wait_text("#card-title", "The answer made no sense")
    assert page.text("#card-action") == "Reconnect"
    report = page.report
    assert [result["unit"] for result in report["results"]] == [2], report["results"]
    assert [error["code"] for error in report["errors"]] == ["bad_image", "unknown_type", "unreadable"]


def test_every_timeout_has_its_words(context: BrowserContext, server: Program) -> None:
    answers: Answers = {"after prepare": [{"type": "timeout", "reason": "Idle timeout (30.0s)"}]}
    stand_in(context, instead=answers)
    page = Visit(context, server.port).start("failed")
    page.wait_text("#card-title", "Nothing came from here")
    answers.clear()
    answers["pause"] = [{"type": "paused", "timeout": 0.0}, {"type": "timeout", "reason": "Pause timeout (0.0s)"}]
    page.start()
    page.page.click("#pause")
    page.wait_text("#card-title", "That was a long pause")


def stand_in(context: BrowserContext, ends: Sequence[int] = (), instead: Answers | None = None) -> list[str | bytes]:
    """The page finds a server that speaks in every second and only knows the plain protocol.

    ends: units with which a turn ends. instead: answers to a type of message, or to a unit as "unit 1", in place of the
    usual ones; with "before 1", "after 1" or "after prepare" beside them. Returns: what it is told.
    """
    got: list[str | bytes] = []
    instead = {} if instead is None else instead
    tone = Sound((0.3 * np.sin(np.arange(24000) / 20)).astype(np.float32)).base64()
    costs = {"cost_all_ms": 1.0, "wall_clock_ms": 2.0, "server_send_ts": 0.0, "kv_cache_length": 9, "news": "ignored"}

    def answer(socket: WebSocketRoute) -> None:
        units = itertools.count(1)

        def take(data: str | bytes) -> None:
            got.append(data)
            name = kind = json.loads(data)["type"] if isinstance(data, str) else "binary"
            usual = []
            if kind == "prepare":
                usual = [{"type": "prepared", "prompt_length": 3}]
            elif kind == "audio_chunk":
                n = next(units)
                name = f"unit {n}"
                fields = {"type": "result", "is_listen": False, "text": "plain ", "audio_data": tone, "current_time": n}
                usual = [{**fields, **costs, "end_of_turn": n in ends}]
            place = name.removeprefix("unit ")
            before, after = (instead.get(f"{when} {place}", []) for when in ("before", "after"))
            for message in [*before, *instead.get(name, usual), *after]:
                socket.send(json.dumps(message))

        socket.on_message(take)
        socket.send(json.dumps({"type": "queue_done"}))

    context.route_web_socket("**/ws/duplex/*", answer)
    return got


def test_waiting_in_line(browser: Browser, tmp_path: Path) -> None:
    with served(tmp_path, "--slots", "1", queue=1) as server:
        first, second, third = (Visit(browser.new_context(), server.port) for _ in range(3))
        first.start()
        second.start("queued")
        second.wait_text("#card-title", "You are number 1 in line")
        second.wait_text("#card-text", "About ")
        third.start("failed")
        third.wait_text("#card-title", "Everybody wants to talk")
        first.page.click("#stop")
        second.wait_state("listening", "speaking")
        third.page.click("#card-action")
        third.wait_state("queued")
        third.page.click("#card-action")
        third.wait_state("ended")
        assert third.text("#card-title") == "Talk face to face", "expected to be back at the start"


def test_whatever_is_lost_can_be_called_again(context: BrowserContext, tmp_path: Path) -> None:
    """The gateway dies, the worker dies, the gateway is stopped: each has its card, and afterwards it works again."""
    with ExitStack() as stack:
        worker = stack.enter_context(null_worker(*TALKATIVE))
        with gateway(tmp_path, [worker.port]) as server:
            page = Visit(context, server.port).start()
        page.wait_text("#card-text", "The connection to the server was lost")
        page.start("failed")
        page.wait_text("#card-title", "Nobody picks up")
        server = stack.enter_context(gateway(tmp_path, [worker.port], "--drain-timeout", "0.1", port=server.port))
        page.start()
        worker.kill()
        page.wait_text("#card-text", "The machine behind it went away")
        stack.enter_context(null_worker(*TALKATIVE, "--port", str(worker.port)))
        page.start()
        page.wait_units(1)
        server.process.send_signal(signal.SIGTERM)
        page.wait_text("#card-title", "The server restarts")
        assert [error["code"] for error in page.report["errors"]] == ["draining"], page.report["errors"]


def test_what_is_switched_off_says_so(visit: Callable[..., Visit], server: Program) -> None:
    page = visit()
    try:
        switch(server, "omni", on=False)
        page.start("failed")  # it was on when the page came
        page.wait_text("#card-title", "Video is switched off")
        switch(server, "audio_duplex", on=False)
        none = visit()
        none.wait_text("#card-action", "Look again")
        switch(server, "audio_duplex", on=True)
        none.page.click("#card-action")
        none.wait_text("#card-action", "Talk by voice")
        assert not none.addresses, "expected nothing to be tried"
        none.page.click("#card-action")
        none.page.wait_for_url("**/audio_duplex?lang=en")
        none.wait_text("#card-title", "Just talk")
    finally:
        for app_id in ("omni", "audio_duplex"):
            switch(server, app_id, on=True)


def switch(server: Program, app_id: str, *, on: bool) -> None:
    url = f"http://127.0.0.1:{server.port}/api/admin/apps/{app_id}"
    body, headers = json.dumps({"enabled": on}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT"), timeout=10) as answer:
        assert answer.status == 200, f"expected 200, got {answer.status}"


# The browser asks, as one that grants by itself does not: devices are given when the page's visitor says so.
ASKING = """
    const devices = MediaDevices.prototype, real = devices.getUserMedia;
    const asking = { kind: "audio", held: [], tracks: [] };
    window.asking = asking;
    devices.getUserMedia = async function (wanted) {
      if (wanted[asking.kind]) await new Promise((resolve) => asking.held.push(resolve));
      const stream = await real.call(this, wanted);
      asking.tracks.push(...stream.getTracks());
      return stream;
    };"""


def test_no_device_stays_open_behind_an_end(context: BrowserContext, visit: Callable[..., Visit]) -> None:
    """Start, think better of it, start again, and only then allow; the first answer may come first or last."""
    context.add_init_script(ASKING)
    page = visit()
    for kind, order in (("audio", ""), ("audio", ".reverse()"), ("video", "")):
        case = f"{kind}{order}"
        page.page.evaluate("(kind) => (asking.kind = kind)", kind)
        for n in (1, 2):
            page.start("asking")
            page.wait(lambda n=n: page.page.evaluate("asking.held.length") == n, f"{case}: question {n}")
            if n == 1:
                page.page.click("#card-action")
                page.wait_state("ended")
        page.page.evaluate(f"for (const give of asking.held.splice(0){order}) give()")
        page.wait_state("listening", "speaking")
        n_live = len(page.page.evaluate(LIVE_TRACKS))
        page.page.click("#stop")
        page.wait_state("ended")
        left = page.page.evaluate(LIVE_TRACKS)
        assert (n_live, left) == (2, []), f"{case}: expected microphone and camera, then none, got {n_live} and {left}"


LIVE_TRACKS = "asking.tracks.filter((track) => track.readyState === 'live').map((track) => track.kind)"


@pytest.mark.parametrize(
    ("device", "error", "title"),
    [("audio", "NotAllowedError", "No microphone yet"), ("audio", "NotFoundError", "No microphone found")],
)
def test_without_a_microphone(context: BrowserContext, server: Program, device: str, error: str, title: str) -> None:
    context.add_init_script(refusing(device, error))
    page = Visit(context, server.port).start("failed")
    page.wait_text("#card-title", title)
    assert page.text("#card-action") == "Start talking" and not page.addresses


def test_without_a_camera_it_goes_on_with_the_voice(context: BrowserContext, server: Program) -> None:
    context.add_init_script(refusing("video", "NotAllowedError"))
    page = Visit(context, server.port).start()
    page.wait_text("#notice", "Without camera")
    page.wait_units(1)
    assert page.sent_units()[0][2] == []


def test_an_unsafe_address_is_explained(context: BrowserContext, server: Program) -> None:
    page = Visit(context, server.port, host="duologue.test").start("failed")
    page.wait_text("#card-title", "This page needs a safe address")


def refusing(device: str, error: str) -> str:
    """A script under which the browser refuses a kind of device, as it does for want of permission or of the device."""
    return f"""
    const devices = MediaDevices.prototype, real = devices.getUserMedia;
    devices.getUserMedia = function (wanted) {{
      if (wanted.{device}) return Promise.reject(new DOMException("refused", "{error}"));
      return real.call(this, wanted);
    }};"""
