"""Speech segments: the rules on given probabilities, the network against silero-vad's TorchScript file, real sound."""

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
from worker.vad_network import CONTEXT, WINDOW, SpeechNetwork, shared_network

MAX_SEGMENT = 30 * 16_000
MS = 16


class ProbabilityFromSample(SpeechNetwork):
    """A window's probability is its last sample. Checks that the context is the end of the previous window."""

    def __init__(self) -> None:
        pass

    def probability(self, sound: np.ndarray, state: np.ndarray) -> tuple[float, np.ndarray]:
        assert sound.shape == (CONTEXT + WINDOW,) and sound.dtype == np.float32
        before = state[0, 0, -1]
        assert sound[CONTEXT - 1] == before, f"context: expected {before}, got {sound[CONTEXT - 1]}"
        return float(sound[-1]), np.full_like(state, sound[-1])


def sound_with(probabilities: Sequence[float], n_more: int = 0) -> np.ndarray:
    """Sound whose windows get these probabilities, then `n_more` samples; all samples differ."""
    sound = np.arange(len(probabilities) * WINDOW + n_more, dtype=np.float32) / 2**12
    sound[WINDOW - 1 :: WINDOW][: len(probabilities)] = probabilities
    return sound


def comparable(events: Sequence[VoiceEvent]) -> list[tuple]:
    """Events as values that support ==."""
    return [("ended", e.samples.tobytes()) if isinstance(e, SpeechEnded) else (type(e),) for e in events]


def start_of(ended: SpeechEnded, sound: np.ndarray) -> int:
    """Index of a segment's first sample in the sound, which must contain the segment once."""
    data, part = sound.tobytes(), ended.samples.tobytes()
    assert data.count(part) == 1, f"expected the segment's samples once in the sound, got {data.count(part)} times"
    return data.index(part) // sound.itemsize


def detect(
    sound: np.ndarray, settings: VoiceSettings, cuts: Sequence[int] = (), network: SpeechNetwork | None = None
) -> list[VoiceEvent]:
    """Events of a new detector that gets the sound in pushes that begin at `cuts`."""
    detector = VoiceDetector(settings, network or ProbabilityFromSample())
    return [event for piece in np.split(sound, cuts) if len(piece) for event in detector.push(piece)]


def expected_events(sound: np.ndarray, settings: VoiceSettings) -> list[tuple]:
    """A second implementation of the rules, over the whole sound at once."""
    p = sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW)[:, -1].tolist()
    below = max(settings.threshold - 0.15, 0.01)
    events: list[tuple] = []
    free_from = i = 0
    while i < len(p):
        if p[i] < settings.threshold:
            i += 1
            continue
        first = max(i * WINDOW - settings.speech_pad_ms * MS, free_from)
        events.append((SpeechStarted,))
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


# Exact in float32, below and above every threshold in the test.
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
def test_events_do_not_depend_on_how_sound_is_split(
    runs: list[tuple[float, int]], settings: VoiceSettings, cuts: list[int], n_more: int
) -> None:
    sound = sound_with([level for level, n in runs for _ in range(n)], n_more)
    cuts = sorted(cut for cut in cuts if cut < len(sound))
    got = comparable(detect(sound, settings, cuts))
    expected = expected_events(sound, settings)
    assert got == expected, f"expected {[e[0] for e in expected]}, got {[e[0] for e in got]}, or other samples"


def test_segment_holds_padding_speech_and_closing_silence() -> None:
    sound = sound_with([0, 0.375, 0.5, 0.9, 0.2, 0.25, 0.2, 0.9, 0.2, 0.2, 0, 0])
    settings = VoiceSettings(threshold=0.4, min_speech_ms=192, min_silence_ms=64, speech_pad_ms=10)
    started, ended = detect(sound, settings)
    assert started == SpeechStarted()
    assert np.array_equal(ended.samples, sound[2 * WINDOW - 160 : 10 * WINDOW]), "expected pad, speech and two windows"


def test_closing_silence_does_not_count_as_speech() -> None:
    """One window of speech is below the minimum although 16 windows of silence follow it."""
    settings = VoiceSettings(min_speech_ms=33, min_silence_ms=500)
    assert detect(sound_with([0, 0.9, *[0.0] * 16]), settings) == [SpeechStarted(), SpeechDiscarded()]


def test_one_push_returns_every_segment() -> None:
    settings = VoiceSettings(min_silence_ms=32, min_speech_ms=64)
    sound = sound_with([0.9, 0.9, 0, 0.9, 0, 0.9, 0.9, 0.9, 0])
    events = detect(sound, settings)
    kinds = [type(event) for event in events]
    assert kinds == [SpeechStarted, SpeechEnded, SpeechStarted, SpeechDiscarded, SpeechStarted, SpeechEnded]
    starts = [start_of(events[n], sound) for n in (1, 5)]
    assert starts == [0, 5 * WINDOW], "expected no padding after the end of a segment"


