"""Sessions over slots: batches, turns, padding and the rows of other slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import SettingsError
from models.graphs.growing_memory import GrowingMemory
from models.token2wav.flow import flow_state
from models.token2wav.flow.block_table import ZERO_ROW
from models.token2wav.flow.flow_state import REFERENCE_FLOW, FlowRules, FlowSizes, FlowState
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.flow.flows import LOOKAHEAD, Chunk, Rig, random_flow, random_tokens, split

FLOW = random_flow()
RULES = [FlowRules(), REFERENCE_FLOW, FlowRules(dit="newest_first")]
by_rules = pytest.mark.parametrize("rules", RULES, ids=["windowed", "reference", "encoder windowed"])
# A product over more rows may add in a different order; mel values are about 4. Measured: bit-identical for more rows,
# 1.4e-6 for longer rows.
BATCH_TOLERANCE = 1e-5
NAN = float("nan")

# Longer than the history, with chunks of all kinds: full, short, nothing synthesized, the end.
LONG = [25, 25, 0, 7, 25, 1, 25, 25]
SHORT = [25, 3, 12]
FLUSHED = [5, 5, 5, 5, 5, 25, 25, 25]


def turn(seed: int, counts: list[int], rest: int) -> list[Chunk]:
    """A turn of random tokens in chunks that synthesize `counts`, then a last chunk with the other `rest` tokens."""
    return split(random_tokens(seed, sum(counts) + rest), counts)


def pools_and_tables(rig: Rig) -> list[tuple[Tensor, object]]:
    """All pools [..., rows, H, hd] with the tables that address them."""
    state = rig.state
    return [
        (state.token_rows, state.token_table),
        (state.mel_rows, state.mel_table),
        *((rows, state.dit_table) for rows in state.dit_rows),
    ]


def bits_of(rig: Rig, slot: int) -> list[Tensor]:
    """Copies of everything that a slot owns: table, tails and the rows of its ring, or of a voice."""
    state, is_voice = rig.state, slot > rig.state.scratch
    own = [
        tensor[slot] for table in (state.token_table, state.mel_table, state.dit_table) for tensor in table.tensors()
    ]
    own += [tensor[slot] for tensor in state.slot_tensors()]
    for rows, table in pools_and_tables(rig):
        seen = table.rows[slot, : table.length[slot]]
        ring = torch.arange(table.ring) + table.start[slot]
        own.append(rows.index_select(-3, seen if is_voice else ring))
    return [tensor.clone() for tensor in own]


def assert_same_bits(got: list[Tensor], expected: list[Tensor], what: str) -> None:
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert_same(a, b, f"{what}, tensor {number}")


@by_rules
def test_batch_equals_separate_sessions(rules):
    """Voices, histories, lengths and ends differ in every call, in any order of slots."""
    turns = {
        0: (0, turn(10, LONG, 9)),
        3: (1, turn(11, FLUSHED, 28)),
        1: (1, turn(12, SHORT, 4)),
        2: (0, turn(13, [], 6)),
    }
    starts = {0: 0, 3: 1, 1: 2, 2: 4}
    rig = Rig(FLOW, rules)
    rig.begin({slot: voice for slot, (voice, _) in turns.items()})
    got: dict[int, list[Tensor]] = {slot: [] for slot in turns}
    for call in range(10):
        chunks = {
            slot: turns[slot][1][call - start]
            for slot, start in starts.items()
            if 0 <= call - start < len(turns[slot][1])
        }
        order = list(chunks) if call % 2 else list(reversed(chunks))
        for slot, mel in rig.step({slot: chunks[slot] for slot in order}).items():
            got[slot].append(mel)
    for slot, (voice, chunks) in turns.items():
        alone = Rig(FLOW, rules)
        alone.begin({2: voice})
        for i, (mel, expected) in enumerate(zip(got[slot], alone.turn(2, chunks), strict=True)):
            assert_close(mel, expected, BATCH_TOLERANCE, f"slot {slot} chunk {i}")


@by_rules
def test_interleaved_sessions_equal_separate_sessions(rules):
    """Bit-identical, because each call has one row."""
    turns = {0: (0, turn(1, LONG, 5)), 3: (1, turn(2, FLUSHED, 11))}
    rig = Rig(FLOW, rules)
    got: dict[int, list[Tensor]] = {0: [], 3: []}
    rig.begin({0: 0, 3: 1})
    for pair in zip(*(chunks for _, chunks in turns.values()), strict=True):
        for slot, chunk in zip(turns, pair, strict=True):
            got[slot] += rig.turn(slot, [chunk])
    for slot, (voice, chunks) in turns.items():
        alone = Rig(FLOW, rules)
        alone.begin({slot: voice})
        for i, (mel, expected) in enumerate(zip(got[slot], alone.turn(slot, chunks), strict=True)):
            assert_same(mel, expected, f"slot {slot} chunk {i}")


@by_rules
def test_second_turn_equals_the_first(rules):
    """Also after an interrupted turn with another voice; the slots of voices do not change."""
    rig, chunks = Rig(FLOW, rules), turn(3, LONG, 8)
    voices = [bits_of(rig, rig.voice_slot(voice)) for voice in (0, 1)]
    rig.begin({1: 0})
    first = rig.turn(1, chunks)
    rig.begin({1: 1})
    rig.turn(1, turn(4, FLUSHED, 2)[:-1])
    rig.begin({1: 0})
    assert_same_bits(rig.turn(1, chunks), first, "second turn")
    for voice, before in enumerate(voices):
        assert_same_bits(bits_of(rig, rig.voice_slot(voice)), before, f"voice {voice}")


def test_mel_depends_on_voice_and_tokens():
    rig, chunks = Rig(FLOW), turn(3, [25], 8)
    rig.begin({0: 0, 1: 1, 2: 0})
    mine, other_voice = rig.turn(0, chunks), rig.turn(1, chunks)
    other_tokens = rig.turn(2, turn(4, [25], 8))
    for other in (other_voice, other_tokens):
        for a, b in zip(mine, other, strict=True):
            assert (a - b).abs().max() > 0.1, "expected different mel for another voice or other tokens"


@by_rules
def test_old_content_of_slots_has_no_effect(rules):
    """NaN in every row, tail and speaker outside the voices, and in the row that receives padding."""
    chunks = turn(5, LONG, 28)
    clean, rig = Rig(FLOW, rules), Rig(FLOW, rules)
    for rows, table in pools_and_tables(rig):
        rows[..., ZERO_ROW + 1 : table.first_voice_row, :, :] = NAN
    sessions = slice(0, rig.state.scratch + 1)
    for tensor in rig.state.slot_tensors():
        if tensor.is_floating_point():
            tensor[sessions] = NAN
    for each in (clean, rig):
        each.begin({0: 0, 2: 1})
    for i, chunk in enumerate(chunks):
        got, expected = (each.step({2: chunk, 0: chunk}, n_scratch=2) for each in (rig, clean))
        for slot in (0, 2):
            assert_same(got[slot], expected[slot], f"slot {slot} chunk {i}")
            assert got[slot].isfinite().all(), f"slot {slot} chunk {i}: expected finite mel, got {got[slot]}"


def slot_state(rig: Rig, slot: int) -> list[Tensor]:
    """Copies of everything that the slot's next chunk depends on."""
    own = [tensor[slot] for tensor in rig.state.slot_tensors()]
    for rows, table in pools_and_tables(rig):
        seen = table.rows[slot, : table.length[slot]]
        own += [seen, rows.index_select(-3, seen)]
    return [tensor.clone() for tensor in own]


