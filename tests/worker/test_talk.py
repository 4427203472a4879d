"""One unit's token machine: rule by rule, against a plain loop, and what holds whatever is sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokens import Tokenizer
from worker.talk import Step, Talk, TalkIds

TINY = Path(__file__).parents[2] / "assets" / "tiny"
IDS = TalkIds(listen=100, speak=101, chunk_eos=102, chunk_tts_eos=103, turn_eos=104, tts_bos=105)
LISTEN, SPEAK, CUT, TTS_CUT, END, BOS = (getattr(IDS, entry.name) for entry in fields(IDS))
SPECIAL = (LISTEN, SPEAK, CUT, TTS_CUT, END, BOS)
OUTCOME = ("terminator", "spoken", "all_ids", "res_ids", "is_listen", "end_of_turn", "turn_open")
both = pytest.mark.parametrize("compat", [True, False], ids=["compat", "fixed"])


def n_chars(ids: Sequence[int]) -> int:
    """Token n is a word of n characters; special tokens have no text."""
    return sum(token for token in ids if token not in SPECIAL)


def make(*, compat: bool = False, turn_open: bool = False, max_tokens: int = 20, **options) -> Talk:
    return Talk(IDS, max_tokens=max_tokens, compat=compat, length=n_chars, turn_open=turn_open, **options)


@dataclass
class Run:
    """What a driver saw: fed tokens, the hidden buffer by place, and how many tokens it sampled."""

    talk: Talk
    fed: list[int] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    n_sampled: int = 0

    def do(self, step: Step) -> Step:
        if step.feed is not None:
            self.fed.append(step.feed)
            if step.place is not None:
                assert step.place not in self.rows, f"expected a free row, got place {step.place} again"
                self.rows[step.place] = step.feed
        else:
            assert step.place is None, f"expected no place without a token, got {step.place}"
        return step

    def outcome(self) -> dict[str, object]:
        return {name: getattr(self.talk, name) for name in OUTCOME}


def drive(talk: Talk, sampled: Sequence[int], *, interrupt_after: int | None = None) -> Run:
    """Run a unit to its end. interrupt_after: break off after that many sampled tokens, if it gets there."""
    run = Run(talk)
    if interrupt_after == 0:
        run.do(talk.interrupt())
        return run
    step = run.do(talk.start())
    while step.sample:
        if run.n_sampled == interrupt_after:
            step = run.do(talk.interrupt())
            break
        assert run.n_sampled < len(sampled), f"expected the unit to end with {sampled}, got a wish for more"
        step = run.do(talk.take(sampled[run.n_sampled]))
        run.n_sampled += 1
    assert not step.sample, f"expected the end, got {step}"
    return run


def check(run: Run, fed: list[int], **expected: object) -> None:
    got = {"fed": run.fed, **{name: getattr(run.talk, name) for name in expected}}
    assert got == {"fed": fed, **expected}


# rules


def test_ids_of_a_tokenizer() -> None:
    special = Tokenizer.load(TINY).special
    ids = TalkIds.of(special)
    for entry in fields(TalkIds):
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
    talk = make(compat=compat)
    assert talk.start() == Step(None, None, True)
    assert talk.take(5) == Step(5, None, True)
    assert talk.take(6) == Step(6, 0, True)
    assert talk.take(7) == Step(7, 1, True)
    assert talk.take(CUT) == Step(None, None, False)
    assert (talk.spoken, talk.res_ids) == ([6, 7], [5, 6, 7])


@both
def test_a_cut_as_first_token_is_an_empty_speak_unit(compat: bool) -> None:
    for turn_open in (True, False):
        run = drive(make(compat=compat, turn_open=turn_open), [CUT])
        check(run, [], terminator=CUT, spoken=[], all_ids=[CUT], is_listen=False, turn_open=turn_open)


@both
def test_speak_further_on_is_content(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, SPEAK, CUT])
    check(run, [SPEAK, 3, SPEAK], spoken=[3, SPEAK], res_ids=[3], all_ids=[SPEAK, 3, SPEAK, CUT])


@both
def test_turn_eos_is_spoken_and_does_not_end_the_unit(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, END, CUT])
    check(run, [SPEAK, 3, END], spoken=[3, END], terminator=CUT, end_of_turn=True, turn_open=False, is_listen=False)


@both
def test_text_behind_turn_eos_reopens_the_turn(compat: bool) -> None:
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
def test_the_character_cap_spares_the_first_token(compat: bool) -> None:
    run = drive(make(compat=compat, max_chars=3), [9, 2, CUT])
    check(run, [9, 2], spoken=[2], all_ids=[9, 2, CUT])


def test_the_character_cap_behind_turn_eos() -> None:
    run = drive(make(compat=True, max_chars=5), [SPEAK, 3, END, 2])
    check(run, [SPEAK, 3, END], spoken=[3, END], terminator=CUT, end_of_turn=True, turn_open=True)
    run = drive(make(compat=False, max_chars=5), [SPEAK, 3, END, 2])
    check(run, [SPEAK, 3, END], spoken=[3, END], terminator=CUT, end_of_turn=True, turn_open=False)


@both
def test_force_listens_and_leaves_the_turn(compat: bool) -> None:
    for turn_open in (True, False):
        run = drive(make(compat=compat, turn_open=turn_open, force=True), [])
        check(run, [], terminator=LISTEN, all_ids=[LISTEN], is_listen=True, end_of_turn=False, turn_open=turn_open)
        assert not run.talk.forced_end


@both
def test_override_closes_an_open_turn(compat: bool) -> None:
    talk = make(compat=compat, turn_open=True, override=True)
    assert talk.start() == Step(END, None, False)
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
    assert run.talk.forced_end, "expected the live turn to count as cut off"
    run = drive(make(compat=compat), [], interrupt_after=0)
    check(run, [], terminator=LISTEN, all_ids=[LISTEN], is_listen=True, end_of_turn=True, turn_open=False)
    assert not run.talk.forced_end, "expected no speech to reset, got forced_end"


@both
def test_interrupt_after_start_without_a_turn(compat: bool) -> None:
    talk = make(compat=compat)
    talk.start()
    assert talk.interrupt() == Step(None, None, False)
    assert (talk.is_listen, talk.end_of_turn, talk.forced_end) == (True, True, False)


@both
def test_interrupt_while_speaking_silences_the_unit(compat: bool) -> None:
    run = drive(make(compat=compat), [SPEAK, 3, 4, 5], interrupt_after=3)
    check(run, [SPEAK, 3, 4, END], spoken=[], res_ids=[3, 4], all_ids=[SPEAK, 3, 4, END, LISTEN], terminator=LISTEN)
    check(run, run.fed, is_listen=True, end_of_turn=True, turn_open=False, forced_end=True)


@pytest.mark.parametrize("sampled", [[SPEAK, 3, END], [END]])
@both
def test_interrupt_behind_turn_eos_still_resets_speech(compat: bool, sampled: list[int]) -> None:
    """The turn is closed already: once is enough."""
    run = drive(make(compat=compat, turn_open=True), sampled, interrupt_after=len(sampled))
    check(run, sampled, spoken=[], all_ids=[*sampled, LISTEN], is_listen=True, end_of_turn=True)
    check(run, run.fed, forced_end=True, turn_open=False)


@both
def test_interrupt_in_implicit_mode_feeds_no_terminator(compat: bool) -> None:
    run = drive(make(compat=compat, turn_open=True, explicit=False), [], interrupt_after=0)
    check(run, [END], terminator=None, all_ids=[END, LISTEN], is_listen=True)


def test_calls_out_of_order_are_our_mistake() -> None:
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


# against a plain loop


@dataclass(frozen=True)
class Case:
    """Settings of a unit and what would be sampled, always more than enough."""

    sampled: tuple[int, ...]
    max_tokens: int
    max_chars: int
    explicit: bool
    turn_open: bool
    force: bool
    override: bool

    def talk(self, *, compat: bool) -> Talk:
        options = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "sampled"}
        return make(compat=compat, **options)

    def run(self, *, compat: bool, interrupt_after: int | None = None) -> Run:
        return drive(self.talk(compat=compat), self.sampled, interrupt_after=interrupt_after)


tokens = st.one_of(st.integers(1, 9), st.integers(1, 4), st.sampled_from([SPEAK, END, END, BOS, LISTEN, CUT, TTS_CUT]))
content = st.one_of(st.integers(1, 4), st.sampled_from([SPEAK, END, END, BOS]))
rarely = st.sampled_from([False] * 7 + [True])
cases = st.builds(
    Case,
    # Content first, so that units often live long enough to meet their limits.
    sampled=st.builds(
        lambda first, then: (*first, *then, *[CUT] * 12), st.lists(content, max_size=6), st.lists(tokens, max_size=6)
    ),
    max_tokens=st.integers(1, 9),
    max_chars=st.integers(1, 28),
    explicit=st.booleans(),
    turn_open=st.booleans(),
    force=rarely,
    override=rarely,
)


def plain_loop(case: Case) -> tuple[dict[str, object], list[int], int]:
    """The public implementation's unit as one loop over ready-made samples: outcome, fed ids, number sampled."""
    fed, on_record, reply_ids, voiced = [], [], [], []
    ended = not case.turn_open
    if case.override and not ended:
        on_record.append(END)
        fed.append(END)
        ended = True
    forced = case.force or case.override
    supply = iter(case.sampled)
    n_sampled, last, silent, finished_turn = 0, None, False, False
    for number in range(case.max_tokens):
        if case.explicit and number == case.max_tokens - 1:
            on_record.append(CUT)
            last = CUT
            break
        if forced:
            token = LISTEN
        else:
            token = next(supply)
            n_sampled += 1
            if token == LISTEN and not ended:
                token = BOS
        silent = token == LISTEN
        if token in (LISTEN, CUT, TTS_CUT):
            on_record.append(token)
            last = token if case.explicit else None
            break
        ended = False
        if number > 0 and n_chars([*voiced, token]) >= case.max_chars:
            if case.explicit:
                on_record.append(CUT)
                last = CUT
            break
        on_record.append(token)
        fed.append(token)
        if token != SPEAK:
            reply_ids.append(token)
        finished_turn = token == END
        ended = ended or finished_turn
        if number > 0:
            voiced.append(token)
    values = (last, voiced, on_record, reply_ids, silent, finished_turn and not silent, not ended)
    return dict(zip(OUTCOME, values, strict=True)), fed, n_sampled


