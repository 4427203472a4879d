"""Rules of the unit decoder, one by one, and its interrupts."""

from dataclasses import fields
from pathlib import Path

import pytest

from models.inputs.tokens import Tokenizer
from tests.worker.loop.decoder.decoder_helpers import BOS, CUT, END, LISTEN, SPEAK, TTS_CUT, both, check, drive, make
from worker.loop.unit_decoder import ControlTokens, DecoderStep, TurnCap

TINY = Path(__file__).parents[4] / "assets" / "tiny"


# rules


def test_control_tokens_of_a_tokenizer() -> None:
    special = Tokenizer.load(TINY).special
    ids = ControlTokens.of(special)
    for entry in fields(ControlTokens):
        assert getattr(ids, entry.name) == getattr(special, entry.name), entry.name


@both
def test_listen_is_a_silent_unit(compat: bool) -> None:
    run = drive(make(compat=compat), [LISTEN])
    check(run, [], terminator=LISTEN, spoken=[], all_ids=[LISTEN], res_ids=[], is_listen=True, end_of_turn=False)
    check(run, [], turn_open=False, forced_end=False)


@both
def test_speaking_opens_a_turn_and_a_cut_keeps_it_open(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, 4, CUT])
    check(run, [SPEAK, 3, 4], terminator=CUT, spoken=[3, 4], all_ids=[SPEAK, 3, 4, CUT], res_ids=[3, 4])
    check(run, run.fed, is_listen=False, end_of_turn=False, turn_open=True, forced_end=False)


@pytest.mark.parametrize("terminator", [CUT, TTS_CUT])
@both
def test_both_cuts_end_a_unit(compat: bool, terminator: int) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, terminator])
    check(run, [SPEAK, 3], terminator=terminator, all_ids=[SPEAK, 3, terminator])


@both
def test_the_first_token_is_fed_and_never_spoken(compat: bool) -> None:
    decoder = make(compat=compat)
    assert decoder.start() == DecoderStep(None, None, True)
    assert decoder.take(5) == DecoderStep(5, None, True)
    assert decoder.take(6) == DecoderStep(6, 0, True)
    assert decoder.take(7) == DecoderStep(7, 1, True)
    assert decoder.take(CUT) == DecoderStep(None, None, False)
    assert (decoder.spoken, decoder.res_ids) == ([6, 7], [5, 6, 7])


@both
def test_a_cut_as_first_token_is_an_empty_speak_unit(compat: bool) -> None:
    for turn_open in (True, False):
        run = drive(make(compat=compat, turn_open=turn_open), [CUT])
        check(run, [], terminator=CUT, spoken=[], all_ids=[CUT], is_listen=False, turn_open=turn_open)


@both
def test_later_speak_token_is_content(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, SPEAK, CUT])
    check(run, [SPEAK, 3, SPEAK], spoken=[3, SPEAK], res_ids=[3], all_ids=[SPEAK, 3, SPEAK, CUT])


@both
def test_turn_eos_is_spoken_and_does_not_end_the_unit(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, END, CUT])
    check(run, [SPEAK, 3, END], spoken=[3, END], terminator=CUT, end_of_turn=True, turn_open=False, is_listen=False)


@both
def test_text_after_turn_eos_reopens_the_turn(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, END, 4, CUT])
    check(run, [SPEAK, END, 4], spoken=[END, 4], end_of_turn=False, turn_open=True)


@both
def test_listen_in_an_open_turn_becomes_tts_bos(compat: bool) -> None:
    run = drive(make(compat=compat, turn_open=True), [LISTEN, LISTEN, 3, END, CUT])
    check(run, [BOS, BOS, 3, END], spoken=[BOS, 3, END], all_ids=[BOS, BOS, 3, END, CUT], is_listen=False)
    run = drive(make(compat=compat), [SPEAK, LISTEN, CUT])
    check(run, [SPEAK, BOS], spoken=[BOS], res_ids=[BOS], terminator=CUT, turn_open=True)


