"""Speech segments: the rules on made-up probabilities, the network against the released one, real sound end to end."""

import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import strategies as st

from models.errors import AudioError, SettingsError
from worker.chat.vad import SpeechDiscarded, SpeechEnded, SpeechStarted, VoiceDetector, VoiceEvent, VoiceSettings
from worker.chat.vad_network import CONTEXT, WINDOW, NetworkState, SpeechNetwork, shared_network

MAX_SEGMENT = 30 * 16_000
MS = 16


class Scripted(SpeechNetwork):
    """A window's probability is its last sample; what was before the window has to be there too."""

    def __init__(self) -> None:
        pass

    def probability(self, sound: np.ndarray, state: NetworkState) -> tuple[float, NetworkState]:
        assert sound.shape == (CONTEXT + WINDOW,) and sound.dtype == np.float32
        assert sound[CONTEXT - 1] == state.hidden[-1], f"context: expected {state.hidden[-1]}, got {sound[CONTEXT - 1]}"
        return float(sound[-1]), NetworkState(sound[-128:].copy(), state.cell)


def scripted(probabilities: Sequence[float], n_more: int = 0) -> np.ndarray:
    """Sound whose windows get these probabilities, and some more samples; every sample can be told from the others."""
    sound = np.arange(len(probabilities) * WINDOW + n_more, dtype=np.float32) / 2**12
    sound[WINDOW - 1 :: WINDOW][: len(probabilities)] = probabilities
    return sound


def described(events: Sequence[VoiceEvent]) -> list[tuple]:
    """Events as values that compare."""
    return [
        ("ended", e.samples.tobytes()) if isinstance(e, SpeechEnded) else (type(e), *vars(e).values()) for e in events
    ]


def heard(
    sound: np.ndarray, settings: VoiceSettings, cuts: Sequence[int] = (), network: SpeechNetwork | None = None
) -> list[VoiceEvent]:
    detector = VoiceDetector(settings, network or Scripted())
    return [event for piece in np.split(sound, cuts) if len(piece) for event in detector.push(piece)]


def by_the_book(sound: np.ndarray, settings: VoiceSettings) -> list[tuple]:
    """The rules on the whole sound at once, in windows counted from its start."""
    p = sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW)[:, -1].tolist()
    below = max(settings.threshold - 0.15, 0.01)
    events: list[tuple] = []
    free_from = i = 0
    while i < len(p):
        if p[i] < settings.threshold:
            i += 1
            continue
        first = max(i * WINDOW - settings.speech_pad_ms * MS, free_from)
        events.append((SpeechStarted, first))
        for end in range(i + 1, len(p)):
            quiet = 0
            while end - quiet > i and p[end - quiet] < below:
                quiet += 1
            over = quiet > 0 and quiet * WINDOW >= settings.min_silence_ms * MS
            if over or (end + 2) * WINDOW - first > MAX_SEGMENT:
                spoken = (end + 1 - quiet - i) * WINDOW
                free_from = (end + 1) * WINDOW
                enough = spoken >= settings.min_speech_ms * MS
                events.append(("ended", sound[first:free_from].tobytes()) if enough else (SpeechDiscarded,))
                i = end + 1
                break
        else:
            break
    return events


# Exact in float32, on both sides of every bound below.
LEVELS = st.sampled_from([0.0, 0.015625, 0.25, 0.34375, 0.359375, 0.5, 0.59375, 0.609375, 0.734375, 0.75, 0.875])
RUNS = st.lists(st.tuples(LEVELS | st.sampled_from([0.0, 0.875]), st.sampled_from([1, 1, 2, 3, 5, 9])), max_size=16)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    runs=RUNS,
    settings=st.builds(
        VoiceSettings,
        threshold=st.sampled_from([0.125, 0.4, 0.5, 0.75]),
        min_speech_ms=st.sampled_from([0, 32, 33, 64, 128]),
        min_silence_ms=st.sampled_from([0, 31, 32, 64, 100, 160]),
        speech_pad_ms=st.sampled_from([0, 1, 30, 70, 300]),
    ),
    cuts=st.lists(st.integers(1, 40_000), max_size=8),
    n_more=st.integers(0, WINDOW - 1),
)
def test_rules_hold_however_sound_is_cut(
    runs: list[tuple[float, int]], settings: VoiceSettings, cuts: list[int], n_more: int
) -> None:
    sound = scripted([level for level, n in runs for _ in range(n)], n_more)
    cuts = sorted(cut for cut in cuts if cut < len(sound))
    got = described(heard(sound, settings, cuts))
    expected = by_the_book(sound, settings)
    assert got == expected, f"expected {[e[0] for e in expected]}, got {[e[0] for e in got]}; or other samples"