@settings(max_examples=600)
@given(cases)
def test_compat_equals_the_plain_loop(case: Case) -> None:
    run = case.run(compat=True)
    assert (run.outcome(), run.fed, run.n_sampled) == plain_loop(case)


@settings(max_examples=300)
@given(cases)
def test_fixed_differs_from_compat_only_where_it_says(case: Case) -> None:
    fixed, compat = case.run(compat=False), case.run(compat=True)
    if (case.force or case.override) and case.explicit and case.max_tokens == 1:
        assert fixed.talk.is_listen and not compat.talk.is_listen
        return
    assert (fixed.fed, fixed.n_sampled) == (compat.fed, compat.n_sampled)
    got = {name for name in OUTCOME if getattr(fixed.talk, name) != getattr(compat.talk, name)}
    expected = set()
    if fixed.fed[-1:] == [END]:
        if case.override:
            expected = {"end_of_turn"}
        elif fixed.talk.all_ids[-1] == LISTEN:
            expected = {"end_of_turn", "is_listen"}
        elif compat.talk.turn_open:
            expected = {"turn_open"}
    assert got == expected


# whatever is sampled


@settings(max_examples=300)
@given(cases, st.none() | st.integers(0, 9), st.booleans())
def test_the_record_is_what_was_fed(case: Case, interrupt_after: int | None, compat: bool) -> None:
    run = case.run(compat=compat, interrupt_after=interrupt_after)
    talk = run.talk
    if case.explicit:
        assert talk.terminator in (LISTEN, CUT, TTS_CUT), f"expected a terminator, got {talk.terminator}"
        assert talk.all_ids == [*run.fed, talk.terminator]
    else:
        assert talk.terminator is None
        assert talk.all_ids[: len(run.fed)] == run.fed
        assert len(talk.all_ids) - len(run.fed) <= 1, f"expected one id not fed at most, got {talk.all_ids}"
    sampled = run.fed[: run.n_sampled] if talk.forced_end else run.fed
    assert talk.res_ids == [token for token in sampled if token != SPEAK]
    assert list(run.rows) == list(range(len(run.rows))), f"expected places in order, got {list(run.rows)}"
    assert list(run.rows.values()) == sampled[1:]
    assert len(sampled) <= case.max_tokens - case.explicit
    assert n_chars(talk.spoken) < case.max_chars or not talk.spoken