def test_turn_eos_then_listen() -> None:
    common = {"terminator": LISTEN, "spoken": [3, END], "all_ids": [SPEAK, 3, END, LISTEN], "turn_open": False}
    run = drive(make(compat=True), [SPEAK, 3, END, LISTEN])
    check(run, [SPEAK, 3, END], **common, is_listen=True, end_of_turn=False)
    run = drive(make(compat=False), [SPEAK, 3, END, LISTEN])
    check(run, [SPEAK, 3, END], **common, is_listen=False, end_of_turn=True)
    run = drive(make(compat=False, turn_open=True), [END, LISTEN])
    check(run, [END], spoken=[], is_listen=False, end_of_turn=True, turn_open=False, terminator=LISTEN)


@both
def test_the_token_limit_cuts_before_sampling_the_last(compat: bool) -> None:
    run = drive(make(compat=compat, max_tokens=4), [SPEAK, 1, 2])
    check(run, [SPEAK, 1, 2], spoken=[1, 2], terminator=CUT, all_ids=[SPEAK, 1, 2, CUT], end_of_turn=False)
    run = drive(make(compat=compat, max_tokens=3), [SPEAK, END])
    check(run, [SPEAK, END], terminator=CUT, end_of_turn=True, turn_open=False)
    run = drive(make(compat=compat, max_tokens=2), [SPEAK])
    check(run, [SPEAK], spoken=[], terminator=CUT, turn_open=True)


@both
def test_a_limit_of_one_samples_nothing(compat: bool) -> None:
    for turn_open in (True, False):
        run = drive(make(compat=compat, max_tokens=1, turn_open=turn_open), [])
        check(run, [], terminator=CUT, spoken=[], all_ids=[CUT], is_listen=False, turn_open=turn_open)


@both
def test_implicit_mode_feeds_no_terminator_and_one_token_more(compat: bool) -> None:
    run = drive(make(compat=compat, max_tokens=3, explicit=False), [SPEAK, 1, 2])
    check(run, [SPEAK, 1, 2], spoken=[1, 2], terminator=None, all_ids=[SPEAK, 1, 2])
    run = drive(make(compat=compat, max_tokens=1, explicit=False), [SPEAK])
    check(run, [SPEAK], spoken=[], terminator=None, all_ids=[SPEAK])
    run = drive(make(compat=compat, explicit=False), [SPEAK, 1, CUT])
    check(run, [SPEAK, 1], terminator=None, all_ids=[SPEAK, 1, CUT])
    run = drive(make(compat=compat, explicit=False), [LISTEN])
    check(run, [], terminator=None, all_ids=[LISTEN], is_listen=True)
    run = drive(make(compat=compat, explicit=False, max_chars=5), [SPEAK, 1, 4])
    check(run, [SPEAK, 1], terminator=None, all_ids=[SPEAK, 1], spoken=[1])


@both
def test_the_character_cap_drops_the_token_that_reaches_it(compat: bool) -> None:
    run = drive(make(compat=compat, max_chars=10), [SPEAK, 4, 5, 1])
    check(run, [SPEAK, 4, 5], spoken=[4, 5], res_ids=[4, 5], terminator=CUT, all_ids=[SPEAK, 4, 5, CUT])
    check(run, run.fed, is_listen=False, end_of_turn=False, turn_open=True)
    run = drive(make(compat=compat), [SPEAK, 20, 7, CUT])
    check(run, [SPEAK, 20, 7], spoken=[20, 7])
    run = drive(make(compat=compat), [SPEAK, 20, 8])
    check(run, [SPEAK, 20], spoken=[20], terminator=CUT)


@both
def test_character_cap_ignores_the_first_token(compat: bool) -> None:
    run = drive(make(compat=compat, max_chars=3), [9, 2, CUT])
    check(run, [9, 2], spoken=[2], all_ids=[9, 2, CUT])


