"""Conversations on units: rules of time, pacing of text, parts of long conversations."""

import itertools
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from models.inputs.tokens import Tokenizer
from training.grammar.phrases import Split, intents
from training.scenes.labels import watched_class
from training.timelines.conversations import BACKCHANNELS, GLANCING, WATCHFUL, Habits, draw_timeline
from training.timelines.layout import NOTHING, PICTURE, SOUND, RowLayout
from training.timelines.pacing import MAX_CHARS, MAX_TOKENS, pace
from training.timelines.speech import RATE, degrade, noise_bursts
from training.timelines.stage import NOTICE_S, SETTLE_S, Stage, answer_unit, heard_in, pause_places
from training.timelines.timeline import FORCED_UNITS, Timeline
from training.timelines.windows import TrainingWindow, part_rows, split_parts
from worker.config.session import WindowConfig
from worker.loop.window import UnitRecord, UnitWindow

TINY = Path(__file__).parents[2] / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


@cache
def timelines(split: Split = "train") -> list[Timeline]:
    tokenizer = Tokenizer.load(TINY)
    return [
        draw_timeline(seed, 90, tokenizer.encode, tokenizer.special, noise_bursts, split=split, things=False)
        for seed in range(30)
    ]


def test_the_same_seed_gives_the_same_conversation(tokenizer: Tokenizer) -> None:
    again = draw_timeline(3, 90, tokenizer.encode, tokenizer.special, noise_bursts, things=False)
    assert again.units == timelines()[3].units
    assert np.array_equal(again.sound, timelines()[3].sound)


def test_turns_are_opened_and_closed(tokenizer: Tokenizer) -> None:
    special = tokenizer.special
    for timeline in timelines():
        is_open = False
        for number, unit in enumerate(timeline.units):
            first, last = unit.tokens[0], unit.tokens[-1]
            assert unit.is_forced == (number < FORCED_UNITS)
            if unit.tokens == (special.listen,):
                assert not is_open, f"unit {number}: expected the turn to go on, got a listening unit"
            elif first == special.turn_eos:
                assert is_open and last == special.listen
                is_open = False
            else:
                assert (first, last) == (special.speak, special.chunk_eos), f"unit {number}: got {unit.tokens}"
                is_open = special.turn_eos not in unit.tokens
                text = [token for token in unit.tokens if token not in tokenizer.special_ids]
                assert 0 < len(tokenizer.decode(text)) <= MAX_CHARS
        assert not is_open


def test_replies_follow_what_was_said() -> None:
    """Each reply begins in the first unit that leaves a settling silence; no pause inside of a sentence is answered."""
    n_paused = 0
    for timeline in timelines():
        heard = [said for said in timeline.script if said.by == "person" and said.skill != "backchannel"]
        for reply in (said for said in timeline.script if said.by == "model" and said.skill != "watch_alert"):
            asked = max((said for said in heard if said.start < reply.start), key=lambda said: said.start)
            delay = reply.start - asked.end
            assert asked.skill == reply.skill, f"{asked} is answered by {reply}"
            assert SETTLE_S <= delay < 2 + SETTLE_S or reply.start <= FORCED_UNITS + 1, (
                f"{delay:.2f} s: {asked}, {reply}"
            )
            n_paused += asked.end - asked.start > len(noise_bursts(asked.text)) / RATE + 0.2
    assert n_paused > 20, f"expected answered sentences with pauses, got {n_paused}"


def test_interrupted_replies_stop_within_a_unit(tokenizer: Tokenizer) -> None:
    special, n_cut = tokenizer.special, 0
    for timeline in timelines():
        for reply in (said for said in timeline.script if said.is_cut):
            by = [said for said in timeline.script if said.by == "person" and reply.start <= said.start < reply.end]
            start = min(said.start for said in by if said.skill != "backchannel")
            unit = heard_in(start + NOTICE_S)
            assert timeline.units[unit].tokens == (special.turn_eos, special.listen), f"unit {unit} of {reply}"
            assert unit + 1 - start <= 1 + NOTICE_S
            n_cut += 1
    assert n_cut > 20, f"expected interruptions, got {n_cut}"


def test_skills_of_the_issue_occur() -> None:
    skills = {said.skill for split in ("train", "held_out") for one in timelines(split) for said in one.script}
    wanted = {"count_freely", "stop", "add", "subtract", "repeat", "unknown", "show_color", "show_shape", "show_motion"}
    wanted |= {
        "shown_before",
        "watch_for",
        "watch_alert",
        "quiet",
        "speak_again",
        "tell_name",
        "ask_name",
        "backchannel",
    }
    assert wanted <= skills, f"missing: {wanted - skills}"


def test_evaluation_uses_phrases_that_training_never_says() -> None:
    def plain(split: Split) -> set[str]:
        said = {said.text for one in timelines(split) for said in one.script if said.by == "person"}
        return {text for text in said if text not in BACKCHANNELS}

    trained = {phrase for intent in intents().values() for phrase in intent.train}
    assert not plain("held_out") & trained
    assert not plain("held_out") & plain("train")


