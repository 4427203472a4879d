"""Drives a unit decoder with given tokens and records its steps."""

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
    """Text length of ids: token n is a word of n characters, special tokens have no text."""
    return sum(token for token in ids if token not in SPECIAL)


def make(*, compat: bool = False, turn_open: bool = False, max_tokens: int = 20, **options) -> UnitDecoder:
    """A decoder with these control tokens, with wide limits by default."""
    return UnitDecoder(IDS, max_tokens=max_tokens, compat=compat, length=n_chars, turn_open=turn_open, **options)


@dataclass
class Run:
    """Steps of a decoder: fed tokens, hidden rows by place, and number of sampled tokens."""

    decoder: UnitDecoder
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
        return {name: getattr(self.decoder, name) for name in OUTCOME}


def drive(decoder: UnitDecoder, sampled: Sequence[int], *, interrupt_after: int | None = None) -> Run:
    """Run a unit to its end. interrupt_after: interrupt after that many sampled tokens."""
    run = Run(decoder)
    if interrupt_after == 0:
        run.do(decoder.interrupt())
        return run
    step = run.do(decoder.start())
    while step.sample:
        if run.n_sampled == interrupt_after:
            step = run.do(decoder.interrupt())
            break
        assert run.n_sampled < len(sampled), f"expected the unit to end with {sampled}, got a request for more"
        step = run.do(decoder.take(sampled[run.n_sampled]))
        run.n_sampled += 1
    assert not step.sample, f"expected the end, got {step}"
    return run


def check(run: Run, fed: list[int], **expected: object) -> None:
    """Check the fed tokens and the outcome."""
    got = {"fed": run.fed, **{name: getattr(run.decoder, name) for name in expected}}
    assert got == {"fed": fed, **expected}
