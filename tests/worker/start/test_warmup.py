"""The warm-up conversation: six steps, a line for each unit, and no effect on later sessions."""

import queue
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import soundfile

from models.graphs.region_graphs import compile_counters
from tests.models.stages.slot_copies import assert_fresh
from tests.worker.engine.failing_regions import Broken, broken, counted
from tests.worker.loop.engines import (
    ALOUD,
    Director,
    assert_same_events,
    make_config,
    make_parts,
    make_prompt,
    make_sound,
    short_speech,
    voice,
)
from worker.admission.unit_cost import measured_cost
from worker.config.session import WindowConfig
from worker.engine import Engine
from worker.loop.results import Event, Failure, StageTimes, UnitResult
from worker.loop.session_handle import ImageCutter
from worker.loop.sessions import Sessions
from worker.media import MediaError
from worker.start.voices import ReferenceSound
from worker.start.warmup import SOUND_REGIONS, SPEECH_REGIONS, WarmUpError, WarmUpMedia, warm_up
from worker.start.warmup_report import UnitTimes, WarmUpReport
from worker.start.warmup_session import WarmUpSession

ROOT = Path(__file__).parents[3]
MEDIA = WarmUpMedia(ROOT / "assets" / "warmup.mp4", ROOT / "assets" / "ref_audio" / "default.wav")
PATIENCE_S = 60.0
TALKING = ALOUD.model_copy(update={"window": WindowConfig(mode="basic", high_tokens=150, low_tokens=80), "seed": None})
MS = r"\d+\.\d+ms"
LINE = re.compile(
    r"\[warmup\] unit=(?P<number>\d+)/(?P<n>\d+) \| "
    rf"prefill: vis_proc={MS} vis_emb={MS} vis_feed=0\.0ms aud_proc={MS} aud_emb={MS} aud_feed={MS} total={MS} \| "
    rf"generate: llm={MS} tts_prep={MS} tts={MS} token2wav={MS} total={MS} \| "
    r'decision=(?P<decision>LISTEN|SPEAK) "(?P<text>.*)" \| elapsed=\d+\.\d+s remaining~\d+\.\d+s'
)


@pytest.fixture(autouse=True, scope="module")
def _short() -> Iterator[None]:
    """Short turns, and one second of the reference sound, since the small engine's context has no room for more."""
    audio_16k = ReferenceSound.audio_16k
    with short_speech(), mock.patch.object(ReferenceSound, "audio_16k", lambda sound: audio_16k(sound)[:16_000]):
        yield


def make_engine(observer: Any = None, n_slots: int = 2, **settings_: Any) -> Engine:
    config = make_config(n_slots, **{"session": TALKING, **settings_})
    return Engine(make_parts(config), config, observer=observer)


def warm(engine: Engine, n: int = 3, **given: Any) -> tuple[WarmUpReport, list[str]]:
    """Run the warm-up. Returns: its report and log lines."""
    lines: list[str] = []
    media = given.pop("media", MEDIA)
    report = warm_up(engine, media, voice=lambda sound: voice(0), log=lines.append, max_units=n, **given)
    return report, lines


