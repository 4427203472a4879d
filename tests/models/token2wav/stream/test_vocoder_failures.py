"""A failed call has no effect: all later sounds are bit-identical. And the bucket sizes that the host side uses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from models.errors import ShapeError, SlotError
from models.graphs.region_graphs import compile_counters
from models.graphs.streams import AsyncHostCopy
from models.token2wav.flow.conformer import RelativeAttention
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from tests.models.compare import assert_same
from tests.models.token2wav.stream.vocoders import (
    FOLDER,
    LOOKAHEAD,
    chunks_of_turn,
    fast_parts,
    make_tokens,
    make_vocoder,
    make_voice,
    shared_parts,
    slot_of,
)

SPEECH_TOKENS = make_tokens(0, 28)
# One size per axis, so that a chunk has the same bits in any batch.
ONE_SIZE = VocoderShapes(batch=(2,), speech_tokens=(28,), columns=(288,), prompt=(60, 120))
# Chunks of a turn: the first, the one after which the oldest history is trimmed, the last.
COUNTS = [25, 25, 25, 7, 12]
FAILING_CHUNKS = (0, 3, 5)
COMPATS = pytest.mark.parametrize("compat", [None, "reference"])


class Watched:
    """Regions of a vocoder that record the requested sizes and can fail."""

    def __init__(self, vocoder: Vocoder):
        self.plain, self.sizes, self.failing = vocoder.regions, [], None
        vocoder.regions = self

    def run(self, function: Callable[..., Any], *given: Tensor, **static: Any) -> Any:
        return self(self.plain.name_of(function), *given, **static)

    def __call__(self, name: str, *tensors: Tensor, **static: Any) -> Any:
        self.sizes.append((name, [tensor.shape for tensor in tensors], static))
        if self.failing == (name, "before"):
            raise torch.OutOfMemoryError("no room")
        result = self.plain(name, *tensors, **static)
        if self.failing == (name, "after"):
            raise torch.OutOfMemoryError("no room")
        return result


@contextmanager
def failing_write(number: int) -> Iterator[None]:
    """The write number `number` to any tensor of the state raises; earlier writes succeed."""
    left, plain = number, {name: getattr(Tensor, name) for name in ("index_copy_", "index_fill_")}

    def writing(name: str) -> Callable[..., Tensor]:
        def write(tensor: Tensor, *given: Any) -> Tensor:
            nonlocal left
            left -= 1
            if left < 0:
                raise torch.OutOfMemoryError("no room")
            return plain[name](tensor, *given)

        return write

    with pytest.MonkeyPatch.context() as patch:
        for name in plain:
            patch.setattr(Tensor, name, writing(name))
        yield


def session_state(vocoder: Vocoder, session: int) -> list[Tensor]:
    """Copies of everything that the session's next chunk depends on."""
    state, slot = vocoder.state, slot_of(vocoder, session)
    own = [tensor[slot : slot + 1] for tensor in (*state.slot_tensors(), *vocoder.vocode_state.tensors())]
    pools = [(state.token_rows, state.token_table), (state.mel_rows, state.mel_table)]
    for rows, table in (*pools, *((rows, state.dit_table) for rows in state.dit_rows)):
        seen = table.rows[slot, : int(table.length[slot])]
        own += [seen, rows.index_select(-3, seen)]
    return [tensor.clone() for tensor in own]


@contextmanager
def without_effect(vocoder: Vocoder) -> Iterator[None]:
    """The call inside fails, and the state of every session and of the host is unchanged."""
    before, host = [session_state(vocoder, n) for n in vocoder._sessions], repr((vocoder._sessions, vocoder._free))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        yield
    assert repr((vocoder._sessions, vocoder._free)) == host
    for session, expected in zip(vocoder._sessions, before, strict=True):
        for number, (got, want) in enumerate(zip(session_state(vocoder, session), expected, strict=True)):
            assert_same(got, want, f"tensor {number} of session {session}")


def three_sessions(compat: str | None, parts: FlowAndHift | None = None) -> tuple[Vocoder, list[list[Chunk]]]:
    """Three sessions with two voices, one of them with fewer steps, and the chunks of each call of a turn."""
    vocoder = make_vocoder(parts or fast_parts(), shapes=ONE_SIZE, compat=compat)
    for seed, n_speech_tokens, n_steps in ((0, 30, 2), (1, 40, 2), (0, 30, 1)):
        vocoder.open(make_voice(seed, n_speech_tokens), n_steps)
    return vocoder, turn_of(vocoder, 10)


