"""The host side over traced and compiled regions: one graph per bucket, compiled at warm-up, for any speech."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.graphs.region_graphs import compile_counters
from models.token2wav.load.parts import load_flow_and_hift
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.stream.windows import TokenWindows
from tests.models.compare import assert_close, assert_same
from tests.models.graphs.fake_captures import replay_on_cpu
from tests.models.token2wav.stream.vocoders import (
    FOLDER,
    copies,
    make_tokens,
    make_vocoder,
    make_voice,
    speak_turn,
    tensors,
    without_convolutions,
)

SHAPES = VocoderShapes(batch=(2,), speech_tokens=(10, 28), columns=(256,), prompt=(60, 120))
VOICES = [make_voice(0, 30), make_voice(1, 55)]  # need 210 and 260 columns: both bucket sizes
TURNS, N_UNITS = (7, 3), 17  # units per turn of each session; all kinds of chunks occur together
N_GRAPHS = 1 + 2 * 2 + 2  # begin, flow, hift; compiled as wholes, with one number of steps. Voices run eagerly.
# Tracing takes the time: with one size of chunks, three graphs; of HiFT, which never compiles as a whole, none. All
# sizes are captured by another test.
TRACED_SHAPES, N_TRACED = replace(SHAPES, speech_tokens=(28,)), 1 + 2


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def own_vocoder(shapes: VocoderShapes = SHAPES, *, convolutions: bool = True) -> Vocoder:
    """A vocoder with its own modules, because compiling by layer changes them.

    Args:
        convolutions: with those of HiFT.
    """
    parts = load_flow_and_hift(FOLDER)
    return make_vocoder(parts if convolutions else without_convolutions(parts), shapes=shapes, steps=(1,))


def many(vocoder: Vocoder, n_units: int) -> Iterator[Tensor]:
    """The sounds of two sessions with turns of different length, alone and together, 25 or fewer tokens per unit.

    The windows are of four kinds: first, steady, short, last.
    """
    sessions = [vocoder.open(voice) for voice in VOICES]
    windows = {session: TokenWindows(min_chunk=5) for session in sessions}
    n_synthesized, samples = 0, 0
    for unit in range(n_units):
        chunks: dict[int, list[Chunk]] = {}
        for session, length in zip(sessions, TURNS, strict=True):
            ends = unit % length == length - 1 or unit == n_units - 1
            speech_tokens = make_tokens(100 * unit + session, 1 + 11 * unit % 24 if unit % 4 == 3 else 25)
            chunks[session] = [Chunk(session, *w) for w in windows[session].push(speech_tokens, last=ends)]
            n_synthesized += sum(len(c.speech_tokens) - 3 * (not c.last) for c in chunks[session])
        while any(chunks.values()):
            for wave in vocoder.speak([waiting.pop(0) for waiting in chunks.values() if waiting]):
                samples += len(wave)
                yield wave
        for session, length in zip(sessions, TURNS, strict=True):
            if unit % length == length - 1:
                vocoder.begin_turn(session)
                windows[session] = TokenWindows(min_chunk=5)
    assert samples == 960 * n_synthesized


def assert_whole_utterances_compile_nothing(plain: Vocoder, compiled: Vocoder) -> None:
    """Their lengths all differ, so the modules compiled for chunks run uncompiled."""
    before = compile_counters()
    for n in (5, 17, 40):
        speech_tokens = make_tokens(n, n)
        assert_same(compiled.offline(speech_tokens, VOICES[0]), plain.offline(speech_tokens, VOICES[0]), f"{n} tokens")
    assert compile_counters() == before


@pytest.mark.slow
def test_many_units_compile_nothing_after_warm_up():
    """Traced and run operation by operation: bit-identical to eager, no graph break, no trace after warm-up."""
    plain, traced = (own_vocoder(TRACED_SHAPES, convolutions=False) for _ in range(2))
    expected = list(many(plain, N_UNITS))
    assert sum(map(len, expected)) >= 25 * 24_000
    before = compile_counters()
    traced.regions.compile(["begin", "flow"], backend="eager")
    traced.regions.warm_up()
    warm, addresses, n_bytes = compile_counters(), [t.data_ptr() for t in tensors(traced)], traced.n_bytes
    assert warm["graphs"] - before["graphs"] == N_TRACED
    got = list(many(traced, N_UNITS))
    after = compile_counters()
    assert after == warm, f"expected nothing compiled after warm-up, got {warm} then {after}"
    assert after["graph_breaks"] == before["graph_breaks"], f"expected no graph breaks, got {before} then {after}"
    assert [t.data_ptr() for t in tensors(traced)] == addresses
    assert traced.n_bytes == n_bytes
    for i, (wave, want) in enumerate(zip(got, expected, strict=True)):
        assert_same(wave, want, f"wave {i}")
    assert_whole_utterances_compile_nothing(plain, traced)


def test_warm_up_does_not_change_sessions_and_voices():
    vocoder = own_vocoder()
    session = vocoder.open(VOICES[0])
    vocoder.speak([Chunk(session, make_tokens(0, 28))])
    before = copies(vocoder)
    vocoder.regions.warm_up()
    state, scratch = vocoder.state, vocoder.state.scratch
    for table in (state.token_table, state.mel_table, state.dit_table):
        assert table.length[scratch] == 0
    kept = slice(None, scratch), slice(scratch + 1, None)
    own = {id(tensor) for tensor in (*state.slot_tensors(), *vocoder.vocode_state.tensors())}
    tables = {id(tensor) for table in state.tables for tensor in table.tensors()}
    for tensor, expected in zip(tensors(vocoder), before, strict=True):
        if id(tensor) in own | tables:
            for part in kept:
                assert_same(tensor[part], expected[part], "slots of sessions and voices")
    for rows, table_ in (
        (state.token_rows, state.token_table),
        (state.mel_rows, state.mel_table),
        (state.dit_rows[0], state.dit_table),
    ):
        expected = before[[id(t) for t in tensors(vocoder)].index(id(rows))]
        first = int(table_.start[scratch])
        assert_same(rows[..., 2:first, :, :], expected[..., 2:first, :, :], "rows of sessions")
        end = first + table_.ring
        assert_same(rows[..., end:, :, :], expected[..., end:, :, :], "rows of voices")


@pytest.mark.slow
def test_compiled_layers_equal_eager_layers():
    """An Euler step, a conformer layer and HiFT's activation as one graph each, at one bucket.

    Traced and decomposed as for code generation, but without it; tests/test_compile_equivalence.py tests generated
    code.
    """
    shapes = VocoderShapes(batch=(1,), speech_tokens=(28,), columns=(288,), prompt=(120,))
    parts = load_flow_and_hift(FOLDER), load_flow_and_hift(FOLDER)
    plain, compiled = (make_vocoder(part, shapes=shapes, steps=(1,)) for part in parts)
    before = compile_counters()
    compiled.regions.compile(["flow", "voice", "hift"], by_layer=True, backend="aot_eager")
    compiled.regions.warm_up()
    warm = compile_counters()
    assert warm["graphs"] > before["graphs"] and warm["graph_breaks"] == before["graph_breaks"], f"got {warm}"
    turns = [speak_turn(v, v.open(VOICES[0]), make_tokens(1, 90), [25, 25, 7, 24]) for v in (plain, compiled)]
    assert compile_counters() == warm
    for i, (want, wave) in enumerate(zip(*turns, strict=True)):
        # A rounding difference of the pitch grows to a phase difference after some hundred samples.
        assert_close(wave, want, 5e-3, f"chunk {i}")
    assert_whole_utterances_compile_nothing(plain, compiled)


def test_regions_without_captured_graphs_run_eagerly():
    vocoder = own_vocoder()
    slots = torch.tensor([0, 1])
    vocoder.vocode_state.wave.fill_(1)
    vocoder.regions("begin", slots, slots + vocoder.state.scratch + 1)
    assert not vocoder.vocode_state.wave[:2].any() and vocoder.vocode_state.wave[2:].all()
    assert (vocoder.regions.n_captured, vocoder.regions.n_skipped) == (0, 0)


def test_every_chunk_replays_a_graph(monkeypatch: pytest.MonkeyPatch):
    """All regions but `voice` are captured at all sizes. Later replays do not change sounds that were returned."""
    made = replay_on_cpu(monkeypatch)
    plain, captured = own_vocoder(), own_vocoder()
    assert captured.regions.capture() == N_GRAPHS == len(made)
    assert {graph.name for graph in made} == {"begin", "flow", "hift"}
    expected, got = list(many(plain, 12)), list(many(captured, 12))
    for i, (wave, want) in enumerate(zip(got, expected, strict=True)):
        assert_same(wave, want, f"wave {i}")
    assert captured.regions.n_skipped == 0, "expected a graph for every call"
    assert sum(graph.n_replays > 0 for graph in made if graph.name == "flow") == 3, "expected chunks of three sizes"