def chat(engine: Engine, seed: int | None, n: int = 3) -> list[Event]:
    """The events of `n` units of a client's session with another voice."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    handle = engine.open("client", TALKING.model_copy(update={"seed": seed}), events.put).result(PATIENCE_S)
    handle.prepare(make_prompt(ref=1, speaker=1)).result(PATIENCE_S)
    received: list[Event] = []
    for number in range(n):
        handle.send(make_sound(number)).result(PATIENCE_S)
        while not received or not isinstance(received[-1], UnitResult | Failure) or len(outcomes(received)) <= number:
            received.append(events.get(timeout=PATIENCE_S))
    handle.close().result(PATIENCE_S)
    assert len(outcomes(received)) == n and not [one for one in received if isinstance(one, Failure)], received
    return received


def outcomes(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, UnitResult | Failure)]


def assert_clean(engine: Engine) -> None:
    """Assert that no session is open and that all slots are reset."""
    parts = engine.parts
    assert engine.n_free() == parts.n_slots, f"slots free: expected {parts.n_slots}, got {engine.n_free()}"
    assert parts.vocoder.n_free == parts.n_slots, f"vocoder slots free: got {parts.vocoder.n_free}"
    assert_fresh(parts.unit_steps.state, range(parts.n_slots))
    assert engine.mark_sessions().result(PATIENCE_S) == (0, {}), "expected nothing remembered of the warm-up"


# --- steps ---------------------------------------------------------------------------------------


def test_steps_and_lines() -> None:
    """All six steps run in order. Each unit has a line with exactly these keys. The report has the same values."""
    reported: list[tuple[str, int, int]] = []
    with make_engine(Director(listen=0.8, turn_end=0.0)) as engine:
        with mock.patch.object(ImageCutter, "cut", autospec=True, side_effect=ImageCutter.cut) as cut:
            report, lines = warm(engine, 5, progress=lambda *given: reported.append(given))
        assert_clean(engine)
    steps = [line.split()[1] for line in lines if re.match(r"\[warmup\] \(\d/6\)", line)]
    assert steps == [f"({number}/6)" for number in range(1, 7)], f"expected six steps, got {steps}"
    units = [match for line in lines if (match := LINE.fullmatch(line))]
    assert [(int(one["number"]), int(one["n"])) for one in units] == [(n, 5) for n in range(1, 6)], lines
    assert [one["decision"] for one in units] == report.decisions
    assert set(report.decisions) == {"LISTEN", "SPEAK"}, f"expected both, got {report.decisions}"
    assert report.n_units == len(report.texts) == len(report.times) == 5
    assert report.tts_triggered and not report.fallback_used and report.compiled_graphs == 0
    for decision, text, times in zip(report.decisions, report.texts, report.times, strict=True):
        assert min(times.vis_emb, times.aud_emb, times.aud_feed) > 0, times
        assert bool(text) == (decision == "SPEAK") == (times.tts > 0 and times.llm > 0), (decision, text, times)
    # A difference of two times: 0 for a unit during whose first one the process was paused.
    assert any(times.vis_proc > 0 for times in report.times), report.times
    last = rf"\[warmup\] ✓ omni duplex warmup complete \(total={report.total_s:.1f}s, tts_triggered=True\)"
    assert re.fullmatch(last, lines[-1]), lines[-1]
    assert ("units", 5, 5) in reported
    frames = [call.args[1] for call in cut.call_args_list]
    assert frames and all(frame.startswith(b"\xff\xd8\xff") for frame in frames), "expected JPEG pictures"
    assert len(set(frames)) == 5, f"expected another picture each unit, got {len(set(frames))} of 5"


def test_line_escapes_any_text() -> None:
    report = WarmUpReport()
    result = UnitResult("a", 1, False, 'Say "yes"\nor 不 and much more than that', False)
    report.add(result, UnitTimes.of(StageTimes(see=1, hear=2, prefill=3), vis_proc=4, aud_proc=5))
    line = report.line(4, 2.0)
    assert LINE.fullmatch(f"[warmup] {line}"), line
    assert r'"Say \"yes\"\nor 不 and m"' in line and "remaining~6.0s" in line and "total=15.0ms" in line, line


def test_it_ends_with_the_turn() -> None:
    session = TALKING.model_copy(update={"drain_s": 0})
    with make_engine(Director(listen=0.0, turn_end=1.0), n_slots=1, session=session) as engine:
        report, lines = warm(engine, 5)
        assert_clean(engine)
    assert report.n_units < 5, f"expected an end before the file's, got {report.n_units} units"
    assert not any("burst" in line for line in lines) and not report.n_burst_units, "expected no burst with one slot"


def test_burst_is_in_batches_of_every_size() -> None:
    with make_engine(Director(listen=0.0, turn_end=0.0), n_slots=3) as engine:
        mixed = (2, 3)  # of batches, as a GPU's table has them
        shapes = engine.parts.unit_steps.shapes
        together: list[int] = []
        feed = engine.parts.unit_steps.feed
        engine.parts.unit_steps.feed = lambda slots, *rest: together.append(len(slots)) or feed(slots, *rest)
        with mock.patch.object(type(engine.parts.unit_steps), "shapes", replace(shapes, batch=mixed)):
            report, lines = warm(engine, 2)
        assert_clean(engine)
    (line,) = [line for line in lines if "burst" in line]
    assert [(burst.n, burst.n_spoken) for burst in report.bursts] == [(2, 2), (3, 3), (3, 3)], report.bursts
    assert all(burst.seconds > 0 for burst in report.bursts) and len(report.lone) == 2, report
    assert all(load.n_jobs == 1 and load.seconds > 0 for load, _ in report.lone), report.lone
    assert measured_cost(report.lone, report.bursts) is not None
    assert report.n_burst_units == 2 + 3 + 3 and "2, 3, 3 sessions at once, 8 units, 8 of them spoken" in line, line
    last = [number for number, one in enumerate(lines) if LINE.fullmatch(one)][-1]
    assert lines.index(line) == last + 1 and "(5/6)" in lines[last + 2], "expected it after the units"


def test_a_brief_one_ends_once_the_model_has_spoken() -> None:
    session = TALKING.model_copy(update={"force_listen_count": 1})
    with make_engine(Director(listen=0.0, turn_end=0.0), session=session) as engine:
        report, _ = warm(engine, 4, briefly=True)
        assert_clean(engine)
    assert report.decisions == ["LISTEN", "SPEAK"] and report.n_burst_units == 2, report
    assert report.tts_triggered and not report.fallback_used


def test_units_that_are_measured_are_forced_to_speak() -> None:
    """The first session only listens unless it is forced. Units that start at different times share no call."""
    session = TALKING.model_copy(update={"force_listen_count": 100})
    with make_engine(Director(listen=0.0, turn_end=0.0), n_slots=3, session=session) as engine:
        with mock.patch.object(WarmUpSession, "send", autospec=True, side_effect=WarmUpSession.send) as send:
            report, lines = warm(engine, 2, briefly=True, measures=True)
        assert_clean(engine)
    forced = [one.args[0] for one in send.call_args_list if one.kwargs.get("speaks")]
    assert [forced.count(one) for one in dict.fromkeys(forced)] == [3, 1, 1], "expected 2 units alone, then 3 at once"
    assert set(report.decisions) == {"LISTEN"} and report.tts_triggered and not report.fallback_used, report
    assert report.cost is not None and 0 < report.cost.alone_s < report.cost.seconds(3), report.cost
    (line,) = [line for line in lines if "units that speak" in line]
    assert "alone" in line and "3 at once" in line and "sessions in time" in line, line


def test_burst_runs_once_if_every_size_is_captured() -> None:
    with make_engine(Director(listen=0.0, turn_end=0.0), n_slots=3) as engine:
        engine.parts.unit_steps.regions.seal()
        report, lines = warm(engine, 2)
        assert_clean(engine)
    (line,) = [line for line in lines if "burst" in line]
    assert report.n_burst_units == 3 and "burst: 3 sessions at once" in line, line


def test_file_longer_than_the_context() -> None:
    """Without eviction a full context is started again, so that a worker for short sessions still starts."""
    session = TALKING.model_copy(update={"window": WindowConfig(mode="off"), "generate_audio": False})
    with make_engine(Director(listen=0.0, turn_end=0.0), n_slots=1, session=session) as engine:
        feed, held = engine.parts.unit_steps.feed, []
        engine.parts.unit_steps.feed = lambda slots, *rest: (
            held.append(engine.parts.unit_steps.context_len(slots[0])) or feed(slots, *rest)
        )
        report, _ = warm(engine, 8)
        assert_clean(engine)
    begun_anew = sum(later < earlier for earlier, later in pairwise(held))
    assert report.n_units == 8 and begun_anew == 1, f"expected 8 units and one new beginning, got rows {held}"


# --- speech that no unit came to -----------------------------------------------------------------


@pytest.mark.parametrize("speaks", [True, False], ids=["listens only", "writes only"])
def test_runs_speech_regions_if_no_unit_spoke(speaks: bool) -> None:
    """They run on scratch slots, which no session uses."""
    session = TALKING.model_copy(update={"generate_audio": speaks})
    with make_engine(Director(listen=1.0 if speaks else 0.0), session=session) as engine:
        parts = engine.parts
        with counted(parts.unit_steps.regions) as speech_tokens, counted(parts.vocoder.regions) as sounds:
            report, lines = warm(engine)
        assert_clean(engine)
    assert report.fallback_used and not report.tts_triggered
    assert (set(report.decisions) == {"LISTEN"}) == speaks
    called = {name: n for name, n in {**speech_tokens, **sounds}.items() if name in (*SPEECH_REGIONS, *SOUND_REGIONS)}
    # A voice that is lent begins a turn with it, spoken or not.
    assert all(n == 1 or (name == "begin" and n > 1 and speaks) for name, n in called.items()), called
    (line,) = [line for line in lines if "(5/6)" in line]
    assert "did not speak" in line and all(name in line for name in called), line
    assert lines[-1].endswith("tts_triggered=False)")


def test_does_not_speak_without_a_reference_voice() -> None:
    with make_engine(Director(listen=0.0), n_slots=1) as engine:
        report, _ = warm(engine, media=WarmUpMedia(MEDIA.video))
        assert_clean(engine)
    assert report.fallback_used and not report.tts_triggered and "SPEAK" in report.decisions


# --- effect on others ------------------------------------------------------------------------------


def test_leaves_later_sessions_unchanged() -> None:
    """All ids and samples are equal, with and without a seed, after few and after many units."""
    by_warmups: dict[int, list[list[Event]]] = {}
    for n in (0, 3, 6):
        with make_engine(Director(listen=0.3), snapshots=2) as engine:
            if n:
                report, _ = warm(engine, n)
                assert report.tts_triggered, "expected it to draw numbers"
                assert_clean(engine)
            by_warmups[n] = [chat(engine, None), chat(engine, 7), chat(engine, None)]
    texts = [[event.text for event in outcomes(events)] for events in by_warmups[0]]
    assert texts[0] != texts[2], "expected sessions without a seed to differ"
    for n in (3, 6):
        for number, (got, expected) in enumerate(zip(by_warmups[n], by_warmups[0], strict=True)):
            assert_same_events(f"session {number} after {n} units", got, expected)


def test_counts_graphs_that_compile_meanwhile() -> None:
    """tests/test_compile_equivalence.py has the warm-up of a compiled engine."""
    with make_engine(n_slots=1) as engine:
        regions = engine.parts.unit_steps.regions
        regions.compile(["mel_unit"], backend="eager")
        before = compile_counters()["graphs"]
        first, _ = warm(engine, 1)
        n = compile_counters()["graphs"] - before
        assert first.compiled_graphs == n >= 1, f"expected {n} graphs, got {first.compiled_graphs}"
        again, _ = warm(engine, 1)
        assert again.compiled_graphs == 0, f"expected none the second time, got {again.compiled_graphs}"


# --- what may go wrong ---------------------------------------------------------------------------


def test_names_the_failed_unit() -> None:
    with make_engine() as engine:
        expected = chat(engine, 3)
        mark = engine.mark_sessions().result(PATIENCE_S)
        calls = [0]

        def third(tensors: Any) -> bool:
            calls[0] += 1
            return calls[0] >= 3

        failing = broken(engine.parts.unit_steps.regions, "audio_unit", third, "before")
        with failing, pytest.raises(WarmUpError, match=r"unit 3 of 5: .*Broken: audio_unit before") as caught:
            warm(engine, 5)
        assert isinstance(caught.value.__cause__, Broken)
        assert engine.n_free() == engine.parts.n_slots
        assert engine.mark_sessions().result(PATIENCE_S) == mark
        assert_same_events("client", chat(engine, 3), expected)


def test_names_the_failed_step() -> None:
    with make_engine() as engine:
        with pytest.raises(WarmUpError, match=r"reference voice: .*ValueError: no throat"):
            warm_up(engine, MEDIA, voice=mock.Mock(side_effect=ValueError("no throat")), log=lambda line: None)
        failing = mock.patch.object(Sessions, "prepare", side_effect=RuntimeError("no room"))
        with failing, pytest.raises(WarmUpError, match=r"prepare: .*RuntimeError: no room"):
            warm(engine)
        assert_clean(engine)


def test_refuses_an_engine_with_sessions() -> None:
    with make_engine() as engine:
        handle = engine.open("client", TALKING, lambda event: None).result(PATIENCE_S)
        with pytest.raises(WarmUpError, match="expected one without sessions, got 1 open"):
            warm(engine)
        handle.close().result(PATIENCE_S)
        assert_clean(engine)


def make_files(folder: Path) -> dict[str, Path]:
    junk, mute = folder / "junk.mp4", folder / "sound.wav"
    junk.write_bytes(b"\x00\x01 no video" * 99)
    soundfile.write(mute, np.zeros(32_000, np.float32), 16_000)
    return {"missing": folder / "none.mp4", "junk": junk, "only sound": mute, "folder": folder}


@pytest.mark.parametrize("kind", ["missing", "junk", "only sound", "folder"])
def test_unfit_video_is_refused_with_a_remedy(tmp_path: Path, kind: str) -> None:
    path = make_files(tmp_path)[kind]
    with make_engine(n_slots=1) as engine:
        with pytest.raises(MediaError) as caught:
            warm(engine, media=WarmUpMedia(path))
        assert_clean(engine)
    for word in (str(path), "assets/build_warmup.py", "service.warmup_video", "--warmup-video"):
        assert word in str(caught.value), f"expected {word} in {caught.value}"


def test_uses_the_engines_config() -> None:
    """The warm-up uses the session settings of the engine, except the seed."""
    session = TALKING.model_copy(update={"force_listen_count": 2})
    with make_engine(Director(listen=0.0, turn_end=0.0), n_slots=1, session=session) as engine:
        report, _ = warm(engine, 4)
    assert report.decisions == ["LISTEN", "LISTEN", "SPEAK", "SPEAK"], report.decisions