def test_quiet_lasts_until_it_is_called_off() -> None:
    n_quiet = 0
    for timeline in timelines() + timelines("held_out"):
        is_quiet = False
        for said in timeline.script:
            if said.by == "person" and said.skill == "speak_again":
                is_quiet = False
            assert not (is_quiet and said.by == "model"), f"expected silence, got {said}"
            if said.by == "model" and said.skill == "quiet":
                is_quiet = True
                n_quiet += 1
    assert n_quiet > 2


def test_alerts_follow_their_picture_at_once() -> None:
    n_alerts = 0
    for timeline in timelines() + timelines("held_out"):
        for said in (said for said in timeline.script if said.skill == "watch_alert"):
            unit = int(said.start) - 1
            now, before = timeline.units[unit].picture, timeline.units[unit - 1].picture
            assert now is not None and before is not None and now.shown is not None
            assert now.shown != before.shown and now.frame == 0, f"unit {unit}: expected a new picture, got {now}"
            assert now.shown.name in said.text or (now.shown.color or "") in said.text
            n_alerts += 1
    assert n_alerts > 2


def test_the_camera_is_turned_on_and_off_within_a_conversation(tokenizer: Tokenizer) -> None:
    n_on = n_off = n_late = 0
    for seed in range(30):
        timeline = draw_timeline(seed, 60, tokenizer.encode, tokenizer.special, noise_bursts, habits=WATCHFUL)
        sees = [unit.picture is not None for unit in timeline.units]
        n_on += sum(now and not before for before, now in itertools.pairwise(sees))
        n_off += sum(before and not now for before, now in itertools.pairwise(sees))
        n_late += not sees[0]
        for unit, (is_seen, one) in enumerate(zip(sees, timeline.units, strict=True)):
            assert is_seen or one.skill != "watch_alert", f"unit {unit}: expected no alert without a picture"
    assert n_late > 5, f"expected conversations that begin without a picture, got {n_late} of 30"
    assert n_on >= n_late > 0 < n_off, f"expected pictures that begin and end, got {n_on} and {n_off} times"


def test_units_say_what_the_model_watches_for(tokenizer: Tokenizer) -> None:
    n_alerts = n_cancelled = 0
    for seed in range(20):
        timeline = draw_timeline(seed, 60, tokenizer.encode, tokenizer.special, noise_bursts, habits=WATCHFUL)
        units = timeline.units
        for unit, (before, now) in enumerate(itertools.pairwise(units), 1):
            if now.skill != "watch_alert" or before.skill == "watch_alert":
                continue
            shown = now.picture.shown if now.picture is not None else None
            assert shown is not None
            matching = {watched_class(None, shown.name), watched_class(shown.color, None)} - {0}
            assert before.watched == now.watched in matching, f"unit {unit}: expected {matching}, got {now.watched}"
            later = units[unit + 1].watched if unit + 1 < len(units) else 0
            assert later == 0, f"unit {unit + 1}: expected nothing to watch for after the alert, got {later}"
            n_alerts += 1
        for said, reply in itertools.pairwise(timeline.script):
            if said.skill == "watch_cancel" and reply.by == "model":
                answered = int(reply.start) - 1  # the sound of a unit's text is heard in the next one
                got = [unit.watched > 0 for unit in units[answered - 1 : answered + 1]]
                assert got == [True, False], f"unit {answered}: expected the end of watching with the answer, got {got}"
                n_cancelled += 1
    assert n_alerts > 3 and n_cancelled > 0, f"expected alerts and ends, got {n_alerts} and {n_cancelled}"


def test_watchful_habits_give_more_alerts_and_glancing_ones_more_pictures(tokenizer: Tokenizer) -> None:
    def count(habits: Habits) -> tuple[int, int]:
        """Alerts, and new views."""
        n_alerts, views = 0, set()
        for seed in range(10):
            timeline = draw_timeline(
                seed, 60, tokenizer.encode, tokenizer.special, noise_bursts, things=False, habits=habits
            )
            n_alerts += sum(said.skill == "watch_alert" for said in timeline.script)
            views |= {(seed, one.picture.look) for one in timeline.units if one.picture is not None}
        return n_alerts, len(views)

    (usual, _), (watchful, n_views), (glancing, n_glances) = map(count, (Habits(camera=1.0), WATCHFUL, GLANCING))
    assert watchful > max(2 * usual, 3), f"expected more than twice as many alerts, got {watchful} and {usual}"
    assert n_glances > 2 * n_views, f"expected more than twice as many views, got {n_glances} and {n_views}"
    assert glancing < n_glances / 6, f"expected an alert in few of {n_glances} views, got {glancing}"


