"""The reply state machine: its end, its text chunks, and a comparison with the calls of the public implementation."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.chat.reply import TEXT_CHUNK, Reply
from worker.loop.unit_decoder import DecoderStep

STOP, OTHER_STOP = 1000, 1001
STOPS = {STOP, OTHER_STOP}
both = pytest.mark.parametrize("compat", [True, False], ids=["compat", "fixed"])


def make(*, max_new_tokens: int = 256, compat: bool = False) -> Reply:
    return Reply(STOPS, max_new_tokens=max_new_tokens, compat=compat)


@dataclass
class Run:
    """Steps of a reply. rows: hidden rows by place. chunk_starts: tokens sampled before each sampler chunk."""

    reply: Reply
    fed: list[int] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    chunks: list[tuple[list[int], bool]] = field(default_factory=list)
    fed_at_chunk: list[int] = field(default_factory=list)
    chunk_starts: list[int] = field(default_factory=list)
    n_sampled: int = 0

    def do(self, step: DecoderStep) -> DecoderStep:
        """Read a completed chunk's rows, then feed."""
        if (chunk := self.reply.take_chunk()) is not None:
            rows = [self.rows[place] for place in range(len(chunk[0]))]
            assert rows == chunk[0], f"expected the rows of {chunk[0]}, got those of {rows}"
            self.chunks.append(chunk)
            self.fed_at_chunk.append(len(self.fed))
            assert self.reply.take_chunk() is None, "expected a chunk once, got it again"
        if step.feed is not None:
            self.fed.append(step.feed)
            self.places.append(step.place)
            self.rows[step.place] = step.feed
        if self.reply.begins_chunk:
            self.chunk_starts.append(self.n_sampled)
        return step


def drive(reply: Reply, sampled: Sequence[int], *, interrupt_after: int | None = None) -> Run:
    run = Run(reply)
    if interrupt_after == 0:
        run.do(reply.interrupt())
        return run
    step = run.do(reply.start())
    while step.sample:
        assert reply.stopped is None, f"expected a running reply, got {reply.stopped}"
        if run.n_sampled == interrupt_after:
            step = run.do(reply.interrupt())
            break
        assert run.n_sampled < len(sampled), f"expected the reply to end with {sampled}, got a wish for more"
        run.n_sampled += 1
        step = run.do(reply.take(sampled[run.n_sampled - 1]))
    assert step == DecoderStep(None, None, False), f"expected an end that feeds nothing, got {step}"
    return run