def test_a_segment_sample_by_sample() -> None:
    sound = scripted([0, 0.375, 0.5, 0.9, 0.2, 0.25, 0.2, 0.9, 0.2, 0.2, 0, 0])
    settings = VoiceSettings(threshold=0.4, min_speech_ms=192, min_silence_ms=64, speech_pad_ms=10)
    started, ended = heard(sound, settings)
    assert started == SpeechStarted(2 * WINDOW - 160)
    assert np.array_equal(ended.samples, sound[2 * WINDOW - 160 : 10 * WINDOW]), "expected pad, speech and two windows"
    assert ended.duration_ms == 10 + 8 * 32


def test_closing_silence_is_no_speech() -> None:
    """One window of speech stays short however long the silence is that ends it."""
    settings = VoiceSettings(min_speech_ms=33, min_silence_ms=500)
    assert heard(scripted([0, 0.9, *[0.0] * 16]), settings) == [SpeechStarted(WINDOW - 30 * MS), SpeechDiscarded()]


def test_every_segment_of_one_push_comes_back() -> None:
    settings = VoiceSettings(min_silence_ms=32, min_speech_ms=64)
    events = heard(scripted([0.9, 0.9, 0, 0.9, 0, 0.9, 0.9, 0.9, 0]), settings)
    kinds = [type(event) for event in events]
    assert kinds == [SpeechStarted, SpeechEnded, SpeechStarted, SpeechDiscarded, SpeechStarted, SpeechEnded]
    assert [event.at_sample for event in events[::2]] == [0, 3 * WINDOW, 5 * WINDOW], "expected no pad behind an end"


def test_silence_is_counted_anew_in_every_segment() -> None:
    sound = scripted([0.9, 0, 0, 0.9, 0, 0.9, 0, 0])
    events = heard(sound, VoiceSettings(min_speech_ms=0, min_silence_ms=64))
    assert described(events) == by_the_book(sound, VoiceSettings(min_speech_ms=0, min_silence_ms=64))
    assert len(events[3].samples) == 5 * WINDOW, f"expected one silent window not to end it, got {events[3]}"


def test_a_segment_ends_at_30_seconds() -> None:
    sound = scripted([0.0] + [0.9] * 1000 + [0.0] * 16)
    started, ended, again, rest = heard(sound, VoiceSettings())
    assert MAX_SEGMENT - WINDOW < len(ended.samples) <= MAX_SEGMENT, f"expected about 30 s, got {len(ended.samples)}"
    assert again.at_sample == started.at_sample + len(ended.samples), "expected nothing lost and nothing twice"
    assert np.array_equal(rest.samples, sound[again.at_sample :])


def test_memory_stays_bounded() -> None:
    """Neither sound that has gone by nor the array it came in is kept."""
    detector = VoiceDetector(VoiceSettings(speech_pad_ms=1000), Scripted())
    detector.push(scripted([0.0] * 20_000 + [0.9] * 3))
    kept = [value for value in vars(detector).values() if isinstance(value, np.ndarray)] + detector._segment
    owners = {id(array if array.base is None else array.base): array for array in kept}
    n_bytes = sum((array if array.base is None else array.base).nbytes for array in owners.values())
    assert n_bytes < 300_000, f"expected some seconds of sound, got {n_bytes} bytes"


def test_segments_are_copies() -> None:
    sound = scripted([0.9] * 4 + [0.0])
    original = sound.copy()
    detector = VoiceDetector(VoiceSettings(min_silence_ms=32), Scripted())
    detector.push(sound[:1000])
    sound[:1000] = -1
    (ended,) = detector.push(sound[1000:])
    sound[:] = -1
    assert np.array_equal(ended.samples, original), "expected the sound as it was when it was pushed"