def turn_of(vocoder: Vocoder, seed: int) -> list[list[Chunk]]:
    turns = [
        chunks_of_turn(session, make_tokens(seed + session, sum(COUNTS) + 9), COUNTS) for session in vocoder._sessions
    ]
    return [list(chunks) for chunks in zip(*turns, strict=True)]


def speak(vocoder: Vocoder, number: int, chunks: list[Chunk]) -> list[Tensor]:
    """The sounds of the chunks, in one call or, if the previous call failed, one by one."""
    calls = [[chunk] for chunk in chunks] if number in FAILING_CHUNKS else [chunks]
    return [wave for call in calls for wave in vocoder.speak(call)]


@cache
def undisturbed_turn(compat: str | None) -> list[list[Tensor]]:
    """The sounds of a turn without failures, in the calls of `speak`."""
    vocoder, turn = three_sessions(compat)
    return [speak(vocoder, number, chunks) for number, chunks in enumerate(turn)]


@pytest.mark.parametrize(
    ("region", "when", "compat"),
    [*((*one, None) for one in product(("flow", "hift"), ("before", "after"))), ("hift", "after", "reference")],
)
def test_chunks_of_a_failed_call_can_be_retried_one_by_one(region: str, when: str, compat: str | None):
    vocoder, turn = three_sessions(compat)
    watched = Watched(vocoder)
    for number, chunks in enumerate(turn):
        for _ in range(2 * (number in FAILING_CHUNKS)):
            watched.failing = region, when
            with without_effect(vocoder):
                vocoder.speak(chunks)
            watched.failing = None
        expected = undisturbed_turn(compat)[number]
        for session, (got, want) in enumerate(zip(speak(vocoder, number, chunks), expected, strict=True)):
            assert_same(got, want, f"chunk {number} of session {session}")


@COMPATS
def test_failure_at_any_write_has_no_effect(compat: str | None):
    """At each write, for both numbers of steps."""
    vocoder, turn = three_sessions(compat)
    undisturbed = three_sessions(compat)[0]
    for number, chunks in enumerate(turn):
        for n_done in range(WRITES * (number == FAILING_CHUNKS[1])):
            with without_effect(vocoder), failing_write(n_done):
                vocoder.speak(chunks)
        with failing_write(WRITES):
            got = vocoder.speak(chunks)
        for session, want in enumerate(undisturbed.speak(chunks)):
            assert_same(got[session], want, f"chunk {number} of session {session}")


def test_failed_copy_to_the_host_has_no_effect(monkeypatch: pytest.MonkeyPatch):
    """The copy of the sounds is part of a pending call."""
    vocoder, turn = three_sessions(None)
    undisturbed = three_sessions(None)[0]

    def fail(copy: AsyncHostCopy) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    for chunks in turn[:3]:
        with without_effect(vocoder), monkeypatch.context() as patch:
            patch.setattr(AsyncHostCopy, "result", fail)
            vocoder.finish(vocoder.start(chunks))
        for got, want in zip(vocoder.finish(vocoder.start(chunks)), undisturbed.speak(chunks), strict=True):
            assert_same(torch.from_numpy(got), want)


# Writes of one call: rows, tables and tails of the encoder, speaker and prompt; rows and tails of each Euler step, its
# table; tails of the sound.
WRITES = sum(2 + 4 + 2 + 2 + 2 * n_steps + 2 + 6 for n_steps in (2, 1))


def test_number_of_writes_per_call():
    vocoder, turn = three_sessions(None)
    with pytest.raises(torch.OutOfMemoryError), failing_write(WRITES - 1):
        vocoder.speak(turn[0])


@COMPATS
def test_failed_begin_turn_has_no_effect(compat: str | None):
    """The current turn continues, and a later `begin_turn` succeeds."""
    vocoder, turn = three_sessions(compat)
    undisturbed, watched = three_sessions(compat)[0], Watched(vocoder)
    for v in (vocoder, undisturbed):
        for chunks in turn[:2]:
            v.speak(chunks)
    for when in ("before", "after"):
        watched.failing = "begin", when
        with without_effect(vocoder):
            vocoder.begin_turn(0, 2)
    watched.failing = None
    for number in range(6 + 5 + 6):  # rows and lengths of three tables, per-slot tensors, tails of the sound
        with without_effect(vocoder), failing_write(number):
            vocoder.begin_turn(0, 2)
    for chunks in turn[2:4]:
        for got, want in zip(vocoder.speak(chunks), undisturbed.speak(chunks), strict=True):
            assert_same(got, want, "the current turn")
    for v in (vocoder, undisturbed):
        v.begin_turn(0, 2)
    fresh = turn_of(vocoder, 20)
    for old, new in zip(turn[4:], fresh, strict=False):
        chunks = [new[0], old[1], new[2]]
        for got, want in zip(vocoder.speak(chunks), undisturbed.speak(chunks), strict=True):
            assert_same(got, want, "later turns")