def test_silence_count_restarts_after_speech() -> None:
    sound = sound_with([0.9, 0, 0, 0.9, 0, 0.9, 0, 0])
    events = detect(sound, VoiceSettings(min_speech_ms=0, min_silence_ms=64))
    assert comparable(events) == expected_events(sound, VoiceSettings(min_speech_ms=0, min_silence_ms=64))
    assert len(events[3].samples) == 5 * WINDOW, f"expected one silent window not to end the segment, got {events[3]}"


def test_segment_ends_at_30_seconds() -> None:
    sound = sound_with([0.0] + [0.9] * 1000 + [0.0] * 16)
    _, ended, _, rest = detect(sound, VoiceSettings())
    assert MAX_SEGMENT - WINDOW < len(ended.samples) <= MAX_SEGMENT, f"expected about 30 s, got {len(ended.samples)}"
    begin = start_of(rest, sound)
    assert begin == start_of(ended, sound) + len(ended.samples), "expected consecutive segments without gap or overlap"
    assert np.array_equal(rest.samples, sound[begin:])


def test_memory_stays_bounded() -> None:
    """The detector keeps neither past sound nor the pushed arrays."""
    detector = VoiceDetector(VoiceSettings(speech_pad_ms=1000), ProbabilityFromSample())
    detector.push(sound_with([0.0] * 20_000 + [0.9] * 3))
    kept = [value for value in vars(detector).values() if isinstance(value, np.ndarray)] + detector._segment
    owners = {id(array if array.base is None else array.base): array for array in kept}
    n_bytes = sum((array if array.base is None else array.base).nbytes for array in owners.values())
    assert n_bytes < 300_000, f"expected some seconds of sound, got {n_bytes} bytes"


def test_segments_are_copies() -> None:
    sound = sound_with([0.9] * 4 + [0.0])
    original = sound.copy()
    detector = VoiceDetector(VoiceSettings(min_silence_ms=32), ProbabilityFromSample())
    detector.push(sound[:1000])
    sound[:1000] = -1
    (ended,) = detector.push(sound[1000:])
    sound[:] = -1
    assert np.array_equal(ended.samples, original), "expected the samples at the time of the push"


def test_reset_restores_the_initial_state() -> None:
    detector = VoiceDetector(VoiceSettings(min_silence_ms=32), ProbabilityFromSample())
    sound = sound_with([0.0, 0.9, 0.9, 0.9, 0.9, 0.0])
    expected = comparable(detector.push(sound))
    detector.push(sound_with([0.9, 0.9], n_more=100))
    detector.reset()
    assert comparable(detector.push(sound)) == expected, "expected the events of a new detector"


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
def test_refuses_invalid_sound_without_effect(samples: object) -> None:
    sound = sound_with([0.0, 0.9, 0.9, 0.9, 0.9, 0.0])
    detector = VoiceDetector(VoiceSettings(min_silence_ms=32), ProbabilityFromSample())
    events = detector.push(sound[:700])
    with pytest.raises(AudioError, match=r"expected .*, got "):
        detector.push(samples)
    events += detector.push(sound[700:])
    assert comparable(events) == expected_events(sound, detector.settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("threshold", value) for value in (0, 0.04, 1.01, float("nan"), "0.7", True)],
        *[("min_speech_ms", value) for value in (-1, 10_001, 1.5)],
        *[("min_silence_ms", value) for value in (-1, 10_001, None)],
        *[("speech_pad_ms", value) for value in (-1, 1_001, "30")],
    ],
)
def test_refuses_settings_outside_their_range(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"{name}: expected .* number .*, got "):
        VoiceSettings(**{name: value})


def test_default_settings() -> None:
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


def windows_of(sound: np.ndarray) -> list[np.ndarray]:
    """The network's inputs [64 + 512] for consecutive windows."""
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), sound])
    return [padded[at : at + CONTEXT + WINDOW] for at in range(0, len(sound) - WINDOW + 1, WINDOW)]


