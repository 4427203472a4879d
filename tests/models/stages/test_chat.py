"""Chat: replies, the rows of a prompt, and concurrent conversations."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from models.errors import ContextOverflowError
from models.inputs.image import cut, patchify, plan
from models.inputs.prompts import PromptOptions
from models.omni import OmniModel
from models.sampling.settings import CHAT_TEXT, TextSampling
from models.stages.chat import Chat, ReplyPiece, greedy
from models.stages.runner import Rows
from tests.models.stages.conversations import LLM_LEN, force_tokens, make_chat, picture, sound, user
from tests.models.stages.hidden_states import record_hidden
from tests.models.stages.slot_copies import assert_same, copy_state

TOLERANCE = 1e-5


@pytest.fixture
def chat(tiny_model: OmniModel, tiny) -> Chat:
    return make_chat(tiny_model, tiny)


def ids_of(pieces: Iterator[ReplyPiece]) -> list[int]:
    return [piece.id for piece in pieces]


# --- replies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_streamed_pieces_equal_the_reply(chat: Chat, seed: int) -> None:
    pieces = list(chat.stream(user("Hello"), seed=seed, max_new_tokens=50))
    answer = chat.reply(user("Hello"), seed=seed, max_new_tokens=50)
    assert [piece.id for piece in pieces] == answer.ids
    assert "".join(piece.text for piece in pieces) == answer.text
    assert answer.text == chat.tokenizer.decode(answer.ids)
    assert answer.stopped == ("stop" if answer.ids[-1] in chat.stop_ids else "length")
    assert len(answer.ids) == 50 or answer.stopped == "stop"


def test_seed_decides_the_draws(chat: Chat) -> None:
    first, again, other = (chat.reply(user("Hello"), seed=seed, max_new_tokens=20).ids for seed in (0, 0, 2))
    assert first == again
    assert first != other
    best = [chat.reply(user("Hello"), sampling=greedy(), seed=seed, max_new_tokens=20).ids for seed in (0, 2)]
    assert best[0] == best[1]


def test_greedy_changes_only_one_setting() -> None:
    settings = TextSampling(temperature=0.3, top_k=7)
    assert greedy(settings) == TextSampling(temperature=0.3, top_k=7, greedy=True)
    assert greedy().repetition_penalty == CHAT_TEXT.repetition_penalty


def test_default_stop_ids(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in ("<|im_end|>", "<|endoftext|>", "<|tts_eos|>"):
        with monkeypatch.context() as patch:
            hello = chat.tokenizer.encode("Hello")
            force_tokens(chat, patch, [*hello, chat.tokenizer.id(token), 7, 7, 7])
            answer = chat.reply(user("Hi"))
            assert answer.ids == [*hello, chat.tokenizer.id(token)]
            assert (answer.text, answer.stopped) == ("Hello", "stop")


def test_given_stop_ids_end_the_reply(chat: Chat) -> None:
    free = chat.reply(user("Hello"), seed=1, max_new_tokens=30, stop_ids=())
    assert free.stopped == "length"
    stop = next(token for n, token in enumerate(free.ids) if n > 3 and token not in free.ids[:n])
    for stop_ids in ([stop], {stop, 3}, (stop,)):
        answer = chat.reply(user("Hello"), seed=1, max_new_tokens=30, stop_ids=stop_ids)
        assert answer.ids == free.ids[: free.ids.index(stop) + 1]
        assert answer.stopped == "stop"
        assert answer.text == chat.tokenizer.decode(answer.ids[:-1]), "expected the text without the stop token"


@pytest.mark.parametrize("n", [1, 2, 7])
def test_reply_ends_at_the_token_limit(chat: Chat, n: int) -> None:
    answer = chat.reply(user("Hello"), seed=1, max_new_tokens=n, stop_ids=())
    assert len(answer.ids) == n
    assert answer.stopped == "length"


def test_stop_token_at_the_limit_counts_as_stop(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    force_tokens(chat, monkeypatch, [7, chat.tokenizer.special.im_end])
    assert chat.reply(user("Hi"), max_new_tokens=2).stopped == "stop"


@pytest.mark.parametrize("end", ["limit", "stop"])
def test_pieces_hold_whole_characters_and_the_last_one_the_rest(chat: Chat, monkeypatch, end: str) -> None:
    smile = chat.tokenizer.encode("🙂")
    assert len(smile) == 4, "expected a character of several tokens"
    ids = [*smile, *smile[:2], *([chat.tokenizer.special.im_end] if end == "stop" else [])]
    force_tokens(chat, monkeypatch, ids)
    pieces = list(chat.stream(user("Hi"), max_new_tokens=6 if end == "limit" else 9))
    assert [piece.text for piece in pieces[:5]] == ["", "", "", "🙂", ""]
    assert [piece.text for piece in pieces[5:]] == (["\ufffd"] if end == "limit" else ["", "\ufffd"])
    assert ids_of(iter(pieces)) == ids


def test_every_token_is_the_argmax_of_one_prefill(chat: Chat) -> None:
    """One prefill of prompt and reply has each token as the argmax of the row before it."""
    answer = chat.reply(user("Hello"), sampling=TextSampling(greedy=True), max_new_tokens=12, stop_ids=())
    rows, llm = chat.encode(chat.read(user("Hello"))), chat.runner.model.llm
    ids = torch.cat((rows.ids, torch.tensor(answer.ids[:-1])))
    with chat.steps.lease() as slot, record_hidden(chat.runner.model) as hidden:
        chat.steps.feed([slot], [Rows(ids)], [False])
    (states,) = hidden
    got = llm.logits(states[0, len(rows) - 1 : len(ids)], chat.runner.model.backend).argmax(-1).tolist()
    assert got == answer.ids, f"expected {answer.ids}, got {got}"


def test_repetition_penalty_covers_the_reply(chat: Chat) -> None:
    plain = chat.reply(user("Hello"), sampling=TextSampling(greedy=True), max_new_tokens=40, stop_ids=())
    strict = TextSampling(greedy=True, repetition_penalty=100.0, repetition_window=4096)
    varied = chat.reply(user("Hello"), sampling=strict, max_new_tokens=40, stop_ids=())
    assert len(set(plain.ids)) < 40
    assert len(set(varied.ids)) == 40, f"expected no token twice, got {varied.ids}"


# --- concurrency ---------------------------------------------------------------------------------


def test_interleaved_conversations_equal_each_alone(chat: Chat) -> None:
    requests = [(user("Hello"), 1, 30), (user("What is this?", sound(9000)), 2, 21)]
    alone = [ids_of(chat.stream(m, seed=seed, max_new_tokens=n, stop_ids=())) for m, seed, n in requests]
    running = [chat.stream(m, seed=seed, max_new_tokens=n, stop_ids=()) for m, seed, n in requests]
    got: list[list[int]] = [[], []]
    while running[0] or running[1]:
        for n, pieces in enumerate(running):
            piece = next(pieces, None) if pieces else None
            if piece is None:
                running[n] = None
            else:
                got[n].append(piece.id)
    assert got == alone, f"expected {alone}, got {got}"
    assert [len(ids) for ids in got] == [30, 21]


def test_conversations_keep_no_state(chat: Chat) -> None:
    first = chat.reply(user("Hello"), seed=5, max_new_tokens=20)
    chat.reply(user("Something else", sound(16000)), seed=6, max_new_tokens=20)
    assert chat.reply(user("Hello"), seed=5, max_new_tokens=20) == first


@pytest.mark.parametrize("way", ["end", "close", "drop"])
def test_slots_are_released_empty(chat: Chat, way: str) -> None:
    fresh = copy_state(chat.runner.state)
    pieces = chat.stream(user("Hello"), max_new_tokens=8, stop_ids=())
    assert chat.runner.pool.n_free == 2, "expected no slot taken before the first piece"
    next(pieces)
    assert chat.runner.pool.n_free == 1
    if way == "end":
        assert len(list(pieces)) == 7
    elif way == "close":
        pieces.close()
    else:
        del pieces
    assert chat.runner.pool.n_free == 2
    assert_same(chat.runner.state, fresh, [0, 1])


# --- rows of a prompt ----------------------------------------------------------------------------


def media_at(chat: Chat, messages: object, options: PromptOptions | None = None, **how: str) -> list[torch.Tensor]:
    """Rows at each placeholder, images first; asserts that there are no other media rows."""
    prompt = chat.read(messages, options)
    rows = chat.encode(prompt, **how)
    bounds = [*prompt.image_bounds, *prompt.audio_bounds]
    where = torch.zeros(len(rows), dtype=torch.bool)
    for start, end in bounds:
        where[start:end] = True
    assert torch.equal(rows.is_row, where)
    assert rows.ids.tolist() == list(prompt.ids)
    table = torch.zeros(len(rows), rows.media.shape[1])
    table[where] = rows.media
    return [table[start:end] for start, end in bounds]


def assert_rows(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape, f"expected {tuple(expected.shape)}, got {tuple(got.shape)}"
    difference = float((got - expected).abs().max())
    assert difference <= TOLERANCE, f"max difference {difference}: expected {expected}, got {got}"


def test_slices_replace_their_placeholders(chat: Chat) -> None:
    large, small = picture(700, 600), picture(50, 90, seed=1)
    got = media_at(chat, user(large, "and", small), PromptOptions(max_slice_nums=4))
    sizes = plan(700, 600, 4)
    assert sizes.n_slices > 2
    parts = [*cut(large, sizes), *cut(small, plan(50, 90, 4))]
    assert len(got) == len(parts) == sizes.n_slices + 1
    for rows, part in zip(got, parts, strict=True):
        assert_rows(rows, chat.runner.encode_images([patchify(part)])[0])


def test_sounds_of_a_message_are_joined(chat: Chat) -> None:
    first, second, other = sound(20000), sound(16000, 1), sound(8000, 2)
    got = media_at(chat, [*user(first, "then", second), *user(other)])
    assert [len(rows) for rows in got] == [12, 10, 5]
    waves = [torch.from_numpy(np.concatenate((first, second))), torch.from_numpy(other)]
    joined, alone = (chat.runner.encode_clips([wave], chunk_length=1.0)[0] for wave in waves)
    assert_rows(torch.cat(got[:2]), joined[:22])
    assert_rows(got[2], alone)
    padded = media_at(chat, [*user(first, "then", second), *user(other)], compat="reference")
    assert_rows(torch.cat(padded[:2]), joined[:22])
    assert float((padded[2] - alone).abs().max()) > 1e-4, "expected the shorter sound to attend to its padding"


def test_silence_fills_a_missing_row(chat: Chat) -> None:
    """Two sounds of 1.09 s count 11 rows each; joined they make 21."""
    clips = [sound(17440), sound(17440, 1)]
    got = media_at(chat, user(*clips))
    assert [len(rows) for rows in got] == [11, 11]
    joined = torch.from_numpy(np.concatenate(clips))
    assert len(chat.runner.encode_clips([joined], chunk_length=1.0)[0]) == 21
    (expected,) = chat.runner.encode_clips([F.pad(joined, (0, 160))], chunk_length=1.0)
    assert_rows(torch.cat(got), expected)
    assert chat.reply(user(*clips), max_new_tokens=2, stop_ids=()).stopped == "length"


def test_drops_a_surplus_row(chat: Chat) -> None:
    """Two sounds of 0.15 s count a row each; joined they make 3."""
    clips = [sound(2400), sound(2400, 1)]
    got = media_at(chat, user(*clips))
    (joined,) = chat.runner.encode_clips([torch.from_numpy(np.concatenate(clips))], chunk_length=1.0)
    assert len(joined) == 3
    assert_rows(torch.cat(got), joined[:2])


def test_sound_beyond_30_seconds(chat: Chat) -> None:
    wave = sound(31 * 16000 + 700)
    (got,) = media_at(chat, user(wave))
    assert len(got) == 310
    assert_rows(got, chat.runner.encode_clips([torch.from_numpy(wave)], chunk_length=1.0)[0])
    assert len(chat.reply(user(wave), max_new_tokens=3, stop_ids=()).ids) == 3


def test_images_and_sound_change_the_reply(chat: Chat) -> None:
    def best(*parts: object) -> list[int]:
        return chat.reply(user(*parts), sampling=greedy(), max_new_tokens=12, stop_ids=()).ids

    replies = [best(picture(60, 60, s), "a") for s in (0, 1)] + [best(sound(16000, s), "a") for s in (0, 1)]
    assert len({tuple(ids) for ids in replies}) == 4, f"expected four different answers, got {replies}"


EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
OPENING = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("options", "joint", "end"),
    [
        (PromptOptions(), "\n", EMPTY_THOUGHT + "<|tts_bos|>"),
        (PromptOptions(omni_mode=True), "", EMPTY_THOUGHT + "<|tts_bos|>"),
        (PromptOptions(enable_thinking=True), "\n", "<|tts_bos|>"),
    ],
)
def test_options_change_the_prompt(chat: Chat, options: PromptOptions, joint: str, end: str) -> None:
    heard = "<|audio_start|>" + "<unk>" * 15 + "<|audio_end|>"
    expected = f"<|im_start|>user\nBefore{joint}{heard}{joint}after<|im_end|>\n{OPENING}{end}"
    prompt = chat.read(user("Before", sound(24000), "after"), options)
    assert prompt.text == expected
    assert list(prompt.ids) == chat.tokenizer.encode(expected)


def test_streamed_sound_has_a_placeholder_per_second(chat: Chat) -> None:
    wave = sound(2 * 16000 + 8000)
    (whole,) = media_at(chat, user(wave))
    parts = media_at(chat, user(wave), PromptOptions(stream_input=True))
    assert [len(rows) for rows in parts] == [10, 10, 5]
    assert_rows(torch.cat(parts), whole)


def test_options_change_the_reply(chat: Chat) -> None:
    replies = [
        chat.reply(user("a", "b"), options, sampling=greedy(), max_new_tokens=12, stop_ids=()).ids
        for options in (None, PromptOptions(enable_thinking=True), PromptOptions(omni_mode=True))
    ]
    assert len({tuple(ids) for ids in replies}) == 3, f"expected three different answers, got {replies}"
    assert (
        replies[0] == chat.reply(user("a", "b"), PromptOptions(), sampling=greedy(), max_new_tokens=12, stop_ids=()).ids
    )


def test_prompt_and_reply_may_fill_a_slot(chat: Chat) -> None:
    room = LLM_LEN - len(chat.read(user("Hello")).ids)
    answer = chat.reply(user("Hello"), max_new_tokens=room, stop_ids=())
    assert len(answer.ids) == room
    with pytest.raises(
        ContextOverflowError, match=rf"expected at most {LLM_LEN} .+, got {LLM_LEN - room} \+ {room + 1}"
    ):
        chat.stream(user("Hello"), max_new_tokens=room + 1)


def test_load_gives_an_equal_chat(chat: Chat, tiny) -> None:
    loaded = Chat.load(tiny, n_slots=3, llm_len=100)
    assert (loaded.runner.pool.n_free, loaded.runner.llm_len) == (3, 100)
    got, expected = (one.reply(user("Hello"), seed=4, max_new_tokens=20) for one in (loaded, chat))
    assert got == expected
