"""The pages' modules without sockets and devices: frames, sample rates, playout, what the server's state means."""

import base64
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from playwright.sync_api import Browser, Page

from server.routes.speech_weights import packed_weights
from worker.config.layers import setting_fields
from worker.config.service import Config
from worker.protocol.wire import Sound, pack_frame, unpack_frame
from worker.vad_network import CONTEXT, WINDOW, SpeechNetwork

STATIC = "/static"
VOICE = Path(__file__).parents[2] / "assets" / "ref_audio" / "default.wav"


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page(browser: Browser, root: Path) -> Iterator[Page]:
    """An empty page on the origin of the modules, which need no gateway."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=root / "server")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/static/icon.svg")
        yield page
        server.shutdown()


def call(page: Page, module: str, body: str, given: Any = None) -> Any:
    """Run `body` with the module's exports as `lib`, and with `given`."""
    return page.evaluate(f"async (given) => {{ const lib = await import('{STATIC}/{module}'); {body} }}", given)


# --- frames ---------------------------------------------------------------------------------------


def test_frames_match_the_servers(page: Page) -> None:
    sound, pictures = bytes(range(7, 107)), [b"\xff\xd8one", b"\xff\xd8another"]
    header = {"type": "audio_chunk", "force_listen": True, "text": "hä 你"}
    body = """const bytes = (list) => Uint8Array.from(list);
        return [...new Uint8Array(lib.packFrame(given.header, bytes(given.sound), given.pictures.map(bytes)))]"""
    given = {"header": header, "sound": list(sound), "pictures": [list(one) for one in pictures]}
    got = unpack_frame(bytes(call(page, "shared/audio/wire.js", body, given)))
    assert got == (header, sound, pictures)

    body = """const { header, sound, pictures } = lib.unpackFrame(Uint8Array.from(given).buffer);
        return { header, sound: [...sound], pictures: pictures.map((one) => [...one]) }"""
    assert call(page, "shared/audio/wire.js", body, list(pack_frame(header, sound, pictures))) == given


def test_broken_frame_is_refused(page: Page) -> None:
    frame = list(pack_frame({"type": "result"}, b"1234"))
    for broken in (frame[:2], frame[:-1], [*frame, 0], [255, 255, *frame[2:]]):
        body = """try { lib.unpackFrame(Uint8Array.from(given).buffer); return null; }
            catch (error) { return `${error.name}: ${error.message}`; }"""
        got = call(page, "shared/audio/wire.js", body, broken)
        assert got is not None and got.startswith("RangeError") and "expected" in got, got


def test_samples_match_the_servers(page: Page) -> None:
    samples = np.random.default_rng(3).uniform(-1.2, 1.2, 500).astype(np.float32)
    clipped = np.clip(samples, -1, 1)
    body = """const x = Float32Array.from(given); return { pcm16: [...lib.toPcm16(x)], base64: lib.soundText(x),
        back: [...lib.fromPcm16(lib.toPcm16(x))] }"""
    got = call(page, "shared/audio/wire.js", body, samples.tolist())
    assert bytes(got["pcm16"]) == Sound(samples).packed("pcm16")
    assert np.array_equal(Sound.of(got["base64"]).samples("base64"), samples)
    assert np.abs(np.array(got["back"]) - clipped).max() <= 1 / 32768


# --- sample rates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(48000, 16000), (44100, 16000), (24000, 48000), (24000, 44100)])
def test_resampling_keeps_a_sine(page: Page, source: int, target: int) -> None:
    """In blocks of 128 samples, as audio worklets get them: the right number of samples, and only the sine."""
    body = """const resampler = new lib.Resampler(given.source, given.target);
        const out = [];
        for (let at = 0; at < 2 * given.source; at += 128) {
          const block = Float32Array.from({ length: 128 }, (_, i) => Math.sin((2 * Math.PI * given.hz * (at + i)) / given.source));
          out.push(...resampler.process(block));
        }
        return out"""  # noqa: E501
    got = np.array(call(page, "duplex/lib/resampler.js", body, {"source": source, "target": target, "hz": 997}))
    expected = np.sin(2 * np.pi * 997 * np.arange(len(got)) / target)
    assert abs(len(got) - 2 * target) < 0.01 * target, f"expected about {2 * target} samples, got {len(got)}"
    inside = slice(2000, -2000)
    noise = got[inside] - expected[inside]
    snr = 10 * np.log10((expected[inside] ** 2).mean() / (noise**2).mean())
    print(f"{source} to {target} Hz: {snr:.1f} dB")
    assert snr > 70, f"{source} to {target} Hz: expected more than 70 dB, got {snr:.1f}"