def test_reset_forgets() -> None:
    detector = VoiceDetector(VoiceSettings(min_silence_ms=32), Scripted())
    sound = scripted([0.0, 0.9, 0.9, 0.9, 0.9, 0.0])
    expected = described(detector.push(sound))
    detector.push(scripted([0.9, 0.9], n_more=100))
    detector.reset()
    assert described(detector.push(sound)) == expected, "expected a reset detector to be like a new one"


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(600, np.int16),
        np.zeros((2, 600), np.float32),
        np.full(600, np.nan, np.float32),
        np.full(600, np.inf, np.float32),
        [0.0] * 600,
    ],
    ids=["integers", "stereo", "nan", "infinite", "list"],
)
def test_odd_sound_is_refused_and_not_heard(samples: object) -> None:
    sound = scripted([0.0, 0.9, 0.9, 0.9, 0.9, 0.0])
    detector = VoiceDetector(VoiceSettings(min_silence_ms=32), Scripted())
    events = detector.push(sound[:700])
    with pytest.raises(AudioError, match=r"expected .*, got "):
        detector.push(samples)
    events += detector.push(sound[700:])
    assert described(events) == by_the_book(sound, detector.settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("threshold", value) for value in (0, 0.04, 1.01, float("nan"), "0.7", True)],
        *[("min_speech_ms", value) for value in (-1, 10_001, 1.5)],
        *[("min_silence_ms", value) for value in (-1, 10_001, None)],
        *[("speech_pad_ms", value) for value in (-1, 1_001, "30")],
    ],
)
def test_settings_have_ranges(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"{name}: expected .* number .*, got "):
        VoiceSettings(**{name: value})


def test_defaults() -> None:
    assert VoiceSettings() == VoiceSettings(threshold=0.7, min_speech_ms=128, min_silence_ms=500, speech_pad_ms=30)


@pytest.fixture(scope="module")
def greeting(root: Path) -> np.ndarray:
    return soundfile.read(root / "tests/data/greeting.wav", dtype="float32")[0]


