"""Each setting has its effect, and only on its own session."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.sampling.text import sample_text
from tests.models.sampling.final_probs import final_probs
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    UNIT_TOKENS,
    assert_same_events,
    make_config,
    make_parts,
    make_prompt,
    short_speech,
)
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.assembly.parts import token_sets
from worker.config.session import SessionConfig, WindowConfig
from worker.engine import Engine
from worker.loop.results import Event, UnitResult
from worker.loop.session import Session

CHATTY = "<|speak|>one two three four five six seven eight nine"
NEUTRAL = QUIET.model_copy(
    update={"temperature": 1.0, "top_k": 0, "top_p": 1.0, "text_repetition_penalty": 1.0, "length_penalty": 1.0}
)


@pytest.fixture(scope="module")
def built() -> Iterator[ScriptedEngine]:
    with short_speech():
        yield ScriptedEngine()


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def given(config: SessionConfig, **settings: Any) -> SessionConfig:
    return config.model_copy(update=settings)


def chances(engine: ScriptedEngine, session: Session, logits: Tensor) -> Tensor:
    """[V] probabilities that the session would sample from."""
    sets = token_sets(engine.tokenizer, len(logits), logits.device)
    return final_probs(logits[None], torch.tensor([session.slot]), engine.unit_steps.state.text, sets)[0]


def choose(engine: ScriptedEngine, session: Session, token: int) -> int:
    """Make the session's sampler choose `token`. Returns: number of tokens in its history."""
    logits = torch.full((1, engine.parts.model.config.vocab_size), -10.0)
    logits[0, token] = 10.0
    sets, text = token_sets(engine.tokenizer, logits.shape[1], logits.device), engine.unit_steps.state.text
    got = sample_text(logits, torch.tensor([session.slot]), torch.tensor([True]), text, sets).ids
    assert got.tolist() == [token], f"choice: expected {token}, got {got.tolist()}"
    return int(text.count[session.slot])


def some_logits(engine: ScriptedEngine) -> Tensor:
    return torch.randn(engine.parts.model.config.vocab_size, generator=torch.Generator().manual_seed(0)) - 1


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_listen_prob_scale_multiplies_the_odds_of_listening(engine: ScriptedEngine, scale: float) -> None:
    plain = engine.start("plain", NEUTRAL)
    scaled = engine.start("scaled", given(NEUTRAL, listen_prob_scale=scale))
    logits, listen = some_logits(engine), engine.special.listen
    logits[listen] = -0.5  # where a factor on the logit would do the opposite
    before, after = (chances(engine, session, logits) for session in (plain, scaled))
    factor = float(after[listen] / (1 - after[listen]) / (before[listen] / (1 - before[listen])))
    assert factor == pytest.approx(scale, rel=1e-3), f"factor on the odds: expected {scale}, got {factor}"
    others = after[torch.arange(len(logits)) != listen] / before[torch.arange(len(logits)) != listen]
    spread = float(others[others.isfinite()].max() - others[others.isfinite()].min())
    assert spread < 1e-3, f"others: expected to keep their shares among each other, spread {spread}"


def test_listen_top_k_limits_listening(engine: ScriptedEngine) -> None:
    engine.script.is_off = True
    eager = engine.start("eager", given(QUIET, decode_mode="greedy", listen_top_k=745))
    plain = engine.start("plain", given(QUIET, decode_mode="greedy"))
    [listened], [spoke] = results(engine.run(eager, 1)), results(engine.run(plain, 1))
    assert not spoke.is_listen, "without the setting: expected a unit that speaks, got one that listens"
    assert listened.tokens == (engine.special.listen,), f"expected <|listen|> alone, got {listened.tokens}"
    assert listened.is_listen, "expected a unit that listens, got one that speaks"


@pytest.mark.parametrize("level", [-1.0, 1.0])
def test_repetition_penalty_lowers_logits_of_either_sign(engine: ScriptedEngine, level: float) -> None:
    session = engine.start("a", given(NEUTRAL, text_repetition_penalty=2.0))
    said, other = engine.ids("hello")[:2]
    assert choose(engine, session, said) == 1, "expected the token to be remembered"
    share = chances(engine, session, torch.full((engine.parts.model.config.vocab_size,), level))
    assert share[said] < share[other], f"chance after it was said: expected below {share[other]}, got {share[said]}"