def test_resampling_removes_frequencies_above_8_khz(page: Page) -> None:
    body = """const resampler = new lib.Resampler(48000, 16000);
        return [...resampler.process(Float32Array.from({ length: 48000 }, (_, i) => Math.sin(2 * Math.PI * 9500 * i / 48000)))]"""  # noqa: E501
    left = np.abs(np.array(call(page, "duplex/lib/resampler.js", body))[1000:-1000]).max()
    assert left < 0.001, f"expected a 9.5 kHz tone to be below -60 dB, got {20 * np.log10(left):.1f} dB"


# --- playout --------------------------------------------------------------------------------------

PLAYOUT = """
const events = [];
const playout = new lib.Playout((event) => events.push(event));
playout.tune(given.delay ?? 100, given.low ?? 0);
const heard = [];
const read = (n) => {
  for (let at = 0; at < n; at += 64) heard.push(...playout.read(new Float32Array(Math.min(64, n - at))));
};
const sound = (n, from = 1) => Float32Array.from({ length: n }, (_, i) => (from + i) / 100000);
"""


def played(page: Page, body: str, **given: Any) -> tuple[np.ndarray, list[dict[str, Any]], Any]:
    """Run `body`. Returns: the played samples in steps of 1/100000, the events, and the result of `body`."""
    code = f"{PLAYOUT} const result = (() => {{ {body} }})(); return {{ heard, events, result }}"
    got = call(page, "duplex/lib/playout.js", code, given)
    return np.rint(100000 * np.array(got["heard"])).astype(int), got["events"], got["result"]


def test_turn_starts_after_delay_and_is_played_completely(page: Page) -> None:
    heard, events, _ = played(
        page, "read(64); playout.push(sound(3000), 1); playout.push(sound(2000, 3001), 1); playout.end(1); read(6000)"
    )
    assert np.array_equal(heard[heard > 0], np.arange(1, 5001)), "expected every sample once and in order"
    assert [event["type"] for event in events] == ["started", "ended"]
    assert np.flatnonzero(heard)[0] == 64, "expected a complete turn to start at once"

    heard, events, _ = played(page, "read(64); playout.push(sound(9000), 1); read(4000)")
    assert np.flatnonzero(heard)[0] == 64 + 2400, "expected a delay of 100 ms"
    assert events == [{"type": "started", "turn": 1, "waitedMs": 100}]


def test_gap_is_counted_in_samples(page: Page) -> None:
    body = """playout.push(sound(2400), 1); read(2400 + 2400 + 77); playout.push(sound(4800, 2401), 1); read(9000);
        playout.end(1); read(10)"""
    heard, events, _ = played(page, body)
    gaps = [event for event in events if event["type"] == "gap"]
    assert [(gap["turn"], gap["samples"]) for gap in gaps] == [(1, 77)]
    assert np.array_equal(heard[heard > 0], np.arange(1, 7201))
    assert (heard[4800:4877] == 0).all() and heard[4877] == 2401


def test_silence_after_turn_is_no_gap(page: Page) -> None:
    body = (
        "playout.push(sound(2400), 1); read(9000); playout.end(1); read(9000); playout.push(sound(50), 2); read(9000)"
    )
    _, events, _ = played(page, body)
    assert [event["type"] for event in events] == ["started", "ended", "started"], events


def test_turns_are_played_in_order(page: Page) -> None:
    body = (
        "playout.push(sound(3000), 1); playout.push(sound(500, 50001), 2); playout.end(1); playout.end(2); read(9000)"
    )
    heard, _, _ = played(page, body)
    assert np.array_equal(heard[heard > 0], [*range(1, 3001), *range(50001, 50501)])


def test_flush_is_silent_at_once(page: Page) -> None:
    heard, _, lost = played(
        page, "playout.push(sound(9000), 1); read(5000); const n = playout.flush(); read(500); return n"
    )
    assert lost == 9000 - (5000 - 2400), f"expected the number of samples not played, got {lost}"
    assert (heard[5000:] == 0).all()