def test_probabilities_equal_the_torchscript_model(greeting: np.ndarray) -> None:
    """The package ships the same network as TorchScript; differences are float32 rounding."""
    path = distribution("silero-vad").locate_file("silero_vad/data/silero_vad.jit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torchscript = torch.jit.load(str(path)).eval()
    sound = np.concatenate([greeting, 3 * greeting, np.zeros(8_000, np.float32)])
    network = shared_network()
    state, seen = network.start(), []
    for n, window in enumerate(windows_of(sound)):
        got, state = network.probability(window, state)
        with torch.inference_mode():
            expected = torchscript(torch.from_numpy(window[CONTEXT:].copy()), 16_000).item()
        assert abs(got - expected) < 1e-4, f"window {n}: expected {expected}, got {got}"
        seen.append(got)
    assert min(seen) < 0.05 and max(seen) > 0.95, f"expected silence and speech, got {min(seen)} to {max(seen)}"


def test_network_keeps_no_state_between_calls(greeting: np.ndarray) -> None:
    network = shared_network()
    assert network is shared_network(), "expected one network in the process"
    sound, state = greeting[8_000 : 8_000 + CONTEXT + WINDOW], network.start()
    first, after = network.probability(sound, state)
    kept = after.copy()
    assert network.probability(greeting[: CONTEXT + WINDOW], after)[0] != first
    assert network.probability(sound, state)[0] == first, "expected equal results from equal states"
    assert np.array_equal(kept, after) and not state.any(), "expected the passed states unchanged"


def test_finds_two_sentences_as_two_segments(conversation: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
    sound, sentences = conversation
    events = detect(sound, VoiceSettings(), network=shared_network())
    assert [type(event) for event in events] == [SpeechStarted, SpeechEnded] * 2
    for (begin, end), ended in zip(sentences, events[1::2], strict=True):
        start = start_of(ended, sound)
        off_ms = (start - begin) / MS
        assert -100 <= off_ms <= 100, f"start: expected within 100 ms of {begin}, got {off_ms:+.0f} ms"
        # 500 ms of silence are sixteen windows.
        off_ms = (start + len(ended.samples) - end) / MS - 512
        assert -150 <= off_ms <= 150, f"end: expected within 150 ms of {end} and silence, got {off_ms:+.0f} ms"


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
def test_noise_is_not_detected_as_speech(name: str) -> None:
    events = detect(noises()[name].astype(np.float32), VoiceSettings(), network=shared_network())
    assert events == [], f"{name}: expected no event, got {events}"


@pytest.mark.parametrize("length", [1, 160, 511, 512, 513, 8_000, 16_000])
def test_push_length_does_not_change_events(
    conversation: tuple[np.ndarray, list[tuple[int, int]]], length: int
) -> None:
    sound = conversation[0][: 4 * 16_000 if length > 1 else 16_000]
    whole = detect(sound, VoiceSettings(min_silence_ms=100), network=shared_network())
    cut = detect(sound, VoiceSettings(min_silence_ms=100), range(length, len(sound), length), shared_network())
    assert comparable(cut) == comparable(whole), f"pushes of {length} samples: expected the events of a single push"


def test_interleaved_sessions_stay_independent(conversation: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
    sounds = [conversation[0], conversation[0][20_000:], conversation[0] * 0.3]
    alone = [comparable(VoiceDetector().push(sound)) for sound in sounds]
    detectors, together = [VoiceDetector() for _ in sounds], [[] for _ in sounds]
    for at in range(0, len(sounds[0]), 3_000):
        for detector, sound, events in zip(detectors, sounds, together, strict=True):
            if at < len(sound):
                events += comparable(detector.push(sound[at : at + 3_000]))
    assert together == alone, "expected each session to get the events it gets alone"


def test_threads_can_share_the_network(conversation: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
    expected = comparable(VoiceDetector().push(conversation[0]))
    got: list[list[tuple]] = []
    threads = [threading.Thread(target=lambda: got.append(comparable_events(conversation[0]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 3


def comparable_events(sound: np.ndarray) -> list[tuple]:
    return comparable(detect(sound, VoiceSettings(), range(700, len(sound), 700), shared_network()))


def test_detects_speech_after_very_loud_sound(greeting: np.ndarray) -> None:
    detector = VoiceDetector()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detector.push(np.random.default_rng(2).normal(0, 2_000, 16_000).astype(np.float32))
        events = detector.push(np.concatenate([np.zeros(32_000, np.float32), greeting, np.zeros(16_000, np.float32)]))
    assert isinstance(events[-1], SpeechEnded), f"expected the greeting to be detected, got {events}"


def test_detector_loads_neither_silero_vad_nor_torch(root: Path) -> None:
    """Importing silero_vad would set torch to one thread for the whole process."""
    code = (
        "import sys, numpy\n"
        "from worker.chat.vad import VoiceDetector\n"
        "print('onnxruntime' in sys.modules)\n"
        "VoiceDetector().push(numpy.zeros(2000, numpy.float32))\n"
        "print('onnxruntime' in sys.modules, 'silero_vad' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    expected = ["False", "True", "False", "False"]
    assert done.stdout.split() == expected, f"expected {expected}; got {done.stdout}{done.stderr}"


def test_windows_of_several_sounds_at_once(greeting: np.ndarray) -> None:
    network = shared_network()
    sounds = np.stack([greeting[at : at + CONTEXT + WINDOW] for at in (0, 4_000, 9_000)])
    states = np.random.default_rng(0).normal(0, 0.1, (2, 3, 128)).astype(np.float32)
    got, after = network.probabilities(sounds, states)
    for row, sound in enumerate(sounds):
        expected, state = network.probability(sound, states[:, row : row + 1])
        np.testing.assert_allclose(got[row], expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(after[:, row : row + 1], state, rtol=0, atol=1e-6)
