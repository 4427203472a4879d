"""The pages' modules of sound: frames, sample rates, playout, loudness, and the user's voice."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from playwright.sync_api import Page

from server.routes.speech_weights import packed_weights
from tests.e2e.modules.loading import call
from worker.protocol.wire import Sound, pack_frame, unpack_frame
from worker.vad_network import CONTEXT, WINDOW, SpeechNetwork

pytestmark = pytest.mark.programs

VOICE = Path(__file__).parents[3] / "assets" / "ref_audio" / "default.wav"


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


# --- loudness --------------------------------------------------------------------------------------


def test_loudness_of_a_sine(page: Page) -> None:
    """A sine at half scale has -9.03 dB; the weighting's constant is -0.69 dB."""
    body = """const step = (2 * Math.PI * 997) / 48000;
        const sine = Float32Array.from({ length: 48000 }, (_, i) => 0.5 * Math.sin(step * i));
        return [lib.loudness(sine), lib.loudness(new Float32Array(100))]"""
    loud, silent = call(page, "shared/audio/channel.js", body)
    assert abs(loud - (-9.03 - 0.69)) < 0.02 and silent == -70, (loud, silent)


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


def test_units_of_the_microphone_end_at_an_edge(page: Page) -> None:
    """Units of 100 ms, with an edge every second."""
    body = """const context = new AudioContext(); await context.resume(); await lib.Capture.load(context);
        const units = [], capture = await new Promise((done) => {
          const one = new lib.Capture(context, { unit: ({ samples, end }) => {
            units.push([samples.length, end]);
            if (end > 20000) done(one);
          } }, 640);
          one.cut(1600, 3000 + 5 * 16000); one.run(true);
        });
        return (capture.close(), await context.close(), units)"""
    units = call(page, "shared/audio/capture.js", body)
    ends = [end for _, end in units]
    assert ends == list(np.cumsum([length for length, _ in units])), f"expected ends of whole units, got {units}"
    assert {3_000, 19_000} <= set(ends), f"expected ends at the edges, got {ends}"
    assert sum(length != 1_600 for length, _ in units) == 1, (
        f"expected one short unit, in front of the first edge, got {units}"
    )


def test_heard_text_ends_with_the_last_whole_word_that_was_played(page: Page) -> None:
    body = """const text = "One two three. Four five six.";
        const marks = [{ sound_ms: 0, characters: 0 }, { sound_ms: 1000, characters: 15 }];
        return given.map((ms) => lib.heardText(text, marks, 2000, ms))"""
    heard = call(page, "live/conversation/heard.js", body, [0, 500, 1000, 1500, 2000])
    assert heard == ["", "One two", "One two three. ", "One two three. Four ", "One two three. Four five six."], heard


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
