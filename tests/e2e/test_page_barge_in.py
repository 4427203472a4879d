"""The user's voice stops the model's; noise does not. The microphone plays sounds at times that the test chooses."""

import base64
from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import BrowserContext

from benchmarks.page.sounds import RATE, voice
from tests.e2e.browser import OpenPage
from tests.e2e.plain_server import plain_server
from tests.e2e.serving import ServerProcess, gateway_with_fake_worker
from worker.protocol.wire import unpack_frame

pytestmark = pytest.mark.programs

# A microphone without a device: `say(base64 float32 at 16 kHz)` plays a sound into it.
MICROPHONE = """
    const room = new AudioContext();
    const air = room.createMediaStreamDestination();
    new ConstantSourceNode(room, { offset: 0 }).connect(air);
    navigator.mediaDevices.getUserMedia = async () => (await room.resume(), air.stream.clone());
    window.say = (text) => {
        const samples = new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
        const buffer = room.createBuffer(1, samples.length, 16000);
        buffer.copyToChannel(samples, 0);
        const source = new AudioBufferSourceNode(room, { buffer });
        source.connect(air);
        source.onended = () => (nSaid += 1);
        source.start();
    };
    window.nSaid = 0; // sounds that were played to their end
"""
STOP_MS = 300  # of speech, until it stops the model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with gateway_with_fake_worker(tmp_path_factory.mktemp("gateway"), "--listen", "1", "--speak", "30") as one:
        yield one


def say(page: OpenPage, sound: np.ndarray) -> None:
    page.page.evaluate("(text) => say(text)", base64.b64encode(sound.astype("<f4").tobytes()).decode())


def say_to_the_end(page: OpenPage, sound: np.ndarray) -> None:
    """Return when a unit that began after the sound's end is sent: the page has seen all of the sound."""
    n = page.page.evaluate("nSaid")
    say(page, sound)
    page.wait(lambda: page.page.evaluate("nSaid") > n, "the end of the sound")
    units = page.report["units"]
    page.wait(lambda: page.report["units"] > units + 1, "the units with the sound")


def test_speech_stops_the_model_and_noise_does_not(context: BrowserContext, server: ServerProcess) -> None:
    context.add_init_script(MICROPHONE)
    page = OpenPage(context, server.port, "/audio_duplex", barge_in=True).start()
    page.wait_state("speaking")
    rng = np.random.default_rng(1)
    noise = 0.1 * rng.standard_normal(2 * RATE)
    for start in (4000, 12000, 20000):  # claps
        noise[start : start + 800] += 0.5 * rng.standard_normal(800) * np.exp(-np.arange(800) / 200)
    say_to_the_end(page, noise)
    assert page.state == "speaking" and page.report["flushes"] == [], page.report["flushes"]

    say(page, voice("default"))
    page.wait(lambda: page.report["flushes"], "speech to stop the reply")
    [flush] = page.report["flushes"]
    assert flush["why"] == "barge_in" and 200 <= flush["speech_ms"] <= STOP_MS, flush
    units = page.report["units"]
    page.wait(lambda: page.report["units"] > units, "the next unit")
    assert page.sent_kind("interrupt") == [{"type": "interrupt"}]
    sent = list(page.sent)
    after = sent.index({"type": "interrupt"})
    forced = [
        at for at, data in enumerate(sent) if isinstance(data, bytes) and unpack_frame(data)[0].get("force_listen")
    ]
    following = next(at for at, data in enumerate(sent) if at > after and isinstance(data, bytes))
    assert forced == [following], f"expected the unit {following} after the interrupt to listen, got {forced}"
    [diagnostic] = [one for one in page.sent_kind("client_diagnostic") if one["event"] == "barge_in"]
    [turn] = [one for one in page.report["turns"] if one["turn"] == diagnostic["turn"]]
    assert 0 < diagnostic["heard_sound_ms"] < turn["sound_ms"] and turn["text"].startswith(diagnostic["heard_text"]), (
        diagnostic,
        turn,
    )
    assert page.text(".turn.cut .mark") == "interrupted"
    assert not page.errors, page.errors


def test_switched_off_detector_does_not_stop_but_the_button_does(
    context: BrowserContext, server: ServerProcess
) -> None:
    plain_server(context)
    context.add_init_script(MICROPHONE)
    page = OpenPage(context, server.port, "/audio_duplex", barge_in=True)
    page.page.click("#open-settings")
    page.page.click("#advanced summary")
    page.page.uncheck("#set-barge-in")
    page.page.keyboard.press("Escape")
    page.start().wait_state("speaking")
    say_to_the_end(page, voice("high"))
    assert page.report["flushes"] == []
    page.page.click("#interrupt")
    page.wait(lambda: page.report["flushes"], "a flush")
    [flush] = page.report["flushes"]
    assert flush["why"] == "interrupt", flush  # how soon: test_real_time.py