@pytest.mark.parametrize("name", ["listen", "speak", "turn_eos", "chunk_tts_eos", "tts_bos"])
def test_control_tokens_stay_out_of_the_history(engine: ScriptedEngine, name: str) -> None:
    session = engine.start("a", given(QUIET, decode_mode="greedy"))
    n = choose(engine, session, getattr(engine.special, name))
    assert n == 0, f"tokens remembered after <|{name}|>: expected none, got {n}"
    n = choose(engine, session, engine.ids("hello")[0])
    assert n == 1, f"tokens remembered after a word: expected 1, got {n}"


def play(engine: ScriptedEngine, name: str, config: SessionConfig) -> tuple[int, list[Event]]:
    """Three units of unscripted tokens. Returns: the slot they ran in, and the events."""
    engine.script.is_off = True
    session = engine.start(name, config)
    for number in range(3):
        engine.send(session, number)
    engine.settle()
    engine.sessions.close(session)
    return session.slot, engine.take(name)


def test_seed_determines_the_conversation(engine: ScriptedEngine) -> None:
    hot = given(ALOUD, temperature=1.5)
    first, again, other = (play(engine, f"{i}", given(hot, seed=seed))[1] for i, seed in enumerate((5, 5, 6)))
    assert_same_events("the same seed", again, first)
    tokens = [[event.tokens for event in events if isinstance(event, UnitResult)] for events in (first, other)]
    assert tokens[0] != tokens[1], f"another seed: expected other tokens, got the same {tokens[1]}"


# --- settings per session in one engine ------------------------------------------------------


def test_force_listen_count_of_each_session(engine: ScriptedEngine) -> None:
    decided = {}
    for n in (0, 2):
        session = engine.start(f"after {n}", given(QUIET, force_listen_count=n), CHATTY, CHATTY)
        decided[n] = [result.is_listen for result in results(engine.run(session, 3))]
    assert decided[0][:2] == [False, False], f"0 units: expected to speak at once, got {decided[0]}"
    assert decided[2] == [True, True, False], f"2 units: expected to speak in the third, got {decided[2]}"


def test_max_new_speak_tokens_per_chunk_of_each_session(engine: ScriptedEngine) -> None:
    for most in (3, 6):
        session = engine.start(f"most {most}", given(QUIET, max_new_speak_tokens_per_chunk=most), CHATTY)
        [result] = results(engine.run(session, 1))
        assert len(result.tokens) == most, f"expected {most} tokens with the terminator, got {result.tokens}"
        assert result.n_tokens == most - 2, f"expected {most - 2} spoken tokens, got {result.n_tokens}"


def codes_of(engine: ScriptedEngine, name: str, **settings: Any) -> list[int]:
    session = engine.start(name, given(ALOUD, **settings), CHATTY)
    engine.end_with(session, None)
    results(engine.run(session, 1))
    engine.sessions.close(session)
    return engine.record(name).speech_tokens


def test_tts_temperature_of_each_session(engine: ScriptedEngine) -> None:
    cold = [codes_of(engine, f"cold {seed}", tts_temperature=1e-6, seed=seed) for seed in (1, 2)]
    warm = [codes_of(engine, f"warm {seed}", tts_temperature=1.0, seed=seed) for seed in (1, 2)]
    assert len(cold[0]) == UNIT_TOKENS and cold[0] == cold[1], f"cold: expected the likeliest speech tokens, got {cold}"
    assert warm[0] != warm[1], f"warm: expected different speech tokens, got twice {warm[0]}"


def test_tts_repetition_penalty_of_each_session(engine: ScriptedEngine) -> None:
    n = {
        penalty: len(set(codes_of(engine, f"penalty {penalty}", tts_temperature=1e-6, tts_repetition_penalty=penalty)))
        for penalty in (0.1, 10.0)
    }
    assert n[0.1] < n[10.0] == UNIT_TOKENS, (
        f"distinct speech tokens by penalty: expected few and {UNIT_TOKENS}, got {n}"
    )


