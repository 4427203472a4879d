"""Half-duplex conversations: the client's sampling settings apply to the answers."""

from collections.abc import Iterator

import pytest

from tests.worker.chat.reply_engine import AnsweringEngine, make_parts
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.loop.results import ReplyResult


@pytest.fixture(scope="module")
def engine() -> Iterator[AnsweringEngine]:
    engine = AnsweringEngine(make_parts())
    yield engine
    engine.sessions.close_all()


def answer(engine: AnsweringEngine, name: str, **settings: float) -> tuple[int, ...]:
    """Ids of the first answer of a half-duplex conversation."""
    config = HalfDuplexConfig(reply=ReplyConfig(max_new_tokens=12, **settings))
    messages = [{"role": "system", "content": ["You are kind."]}]
    system = engine.reader.cut(engine.reader.read(messages, config.reply.prompt_options()))
    session = engine.answers.converse(name, system, config, engine.events[name].append)
    engine.answers.answer(session, engine.content("Tell me."), config.reply, 0.0)
    result = engine.outcome(name)
    engine.sessions.close(session)
    assert isinstance(result, ReplyResult), f"expected an answer, got {result}"
    return result.tokens


@pytest.mark.parametrize(
    ("cold", "hot"), [({"temperature": 0.001}, {"temperature": 2.0}), ({"top_k": 1}, {"top_k": 0})]
)
def test_clients_sampling_settings_apply_to_answers(
    engine: AnsweringEngine, cold: dict[str, float], hot: dict[str, float]
) -> None:
    most_likely = [answer(engine, f"cold {seed}", seed=seed, **cold) for seed in (1, 2)]
    assert most_likely[0] == most_likely[1], f"{cold}: expected the most likely tokens for any seed, got {most_likely}"
    drawn = [answer(engine, f"hot {seed}", seed=seed, top_p=1.0, **hot) for seed in (1, 2)]
    assert drawn[0] != drawn[1], f"{hot}: expected different draws for different seeds, got twice {drawn[0]}"
