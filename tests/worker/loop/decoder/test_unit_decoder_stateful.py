"""The unit decoder compared with a plain loop, and its invariants for any sampled tokens."""

from dataclasses import dataclass, fields

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.loop.decoder.decoder_helpers import (
    BOS,
    CUT,
    END,
    LISTEN,
    OUTCOME,
    SPEAK,
    TTS_CUT,
    Run,
    drive,
    make,
    n_chars,
)
from worker.loop.unit_decoder import UnitDecoder

# against a plain loop


@dataclass(frozen=True)
class Case:
    """Settings of a unit and more sampled tokens than it can use."""

    sampled: tuple[int, ...]
    max_tokens: int
    max_chars: int
    explicit: bool
    turn_open: bool
    force: bool
    override: bool

    def decoder(self, *, compat: bool) -> UnitDecoder:
        options = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "sampled"}
        return make(compat=compat, **options)

    def run(self, *, compat: bool, interrupt_after: int | None = None) -> Run:
        return drive(self.decoder(compat=compat), self.sampled, interrupt_after=interrupt_after)


tokens = st.one_of(st.integers(1, 9), st.integers(1, 4), st.sampled_from([SPEAK, END, END, BOS, LISTEN, CUT, TTS_CUT]))
content = st.one_of(st.integers(1, 4), st.sampled_from([SPEAK, END, END, BOS]))
rarely = st.sampled_from([False] * 7 + [True])
cases = st.builds(
    Case,
    # Content is frequent, so that units often reach their limits.
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
    """The public implementation's unit as one loop over given samples. Returns: outcome, fed ids, number sampled."""
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
def test_fixed_differs_from_compat_in_documented_cases_only(case: Case) -> None:
    fixed, compat = case.run(compat=False), case.run(compat=True)
    if (case.force or case.override) and case.explicit and case.max_tokens == 1:
        assert fixed.decoder.is_listen and not compat.decoder.is_listen
        return
    assert (fixed.fed, fixed.n_sampled) == (compat.fed, compat.n_sampled)
    got = {name for name in OUTCOME if getattr(fixed.decoder, name) != getattr(compat.decoder, name)}
    expected = set()
    if fixed.fed[-1:] == [END]:
        if case.override:
            expected = {"end_of_turn"}
        elif fixed.decoder.all_ids[-1] == LISTEN:
            expected = {"end_of_turn", "is_listen"}
        elif compat.decoder.turn_open:
            expected = {"turn_open"}
    assert got == expected


# invariants


@settings(max_examples=300)
@given(cases, st.none() | st.integers(0, 9), st.booleans())
def test_record_equals_the_fed_ids(case: Case, interrupt_after: int | None, compat: bool) -> None:
    run = case.run(compat=compat, interrupt_after=interrupt_after)
    decoder = run.decoder
    if case.explicit:
        assert decoder.terminator in (LISTEN, CUT, TTS_CUT), f"expected a terminator, got {decoder.terminator}"
        assert decoder.all_ids == [*run.fed, decoder.terminator]
    else:
        assert decoder.terminator is None
        assert decoder.all_ids[: len(run.fed)] == run.fed
        assert len(decoder.all_ids) - len(run.fed) <= 1, f"expected one id not fed at most, got {decoder.all_ids}"
    sampled = run.fed[: run.n_sampled] if decoder.forced_end else run.fed
    assert decoder.res_ids == [token for token in sampled if token != SPEAK]
    assert list(run.rows) == list(range(len(run.rows))), f"expected places in order, got {list(run.rows)}"
    assert list(run.rows.values()) == sampled[1:]
    assert len(sampled) <= case.max_tokens - case.explicit
    assert n_chars(decoder.spoken) < case.max_chars or not decoder.spoken


@settings(max_examples=300)
@given(cases, st.none() | st.integers(0, 9))
def test_fixed_outcomes_agree_with_each_other(case: Case, interrupt_after: int | None) -> None:
    run = case.run(compat=False, interrupt_after=interrupt_after)
    decoder = run.decoder
    assert not (decoder.end_of_turn and decoder.turn_open), "expected an ended turn to be closed, got it open"
    if decoder.is_listen:
        assert not decoder.spoken, f"expected no spoken ids in a silent unit, got {decoder.spoken}"
    else:
        assert decoder.spoken == run.fed[1:]
    if decoder.turn_open:
        assert run.fed[-1:] != [END], "expected turn_eos to close the turn, got it open"
    closed = case.turn_open and not decoder.turn_open
    if closed:
        assert decoder.end_of_turn, "expected a turn that was closed to be reported as ended"
    if decoder.forced_end:
        assert decoder.is_listen and decoder.end_of_turn, "expected a cut-off turn to be silent and over"


@settings(max_examples=200)
@given(cases, st.integers(0, 6))
def test_interrupted_unit_is_silent_and_ends_its_turn(case: Case, interrupt_after: int) -> None:
    for compat in (True, False):
        if interrupt_after > 0 and case.run(compat=compat).n_sampled <= interrupt_after:
            continue  # complete by then
        run = case.run(compat=compat, interrupt_after=interrupt_after)
        decoder = run.decoder
        assert (decoder.is_listen, decoder.end_of_turn, decoder.turn_open, decoder.spoken) == (True, True, False, [])
        live = case.turn_open or run.fed not in ([], [END])  # a first turn_eos ends nothing if nothing was begun
        assert decoder.forced_end is live, f"expected forced_end {live}, got {decoder.forced_end}"
        if live:
            assert decoder.all_ids[-2:] == [END, LISTEN], f"expected turn_eos then listen, got {decoder.all_ids}"


@given(st.lists(cases, min_size=2, max_size=6))
def test_open_turn_never_listens_unforced(units: list[Case]) -> None:
    """Consecutive units, each with the turn state of the one before."""
    turn_open = False
    for case in units:
        decoder = make(compat=False, turn_open=turn_open, max_tokens=case.max_tokens, max_chars=case.max_chars)
        drive(decoder, case.sampled)
        assert not (turn_open and decoder.is_listen), "expected an open turn to go on, got listen"
        assert not decoder.forced_end
        turn_open = decoder.turn_open