def test_stretching_avoids_gap(page: Page) -> None:
    """A tone that arrives 60 ms late: a gap without stretching, none with it, and the tone stays smooth."""
    body = """const tone = (n, at) => Float32Array.from({ length: n }, (_, i) => 0.5 * Math.sin(2 * Math.PI * 200 * (at + i) / 24000));
        playout.push(tone(12000, 0), 1); read(2400 + 12000 + 1440); playout.push(tone(12000, 12000), 1); playout.end(1);
        read(15000); return playout.stretched"""  # noqa: E501
    _, events, _ = played(page, body, low=0)
    assert [event["samples"] for event in events if event["type"] == "gap"] == [1440]
    heard, events, stretched = played(page, body, low=200)
    assert [event["type"] for event in events] == ["started", "ended"], f"expected no gap, got {events}"
    assert stretched >= 1440, f"expected at least the 1440 samples that were late, got {stretched}"
    voice = heard[2400 : 2400 + 24000 + stretched] / 100000
    steps = np.abs(np.diff(voice)).max()
    assert steps < 0.05, f"expected no jump in a tone (its own largest step is 0.026), got {steps:.3f}"


def test_playout_delay_adapts(page: Page) -> None:
    body = """const playoutDelay = new lib.PlayoutDelay(given.floor);
        const before = playoutDelay.delayMs;
        for (let turn = 1; turn <= 3; turn++) {
          playoutDelay.add(turn, 840, 5000 * turn);
          playoutDelay.add(turn, 1000, 5000 * turn + 1000 + given.late);
          playoutDelay.add(turn, 1000, 5000 * turn + 2000);
        }
        return [before, playoutDelay.delayMs, playoutDelay.lowMs]"""
    _, steady, _ = call(page, "shared/audio/playout-delay.js", body, {"floor": 100, "late": 0})  # before, after, low
    assert steady == 200, f"expected 160 ms for the first unit and a margin, got {steady}"
    before, unsteady, low = call(page, "shared/audio/playout-delay.js", body, {"floor": 100, "late": 250})
    assert unsteady == 450 and unsteady > before and low > 140, (
        f"expected 160 + 250 + 40, got {unsteady} after {before}"
    )
    assert call(page, "shared/audio/playout-delay.js", body, {"floor": 700, "late": 0})[1] == 700, (
        "expected the lower bound"
    )


# --- state of server and connection ---------------------------------------------------------------


def test_reason_for_waiting(page: Page) -> None:
    cases = [
        ({"slots": {"total": 2, "free": 1}, "loading_workers": 1}, None),
        ({"slots": {"total": 2, "free": 0}, "loading_workers": 1}, "busy"),
        ({"slots": {"total": 0, "free": 0}, "loading_workers": 1}, "loading"),
        ({"slots": {"total": 0, "free": 0}, "loading_workers": 0}, "no_worker"),
        ({"slots": {"total": 0, "free": 0}, "loading_workers": 0, "reason": "loading"}, "loading"),
    ]
    got = call(page, "shared/server-status.js", "return given.map(lib.reasonOf)", [status for status, _ in cases])
    assert got == [reason for _, reason in cases]


def test_connection_quality_names_the_cause(page: Page) -> None:
    def results(reply: float, server: float) -> list[dict[str, float]]:
        return [{"unit": n, "reply_ms": reply, "wall_clock_ms": server} for n in range(1, 11)]

    cases = [
        ((results(400, 300), []), {"level": 3, "cause": None}),
        ((results(800, 300), []), {"level": 2, "cause": "network"}),
        ((results(1300, 300), []), {"level": 1, "cause": "network"}),
        ((results(1300, 1200), []), {"level": 1, "cause": "server"}),
        ((results(400, 300), [{"unit": 3}, {"unit": 4}]), {"level": 1, "cause": "network"}),
        (([], []), {"level": 3, "cause": None}),
    ]
    body = "return given.map(([results, gaps]) => lib.qualityOf(results, gaps))"
    got = call(page, "live/conversation/quality.js", body, [list(case) for case, _ in cases])
    assert got == [expected for _, expected in cases]