@pytest.mark.parametrize("when", ["before", "after"])
def test_failed_open_leases_nothing(when: str):
    """Neither the session's slot nor a use of the voice; a later `open` succeeds."""
    vocoder, turn = three_sessions(None)
    undisturbed, watched = three_sessions(None)[0], Watched(vocoder)
    for v in (vocoder, undisturbed):
        v.speak(turn[0])
    for n_tries in range(2 * vocoder.sizes.n_voices):
        watched.failing = "begin", when
        with without_effect(vocoder):
            vocoder.open(make_voice(n_tries, 20))
    for name in ("open", "prepare"):
        for number in (0, 9, 17):
            with without_effect(vocoder), failing_write(number):
                getattr(vocoder, name)(make_voice(50, 20))
    watched.failing = None
    assert vocoder.n_free == 2
    opened = [v.open(make_voice(50, 20)) for v in (vocoder, undisturbed)]
    assert opened == [3, 3]
    chunks = [*turn[1], Chunk(3, SPEECH_TOKENS)]
    for got, want in zip(vocoder.speak(chunks), undisturbed.speak(chunks), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize(("where", "compat"), [("rows", None), ("rows", "reference"), ("tails", None), ("sound", None)])
def test_nan_stays_in_its_session(where: str, compat: str | None):
    """Its sound is not finite until the next turn, wherever the NaN arises; other sessions are not affected."""
    parts = shared_parts() if where == "sound" else fast_parts()
    vocoder, turn = three_sessions(compat, parts)
    undisturbed = three_sessions(compat, parts)[0]
    for v in (vocoder, undisturbed):
        v.speak(turn[0])
    slot, state = slot_of(vocoder, 1), vocoder.state
    if where == "rows":
        newest = 0 if compat == "reference" else state.dit_table.length[slot] - 1
        state.dit_rows[0][:, :, :, state.dit_table.rows[slot, newest]] = float("nan")
    elif where == "tails":
        state.lookahead_tail[slot] = float("inf")
    else:
        vocoder.vocode_state.mel[slot] = float("nan")
    for session, (got, want) in enumerate(zip(vocoder.speak(turn[1]), undisturbed.speak(turn[1]), strict=True)):
        if session == 1:
            assert not got.isfinite().all(), "expected sound that is not finite"
        else:
            assert_same(got, want, f"sound of session {session}")
    for v in (vocoder, undisturbed):
        v.begin_turn(1)
    for number, new in enumerate(turn_of(vocoder, 30)[:2]):
        chunks = [turn[2 + number][0], new[1], turn[2 + number][2]]
        for session, (got, want) in enumerate(zip(vocoder.speak(chunks), undisturbed.speak(chunks), strict=True)):
            assert_same(got, want, f"chunk {number} of the next turn, session {session}")


def test_a_voice_without_memory_fails_alone(monkeypatch: pytest.MonkeyPatch):
    """Its slot is free again, sessions go on, and it is prepared once there is memory."""
    vocoder, turn = three_sessions(None)
    undisturbed = three_sessions(None)[0]
    asked: list[int] = []

    def fail(n_frames: int) -> None:
        asked.append(n_frames)
        raise torch.OutOfMemoryError("cuMemCreate: no room")

    new, host = make_voice(77, 20), repr((vocoder._sessions, vocoder._free))
    before = vars(vocoder.voices)["_by_slot"].copy()
    with monkeypatch.context() as patch:
        patch.setattr(vocoder.state, "grow_voices", fail)
        for call in (vocoder.open, vocoder.prepare, partial(vocoder.change_voice, 0)):
            with pytest.raises(SlotError, match=r"voice: expected memory .* mel frames.*, got too little .*no room"):
                call(new)
    assert repr((vocoder._sessions, vocoder._free)) == host and vocoder.voices._by_slot == before
    for got, want in zip(vocoder.speak(turn[0]), undisturbed.speak(turn[0]), strict=True):
        assert_same(got, want)
    first = max(entry.start + entry.n_frames for entry in before.values())
    assert asked == 6 * [first + new.n_frames], "expected a second attempt without unused voices"
    assert [v.open(new) for v in (vocoder, undisturbed)] == [3, 3]
    chunks = [*turn[1], Chunk(3, SPEECH_TOKENS)]
    for got, want in zip(vocoder.speak(chunks), undisturbed.speak(chunks), strict=True):
        assert_same(got, want)


def test_a_voice_without_memory_takes_the_rows_of_unused_voices(monkeypatch: pytest.MonkeyPatch):
    vocoder = make_vocoder()
    for n in range(2):
        vocoder.prepare(make_voice(n, 20))
    held = 2 * make_voice(0, 20).n_frames

    def grow(n_frames: int) -> None:
        if n_frames > held:
            raise torch.OutOfMemoryError("cuMemCreate: no room")

    monkeypatch.setattr(vocoder.state, "grow_voices", grow)
    session = vocoder.open(make_voice(2, 20))
    (entry,) = vocoder.voices._by_slot.values()
    assert entry.start == 0 and entry.users == 1, f"expected the first rows, and no other voice, got {entry}"
    with pytest.raises(SlotError, match="got too little"):
        vocoder.prepare(make_voice(3, 40))
    vocoder.close(session)


def test_every_turn_uses_the_same_sizes():
    vocoder = make_vocoder(shapes=VocoderShapes(batch=(1,), columns=(176, 256), prompt=(60, 120)))
    session, watched = vocoder.open(make_voice()), Watched(vocoder)
    turns = []
    for _ in range(2):
        watched.sizes.clear()
        for _ in range(4):
            vocoder.speak([Chunk(session, SPEECH_TOKENS)])
        turns.append(list(watched.sizes))
        vocoder.begin_turn(session)
    assert turns[0] == turns[1]
    n_new = FRAMES_PER_TOKEN * (len(SPEECH_TOKENS) - LOOKAHEAD)
    columns = [static["width"] + n_new for name, _, static in turns[0] if name == "flow"]
    assert columns == [176, 176, 256, 256], "expected columns that grow up to a bound"


def test_batch_sizes_are_limited_to_the_sessions():
    assert make_vocoder(sizes=FlowSizes(1, 1, 2, max_prompt=120, voice_frames=120)).shapes.batch == (1,)
    assert make_vocoder(sizes=FlowSizes(3, 1, 2, max_prompt=120, voice_frames=120)).shapes.batch == (1, 2, 3)
    assert make_vocoder(sizes=FlowSizes(9, 1, 2, max_prompt=120, voice_frames=120)).shapes.batch == (1, 2, 4)


def test_a_new_voice_compiles_nothing():
    torch._dynamo.reset()
    vocoder = make_vocoder(load_flow_and_hift(FOLDER), steps=(1,))
    vocoder.regions.compile(["flow"], by_layer=True, backend="eager")
    vocoder.open(make_voice(0, 30))
    session = vocoder.open(make_voice(1, 31))
    vocoder.speak([Chunk(session, SPEECH_TOKENS)])
    before = compile_counters()
    vocoder.open(make_voice(2, 32))
    vocoder.offline(SPEECH_TOKENS, make_voice(2, 33))
    assert compile_counters() == before
    torch._dynamo.reset()


def test_warm_up_empties_the_scratch_slot():
    vocoder = make_vocoder()
    vocoder.regions.warm_up()
    for tensor in vocoder.vocode_state.tensors():
        assert not tensor[vocoder.state.scratch].any()


def test_distances_of_every_bucket_are_precomputed(monkeypatch: pytest.MonkeyPatch):
    """At the default sizes: the longest prompt and the largest chunk."""
    vocoder = make_vocoder(shapes=None, sizes=FlowSizes(1, 1, max_steps=2, voice_frames=1500))
    session = vocoder.open(make_voice(0, 750))
    monkeypatch.setattr(RelativeAttention, "_project", lambda *_: pytest.fail("projected again"))
    for _ in range(4):
        vocoder.speak([Chunk(session, SPEECH_TOKENS)])
    vocoder.speak([Chunk(session, SPEECH_TOKENS, last=True)])


def test_refuses_a_whole_utterance_that_is_too_long():
    vocoder = make_vocoder()
    with pytest.raises(
        ShapeError, match=r"speech tokens in one pass: expected at most 2018 with this voice.* got 2019"
    ):
        vocoder.offline([1] * 2019, make_voice(0, 30))