@by_rules
def test_alternating_between_two_slots_equals_one_slot(rules):
    """Each call reads one slot and writes the other, some calls repeatedly; the slot that is read does not change."""
    rig, plain = Rig(FLOW, rules), Rig(FLOW, rules)
    for each in (rig, plain):
        each.begin({0: 0, 3: 1})
    current = {0: 0, 3: 3}
    for i, pair in enumerate(zip(turn(8, LONG, 3), turn(9, FLUSHED, 28), strict=True)):
        others = {slot: (slot + rig.n_sessions) % rig.state.scratch for slot in current.values()}
        chunks = {current[slot]: chunk for slot, chunk in zip((0, 3), pair, strict=True)}
        before = {slot: slot_state(rig, slot) for slot in chunks}
        for _ in range(1 + i % 3):
            got = rig.step(chunks, n_scratch=1, targets=others)
            for slot in chunks:
                assert_same_bits(slot_state(rig, slot), before[slot], f"slot {slot}, read by chunk {i}")
        expected = plain.step(dict(zip((0, 3), pair, strict=True)), n_scratch=1)
        for slot in (0, 3):
            assert_same(got[current[slot]], expected[slot], f"slot {slot} chunk {i}")
        current = {slot: others[current[slot]] for slot in current}


@by_rules
@pytest.mark.parametrize("last", [False, True])
def test_a_chunk_without_tokens_does_not_change_the_slot(rules, last):
    rig, nothing = Rig(FLOW, rules), (torch.zeros(0, dtype=torch.int64), last)
    rig.begin({0: 0, 1: 1, 2: 1})
    for i, (chunk, other) in enumerate(zip(turn(6, LONG, 3), turn(7, FLUSHED, 28), strict=True)):
        before = {slot: bits_of(rig, slot) for slot in (0, 2, rig.state.scratch)}
        mel = rig.step({0: nothing, 1: other, 2: nothing}, n_scratch=1)
        assert len(mel[0]) == 0
        for slot, expected in before.items():
            assert_same_bits(bits_of(rig, slot), expected, f"slot {slot} at chunk {i}")
        rig.turn(0, [chunk])