def test_delays_between_attempts_double_and_end(page: Page) -> None:
    body = """const backoff = new lib.Backoff();
        const delays = Array.from({ length: 13 }, () => backoff.next(() => 0.5));
        backoff.reset();
        return [delays, backoff.next(() => 0), backoff.next(() => 1)]"""
    delays, low, high = call(page, "live/conversation/backoff.js", body)
    assert delays == [1, 2, 4, 8, *[15] * 8, None], delays
    assert (low, high) == (0.8, 2.4), "expected 20 % of randomness"


def test_settings_with_dots_become_objects(page: Page) -> None:
    given = {"temperature": 0.5, "window.mode": "off", "window.max_units": 3}
    got = call(page, "shared/fields.js", "return lib.nested(given)", given)
    assert got == {"temperature": 0.5, "window": {"mode": "off", "max_units": 3}}


def test_every_session_setting_has_a_control(page: Page) -> None:
    """With its documented range and default, and a name in both languages. Two settings have only one value."""
    body = """const { SESSION_SETTINGS: found } = lib;
        const texts = await Promise.all(["en", "zh"].map((name) => import(`/static/live/texts/${name}.js`)));
        const names = found.map(({ key }) => `set_${key.replaceAll(".", "_")}`);
        const missing = texts.flatMap((one, i) => names.filter((name) => !(name in one[["en", "zh"][i]])));
        return { found, missing }"""
    got = call(page, "live/controls/session-settings.js", body)
    assert not got["missing"], f"expected texts, got none for {got['missing']}"
    controls = {one["key"]: one for one in got["found"]}
    settings = {one.key.removeprefix("duplex.session."): one for one in setting_fields(Config)}
    expected = {
        one.removeprefix("duplex.session.")
        for one in (setting.key for setting in setting_fields(Config))
        if one.startswith("duplex.session.")
    } - {"chunk_ms", "sample_rate", "window"}
    assert controls.keys() == expected, controls.keys() ^ expected
    for key, control in controls.items():
        default = json.loads(json.dumps(settings[key].default))
        assert control["usual"] == default or key == "window.marker", (
            f"{key}: expected {default}, got {control['usual']}"
        )


def test_page_begins_when_the_server_has_asked_for_it(page: Page) -> None:
    """`prepared` is delivered after `start_after_ms`, at once without it, and not after the end."""
    body = """const order = [];
        class Socket { static OPEN = 1; readyState = 1; send() {} close() {} constructor() { Socket.last = this; } }
        const real = window.WebSocket;
        window.WebSocket = Socket;
        const receive = (name, ms, ends) => new Promise((resolve) => {
            const on = { prepared: () => { order.push(name); resolve(); } };
            const session = new lib.Session("a", {}, on);
            Socket.last.onopen();
            Socket.last.onmessage({ data: JSON.stringify({ type: "prepared", spec: {}, start_after_ms: ms }) });
            order.push(`${name} received`);
            if (ends) { session.close(); resolve(); }
        });
        await receive("at once", 0, false);
        const ended = receive("ended", 10, true);
        await receive("later", 40, false);
        await ended;
        window.WebSocket = real;
        return order"""
    got = call(page, "live/conversation/session.js", body)
    assert got == ["at once", "at once received", "ended received", "later received", "later"], got


def test_resumption_counts_messages_and_sends_again_what_has_not_arrived(page: Page) -> None:
    body = """const one = new lib.Resumption();
        const closed = (code, reason = "") => one.survives({ code, reason });
        const got = [closed(1006)];
        for (const text of ["prepare", "a", "b"]) one.keep(text);
        for (const type of ["queued", "queue_done"]) one.count({ type });
        one.count({ type: "prepared", resume_token: "t1", resume_grace_s: 30 });
        for (let n = 0; n < 6; n++) one.count({ type: "result" });
        got.push(one.acknowledgement(), closed(1006), closed(1000), closed(4001));
        got.push(closed(1012), closed(1012, "Try again"));
        one.count(null);
        got.push(one.acknowledgement(), one.acknowledgement(), one.request());
        one.count({ type: "session_resumed" });
        got.push(one.resumed({ resume_token: "t2", received: 1, lost: 0 }));
        got.push(one.request().received, one.request().token);
        got.push(one.resumed({ resume_token: "t3", received: 3, lost: 1 }));
        one.keep("x".repeat(9 * 2 ** 20));
        got.push(one.resumed({ resume_token: "t4", received: 3, lost: 0 }));
        return got"""
    got = call(page, "live/conversation/resumption.js", body)
    request = {"type": "resume_session", "token": "t1", "received": 8}
    acknowledged = [None, True, False, False, False, True, {"type": "received", "count": 8}, None, request]
    assert got == [False, *acknowledged, ["a", "b"], 8, "t2", None, None], got