@settings(max_examples=300)
@given(cases, st.none() | st.integers(0, 9))
def test_fixed_outcomes_agree_with_each_other(case: Case, interrupt_after: int | None) -> None:
    run = case.run(compat=False, interrupt_after=interrupt_after)
    talk = run.talk
    assert not (talk.end_of_turn and talk.turn_open), "expected an ended turn to be closed, got it open"
    if talk.is_listen:
        assert not talk.spoken, f"expected a silent unit to say nothing, got {talk.spoken}"
    else:
        assert talk.spoken == run.fed[1:]
    if talk.turn_open:
        assert run.fed[-1:] != [END], "expected turn_eos to close the turn, got it open"
    closed = case.turn_open and not talk.turn_open
    if closed:
        assert talk.end_of_turn, "expected a turn that was closed to be reported as ended"
    if talk.forced_end:
        assert talk.is_listen and talk.end_of_turn, "expected a cut-off turn to be silent and over"


@settings(max_examples=200)
@given(cases, st.integers(0, 6))
def test_an_interrupted_unit_is_silent_and_over(case: Case, interrupt_after: int) -> None:
    for compat in (True, False):
        if interrupt_after > 0 and case.run(compat=compat).n_sampled <= interrupt_after:
            continue  # complete by then
        run = case.run(compat=compat, interrupt_after=interrupt_after)
        talk = run.talk
        assert (talk.is_listen, talk.end_of_turn, talk.turn_open, talk.spoken) == (True, True, False, [])
        live = case.turn_open or run.fed not in ([], [END])  # a first turn_eos ends nothing if nothing was begun
        assert talk.forced_end is live, f"expected forced_end {live}, got {talk.forced_end}"
        if live:
            assert talk.all_ids[-2:] == [END, LISTEN], f"expected turn_eos then listen, got {talk.all_ids}"


@given(st.lists(cases, min_size=2, max_size=6))
def test_an_open_turn_never_listens_by_itself(units: list[Case]) -> None:
    """Units in a row, each starting as the one before left the turn."""
    turn_open = False
    for case in units:
        talk = make(compat=False, turn_open=turn_open, max_tokens=case.max_tokens, max_chars=case.max_chars)
        drive(talk, case.sampled)
        assert not (turn_open and talk.is_listen), "expected an open turn to go on, got listen"
        assert not talk.forced_end
        turn_open = talk.turn_open
