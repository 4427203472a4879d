"""Sound of units: every second is encoded once, in order, and does not reach other sessions."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from models.errors import ImageError
from models.inputs.audio_sizes import FIRST_UNIT_SAMPLES, UNIT_SAMPLES
from models.inputs.image import image_patches, plan
from models.stages import regions
from models.stages.unit_steps import UnitSteps
from tests.models.compare import assert_close
from tests.worker.engine.failing_regions import broken
from tests.worker.loop.engines import (
    QUIET,
    assert_same_events,
    make_config,
    make_image,
    make_parts,
    make_patches,
    make_prompt,
    make_sound,
)
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.config.session import WindowConfig
from worker.engine import Engine
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Failure
from worker.loop.session import Session, UnitInput

CHATTY = "<|speak|>one two three four five"


@pytest.fixture(scope="module")
def built() -> ScriptedEngine:
    return ScriptedEngine(make_config(snapshots=0))


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def run_sound(engine: ScriptedEngine, session: Session, sound: np.ndarray) -> Any:
    """Send one unit of this sound and run it. Returns: its outcome."""
    engine.sessions.unit(session, UnitInput(sound, [], False, arrived=0.0))
    engine.settle()
    return engine.take(session.id)[-1]


def assert_same(what: str, got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    same = [torch.equal(one, other) for one, other in zip(got, expected, strict=True)]
    assert same and all(same), f"{what}: expected the same rows, got {same}"


# --- no leftovers ------------------------------------------------------------


@pytest.mark.parametrize("n_units", [2, 6])  # so that the encoder holds some, and the log-mel is clipped by loudness
def test_second_prompt_drops_the_sound_of_the_first(engine: ScriptedEngine, n_units: int) -> None:
    received = []
    session = engine.start("a", QUIET, *[CHATTY] * 2 * n_units)
    for _ in range(2):
        for number in range(n_units):
            engine.send(session, number)
            engine.settle()
        received.append(engine.take("a"))
        engine.sessions.prepare(session, make_prompt())
    assert_same_events("after a second prompt", received[1], received[0])
    heard = engine.record("a").heard
    assert_same("sound after a second prompt", heard[n_units:], heard[:n_units])


def test_session_does_not_affect_the_next_reference_voice() -> None:
    """Voices with a silent half, whose encoding depends on how the log-mel is clipped."""
    engine, prompts = ScriptedEngine(make_config(snapshots=0)), []
    voices = [np.concatenate((make_sound(number), np.zeros(8000, np.float32))) for number in (1, 2)]
    for name, sound in (("fresh", voices[0]), ("later", voices[0]), ("other", voices[1])):
        session = engine.open(name, QUIET, SystemPrompt.of("You are kind.", sound))
        prompts.append(engine.record(name).fed[0][2].media)
        for number in range(6):
            results([run_sound(engine, session, 5 * make_sound(number))])
        engine.sessions.close(session)
    assert_same("reference voice", prompts[1:2], prompts[:1])
    assert not torch.equal(prompts[2], prompts[0]), "expected another voice to make other rows"


# --- input of a unit -------------------------------------------------------------------------------


def test_images_alone_do_not_consume_the_first_audio_unit(engine: ScriptedEngine) -> None:
    plain, seen = engine.start("plain"), engine.start("seen")
    [pictures] = results([engine.run_unit(seen, None, pictures=[0])])
    assert pictures.n_slices == 1, f"expected a unit of one picture, got {pictures}"
    for session in (plain, seen):
        results([engine.run_unit(session, number) for number in range(3)])
        assert session.audio_buffer.n_waiting == 80, (
            f"expected 80 samples to wait, got {session.audio_buffer.n_waiting}"
        )
    assert_same("sound with pictures", engine.record("seen").heard, engine.record("plain").heard)


@pytest.mark.parametrize("n_before", [0, 2])
def test_short_sound_is_buffered_for_the_next_unit(engine: ScriptedEngine, n_before: int) -> None:
    session, whole = engine.start("pieces"), engine.start("whole")
    for one in (session, whole):
        results(engine.run(one, n_before))
    rows, sound = engine.rows(session), make_sound(7)
    short = run_sound(engine, session, sound[:7000])
    assert (short.is_listen, short.tokens) == (True, ()), f"expected a listening unit without tokens, got {short}"
    assert engine.rows(session) == rows, f"context rows: expected {rows} as before, got {engine.rows(session)}"
    assert session.window.stray == 0, f"rows of no unit: expected none, got {session.window.stray}"
    results([run_sound(engine, session, sound[7000:]), run_sound(engine, whole, sound)])
    assert_same("sound in pieces", engine.record("pieces").heard, engine.record("whole").heard)
    assert engine.rows(session) == engine.rows(whole), "expected as many rows in pieces as in one"


def test_images_wait_for_the_sound_of_their_unit(engine: ScriptedEngine) -> None:
    session = engine.start("a")
    short = engine.run_unit(session, 0, 5000, pictures=[0])
    n_rows = engine.rows(session) - session.n_early_rows
    assert short.n_slices == 0 and n_rows == session.window.length, (
        f"expected no row of the unit but early ones, got {short}"
    )
    whole = engine.run_unit(session, 1, 11_000, pictures=[1])
    assert whole.n_slices == 2, f"slices: expected that of both pictures, got {whole.n_slices}"
    assert engine.rows(session) == session.window.length - 2, "expected the unit's rows but its last two"


def test_refuses_an_invalid_image_without_queueing_the_unit() -> None:
    config = make_config()
    with Engine(make_parts(config), config) as engine:
        events: list[Any] = []
        handle = engine.open("a", QUIET, events.append).result(60)
        handle.prepare(make_prompt()).result(60)
        for picture in (b"no picture", Image.new("RGB", (0, 0))):
            with pytest.raises(ImageError):
                handle.send(make_sound(0), [make_image(0), picture])
        handle.close().result(60)
    assert not events, f"expected no events, got {events}"


@pytest.mark.parametrize("n_before", [0, 2])
@pytest.mark.parametrize("stage", ["vision", "audio_unit", "unit_prefill", "unit_step"])
def test_failed_unit_is_undone(engine: ScriptedEngine, n_before: int, stage: str) -> None:
    lines = [CHATTY] * (n_before + 4)
    session, plain = engine.start("fails", QUIET, *lines), engine.start("plain", QUIET, *lines)
    for one in (session, plain):
        results(engine.run(one, n_before))
    with broken(engine.unit_steps.regions, stage, lambda _: True, "after"):
        failed = engine.run_unit(session, 50, 20_000, pictures=[0])
    assert isinstance(failed, Failure), f"expected a failure, got {failed}"
    assert engine.rows(session) == engine.rows(plain), "context rows: expected those of a session without the unit"
    engine.script.lines["fails"] = [engine.ids(CHATTY)] * 3
    for number in range(3):
        for one in (session, plain):
            engine.send(one, 60 + number)
    engine.settle()
    assert_same_events("after a failed unit", engine.take("fails"), engine.take("plain"))


# --- backlog -----------------------------------------------------------------------------------------


def test_images_end_before_the_next_work_when_the_sound_beside_them_fails(engine: ScriptedEngine) -> None:
    session = engine.start("s")
    encode = engine.loop._text._encode
    stream = encode._vision_stream
    with (
        mock.patch.object(encode, "_vision_stream", mock.Mock(work=stream.work, join=mock.Mock())) as beside,
        broken(engine.unit_steps.regions, "audio_unit", lambda tensors: True, "before"),
    ):
        failed = engine.run_unit(session, 0, pictures=[0])
    assert isinstance(failed, Failure)
    beside.join.assert_called()


def test_buffered_seconds_are_fed_in_one_unit(engine: ScriptedEngine) -> None:
    session, steady = engine.start("late"), engine.start("steady")
    late = run_sound(engine, session, make_sound(0, 3 * UNIT_SAMPLES + 8000))
    assert late.n_caught_up == 2, f"seconds caught up: expected 2, got {late.n_caught_up}"
    assert late.index == 3, f"units heard: expected 3, got {late.index}"
    assert 0.5 <= late.lag_s < 0.55, f"sound that waits: expected half a second, got {late.lag_s}"
    sound = make_sound(0, 3 * UNIT_SAMPLES + 8000)
    for second in range(3):
        results([run_sound(engine, steady, sound[second * UNIT_SAMPLES :][:UNIT_SAMPLES])])
    kinds = [(unit.length, unit.is_listen) for unit in session.window.units]
    assert kinds == [(13, True)] * 3, f"units: expected three seconds listened to, got {kinds}"
    assert_same("sound caught up", engine.record("late").heard, engine.record("steady").heard)


def test_session_with_waiting_units_listens(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, *[CHATTY] * 4)
    for number in range(4):
        engine.send(session, number)
    engine.settle()
    units = [event for event in engine.take("a") if hasattr(event, "is_listen")]
    assert [one.is_listen for one in units] == [True, True, True, False], f"decisions: got {units}"
    lags = [round(one.lag_s) for one in units]
    assert lags == [3, 2, 1, 0], f"seconds that wait: expected fewer each time, got {lags}"


def test_open_turn_takes_one_second_per_unit_and_catches_up_later(engine: ScriptedEngine) -> None:
    lines = [CHATTY, CHATTY, "<|speak|>end<|turn_eos|>"]
    session = engine.start("a", QUIET.model_copy(update={"max_new_speak_tokens_per_chunk": 9}), *lines)
    speaking = [run_sound(engine, session, make_sound(number, 24_000)) for number in range(3)]
    waits = [round(one.lag_s, 1) for one in results(speaking)]
    assert waits == [0.5, 1.0, 1.5], f"sound that waits: expected half a second more each time, got {waits}"
    [after] = results([run_sound(engine, session, make_sound(9))])
    assert (after.n_caught_up, after.is_listen) == (1, True), f"afterwards: expected a second caught up, got {after}"
    assert after.lag_s < 1, f"afterwards: expected less than a second to wait, got {after.lag_s}"


def test_long_turn_does_not_overflow_the_audio_buffer() -> None:
    engine = ScriptedEngine(make_config(max_waiting_units=2, llm_len=600))
    session = engine.start("a", QUIET, *[CHATTY] * 12)  # the turn stays open
    lags = [
        one.lag_s for one in results([run_sound(engine, session, make_sound(number, 24_000)) for number in range(12)])
    ]
    assert session.turn_open, "expected an open turn"
    assert max(lags) <= 2.1, f"sound that waits: expected at most half of four seconds, got {lags}"


def test_backlog_beyond_the_context_fails_once(engine: ScriptedEngine) -> None:
    window = WindowConfig(mode="context", max_units=100, previous_max_tokens=3)
    session = engine.start("a", QUIET.model_copy(update={"window": window}), *[CHATTY] * 20)
    results([run_sound(engine, session, make_sound(number, 24_000)) for number in range(20)])
    assert session.audio_buffer.lag_s > 9, f"expected ten seconds to wait, got {session.audio_buffer.lag_s}"
    session.turn_open = False
    failed = run_sound(engine, session, make_sound(0))
    assert isinstance(failed, Failure), f"expected more seconds than the context holds to fail, got {failed}"
    [after] = results([run_sound(engine, session, make_sound(1))])
    assert after.lag_s < 1, f"afterwards: expected less than a second to wait, got {after.lag_s}"


# --- the encoder's 30 seconds ----------------------------------------------------------------------


def test_encoder_keeps_history_across_its_last_position() -> None:
    """Two sessions that differ only in the sound 2 to 9 seconds before the encoder starts over."""
    engine = ScriptedEngine(short_history=False)
    sounds = {name: [make_sound(number) for number in range(31)] for name in ("one", "other")}
    for number in range(20, 28):
        sounds["other"][number] = make_sound(100 + number)
    for own in sounds.values():
        own[28][8000] = 3.0  # the loudest sample, so that the log-mel is clipped alike
    # The context window is independent of the encoder's.
    window = WindowConfig(mode="basic", high_tokens=60, low_tokens=40)
    sessions = {name: engine.start(name, QUIET.model_copy(update={"window": window})) for name in sounds}
    for number in range(31):
        for name, session in sessions.items():
            engine.sessions.unit(session, UnitInput(sounds[name][number], [], False, arrived=0.0))
        engine.settle()
        held = int(engine.unit_steps.state.apm.lengths[sessions["one"].slot])
        assert held >= 50 * min(number + 1, 10), f"unit {number}: expected at least ten units to see, got {held} rows"
    one, other = (engine.record(name).heard for name in sounds)
    assert torch.equal(one[19], other[19]), "expected the same rows where the same was heard"
    for number in (29, 30):
        assert not torch.equal(one[number], other[number]), f"unit {number}: expected it to depend on what was before"


def test_counts_image_slices(engine: ScriptedEngine) -> None:
    session = engine.start("a")
    assert [len(make_patches(number)) for number in (0, 1)] == [1, 1], "expected pictures of one slice"
    counted = [
        engine.run_unit(session, number, pictures=pictures).n_slices for number, pictures in enumerate(([], [0, 1]))
    ]
    assert counted == [0, 2], f"slices: expected 0 and 2, got {counted}"
    image = make_image(0, 896, 448)
    wide = image_patches(image, plan(*image.size, 2))
    engine.sessions.unit(session, UnitInput(make_sound(3), [wide], False, arrived=0.0))
    engine.settle()
    result = engine.take("a")[-1]
    assert result.n_slices == len(wide) == 3, f"slices of a wide picture: expected 3, got {result.n_slices}"
    assert result.context_len - session.window.length == -2, "expected every row to be counted"


def test_only_slots_at_the_end_of_their_positions_are_encoded_again() -> None:
    """Slots beside them in the batch are left out of that call; all rows are those of each slot alone."""
    noise = torch.randn(5, FIRST_UNIT_SAMPLES, generator=torch.Generator().manual_seed(0)).mul(0.1)

    def encode(steps: UnitSteps, slots: list[int], units: list[int]) -> list[Tensor]:
        samples = [noise[unit][: FIRST_UNIT_SAMPLES if unit in (0, 4) else UNIT_SAMPLES] for unit in units]
        return steps.encode_audio(slots, samples, [True] * len(slots))

    together, alone = (make_parts(make_config()).unit_steps for _ in range(2))
    for steps in (together, alone):
        long, new = steps.open(), steps.open()
        for unit in range(3):
            encode(steps, [long], [unit])
    with mock.patch.object(together.runner.regions, "run", wraps=together.runner.regions.run) as run:
        got = encode(together, [new, long], [4, 3])
    (again,) = (call.args[1] for call in run.call_args_list if call.args[0] is regions.audio_overlap)
    assert {*again.tolist()} - {together.state.scratch} == {long}, f"expected only slot {long}, got {again}"
    expected = [*encode(alone, [new], [4]), *encode(alone, [long], [3])]
    for slot, own, want in zip((new, long), got, expected, strict=True):
        assert_close(own, want, 1e-5, f"rows of slot {slot}")


# --- sound in pieces -------------------------------------------------------------------------------


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(500, 12_000), min_size=3, max_size=12), st.sets(st.integers(1, 11)))
def test_earlier_pieces_count_as_if_each_were_sent(lengths: list[int], waits: set[int]) -> None:
    """Pieces that fill no unit are sent with a later one or each by itself: results and sound that waits are equal."""
    engine = ScriptedEngine(make_config(snapshots=0))
    sound = np.concatenate([make_sound(number) for number in range(10)])[: sum(lengths)]
    pieces = np.split(sound, np.cumsum(lengths)[:-1])
    each, joined = (engine.start(name, QUIET, *["<|listen|>"] * 12) for name in ("each", "joined"))
    found: dict[str, list[Any]] = {"each": [], "joined": []}
    earlier: list[np.ndarray] = []
    for number, one in enumerate(pieces):
        result = run_sound(engine, each, one)
        found["each"] += [] if result.is_incomplete else [(result.index, result.tokens, result.context_len)]
        if result.is_incomplete and number in waits:
            earlier.append(one)
            continue
        engine.sessions.unit(joined, UnitInput(one, [], False, arrived=0.0, earlier=earlier))
        engine.settle()
        result = engine.take("joined")[-1]
        found["joined"] += [] if result.is_incomplete else [(result.index, result.tokens, result.context_len)]
        earlier = []
    assert found["joined"] == found["each"]
    n_left = joined.audio_buffer.n_waiting + sum(map(len, earlier))
    assert n_left == each.audio_buffer.n_waiting, f"expected {each.audio_buffer.n_waiting} samples left, got {n_left}"
    if found["each"]:
        assert_same("sound heard", engine.record("joined").heard, engine.record("each").heard)


def test_unit_that_fails_leaves_its_earlier_pieces(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, "<|listen|>")
    bad = np.full(9_000, np.nan, np.float32)
    engine.sessions.unit(session, UnitInput(bad, [], False, arrived=0.0, earlier=[make_sound(0, 4_000)] * 2))
    engine.settle()
    assert isinstance(engine.take("a")[-1], Failure)
    n_left = session.audio_buffer.n_waiting
    assert n_left == 8_000, f"expected the earlier pieces to wait, got {n_left} samples"
    assert run_sound(engine, session, make_sound(1, 8_000)).index == 1
