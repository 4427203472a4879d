"""Refused requests and failing replies: one typed error each, and unchanged slots."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models.errors import (
    AudioError,
    ConfigError,
    ContextOverflowError,
    ImageError,
    MessageError,
    ModelError,
    NumericsError,
    SettingsError,
    SlotError,
    TokenError,
)
from models.load import load_model
from models.random_weights import random_model
from models.sampling.settings import TextSampling
from models.stages.chat import Chat
from tests.models.stages.conversations import force_tokens, make_chat, picture, sound, user
from tests.models.stages.slot_copies import assert_same, copy_state


@pytest.fixture
def chat(tiny_model, tiny: Path) -> Chat:
    return make_chat(tiny_model, tiny)


def truncated_image() -> Image.Image:
    """An image that opens but cannot be decoded."""
    file = io.BytesIO()
    picture(64, 64).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[:2000]))


def with_nan() -> np.ndarray:
    wave = sound(16000)
    wave[77] = np.nan
    return wave


REFUSED = {
    "corrupt image": (ImageError, lambda: user(truncated_image(), "what"), {}),
    "image bytes": (MessageError, lambda: user(b"\x89PNG", "what"), {}),
    "line-shaped image": (ImageError, lambda: user(Image.new("RGB", (60000, 2)), "what"), {}),
    "empty sound": (MessageError, lambda: user(sound(0)), {}),
    "sound below a row": (MessageError, lambda: user(sound(1000)), {}),
    "NaN in sound": (AudioError, lambda: user(with_nan()), {}),
    "NaN after an image": (AudioError, lambda: user(picture(60, 60), with_nan()), {}),
    "whole-number sound": (MessageError, lambda: user(np.zeros(16000, np.int16)), {}),
    "stereo sound": (MessageError, lambda: user(np.zeros((2, 16000), np.float32)), {}),
    "no messages": (MessageError, lambda: [], {}),
    "not a list": (MessageError, lambda: "Hello", {}),
    "no content": (MessageError, lambda: user(), {}),
    "unknown role": (MessageError, lambda: [{"role": "tool", "content": "Hello"}], {}),
    "unknown key": (MessageError, lambda: [{"role": "user", "content": "Hello", "name": "me"}], {}),
    "unpaired image start": (MessageError, lambda: user("see <image> there"), {}),
    "sound marks in text": (MessageError, lambda: user("<|audio_start|><unk><|audio_end|>"), {}),
    "unpaired slice end": (MessageError, lambda: user(picture(50, 50), "</slice>"), {}),
    "unpaired surrogate": (TokenError, lambda: user("\ud83d"), {}),
    "too long": (ContextOverflowError, lambda: user("word " * 600), {}),
    "too long with sound": (ContextOverflowError, lambda: user(sound(16000 * 56)), {}),
    "reply too long": (ContextOverflowError, lambda: user("Hello"), {"max_new_tokens": 600}),
    "no tokens": (SettingsError, lambda: user("Hello"), {"max_new_tokens": 0}),
    "negative tokens": (SettingsError, lambda: user("Hello"), {"max_new_tokens": -3}),
    "fractional tokens": (SettingsError, lambda: user("Hello"), {"max_new_tokens": 1.5}),
    "negative seed": (SettingsError, lambda: user("Hello"), {"seed": -1}),
    "seed of 65 bits": (SettingsError, lambda: user("Hello"), {"seed": 2**64}),
    "seed as text": (SettingsError, lambda: user("Hello"), {"seed": "one"}),
    "window beyond the history": (
        SettingsError,
        lambda: user("Hello"),
        {"sampling": TextSampling(repetition_window=4097)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_requests_change_nothing(chat: Chat, case: str) -> None:
    error, messages, settings = REFUSED[case]
    neighbour = chat.stream(user("Hello"), seed=3, max_new_tokens=6, stop_ids=())
    ids_so_far = [next(neighbour).id, next(neighbour).id]
    before = copy_state(chat.runner.state)
    with pytest.raises(error, match=r"(?s)^.+: expected .+, got .+$"):
        list(chat.stream(messages(), **{"max_new_tokens": 4, **settings}))
    assert_same(chat.runner.state, before)
    assert chat.runner.pool.n_free == 1
    ids_so_far += [piece.id for piece in neighbour]
    assert ids_so_far == chat.reply(user("Hello"), seed=3, max_new_tokens=6, stop_ids=()).ids


EAGER = [case for case, (_, _, settings) in REFUSED.items() if settings.keys() <= {"max_new_tokens"}]


@pytest.mark.parametrize("case", EAGER)
def test_refuses_before_iteration(chat: Chat, case: str) -> None:
    error, messages, settings = REFUSED[case]
    with pytest.raises(error):
        chat.stream(messages(), **{"max_new_tokens": 4, **settings})


@pytest.mark.parametrize("settings", [{"top_p": 1.01}, {"top_p": -0.1}, {"top_p": float("nan")}, {"temperature": 0.0}])
def test_refuses_sampling_outside_its_range(settings: dict[str, float]) -> None:
    (name,) = settings
    with pytest.raises(SettingsError, match=rf"{name}: expected .+, got "):
        TextSampling(**settings)


def test_refuses_unknown_special_token(chat: Chat) -> None:
    with pytest.raises(TokenError, match=r"expected an entry '<\|nope\|>', got none"):
        chat.tokenizer.id("<|nope|>")


def test_refuses_more_conversations_than_slots(chat: Chat) -> None:
    running = [chat.stream(user("Hello"), seed=seed, max_new_tokens=5, stop_ids=()) for seed in (0, 1)]
    ids_so_far = [[next(pieces).id] for pieces in running]
    before = copy_state(chat.runner.state)
    with pytest.raises(SlotError, match=r"expected a free slot, got all 2 leased"):
        chat.reply(user("Hello"))
    assert_same(chat.runner.state, before)
    for seed, (ids, pieces) in enumerate(zip(ids_so_far, running, strict=True)):
        ids += [piece.id for piece in pieces]
        assert ids == chat.reply(user("Hello"), seed=seed, max_new_tokens=5, stop_ids=()).ids


def chat_with_bad_embedding(tiny: Path, token: str, value: float = float("nan")) -> Chat:
    """A chat whose logits are not finite once `token` was fed."""
    model = load_model(tiny)
    table = model.llm.model.embed_tokens
    weights = table.weight.clone()
    chat = make_chat(model, tiny)
    weights[chat.tokenizer.id(token)] = value
    table.weight = torch.nn.Parameter(weights, requires_grad=False)
    return chat


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_failing_conversation_does_not_affect_others(tiny: Path, tiny_model, value: float) -> None:
    chat = chat_with_bad_embedding(tiny, "<|speak|>", value)
    fresh = copy_state(chat.runner.state)
    neighbour = chat.stream(user("Hello"), seed=3, max_new_tokens=9, stop_ids=())
    ids_so_far = [next(neighbour).id, next(neighbour).id]
    before = copy_state(chat.runner.state)
    for _ in range(3):
        with pytest.raises(NumericsError, match="logits: expected finite numbers, got NaN"):
            chat.reply(user("<|speak|>"), max_new_tokens=5)
        assert_same(chat.runner.state, before, [0, 1])
        ids_so_far.append(next(neighbour).id)
        before = copy_state(chat.runner.state)
    ids_so_far += [piece.id for piece in neighbour]
    healthy = make_chat(tiny_model, tiny)
    expected = healthy.reply(user("Hello"), seed=3, max_new_tokens=9, stop_ids=()).ids
    assert chat.tokenizer.id("<|speak|>") not in expected
    assert ids_so_far == expected, f"expected {expected}, got {ids_so_far}"
    # The slot is usable again.
    assert chat.reply(user("Hello"), seed=3, max_new_tokens=9, stop_ids=()).ids == expected
    assert_same(chat.runner.state, fresh, [0, 1])


def test_reply_may_fail_after_some_tokens(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_with_bad_embedding(tiny, "<|speak|>")
    fresh = copy_state(chat.runner.state)
    ids_so_far = [*chat.tokenizer.encode("Hi"), chat.tokenizer.id("<|speak|>")]
    force_tokens(chat, monkeypatch, ids_so_far)
    got: list[int] = []
    with pytest.raises(NumericsError):
        for piece in chat.stream(user("Hello"), max_new_tokens=20):
            got.append(piece.id)
    assert got == ids_so_far, f"expected everything before the failure {ids_so_far}, got {got}"
    assert chat.runner.pool.n_free == 2
    assert_same(chat.runner.state, fresh, [0, 1])


def test_nan_weights_raise_numerics_error(tiny: Path) -> None:
    model = load_model(tiny)
    head = model.llm.lm_head
    head.weight = torch.nn.Parameter(torch.full_like(head.weight, float("nan")), requires_grad=False)
    chat = make_chat(model, tiny)
    fresh = copy_state(chat.runner.state)
    with pytest.raises(NumericsError, match=r"expected .+, got "):
        chat.reply(user("Hello"))
    assert chat.runner.pool.n_free == 2
    assert_same(chat.runner.state, fresh, [0, 1])


def test_every_error_is_a_model_error() -> None:
    assert all(issubclass(error, ModelError) for error, _, _ in REFUSED.values())


@pytest.mark.parametrize("part", ["init_vision", "init_audio"])
def test_refuses_media_that_the_checkpoint_does_not_take(tiny_model, tiny: Path, part: str) -> None:
    model = random_model(tiny_model.config.model_copy(update={part: False}))
    chat = make_chat(model, tiny)
    media = picture(30, 30) if part == "init_vision" else sound(9000)
    with pytest.raises(MessageError, match=r"expected a checkpoint that takes .+, got one without"):
        chat.read(user(media))
    assert chat.reply(user("Hi"), max_new_tokens=1).ids


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": -1},
        {"sampling": TextSampling(repetition_window=5000)},
        {"sampling": TextSampling(set_index=1)},
        {"max_new_tokens": True},
        {"compat": "upstream"},
    ],
)
def test_refuses_settings_before_any_work(chat: Chat, bad: dict[str, object]) -> None:
    before = copy_state(chat.runner.state)
    with pytest.raises(SettingsError, match=r"expected .+, got"):
        chat.stream(user("Hi"), **bad)
    assert_same(chat.runner.state, before)


def test_refuses_too_long_prompt_before_encoding_images(chat: Chat, monkeypatch) -> None:
    monkeypatch.setattr(chat.runner, "encode_images", lambda _: pytest.fail("encoded"))
    with pytest.raises(ContextOverflowError):
        chat.stream(user(*[picture(60, 60)] * 9, "all of them"))


def test_refuses_image_token_count_of_another_model(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_feature_size": 32}')
    with pytest.raises(ConfigError, match=r"image_feature_size: expected 64, got 32"):
        Chat.load(tmp_path)


def test_refuses_tokenizer_larger_than_the_model(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    extra = {**whole["added_tokens"][-1], "id": 750, "content": "<beyond>"}
    whole["added_tokens"].append(extra)
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=r"tokenizer: highest id: expected below 745 \(vocab_size\), got 7\d\d"):
        Chat.load(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"options": {"a": 1}}, {"options": {}}, {"sampling": None}, {"stop_ids": 5}, {"stop_ids": ["a"]}]
)
def test_refuses_arguments_of_another_type(chat: Chat, wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=r"expected .+, got"):
        chat.stream(user("Hi"), **wrong)
    with pytest.raises(SettingsError, match=r"expected .+, got"):
        chat.reply(user("Hi"), **wrong)