def test_generate_audio_of_each_session(engine: ScriptedEngine) -> None:
    for speaks in (True, False):
        name = f"speaks {speaks}"
        session = engine.start(name, given(ALOUD, generate_audio=speaks), CHATTY, speaker=0)
        [result] = results(engine.run(session, 1))
        assert result.text, "expected text, got none"
        assert (result.n_speech_tokens > 0) == speaks, f"{name}: got {result.n_speech_tokens} speech tokens"
        assert (result.pcm is not None) == speaks, f"{name}: got sound {result.pcm}"
        assert (session.speech.vocoder_slot is not None) == speaks, (
            f"{name}: got vocoder slot {session.speech.vocoder_slot}"
        )


def test_ls_mode_of_each_session(engine: ScriptedEngine) -> None:
    special = engine.special
    for mode, closing in (("explicit", [special.listen, special.unit_end]), ("implicit", [special.unit_end])):
        session = engine.start(mode, given(QUIET, ls_mode=mode))
        results(engine.run(session, 1))
        assert session.pending == closing, f"{mode}: expected {closing} to close a unit, got {session.pending}"
        rows = session.window.units[-1].length
        assert rows == 11 + len(closing), f"{mode}: expected {11 + len(closing)} rows of a unit, got {rows}"


def test_window_mode_and_sizes_of_each_session(engine: ScriptedEngine) -> None:
    windows = {
        "off": (WindowConfig(mode="off"), 6),
        "basic": (WindowConfig(mode="basic", high_tokens=60, low_tokens=40), 3),
        "wider": (WindowConfig(mode="basic", high_tokens=80, low_tokens=75), 4),
        "context": (WindowConfig(mode="context", max_units=2, previous_max_tokens=12), 2),
    }
    for name, (window, n_units) in windows.items():
        session = engine.start(name, given(QUIET, window=window))
        results(engine.run(session, 6))
        n_rows = session.window.preserve + 13 * n_units - len(session.pending)
        got = len(session.window.units), engine.rows(session)
        assert got == (n_units, n_rows), f"{name}: expected {n_units} units in {n_rows} rows, got {got}"
        engine.sessions.close(session)


def test_default_window_mode_is_basic() -> None:
    window = SessionConfig().window
    assert (window.mode, window.high_tokens, window.low_tokens) == ("basic", 4000, 3500), f"got {window}"


ODD = given(
    ALOUD,
    ls_mode="implicit",
    force_listen_count=1,
    max_new_speak_tokens_per_chunk=3,
    max_chars_per_chunk=5,
    decode_mode="greedy",
    text_repetition_penalty=3.0,
    listen_prob_scale=50.0,
    listen_top_k=9,
    tts_temperature=2.0,
    tts_repetition_penalty=5.0,
    window=WindowConfig(mode="basic", high_tokens=40, low_tokens=20),
    early_sound=False,
    drain_s=1,
    seed=99,
)


def test_slot_does_not_keep_settings_for_the_next_session(engine: ScriptedEngine) -> None:
    config = given(ALOUD, temperature=1.2)
    _, expected = play(ScriptedEngine(), "fresh", config)
    odd_slot, _ = play(engine, "odd", ODD)
    for number in range(2):  # a slot goes to the end of the queue: take those in front of it
        engine.start(f"in front {number}")
    slot, got = play(engine, "after", config)
    assert slot == odd_slot, f"slot: expected the odd session's, {odd_slot}, got {slot}"
    assert_same_events("after a session with unusual settings", got, expected)


def test_default_settings_are_those_of_the_engine() -> None:
    config = make_config()
    with Engine(make_parts(config), config) as engine:
        first = engine.open("first", ODD, lambda event: None).result(60)
        first.prepare(make_prompt()).result(60)
        first.close().result(60)
        second = engine.open("second", None, lambda event: None).result(60)
        held = second._session.config
        assert held == config.session, f"expected the engine's defaults {config.session}, got {held}"
        second.prepare(make_prompt()).result(60)
        assert second._session.config == config.session, f"after prepare: got {second._session.config}"