@by_rules
def test_a_chunk_of_look_ahead_only_does_not_change_the_slot(rules):
    rig = Rig(FLOW, rules)
    rig.begin({0: 0})
    rig.turn(0, turn(6, [25, 25, 25], 3)[:-1])
    for n in range(1, LOOKAHEAD + 1):
        before = bits_of(rig, 0)
        rig.turn(0, [(random_tokens(n, n), False)])
        assert_same_bits(bits_of(rig, 0), before, f"{n} tokens")


@by_rules
def test_padding_rows_change_nothing(rules):
    """Rows of the scratch slot and other padding tokens; the number of rows may change rounding."""
    chunks = {0: turn(8, LONG, 3), 3: turn(9, FLUSHED, 28)}
    plain, noisy = Rig(FLOW, rules), Rig(FLOW, rules)
    for rig in (plain, noisy):
        rig.begin({0: 0, 3: 1})
    for i in range(9):
        call = {slot: each[i] for slot, each in chunks.items()}
        got, expected = noisy.step(call, n_scratch=3, pad_token=i), plain.step(call)
        for slot in call:
            assert_close(got[slot], expected[slot], BATCH_TOLERANCE, f"slot {slot} chunk {i}")
    for table in ("token_table", "mel_table", "dit_table"):
        for got, expected in zip(
            getattr(noisy.state, table).tensors(), getattr(plain.state, table).tensors(), strict=True
        ):
            assert_same(got, expected, table)


def test_padding_tokens_have_no_effect():
    chunks, rigs = turn(8, LONG, 3), (Rig(FLOW), Rig(FLOW))
    for rig, token in zip(rigs, (1, 4000), strict=True):
        rig.begin({0: 0})
        rig.mels = rig.turn(0, chunks, pad_token=token)
    assert_same_bits(rigs[0].mels, rigs[1].mels, "mel")
    assert_same_bits(bits_of(rigs[0], 0), bits_of(rigs[1], 0), "state")


def test_a_larger_bucket_changes_rounding_only():
    chunks, rigs = turn(8, LONG, 3), (Rig(FLOW), Rig(FLOW))
    for rig in rigs:
        rig.begin({0: 0})
    mels = [rig.turn(0, chunks, bucket=bucket) for rig, bucket in zip(rigs, (28, 41), strict=True)]
    for i, (got, expected) in enumerate(zip(*mels, strict=True)):
        assert_close(got, expected, BATCH_TOLERANCE, f"chunk {i}")


@pytest.mark.parametrize("rules", RULES[:2], ids=["windowed", "reference"])
def test_a_minute_of_speech_allocates_nothing(rules):
    rig = Rig(FLOW, rules)
    before = [(tensor.data_ptr(), tensor.shape) for tensor in rig.state.tensors()]
    n_bytes = rig.state.n_bytes
    rig.begin({0: 0, 1: 1})
    for i in range(60):
        call = {slot: (random_tokens(i + slot, 28), False) for slot in (0, 1)}
        for slot, mel in rig.step(call).items():
            assert mel.isfinite().all(), f"slot {slot}, second {i}: expected finite mel, got {mel}"
    assert [(tensor.data_ptr(), tensor.shape) for tensor in rig.state.tensors()] == before
    assert rig.state.n_bytes == n_bytes == sum(tensor.nbytes for tensor in rig.state.tensors())
    assert rig.state.held_bytes == n_bytes, "expected a block that holds everything on a CPU"
    for name in ("mel_table", "dit_table"):
        expected = [rig.state.prompt[slot] + 100 for slot in (0, 1)]
        assert getattr(rig.state, name).length[:2].tolist() == expected, f"rows of {name}"