def test_character_cap_after_turn_eos() -> None:
    run = drive(make(compat=True, max_chars=5), [SPEAK, 3, END, 2])
    check(run, [SPEAK, 3, END], spoken=[3, END], terminator=CUT, end_of_turn=True, turn_open=True)
    run = drive(make(compat=False, max_chars=5), [SPEAK, 3, END, 2])
    check(run, [SPEAK, 3, END], spoken=[3, END], terminator=CUT, end_of_turn=True, turn_open=False)


@both
def test_force_listens_and_keeps_the_turn_open(compat: bool) -> None:
    for turn_open in (True, False):
        run = drive(make(compat=compat, turn_open=turn_open, force=True), [])
        check(run, [], terminator=LISTEN, all_ids=[LISTEN], is_listen=True, end_of_turn=False, turn_open=turn_open)
        assert not run.decoder.forced_end


@both
def test_override_closes_an_open_turn(compat: bool) -> None:
    decoder = make(compat=compat, turn_open=True, override=True)
    assert decoder.start() == DecoderStep(END, None, False)
    run = drive(make(compat=compat, turn_open=True, override=True), [])
    check(run, [END], terminator=LISTEN, all_ids=[END, LISTEN], spoken=[], res_ids=[], is_listen=True, turn_open=False)
    check(run, [END], end_of_turn=not compat, forced_end=True)


@both
def test_override_without_a_turn_only_listens(compat: bool) -> None:
    run = drive(make(compat=compat, override=True), [])
    check(run, [], terminator=LISTEN, all_ids=[LISTEN], is_listen=True, end_of_turn=False, forced_end=False)


def test_force_and_a_limit_of_one() -> None:
    run = drive(make(compat=True, max_tokens=1, turn_open=True, override=True), [])
    check(run, [END], terminator=CUT, all_ids=[END, CUT], is_listen=False, turn_open=False, forced_end=True)
    run = drive(make(compat=False, max_tokens=1, turn_open=True, override=True), [])
    check(run, [END], terminator=LISTEN, all_ids=[END, LISTEN], is_listen=True, end_of_turn=True, turn_open=False)


# interrupt


@both
def test_interrupt_before_the_first_token(compat: bool) -> None:
    run = drive(make(compat=compat, turn_open=True), [], interrupt_after=0)
    check(run, [END], terminator=LISTEN, all_ids=[END, LISTEN], is_listen=True, end_of_turn=True, turn_open=False)
    assert run.decoder.forced_end, "expected forced_end for an open turn"
    run = drive(make(compat=compat), [], interrupt_after=0)
    check(run, [], terminator=LISTEN, all_ids=[LISTEN], is_listen=True, end_of_turn=True, turn_open=False)
    assert not run.decoder.forced_end, "expected no speech to reset, got forced_end"


@both
def test_interrupt_after_start_without_a_turn(compat: bool) -> None:
    decoder = make(compat=compat)
    decoder.start()
    assert decoder.interrupt() == DecoderStep(None, None, False)
    assert (decoder.is_listen, decoder.end_of_turn, decoder.forced_end) == (True, True, False)


@both
def test_interrupt_while_speaking_silences_the_unit(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, 4, 5], interrupt_after=3)
    check(run, [SPEAK, 3, 4, END], spoken=[], res_ids=[3, 4], all_ids=[SPEAK, 3, 4, END, LISTEN], terminator=LISTEN)
    check(run, run.fed, is_listen=True, end_of_turn=True, turn_open=False, forced_end=True)


@pytest.mark.parametrize("sampled", [[SPEAK, 3, END], [END]])
@both
def test_interrupt_after_turn_eos_resets_speech(compat: bool, sampled: list[int]) -> None:
    """The turn is closed already and is not closed twice."""
    run = drive(make(compat=compat, turn_open=True), sampled, interrupt_after=len(sampled))
    check(run, sampled, spoken=[], all_ids=[*sampled, LISTEN], is_listen=True, end_of_turn=True)
    check(run, run.fed, forced_end=True, turn_open=False)