def test_a_session_whose_messages_the_server_has_dropped_is_over(page: Page) -> None:
    body = """const ends = [];
        class Socket {
            static OPEN = 1; readyState = 1; static n = 0;
            constructor() { Socket.last = this; Socket.n += 1; }
            send() {}
            close() {}
        }
        const real = window.WebSocket;
        window.WebSocket = Socket;
        const receive = (message) => Socket.last.onmessage({ data: JSON.stringify(message) });
        const begin = () => {
            const session = new lib.Session("a", {}, { closed: (event) => ends.push(event.isIncomplete) });
            Socket.last.onopen();
            receive({ type: "prepared", spec: {}, resume_token: "t", resume_grace_s: 30 });
            return session;
        };
        const resume = (session, answer) => {
            Socket.last.onclose({ code: 1006, reason: "" });
            session.retry();
            Socket.last.onopen();
            receive(answer);
        };
        begin();
        receive({ type: "messages_lost", lost: 2, lost_sound_s: 1, next: 9 });
        resume(begin(), { type: "session_resumed", resume_token: "t", received: 0, lost: 1 });
        resume(begin(), { type: "error", code: "resume_refused", error: "" });
        resume(begin(), { type: "session_resumed", resume_token: "t", received: 0, lost: 0 });
        window.WebSocket = real;
        return { ends, n: Socket.n }"""
    got = call(page, "live/conversation/session.js", body)
    assert got == {"ends": [True, True, False], "n": 7}, f"expected two incomplete ones and a refused one, got {got}"
    body = "const code = lib.closeErrorCode(given); return [code, lib.isRetried(code)]"
    lost = call(page, "live/conversation/errors.js", body, {"opened": True, "isIncomplete": True})
    assert lost == ["messages_lost", False], f"expected an end without another attempt, got {lost}"


def test_loudness_of_a_sine(page: Page) -> None:
    """A sine at half scale has -9.03 dB; the weighting's constant is -0.69 dB."""
    body = """const step = (2 * Math.PI * 997) / 48000;
        const sine = Float32Array.from({ length: 48000 }, (_, i) => 0.5 * Math.sin(step * i));
        return [lib.loudness(sine), lib.loudness(new Float32Array(100))]"""
    loud, silent = call(page, "shared/audio/channel.js", body)
    assert abs(loud - (-9.03 - 0.69)) < 0.02 and silent == -70, (loud, silent)


def test_both_languages_have_the_same_texts(page: Page) -> None:
    """Of all pages; each page's help asks the same number of questions in both."""
    for folder in ("shared", "live", "chat", "half_duplex", "home", "viewer", "admin"):
        body = "const { zh } = await import(given); return [Object.keys(lib.en), Object.keys(zh)]"
        english, chinese = call(page, f"{folder}/texts/en.js", body, f"/static/{folder}/texts/zh.js")
        assert english == chinese, f"{folder}: {set(english) ^ set(chinese)}"
    both = call(page, "shared/texts/character.js", "return Object.values(lib.characterTexts).map(Object.keys)")
    assert both[0] == both[1], set(both[0]) ^ set(both[1])
    faq = Path(__file__).parents[2] / "server" / "static" / "faq"
    questions = {file.relative_to(faq): file.read_text().count("\n## ") for file in faq.glob("*/*.md")}
    names = sorted(file.name for file in faq.glob("en/*.md"))
    assert names and all(questions[Path("en", name)] == questions.get(Path("zh", name)) for name in names), questions


# --- the user's voice -----------------------------------------------------------------------------