@pytest.fixture(scope="module")
def conversation(root: Path, greeting: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """A second of faint noise, a sentence, a second, another one, a second; and where the sentences are."""
    question = soundfile.read(root / "tests/data/question.wav", dtype="float32")[0]
    pause = np.zeros(16_000, np.float32)
    sound = np.concatenate([pause, greeting, pause, question, pause])
    sound += np.random.default_rng(0).normal(0, 1e-3, len(sound)).astype(np.float32)
    second = 32_000 + len(greeting)
    return sound, [(16_000, 16_000 + len(greeting)), (second, second + len(question))]


def test_the_network_is_the_released_one(greeting: np.ndarray) -> None:
    path = distribution("silero-vad").locate_file("silero_vad/data/silero_vad.jit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        released = torch.jit.load(str(path)).eval()
    sound = np.concatenate([greeting, 3 * greeting, np.zeros(8_000, np.float32)])
    network, before = shared_network(), np.zeros(CONTEXT, np.float32)
    state = network.start()
    for n, window in enumerate(sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW)):
        got, state = network.probability(np.concatenate([before, window]), state)
        with torch.inference_mode():
            expected = released(torch.from_numpy(window), 16_000).item()
        assert abs(got - expected) < 1e-5, f"window {n}: expected {expected}, got {got}"
        before = window[-CONTEXT:]


def test_the_network_remembers_nothing(greeting: np.ndarray) -> None:
    network = shared_network()
    assert network is shared_network(), "expected one network for the process"
    sound, state = greeting[8_000 : 8_000 + CONTEXT + WINDOW], network.start()
    first, after = network.probability(sound, state)
    kept = [part.copy() for part in after]
    assert network.probability(greeting[: CONTEXT + WINDOW], after)[0] != first
    assert network.probability(sound, state)[0] == first, "expected the same from the same state"
    assert all(np.array_equal(was, part) for was, part in zip(kept, after, strict=True)), "expected the state unwritten"


def test_two_sentences_are_two_segments(conversation: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
    sound, sentences = conversation
    events = heard(sound, VoiceSettings(), network=shared_network())
    assert [type(event) for event in events] == [SpeechStarted, SpeechEnded] * 2
    for (begin, end), started, ended in zip(sentences, events[::2], events[1::2], strict=True):
        off_ms = (started.at_sample - begin) / MS
        assert -100 <= off_ms <= 100, f"start: expected within 100 ms of {begin}, got {off_ms:+.0f} ms"
        # 500 ms of silence are sixteen windows.
        off_ms = (started.at_sample + len(ended.samples) - end) / MS - 512
        assert -150 <= off_ms <= 150, f"end: expected within 150 ms of {end} and silence, got {off_ms:+.0f} ms"
        expected = sound[started.at_sample : started.at_sample + len(ended.samples)]
        assert np.array_equal(ended.samples, expected), "expected the sound itself"


def noises() -> dict[str, np.ndarray]:
    t = np.arange(4 * 16_000) / 16_000
    noise = np.random.default_rng(1).normal(size=len(t)).clip(-3, 3)
    click = np.zeros(len(t))
    click[::8_000] = 0.9
    return {
        "silence": np.zeros(len(t)),
        "faint noise": noise * 0.003,
        "loud noise": noise * 0.3,
        "hum": 0.3 * np.sin(2 * np.pi * 50 * t),
        "tone": 0.5 * np.sin(2 * np.pi * 440 * t),
        "clicks": click,
        "direct current": np.ones(len(t)),
    }


@pytest.mark.parametrize("name", noises())
def test_noise_is_no_speech(name: str) -> None:
    events = heard(noises()[name].astype(np.float32), VoiceSettings(), network=shared_network())
    assert events == [], f"{name}: expected no event, got {events}"


@pytest.mark.parametrize("length", [1, 160, 511, 512, 513, 8_000, 16_000])
def test_pushes_of_any_length(conversation: tuple[np.ndarray, list[tuple[int, int]]], length: int) -> None:
    sound = conversation[0][: 4 * 16_000 if length > 1 else 16_000]
    whole = heard(sound, VoiceSettings(min_silence_ms=100), network=shared_network())
    cut = heard(sound, VoiceSettings(min_silence_ms=100), range(length, len(sound), length), shared_network())
    assert described(cut) == described(whole), f"pushes of {length}: expected the events of a single push"


def test_sessions_do_not_hear_each_other(conversation: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
    sounds = [conversation[0], conversation[0][20_000:], conversation[0] * 0.3]
    alone = [described(VoiceDetector().push(sound)) for sound in sounds]
    detectors, together = [VoiceDetector() for _ in sounds], [[] for _ in sounds]
    for at in range(0, len(sounds[0]), 3_000):
        for detector, sound, events in zip(detectors, sounds, together, strict=True):
            if at < len(sound):
                events += described(detector.push(sound[at : at + 3_000]))
    assert together == alone, "expected interleaved sessions to get the events that each gets alone"


def test_threads_share_the_network(conversation: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
    expected = described(VoiceDetector().push(conversation[0]))
    got: list[list[tuple]] = []
    threads = [threading.Thread(target=lambda: got.append(heard_in_thread(conversation[0]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 3


def heard_in_thread(sound: np.ndarray) -> list[tuple]:
    return described(heard(sound, VoiceSettings(), range(700, len(sound), 700), shared_network()))


def test_very_loud_sound_does_no_lasting_harm(greeting: np.ndarray) -> None:
    detector = VoiceDetector()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detector.push(np.random.default_rng(2).normal(0, 2_000, 16_000).astype(np.float32))
        events = detector.push(np.concatenate([np.zeros(32_000, np.float32), greeting, np.zeros(16_000, np.float32)]))
    assert isinstance(events[-1], SpeechEnded), f"expected the greeting to be heard, got {events}"


def test_torch_keeps_its_threads(root: Path) -> None:
    """silero-vad sets them to one for the whole process as soon as it is imported."""
    code = (
        "import sys, numpy, torch; torch.set_num_threads(3)\n"
        "from worker.chat.vad import VoiceDetector\n"
        "VoiceDetector().push(numpy.zeros(2000, numpy.float32))\n"
        "print(torch.get_num_threads(), 'silero_vad' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["3", "False"], f"expected 3 threads, no silero_vad; got {done.stdout}{done.stderr}"