@both
def test_interrupt_in_implicit_mode_feeds_no_terminator(compat: bool) -> None:
    run = drive(make(compat=compat, turn_open=True, explicit=False), [], interrupt_after=0)
    check(run, [END], terminator=None, all_ids=[END, LISTEN], is_listen=True)


# limit of a turn


@pytest.mark.parametrize("then", [3, CUT, TTS_CUT, LISTEN, SPEAK], ids=["word", "cut", "tts cut", "listen", "speak"])
@both
def test_turn_eos_replaces_the_token_after_the_limit(compat: bool, then: int) -> None:
    run = drive(make(compat=compat, turn_open=True, cap=TurnCap(4, 6)), [SPEAK, 1, 2, then])
    check(run, [SPEAK, 1, 2, END], spoken=[1, 2, END], terminator=CUT, is_listen=False, end_of_turn=True)
    check(run, [SPEAK, 1, 2, END], turn_open=False, turn_limited=True, n_turn_tokens=0, forced_end=False)
    assert run.rows == {0: 1, 1: 2, 2: END}


@pytest.mark.parametrize("explicit", [True, False])
def test_limit_at_the_end_of_a_full_unit_ends_the_turn_in_it(explicit: bool) -> None:
    """One token more than the unit may have otherwise."""
    n_fed = 3 if explicit else 4
    words = [1, 2, 3][: n_fed - 1]
    run = drive(make(max_tokens=4, explicit=explicit, cap=TurnCap(0, len(words))), [SPEAK, *words, 5])
    check(run, [SPEAK, *words, END], spoken=[*words, END], terminator=CUT if explicit else None, turn_limited=True)


def test_turn_may_end_by_itself_at_its_limit() -> None:
    run = drive(make(cap=TurnCap(0, 2)), [SPEAK, 1, 2, END, LISTEN])
    check(run, [SPEAK, 1, 2, END], spoken=[1, 2, END], end_of_turn=True, turn_limited=False, n_turn_tokens=0)


def test_turn_beyond_its_limit_ends_with_the_first_token() -> None:
    run = drive(make(turn_open=True, cap=TurnCap(9, 3)), [SPEAK])
    check(run, [END], spoken=[], all_ids=[END, CUT], is_listen=False, end_of_turn=True, turn_limited=True)


def test_turn_that_reopens_is_counted_anew() -> None:
    run = drive(make(turn_open=True, cap=TurnCap(2, 3)), [SPEAK, 1, END, 2, CUT])
    check(run, [SPEAK, 1, END, 2], turn_open=True, turn_limited=False, n_turn_tokens=1)


def test_count_goes_on_over_units() -> None:
    run = drive(make(cap=TurnCap(0, 9)), [SPEAK, 1, 2, CUT])
    check(run, [SPEAK, 1, 2], turn_open=True, n_turn_tokens=2)
    interrupted = drive(make(turn_open=True, cap=TurnCap(2, 9)), [], interrupt_after=0)
    check(interrupted, [END], turn_open=False, n_turn_tokens=0, turn_limited=False)


# order of calls


def test_refuses_calls_out_of_order() -> None:
    with pytest.raises(AssertionError, match="take"):
        make().take(3)
    started = make()
    started.start()
    with pytest.raises(AssertionError, match="start"):
        started.start()
    for explicit in (True, False):
        for again, arguments in (("take", [3]), ("interrupt", []), ("start", [])):
            done = make(explicit=explicit, max_tokens=3)
            drive(done, [SPEAK, 3, 4])
            with pytest.raises(AssertionError, match=again):
                getattr(done, again)(*arguments)
    interrupted = make()
    interrupted.interrupt()
    with pytest.raises(AssertionError, match="start"):
        interrupted.start()
    with pytest.raises(AssertionError, match="max_tokens"):
        make(max_tokens=0)
