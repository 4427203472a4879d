"""The evaluation over sockets: a gateway, and a talker that follows a script with known mistakes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serve.fake_replies import ScriptedUnit
from benchmarks.serve.fake_worker import FakeWorker
from clients.errors import ClientError
from tests.server.live_gateway import running_gateway
from tests.training.evaluate.scripted_talker import Flaw, ScriptedTalker, label, tone_voice
from training.evaluate import __main__ as command
from training.evaluate import figures, playing, targets
from training.evaluate.acts import Appear, Idle, Played, Say
from training.evaluate.material import Sizes, Voices, draw_cases, draw_conversation
from training.evaluate.playing import Player, play, play_all
from training.grammar.phrases import intents
from worker.protocol.messages import AudioChunk, Result

GROUPS = ("training voices", "unseen voice", "15 dB noise")
VOICES = Voices(dict.fromkeys(GROUPS, (tone_voice,)))
SIZES = Sizes(
    {"training voices": 12, "unseen voice": 6, "15 dB noise": 6},
    scenes=8,
    watches=4,
    unseen_watches=2,
    interruptions=5,
    minutes=1,
)
CASES = [
    *draw_cases(SIZES, VOICES, 1, things=False),
    replace(draw_conversation(1, VOICES, 1, things=False), part="conversation"),
]
FLAWS: dict[str, Flaw] = {
    "training-voices-6": "wrong",
    "15-dB-noise-0": "mute",
    "scene-0": "late",
    "scene-4": "early",
    "watch-1": "late",
    "watch-2": "wrong",
    "watch-idle-0": "alarm",
    "interruption-1": "deaf",
    "interruption-2": "mute",
}


@pytest.fixture(scope="module")
def played() -> list[Played]:
    async def run() -> list[Played]:
        async with FakeWorker(2, script=ScriptedTalker(CASES, FLAWS)) as worker, running_gateway(worker) as gateway:
            return await play_all(f"ws://127.0.0.1:{gateway.port}", CASES, render=label)

    return asyncio.run(run())


def test_figures_are_those_of_the_script(played: list[Played]) -> None:
    assert [one.error for one in played if one.error] == []
    found = figures.figures_of(played)
    got = {name: None if one is None else (round(one.value * one.n), one.n) for name, one in found.items()}
    alarms = got.pop("watch, false alarms")
    expected = {
        "answers, training voices": (6, 12),
        "answers, unseen voice": (6, 6),
        "answers, 15 dB noise": (0, 6),
        "scenes": (8, 8),  # late and early answers are right
        "watch, in time": (2, 4),
        "starts in time": (12, 20),
        "speaks over the user": (4, 20),
        "silent in time": (3, 5),
    }
    assert got == expected, [row for row in figures.records_of(played) if not row["right"]]
    watched = sum(act.units for one in played for act in one.case.acts if isinstance(act, Idle) and act.watching)
    assert alarms is not None and alarms[1] == watched
    assert figures.false_alarms(one for one in played if one.case.part == "watch") == (1, watched)


def test_requests_of_a_session_that_breaks_off_are_wrong() -> None:
    case = next(one for one in CASES if one.name == "unseen-voice-0")
    talker = ScriptedTalker([case], {})

    def breaks_off(session: str, number: int, chunk: AudioChunk) -> ScriptedUnit | None:
        if number > 12:
            raise RuntimeError("the worker's conversation fails")
        return talker(session, number, chunk)

    async def run() -> Played:
        async with FakeWorker(2, script=breaks_off) as worker, running_gateway(worker) as gateway:
            return await play(f"ws://127.0.0.1:{gateway.port}", case, render=label)

    one = asyncio.run(run())
    assert "expected" in one.error and len(one.units) == 12
    answers = figures.figures_of([one])["answers, unseen voice"]
    assert answers is not None and answers.n == 6 and 0 < answers.value * 6 < 6


def test_every_sentence_is_heard_where_it_is_said(played: list[Played]) -> None:
    for one in played:
        assert len(one.units) <= one.case.max_units + 60
        for done in one.happened:
            if isinstance(done.act, Say):
                assert done.end - done.start == pytest.approx(len(done.act.sound) / 16_000)
                assert done.until >= done.end
                assert done.reached == (one.case.name != "interruption-2" or not done.act.after)
            if isinstance(done.act, Appear) and one.case.name == "watch-0":
                assert one.speaks[int(done.start)] and not one.speaks[int(done.start) - 1]


def test_a_long_conversation_has_no_loops_and_all_its_units(played: list[Played]) -> None:
    (long,) = (one for one in played if one.case.part == "conversation")
    found = figures.figures_of_conversation(long)
    assert found["loops"] is not None and found["loops"].value == 0
    assert found["loops"].n == len(long.units) >= 60
    spoken, heard = found["SPEAK unit, p95"], found["LISTEN unit, p95"]
    assert spoken is not None and heard is not None and spoken.n + heard.n == len(long.units)


@pytest.mark.parametrize(
    ("replies", "n"),
    [
        (["La la la. That is all I can sing."], 0),
        (["I see I see I see I see"], 1),
        (["one two three one two three one two three"], 0),
        (["one two three one two three one two three one two three now"], 1),
        (["Red.", "Red.", "Red.", "Red."], 0),
        (["Red.", "Red!", "red", "Red.", "Red."], 1),
    ],
)
def test_loops(replies: list[str], n: int) -> None:
    assert figures.n_loops(replies) == n


def test_intervals() -> None:
    assert figures.share([]) is None and figures.rate(0, 0) is None and figures.statistic([], np.mean) is None
    half = figures.share([True, False] * 50)
    assert half is not None and (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-3)
    none = figures.rate(0, 600)
    assert none is not None and (none.low, none.high) == pytest.approx((0.0, 3.689), abs=1e-2)
    four = figures.rate(4, 600)
    assert four is not None and (four.low, four.high) == pytest.approx((1.090, 10.242), abs=1e-2)


def test_material_repeats_and_is_held_out() -> None:
    again = draw_cases(SIZES, VOICES, 1, things=False)
    more = draw_cases(replace(SIZES, scenes=12, watches=9), VOICES, 1, things=False)
    other = draw_cases(SIZES, VOICES, 2, things=False)
    said = [[act.text for act in one.acts if isinstance(act, Say)] for one in CASES[: len(again)]]
    assert said == [[act.text for act in one.acts if isinstance(act, Say)] for one in again]
    assert said != [[act.text for act in one.acts if isinstance(act, Say)] for one in other]
    by_name = {one.name: one.seed for one in more}
    assert all(by_name[one.name] == one.seed for one in again), "expected the same cases among more of them"
    trained = {phrase for intent in intents().values() if intent.held_out for phrase in intent.phrases("train")}
    assert not trained & {text for texts in said for text in texts}
    known = draw_cases(SIZES, VOICES, 1, things=False, split="train")
    assert trained & {act.text for one in known for act in one.acts if isinstance(act, Say)}


def test_settings_reach_the_sessions_and_sound_is_left_out_where_it_is_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared: list[dict[str, Any]] = []

    class Refusing:
        async def prepare(self, _: str, *, config: dict[str, Any], **__: object) -> None:
            prepared.append(config)
            raise ClientError("prepare", expected="a test that wants more", got="one of settings")

    @asynccontextmanager
    async def connect(*_: object) -> AsyncIterator[Refusing]:
        yield Refusing()

    monkeypatch.setattr(playing, "connect", connect)
    heard, unheard = (next(one for one in CASES if one.name == name) for name in ("training-voices-0", "scene-0"))
    for case, settings in ((heard, {}), (unheard, {}), (heard, {"generate_audio": False, "temperature": 0.5})):
        assert asyncio.run(play("ws://nowhere", case, settings=settings)).error
    assert prepared == [
        {"seed": heard.seed, "generate_audio": True},
        {"seed": unheard.seed, "generate_audio": False},
        {"seed": heard.seed, "generate_audio": False, "temperature": 0.5},
    ]


@pytest.mark.parametrize("real_time", [False, True])
def test_pictures_come_half_a_second_before_their_unit_in_real_time(
    monkeypatch: pytest.MonkeyPatch, *, real_time: bool
) -> None:
    events: list[str | float] = []

    class Recording:
        async def send_picture(self, _: bytes) -> None:
            events.append("picture")

        async def send_unit(self, _: np.ndarray, pictures: list[bytes]) -> None:
            events.append(f"unit and {len(pictures)}")

        async def __aiter__(self) -> AsyncIterator[Result]:
            yield Result.model_construct(audio_data=None, text="", is_listen=True, end_of_turn=False)

    case = next(one for one in CASES if one.name == "watch-idle-0")
    player = Player(Recording(), Played(replace(case, max_units=5)), real_time=real_time, render=label)  # type: ignore[arg-type]

    async def until(due: float) -> None:
        events.append(round(due - player._begun, 3))

    monkeypatch.setattr(playing, "_sleep_until", until)
    asyncio.run(player.run())
    if real_time:
        assert events[:9] == [
            0.5,
            1.0,
            "unit and 0",
            1.5,
            2.0,
            "unit and 0",
            2.5,
            3.0,
            "unit and 0",
        ]  # the camera is off
        assert events[9:13] == [3.5, "picture", 4.0, "unit and 0"]
    else:
        assert events[:4] == ["unit and 0"] * 3 + ["unit and 1"]


def test_the_command_prints_the_table_and_its_gate_fails_below_a_bound(
    played: list[Played], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Voices, "of_engines", lambda *_: VOICES)
    monkeypatch.setattr(command, "QUICK", SIZES)

    async def results(*_: object) -> tuple[list[Played], Played]:
        return played[:-1], played[-1]

    monkeypatch.setattr(command, "play_material", results)
    written, bounds = tmp_path / "result.json", tmp_path / "bounds.json"

    def run(*more: str) -> int:
        return command.main(["--url", "ws://localhost:1", "--quick", "--no-ear", "--work", str(tmp_path), *more])

    assert run("--json", str(written), "--write-bounds", str(bounds)) == 0
    printed = capsys.readouterr().out
    assert "| answers, training voices | 50.0 % | 25.4 % to 74.6 % | 12 | ≥ 90.0 % | ≥ 97.0 % | missed |" in printed
    assert "| answers, unseen voice | 100.0 % |" in printed and "| start to ready | - | - | 0 |" in printed
    result = json.loads(written.read_text())
    assert result["figures"]["silent in time"]["measured"]["value"] == 0.6
    assert result["skills"]["show_digit"] == "2 of 2"
    wrong = [row for row in result["records"] if row["case"] == "training-voices-6"]
    assert len(wrong) == 6 and not any(row["right"] for row in wrong)

    assert run("--bounds", str(bounds)) == 0, "expected a run to meet the bounds made of it"
    kept = targets.read_bounds(bounds)
    assert kept["answers, training voices"] == pytest.approx(0.254, abs=1e-3) and "start to ready" not in kept
    bounds.write_text(json.dumps({**kept, "scenes": 0.99, "answers, 15 dB noise": 0.5}))
    capsys.readouterr()
    assert run("--bounds", str(bounds)) == 1
    assert "bound of answers, 15 dB noise: expected at least 50.0 %, got 0.0 %" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"expected answers, training voices.*got sums"):
        targets.failures({}, {"sums": 1.0})


def test_unknown_parts_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.parse(["--model", "talker", "--parts", "scenes,watch"]).parts == ("scenes", "watch")
    for arguments in (["--model", "talker", "--parts", "scenes,songs"], [], ["--model", "a", "--url", "ws://b"]):
        with pytest.raises(SystemExit):
            command.parse(arguments)
    assert "expected requests, scenes, watch, interruptions, conversation, got songs" in capsys.readouterr().err
