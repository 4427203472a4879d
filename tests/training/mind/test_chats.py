"""Chats are learned with the rows and the logits of served chats."""

import random

import pytest

from models.checkpoint.config import load_preprocessor_config
from models.inputs.prompts import PromptOptions
from models.stages.chat import Chat
from tests.training.batches import predict
from tests.worker.loop.engines import TINY, loaded, make_image, make_sound
from training.mind.chats import ChatMaker, written
from training.scenes.drawing import has_things
from training.timelines.layout import NOTHING
from training.timelines.speech import noise_bursts


@pytest.fixture(scope="module")
def maker() -> ChatMaker:
    return ChatMaker(loaded()[1], load_preprocessor_config(TINY))


@pytest.mark.parametrize("is_voiced", [False, True])
def test_logits_equal_those_of_a_served_chat(maker: ChatMaker, is_voiced: bool) -> None:
    parts: list[object] = [make_image(1, 448, 448), "What is this?"]
    if is_voiced:
        parts.append(make_sound(3, 20_000))
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How are you?"},
        {"role": "user", "content": parts},
    ]
    record = maker.record(messages, "It is red.", is_voiced)
    chat = Chat.load(TINY, llm_len=512)
    prompt = chat.read(messages, PromptOptions(use_tts_template=is_voiced))
    with chat.steps.lease() as slot:
        (chosen,) = chat.steps.feed([slot], [chat.encode(prompt)], [True])
    got = predict(loaded()[0], [record])
    worst = float((got.logits[0] - chosen.logits).abs().max())
    assert worst < 1e-3, f"expected the logits of serving, got a difference of {worst:.5f}"
    end = maker.tokenizer.special.tts_eos if is_voiced else maker.tokenizer.special.im_end
    assert got.batch.targets.tolist() == [*maker.tokenizer.encode("It is red."), end]


def test_chats_have_every_medium(maker: ChatMaker) -> None:
    media = set()
    for seed in range(25):
        record, turn = maker.make(random.Random(seed), noise_bursts, things=has_things())
        media.add((len(record.pictures), len(record.clip) > 0))
        answer = [token for token in record.targets.tolist() if token != NOTHING]
        assert maker.tokenizer.decode(answer) == turn.text
        assert turn.text in record.accepted
    assert media == {(0, False), (1, False), (0, True)}


def test_typed_questions_end_as_questions() -> None:
    rng = random.Random(0)
    assert {written("how are you", rng)[-1] for _ in range(30)} == {"u", "?"}
    assert {written("hello", rng) for _ in range(60)} == {"hello", "Hello", "hello.", "Hello.", "hello!", "Hello!"}