def test_pacing_keeps_the_text_and_its_limits(tokenizer: Tokenizer) -> None:
    text = "A small cat saw the moon and said hello to it. The moon smiled, wonderful! The end."
    units = pace([text], tokenizer.encode)
    assert tokenizer.decode([token for unit in units for token in unit]) == text
    words = text.split()
    assert max(map(len, units)) <= max(MAX_TOKENS, *(len(tokenizer.encode(f" {word}")) for word in words))
    counted = pace(["One,", "two,", "three."], tokenizer.encode)
    assert [tokenizer.decode(unit) for unit in counted] == ["One,", " two,", " three."]
    with pytest.raises(ValueError, match="expected at most"):
        pace(["Donaudampfschifffahrtsgesellschaftskapitän"], tokenizer.encode)


def test_stage_refuses_what_cannot_be(tokenizer: Tokenizer) -> None:
    stage = Stage(random.Random(0), tokenizer.encode, tokenizer.special, noise_bursts)
    with pytest.raises(ValueError, match="unit 1: expected one in which the model may begin"):
        stage.speak(["Hi."], 1, "greet")
    stage.show(None, 5)
    with pytest.raises(ValueError, match="expected one from 5 on"):
        stage.show(None, 4)
    assert [answer_unit(end) for end in (4.5, 4.6, 4.61, 5.0)] == [4, 4, 5, 5]


def test_pauses_leave_a_beginning_that_is_no_sentence() -> None:
    assert pause_places(["thank", "you", "very", "much"]) == [1, 3]
    assert pause_places(["what", "is", "your", "name"]) == [1, 2, 3]
    assert pause_places(["the", "cat", "sees", "a", "bird", "in", "the", "morning"]) == [1, 2, 3, 4]
    assert pause_places(["stop"]) == []


def test_silence_stays_silent_for_minutes(tokenizer: Tokenizer) -> None:
    habits = Habits(long_idle=1.0)
    timeline = draw_timeline(1, 600, tokenizer.encode, tokenizer.special, noise_bursts, habits=habits, things=False)
    assert len(timeline.units) >= 600
    assert {unit.tokens for unit in timeline.units} == {(tokenizer.special.listen,)}


def test_degraded_sound_is_as_long_and_never_silent() -> None:
    sound = timelines()[0].sound[: 10 * RATE]
    for seed in range(4):
        worse = degrade(sound, random.Random(seed))
        assert worse.shape == sound.shape and worse.dtype == np.float32
        assert np.isfinite(worse).all() and np.abs(worse[:RATE]).max() > 0


def serving_window(layout: RowLayout, timeline: Timeline, config: WindowConfig, tokenizer: Tokenizer) -> list[tuple]:
    """(first unit kept, previous text's ids) after each unit, as serving's window decides."""
    window = UnitWindow(
        config, is_special=tokenizer.special_ids.__contains__, decode=tokenizer.decode, marker=layout.marker
    )
    prompt = layout.prompt()
    window.protect(len(prompt.before), prompt.after)
    states = []
    for number, unit in enumerate(timeline.units):
        is_listen = unit.tokens[-1] == tokenizer.special.listen
        spoken = () if is_listen else unit.tokens[1:-1]
        text = tokenizer.decode(spoken)
        window.close_unit(UnitRecord(number, layout.unit_length(unit), "omni", spoken, text, is_listen))
        states.append((window.units[0].id, window.previous_ids))
    return states


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_parts_keep_what_the_window_of_serving_keeps(tokenizer: Tokenizer, mode: str) -> None:
    layout = RowLayout(tokenizer)
    limits = {"high": 900, "low": 600} if mode == "basic" else {"max_units": 10, "max_previous": 30, "slack": 0}
    config = (
        {"high_tokens": 900, "low_tokens": 600} if mode == "basic" else {"max_units": 10, "previous_max_tokens": 30}
    )
    for timeline in timelines()[:8]:
        states = serving_window(layout, timeline, WindowConfig(mode=mode, **config), tokenizer)
        learned: list[int] = []
        for part in split_parts(timeline.units, layout, TrainingWindow(mode=mode, **limits)):
            learned += range(part.learned_from, part.end)
            if part.learned_from:
                assert states[part.learned_from - 1] == (part.first, part.previous)
            rows = part_rows(timeline.units, part, layout)
            assert set(rows.units[rows.targets != NOTHING]) <= set(range(part.learned_from, part.end))
        assert learned == list(range(len(timeline.units))), "expected each unit to be learned once"


def test_rows_count_as_the_layout_says(tokenizer: Tokenizer) -> None:
    layout = RowLayout(tokenizer)
    timeline = next(one for one in timelines() if one.units[0].picture is not None)
    rows = layout.rows(timeline.units, layout.prompt(n_reference=30))
    n, n_seen = len(timeline.units), sum(unit.picture is not None for unit in timeline.units)
    assert len(rows) == len(layout.prompt(30)) + sum(map(layout.unit_length, timeline.units))
    assert (rows.kinds == PICTURE).sum() == 64 * n_seen and (rows.kinds == SOUND).sum() == 10 * n + 30
    decided = sum(len(unit.tokens) for unit in timeline.units if not unit.is_forced)
    assert (rows.targets != NOTHING).sum() == decided