def test_speech_network_matches_onnxruntime(page: Page) -> None:
    samples, _ = soundfile.read(VOICE, dtype="float32")
    network = SpeechNetwork()
    state, context, expected = network.start(), np.zeros(CONTEXT, np.float32), []
    windows = samples[: len(samples) // WINDOW * WINDOW].reshape(-1, WINDOW)
    for window in windows:
        probability, state = network.probability(np.concatenate([context, window]), state)
        expected.append(probability)
        context = window[-CONTEXT:]
    body = """const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
        const network = new lib.SpeechNetwork(lib.readWeights(bytes(given.weights)));
        const x = new Float32Array(bytes(given.samples));
        const got = [];
        for (let i = 0; i < x.length; i += lib.WINDOW) got.push(network.probability(x.subarray(i, i + lib.WINDOW)));
        return got"""
    given = {name: base64.b64encode(data).decode() for name, data in
             (("weights", packed_weights()), ("samples", windows.astype("<f4").tobytes()))}  # fmt: skip
    got = call(page, "shared/audio/speech-network.js", body, given)
    assert max(expected) > 0.9 and min(expected) < 0.1, expected
    np.testing.assert_allclose(got, expected, atol=1e-3)


def test_onset_needs_speech_without_pause(page: Page) -> None:
    """Windows of 32 ms until speech is confirmed; null: not confirmed."""
    body = """const windows = (list, loud = 1, isHidden = false) => {
            const onset = new lib.Onset();
            onset.confirmMs = given;
            const at = list.findIndex((p) => onset.add(p, Uint8Array.of(loud, loud, loud, loud), isHidden));
            return at < 0 ? null : at + 1;
        };
        const speech = Array(30).fill(0.9), syllables = speech.map((p, i) => (i % 5 ? p : 0));
        const led = [0.2, 0.2, ...speech], quiet = [0, 0, ...speech], fading = [0.45, ...Array(29).fill(0.2)];
        return [windows(speech), windows(led), windows(quiet, 0), windows(speech, 1, true),
            windows(syllables), windows(Array(30).fill(0.39)), windows(fading)]"""
    assert call(page, "shared/audio/onset.js", body, 200) == [7, 7, 9, 5, None, None, None]
    assert call(page, "shared/audio/onset.js", body, 320)[0] == 11


def test_echo_is_told_from_other_sound(page: Page) -> None:
    """A third of the played sound 80 ms later, then the user over it; only the user; a quiet user over a hundredth of
    it in the first half second, without and with the browser's echo canceller."""
    body = """let seed = 1;
        const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
        const sound = (pace) => Array.from({ length: 600 }, (_, frame) => {
            const syllable = Math.sin(frame / pace + 3 * Math.sin(frame / 50)) > 0 ? 1 : 0.01;
            return Float32Array.from({ length: 14 }, () => syllable * (0.3 + random()));
        });
        const [played, user] = [sound(8), sound(5)];
        const others = (gain, begin = 400, level = 2, isCancelled = false) => {
            const echo = Object.assign(new lib.Echo(), { isCancelled }), found = [];
            for (let at = 0; at < 600; at += 4) {
                const window = (one) =>
                    Float32Array.from({ length: 56 }, (_, i) => one(at + Math.floor(i / 14), i % 14));
                const mic = window((frame, band) => gain * (played[frame - 10]?.[band] ?? 0)
                    + (frame >= begin || !gain ? level * user[frame][band] : 0));
                echo.add(mic, window((frame, band) => played[frame][band]));
                let n = 0;
                for (let frame = 0; frame < 4; frame++) n += echo.isPresent && !echo.isOther(frame, mic) ? 0 : 1;
                found.push(n);
            }
            const sum = (from, to) => found.slice(from, to).reduce((all, one) => all + one, 0) / (4 * (to - from));
            return begin === 400 ? [sum(50, 100), sum(100, 120)] : [sum(6, 15)];
        };
        return [...others(0.3), ...others(0), ...others(0.01, 24, 0.4), ...others(0.01, 24, 0.4, true)]"""
    echo, user_over_echo, user, later, unsure, cancelled = call(page, "shared/audio/echo.js", body)
    assert echo < 0.05, f"expected echo, got other sound in {echo:.0%} of the frames"
    assert user_over_echo > 0.4 and user > 0.9 and later > 0.9, (user_over_echo, user, later)
    assert unsure < 0.2 and cancelled > 0.4, (unsure, cancelled)


def test_microphone_tells_whether_the_browser_cancels_echo(page: Page) -> None:
    body = """const context = new AudioContext(), { stream } = context.createMediaStreamDestination();
        const capture = (await lib.Capture.load(context), new lib.Capture(context, {})), [track] = stream.getTracks();
        const found = [capture.isCancelled], settings = [{}, { echoCancellation: false }, { echoCancellation: true }];
        capture.use(stream);
        for (const one of settings) found.push(((track.getSettings = () => one), capture.isCancelled));
        return (capture.close(), await context.close(), [...found, capture.isCancelled])"""
    assert call(page, "shared/audio/capture.js", body) == [False, False, False, True, False]


def test_heard_text_ends_with_the_last_whole_word_that_was_played(page: Page) -> None:
    body = """const text = "One two three. Four five six.";
        const marks = [{ sound_ms: 0, characters: 0 }, { sound_ms: 1000, characters: 15 }];
        return given.map((ms) => lib.heardText(text, marks, 2000, ms))"""
    heard = call(page, "live/conversation/heard.js", body, [0, 500, 1000, 1500, 2000])
    assert heard == ["", "One two", "One two three. ", "One two three. Four ", "One two three. Four five six."], heard


def test_each_unit_of_pieces_gets_one_picture_and_its_demand(page: Page) -> None:
    """The unit ends with the tenth piece, and early with the fourteenth: the next one begins there."""
    body = """const out = new lib.Outgoing(); const found = [];
        for (let n = 1; n <= 30; n++) {
            if (n === 16) out.speakOnce();
            const { picture, snap } = out.next(1600);
            const demands = out.demands(false);
            out.add(1600, demands);
            found.push([picture, snap, Boolean(demands.force_speak)]);
            out.answered([10, 14, 24].includes(n));
        }
        const short = [...Array(25).keys()].map(() => { const due = out.next(640); out.add(640, {}); return due; });
        const lengths = ["off", "auto"].flatMap((early_unit) => [false, true].map((isNear) =>
            lib.Outgoing.length({ early_unit }, isNear)));
        const whole = out.next(16000); out.listenOnce(); const [first, all] = [out.demands(false), out.demands(true)];
        out.add(16000, first);
        return { found, short, lengths, whole, first, all, after: out.demands(false) };"""
    got = call(page, "live/conversation/outgoing.js", body)
    numbers = [[n for n, one in enumerate(got["found"], 1) if one[k]] for k in range(3)]
    assert numbers == [[6, 20, 30], [5, 19, 29], list(range(16, 25))], numbers
    assert got["lengths"] == [16000, 16000, 1600, 640]
    assert [sum(one[k] for one in got["short"]) for k in ("picture", "snap")] == [1, 1], got["short"]
    assert got["whole"] == {"picture": True, "snap": False}
    assert (got["first"], got["all"], got["after"]) == ({"force_listen": True}, {"force_listen": True}, {})


def test_end_of_speech_is_found_by_its_level(page: Page) -> None:
    """As in the client of the shell; a click is no speech."""
    rng = np.random.default_rng(0)
    parts = ((1, 0.003), (0.5, 0.1), (0.5, 0.003), (0.01, 0.5), (0.99, 0.003))
    sound = np.concatenate([level * rng.standard_normal(int(16_000 * seconds)) for seconds, level in parts])
    body = """const speech = new lib.SpeechEnd(); const before = speech.endMs;
        for (let at = 0; at < given.length; at += 1600) speech.add(Float32Array.from(given.slice(at, at + 1600)));
        return [before, speech.endMs, speech.ms];"""
    before, end_ms, ms = call(page, "live/conversation/speech-end.js", body, sound.round(5).tolist())
    assert before is None and abs(end_ms - 1500) <= 11 and ms == 3000, (before, end_ms, ms)


def test_parts_of_a_wait_match_the_client(page: Page) -> None:
    stages = {"wait": 5.0, "first_sound": 75.0, "first_vocoder": 20.0}
    given = {"stages": stages, "lag_ms": 30.0, "shift_ms": 400.0}
    body = "return lib.waitOf(given, { sinceMs: 250, firstSound: 104 });"
    expected = {"alignment": 250, "saved": 400, "model": 80, "vocoder": 20, "transport": 4}
    assert call(page, "live/conversation/units.js", body, given) == expected