@settings(max_examples=10)
@given(data=st.data(), rules=st.sampled_from(RULES), seed=st.integers(0, 99))
def test_random_session_events_equal_separate_sessions(data, rules, seed):
    """Turn starts, chunks of any length and pauses of four slots at random, each against a separate session."""
    rig, alone = (Rig(FLOW, rules, prompts=(4, 60), n_steps=1, max_chunk=20) for _ in range(2))
    slots = range(rig.n_sessions)
    logs: dict[int, list[tuple[int, Chunk | None, Tensor | None]]] = {slot: [] for slot in slots}
    started = {slot: data.draw(st.integers(0, 1)) for slot in slots}
    rig.begin(started)
    for slot, voice in started.items():
        logs[slot].append((voice, None, None))
    for number in range(data.draw(st.integers(1, 10))):
        chunks = {}
        for slot in data.draw(st.permutations(slots))[: data.draw(st.integers(1, 4))]:
            if data.draw(st.integers(0, 7)) == 0:
                voice = data.draw(st.integers(0, 1))
                rig.begin({slot: voice})
                logs[slot].append((voice, None, None))
            n = data.draw(st.just(20) | st.integers(0, 20))
            last = data.draw(st.booleans())
            chunks[slot] = random_tokens(seed + 10 * number + slot, n if last else n + LOOKAHEAD), last
        for slot, mel in rig.step(chunks, bucket=20).items():
            logs[slot].append((-1, chunks[slot], mel))
    for slot in slots:
        for number, (voice, chunk, mel) in enumerate(logs[slot]):
            if chunk is None:
                alone.begin({0: voice})
                continue
            expected = alone.step({0: chunk}, bucket=20)[0]
            assert_close(mel, expected, BATCH_TOLERANCE, f"slot {slot}, event {number}")


def test_reused_voice_slot_equals_a_new_one():
    """Bit-identical for any old content of its rows and tails."""
    used, new = Rig(FLOW), Rig(FLOW, voice_seed=1)
    used.begin({0: 0})
    used.turn(0, turn(1, [25, 25], 3))
    for rows, table in pools_and_tables(used):
        rows[..., table.first_voice_row :, :, :] = NAN
    for tensor in used.state.slot_tensors():
        if tensor.is_floating_point():
            tensor.fill_(NAN)
    used.set_up_voices(seed=1)
    mels = []
    for rig in (used, new):
        rig.begin({0: 1})
        mels.append(rig.turn(0, turn(2, [25, 25, 25], 3)))
    for voice in (0, 1):
        got, expected = (bits_of(rig, rig.voice_slot(voice)) for rig in (used, new))
        assert_same_bits(got, expected, f"voice {voice}")
    assert_same_bits(*mels, "mel")


@pytest.mark.parametrize(
    ("settings_", "what"),
    [
        ({"n_sessions": 0}, "n_sessions: expected at least 1, got 0"),
        ({"n_voices": 0}, "n_voices: expected at least 1, got 0"),
        ({"max_steps": 0}, "max_steps: expected at least 1, got 0"),
        ({"max_chunk": -1}, "max_chunk: expected at least 1, got -1"),
        ({"max_prompt": 0}, "max_prompt: expected at least 1, got 0"),
        ({"max_prompt": 301}, "max_prompt, voice_frames: expected even counts, got"),
        ({"voice_frames": 301}, "max_prompt, voice_frames: expected even counts, got"),
    ],
)
def test_refuses_sizes_below_one(settings_, what):
    with pytest.raises(SettingsError, match=what):
        FlowSizes(**({"n_sessions": 1, "n_voices": 1} | settings_))


def test_the_first_rows_of_the_estimator_are_the_first_bytes_of_its_blocks():
    """Each step has a block of its own: inputs of a compiled graph must not share memory."""
    state = Rig(FLOW).state
    n_rows, blocks = state.dit_table.n_rows, [rows.untyped_storage() for rows in state.dit_rows]
    assert len({block.data_ptr() for block in blocks}) == len(blocks) > 1
    for rows, block in zip(state.dit_rows, blocks, strict=True):
        places = torch.arange(block.nbytes() // 4, dtype=torch.float32).view(n_rows, -1)  # exact, as below 2**24
        torch.tensor([], dtype=torch.float32).set_(block).copy_(places.flatten())
        for row in (0, 1, state.dit_table.first_voice_row, n_rows - 1):
            assert_same(rows[..., row, :, :].flatten(), places[row], f"row {row}")


def test_growth_covers_the_rows_of_sessions_and_the_first_rows_of_voices(monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []

    class Block(GrowingMemory):
        def __init__(self, n_bytes: int, held_bytes: int, device: torch.device):
            super().__init__(n_bytes, held_bytes, device)
            held.extend((n_bytes, held_bytes))

        def grow(self, n_bytes: int) -> None:
            held.append(n_bytes)

    monkeypatch.setattr(flow_state, "GrowingMemory", Block)
    state = FlowState(FLOW, FlowSizes(n_sessions=3, n_voices=2, max_steps=2, max_prompt=20, voice_frames=60))
    for n_frames in (20, 60):
        state.grow_voices(n_frames)
    first, row_bytes = state.dit_table.first_voice_row, held[0] // state.dit_table.n_rows
    grown = [n for n_frames in (20, 60) for n in [first + n_frames] * 2]  # of both steps
    assert [n / row_bytes for n in held] == [first + 60, first] * 2 + grown