def text(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


# rules


@both
def test_first_steps(compat: bool) -> None:
    reply = make(compat=compat)
    assert reply.start() == DecoderStep(None, None, True)
    assert reply.take(7) == DecoderStep(7, 0, True)
    assert reply.take(8) == DecoderStep(8, 1, True)
    assert reply.take_chunk() is None
    assert reply.take(STOP) == DecoderStep(None, None, False)
    assert (reply.ids, reply.stopped, reply.take_chunk()) == ([7, 8], "stop", ([7, 8], True))


@both
@pytest.mark.parametrize("stop", [STOP, OTHER_STOP])
def test_a_terminator_as_first_token_is_an_empty_reply(compat: bool, stop: int) -> None:
    run = drive(make(compat=compat), [stop])
    assert (run.reply.ids, run.reply.stopped, run.chunks, run.fed) == ([], "stop", [], [])


@both
@pytest.mark.parametrize(
    ("n", "sizes"), [(1, [1]), (9, [9]), (10, [10]), (11, [10, 1]), (20, [10, 10]), (25, [10, 10, 5])]
)
def test_only_the_last_text_chunk_is_finished(compat: bool, n: int, sizes: list[int]) -> None:
    run = drive(make(compat=compat), [*text(n), STOP])
    assert [len(ids) for ids, _ in run.chunks] == sizes
    assert [finished for _, finished in run.chunks] == [False] * (len(sizes) - 1) + [True]
    assert run.reply.ids == run.fed == text(n)


@both
def test_full_chunk_waits_for_the_next_token(compat: bool) -> None:
    reply = make(compat=compat)
    reply.start()
    for token in text(10):
        reply.take(token)
        assert reply.take_chunk() is None, f"expected no chunk at token {token}, got one"
    assert reply.take(10) == DecoderStep(10, 0, True)
    assert reply.take_chunk() == (text(10), False)
    assert reply.take_chunk() is None


@both
def test_the_sampler_chunks(compat: bool) -> None:
    run = drive(make(compat=compat), [*text(35), STOP])
    assert run.chunk_starts == [0, 11, 21, 31]
    run = drive(make(compat=compat, max_new_tokens=20), text(21))
    assert run.chunk_starts == [0, 11], f"expected no chunk to begin at the end, got {run.chunk_starts}"


@pytest.mark.parametrize(("limit", "n"), [(1, 1), (9, 9), (10, 10), (11, 11), (25, 25)])
def test_fixed_emits_and_feeds_exactly_the_limit(limit: int, n: int) -> None:
    run = drive(make(max_new_tokens=limit), text(n + 1))
    assert run.reply.ids == run.fed == text(n)
    assert run.reply.stopped == "length"
    assert [finished for _, finished in run.chunks] == [False] * ((n - 1) // 10) + [True]


@pytest.mark.parametrize(("limit", "n"), [(1, 10), (10, 10), (11, 20), (25, 30), (256, 260)])
def test_compat_rounds_the_limit_up_and_finishes_no_chunk_there(limit: int, n: int) -> None:
    run = drive(make(max_new_tokens=limit, compat=True), text(n + 1))
    assert run.reply.ids == run.fed == text(n)
    assert run.reply.stopped == "length"
    assert [finished for _, finished in run.chunks] == [False] * (n // 10)


@both
def test_terminator_after_the_limit_is_a_stop(compat: bool) -> None:
    run = drive(make(max_new_tokens=20, compat=compat), [*text(20), STOP])
    assert (run.reply.stopped, run.chunks) == ("stop", [(text(10), False), (text(10, 10), True)])


@both
def test_interrupt(compat: bool) -> None:
    run = drive(make(compat=compat), [], interrupt_after=0)
    assert (run.reply.stopped, run.reply.ids, run.chunks, run.chunk_starts) == ("interrupted", [], [], [])
    run = drive(make(compat=compat), text(20), interrupt_after=14)
    assert (run.reply.stopped, run.reply.ids) == ("interrupted", text(14))
    assert run.chunks == [(text(10), False)], f"expected the unfinished chunk not to be voiced, got {run.chunks}"
    assert not run.reply.begins_chunk


@both
def test_interrupt_discards_a_chunk_that_was_not_taken(compat: bool) -> None:
    reply = make(compat=compat)
    reply.start()
    for token in text(11):
        reply.take(token)
    assert reply.begins_chunk
    reply.interrupt()
    assert (reply.take_chunk(), reply.ids, reply.begins_chunk) == (None, text(11), False)


def test_refuses_calls_out_of_order() -> None:
    with pytest.raises(AssertionError, match="take"):
        make().take(3)
    started = make()
    started.start()
    with pytest.raises(AssertionError, match="start"):
        started.start()
    for name, arguments in (("take", [3]), ("interrupt", []), ("start", [])):
        done = make()
        drive(done, [STOP])
        with pytest.raises(AssertionError, match=name):
            getattr(done, name)(*arguments)
    interrupted = make()
    interrupted.interrupt()
    with pytest.raises(AssertionError, match="start"):
        interrupted.start()
    with pytest.raises(AssertionError, match="max_new_tokens"):
        make(max_new_tokens=0)


def test_refuses_a_chunk_that_was_not_taken() -> None:
    reply = make()
    reply.start()
    with pytest.raises(AssertionError, match="take_chunk"):
        for token in text(21):
            reply.take(token)


# compared with calls


def by_calls(sampled: Sequence[int], max_new_tokens: int) -> tuple[list[tuple[list[int], bool]], list[int], int]:
    """The public implementation: calls of 11, 10, 10, ... samples, each returning the tokens it fed.

    Gives text chunks with their finished flag, samples drawn before each call, and all samples drawn.
    """
    supply, waiting = iter(sampled), []
    chunks, starts, n_sampled = [], [], 0
    for call in range(-(-max_new_tokens // 10)):
        starts.append(n_sampled)
        drawn, finished = [], False
        for _ in range(10 if call else 11):
            token = next(supply)
            n_sampled += 1
            if token in STOPS:
                finished = True
                break
            drawn.append(token)
        known = waiting + drawn
        ready, waiting = (known, []) if finished else (known[:-1], known[-1:])
        if ready:
            chunks.append((ready, finished))
        if finished:
            break
    return chunks, starts, n_sampled


replies = st.builds(lambda n, stop: [*text(n), stop, *text(70, 200)], st.integers(0, 45), st.sampled_from([STOP, 99]))


@settings(max_examples=300)
@given(replies, st.integers(1, 45))
def test_compat_equals_calls(sampled: list[int], limit: int) -> None:
    run = drive(make(max_new_tokens=limit, compat=True), sampled)
    chunks, starts, n_sampled = by_calls(sampled, limit)
    assert (run.chunks, run.n_sampled) == (chunks, n_sampled)
    assert run.chunk_starts == starts
    assert run.fed == run.reply.ids == [token for ids, _ in chunks for token in ids]


@settings(max_examples=300)
@given(replies, st.integers(1, 45), st.booleans(), st.none() | st.integers(0, 45))
def test_invariants_of_any_reply(sampled: list[int], limit: int, compat: bool, interrupt_after: int | None) -> None:
    run = drive(make(max_new_tokens=limit, compat=compat), sampled, interrupt_after=interrupt_after)
    reply = run.reply
    assert reply.ids == run.fed == sampled[: len(run.fed)]
    assert run.places == [index % TEXT_CHUNK for index in range(len(run.fed))]
    assert not STOPS & set(reply.ids)
    voiced = [token for ids, _ in run.chunks for token in ids]
    assert all(len(ids) == TEXT_CHUNK for ids, _ in run.chunks[:-1])
    assert not any(finished for _, finished in run.chunks[:-1])
    if reply.stopped == "interrupted":
        assert voiced == reply.ids[: len(voiced)]
        assert not any(finished for _, finished in run.chunks)
        assert len(reply.ids) - len(voiced) <= TEXT_CHUNK
        return
    assert voiced == reply.ids
    n_text = sampled.index(STOP) if STOP in sampled else len(sampled)
    most = -(-limit // 10) * 10 if compat else limit
    assert len(reply.ids) == min(n_text, most)
    assert reply.stopped == ("stop" if n_text <= most else "length")
    if run.chunks:
        assert run.chunks[-1][1] is (reply.stopped == "stop" or not compat)
