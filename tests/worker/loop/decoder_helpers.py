"""One unit's token machine driven by hand: its ids, what it is asked, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import pytest

from worker.loop.unit_decoder import ControlTokens, DecoderStep, UnitDecoder

IDS = ControlTokens(listen=100, speak=101, chunk_eos=102, chunk_tts_eos=103, turn_eos=104, tts_bos=105)
LISTEN, SPEAK, CUT, TTS_CUT, END, BOS = (getattr(IDS, entry.name) for entry in fields(IDS))
SPECIAL = (LISTEN, SPEAK, CUT, TTS_CUT, END, BOS)
OUTCOME = ("terminator", "spoken", "all_ids", "res_ids", "is_listen", "end_of_turn", "turn_open")
both = pytest.mark.parametrize("compat", [True, False], ids=["compat", "fixed"])


def n_chars(ids: Sequence[int]) -> int:
    """Token n is a word of n characters; special tokens have no text."""
    return sum(token for token in ids if token not in SPECIAL)


def make(*, compat: bool = False, turn_open: bool = False, max_tokens: int = 20, **options) -> UnitDecoder:
    """A unit of these ids, with wide limits unless others are given."""
    return UnitDecoder(IDS, max_tokens=max_tokens, compat=compat, length=n_chars, turn_open=turn_open, **options)


@dataclass
class Run:
    """What a driver saw: fed tokens, the hidden buffer by place, and how many tokens it sampled."""

    talk: UnitDecoder
    fed: list[int] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    n_sampled: int = 0

    def do(self, step: DecoderStep) -> DecoderStep:
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


def drive(talk: UnitDecoder, sampled: Sequence[int], *, interrupt_after: int | None = None) -> Run:
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
    """What was fed, and what the machine says of the unit."""
    got = {"fed": run.fed, **{name: getattr(run.talk, name) for name in expected}}
    assert got == {"fed": fed, **expected}
