"""The chat template, placeholders and bounds, and refused conversations."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.checkpoint.config import PreprocessorConfig
from models.errors import ImageError, MessageError, SettingsError, TokenError
from models.inputs.image import SlicePlan, plan
from models.inputs.messages import ChatMessage, parse_messages
from models.inputs.prompts import (
    PromptOptions,
    build_prompt,
    build_segment,
    find_bounds,
    image_placeholder,
    render_chat,
)
from models.inputs.tokens import Tokenizer

TINY = Path(__file__).parents[3] / "assets" / "tiny"
N_ROWS = 3


@cache
def tiny() -> Tokenizer:
    return Tokenizer.load(TINY)


def groups(n_samples: int, *, chunked: bool) -> list[int]:
    """An embedding for every 1000 samples; chunks of 2."""
    n = n_samples // 1000
    if not chunked:
        return [n] if n else []
    return [2] * (n // 2) + [1] * (n % 2)


def build(messages, *, settings: PreprocessorConfig | None = None, **options):
    settings = settings or PreprocessorConfig(image_feature_size=N_ROWS, max_slice_nums=4)
    return build_prompt(messages, tiny(), settings, groups, PromptOptions(**options))


def user(*parts) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def picture(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height))


def sound(n_rows: int) -> np.ndarray:
    return np.zeros(1000 * n_rows + 1, np.float32)


IMAGE = f"<image>{'<unk>' * N_ROWS}</image>"
CELL = f"<slice>{'<unk>' * N_ROWS}</slice>"
OPENING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def audio(n_rows: int) -> str:
    return f"<|audio_start|>{'<unk>' * n_rows}<|audio_end|>"


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([turn("assistant", "b")], "<|im_start|>assistant\nb<|im_end|>\n"),
        (
            [turn("user", "a"), turn("assistant", "b")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>\n",
        ),
        (
            [turn("user", "a"), turn("assistant", "<think>\nhm\n</think>\n\nb"), turn("assistant", "c")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nb<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nc<|im_end|>\n",
        ),
        (
            [turn("user", "a"), turn("assistant", "b"), turn("assistant", "c")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\nc<|im_end|>\n",
        ),
    ],
)
def test_assistant_turns_after_the_last_user_turn_keep_their_thoughts(messages, expected):
    assert render_chat(messages) == expected


def test_earlier_thoughts_are_dropped():
    messages = [turn("user", "a"), turn("assistant", "<think>\nhm\n</think>\n\nb"), turn("user", "c")]
    assert "hm" not in render_chat(messages) and "<think>" not in render_chat(messages)


@pytest.mark.parametrize(
    ("thinking", "speech", "tail"),
    [
        (None, False, "assistant\n"),
        (True, True, "assistant\n<|tts_bos|>"),
        (False, False, "assistant\n<think>\n\n</think>\n\n"),
        (False, True, "assistant\n<think>\n\n</think>\n\n<|tts_bos|>"),
    ],
)
def test_generation_prompt_opens_the_answer(thinking, speech, tail):
    text = render_chat(
        [turn("user", "a")], add_generation_prompt=True, enable_thinking=thinking, use_tts_template=speech
    )
    assert text == f"<|im_start|>user\na<|im_end|>\n<|im_start|>{tail}"


def test_text_prompts_have_no_media():
    prompt = build([turn("system", "s"), turn("user", "u")])
    assert prompt.text == f"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n{OPENING}"
    assert prompt.ids == tuple(tiny().encode(prompt.text))
    assert (prompt.image_bounds, prompt.audio_bounds) == ((), ())


def test_media_keep_their_order_and_have_bounds():
    image = picture(900, 448)
    prompt = build(
        [
            {"role": "user", "content": [picture(50, 50), "x", sound(4)]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": [sound(2), image, sound(1)]},
        ]
    )
    assert prompt.text == (
        f"<|im_start|>user\n<image_id>0</image_id>{IMAGE}\nx\n{audio(4)}<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n"
        f"<|im_start|>user\n{audio(2)}\n<image_id>1</image_id>{IMAGE}{CELL}{CELL}\n{audio(1)}<|im_end|>\n"
        f"{OPENING}<|tts_bos|>"
    )
    assert [len(placed.bounds) for placed in prompt.images] == [1, 3]
    assert prompt.images[1].image is image and prompt.images[1].plan == plan(900, 448, 4)
    # Sounds of one message are one entry.
    assert [[len(wave) for wave in placed.waves] for placed in prompt.audios] == [[4001], [2001, 1001]]
    assert [placed.n_rows for placed in prompt.audios] == [4, 3]
    bounds = [*prompt.image_bounds, *prompt.audio_bounds]
    inside = {i for start, end in bounds for i in range(start, end)}
    assert inside == {i for i, token in enumerate(prompt.ids) if token == tiny().special.unk}


@pytest.mark.parametrize(
    ("options", "content"),
    [
        ({"omni_mode": True}, f"<image_id>0</image_id>{IMAGE}a{audio(3)}"),
        ({"stream_input": True}, f"<image_id>0</image_id>{IMAGE}a{audio(2)}{audio(1)}"),
        ({"use_image_id": False}, f"{IMAGE}\na\n{audio(3)}"),
    ],
)
def test_options_change_the_joining_and_the_placeholders(options, content):
    prompt = build(user(picture(50, 50), "a", sound(3)), **options)
    assert prompt.text == f"<|im_start|>user\n{content}<|im_end|>\n{OPENING}<|tts_bos|>"


def test_preprocessor_settings_are_the_defaults():
    settings = PreprocessorConfig(image_feature_size=N_ROWS, max_slice_nums=1, use_image_id=False)
    assert f"user\n{IMAGE}<|im_end|>" in build(user(picture(900, 448)), settings=settings).text
    sliced = build(user(picture(900, 448)), settings=settings, max_slice_nums=2)
    assert len(sliced.image_bounds) == 3


def test_each_grid_row_is_one_line():
    text = image_placeholder(SlicePlan((448, 448), (2, 3), (896, 1344)), N_ROWS, number=7)
    assert text == f"<image_id>7</image_id>{IMAGE}" + "\n".join([CELL * 2] * 3)


def test_listen_tokens_are_removed():
    prompt = build(user("a<|listen|>b", sound(1)))
    assert tiny().special.listen not in prompt.ids
    assert prompt.audio_bounds[0][0] == prompt.ids.index(tiny().special.audio_start) + 1


def test_segments_have_no_template():
    message = parse_messages(user("hi", sound(2)))[0]
    options = PromptOptions(stream_input=True, use_image_id=False)
    prompt = build_segment(message, tiny(), PreprocessorConfig(), groups, options, prefix="<|im_start|>user\n")
    assert prompt.text == f"<|im_start|>user\nhi{audio(2)}"
    assert prompt.audios[0].n_rows == 2


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(
            st.one_of(st.text(max_size=5), st.integers(1, 5), st.tuples(sizes := st.integers(1, 2000), sizes)),
            max_size=4,
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_every_embedding_has_one_placeholder(conversation, stream_input):
    def part(value):
        return sound(value) if isinstance(value, int) else value if isinstance(value, str) else picture(*value)

    messages = [{"role": "user", "content": [*map(part, parts), "."]} for parts in conversation]
    prompt = build(messages, stream_input=stream_input)
    sounds = sum(value for parts in conversation for value in parts if isinstance(value, int))
    assert sum(end - start for start, end in prompt.audio_bounds) == sounds
    assert len(prompt.image_bounds) == sum(placed.plan.n_slices for placed in prompt.images)
    bounds = sorted([*prompt.image_bounds, *prompt.audio_bounds])
    assert all(a[1] < b[0] for a, b in pairwise(bounds)), bounds
    assert all(set(prompt.ids[a:b]) == {tiny().special.unk} for a, b in bounds)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: expected at least one message, got none"),
        (None, "messages: expected a list of messages, got NoneType"),
        ("hi", "messages: expected a list of messages, got str"),
        (["hi"], r"messages\[0\]: expected an object with role and content, got str"),
        ([{"role": "user"}], "expected keys role, content, got keys role"),
        ([{"role": "user", "content": "a", "name": "b"}], "got keys role, content, name"),
        (
            [turn("user", "a"), turn("tool", "b")],
            r"messages\[1\].role: expected one of system, user, assistant, got 'tool'",
        ),
        ([{"role": ["user"], "content": "a"}], "expected one of system"),
        ([turn("user", "")], r"messages\[0\].content: expected text, an image or sound, got nothing"),
        ([{"role": "user", "content": []}], "got nothing"),
        ([{"role": "user", "content": ["", ""]}], "got nothing"),
        ([{"role": "user", "content": 3}], "expected text or a list of parts, got int"),
        ([{"role": "user", "content": ["a", {"image": "b"}]}], r"content\[1\]: expected text, a PIL image or a NumPy"),
        (
            [{"role": "user", "content": [np.zeros((2, 5), np.float32)]}],
            r"expected mono float samples.* shape \(2, 5\)",
        ),
        ([{"role": "user", "content": [np.zeros(5, np.int16)]}], "expected mono float samples.*got int16"),
        ([{"role": "user", "content": [np.zeros(0, np.float32)]}], "expected mono float samples"),
    ],
)
def test_refuses_malformed_messages(messages, message):
    with pytest.raises(MessageError, match=message):
        parse_messages(messages)


def test_parsed_messages_parse_again():
    message = parse_messages(user("a"))[0]
    assert isinstance(message, ChatMessage)
    assert parse_messages([message])[0].parts == ("a",)


@pytest.mark.parametrize(
    "text",
    [
        IMAGE,
        "<image>",
        "</image>",
        "<slice></image>",
        audio(2),
        "<|audio_end|>",
        "</slice><image>",
        "<image><slice></slice>",
    ],
)
@pytest.mark.parametrize("media", [(), (picture(50, 50), sound(2))])
def test_refuses_media_markers_in_text(text, media):
    with pytest.raises(MessageError, match="markers in text"):
        build(user(text, *media))


def test_other_placeholder_tokens_in_text_are_text():
    prompt = build(user("<image_id>3</image_id><unk><unk>"))
    assert prompt.image_bounds == ()


def test_refuses_sound_too_short_for_an_embedding():
    with pytest.raises(MessageError, match="expected enough samples for one embedding, got 999 samples"):
        build(user(np.zeros(999, np.float32)))


def test_image_and_token_errors_pass_through():
    with pytest.raises(ImageError):
        build(user(picture(0, 4)))
    with pytest.raises(TokenError):
        build(user("\ud800"))


def test_bounds_are_between_paired_markers():
    pairs = {1: 2, 3: 4}
    assert find_bounds([9, 1, 0, 0, 2, 3, 4, 9], pairs) == [(2, 4), (6, 6)]
    for ids in ([1], [2], [1, 4], [1, 1, 2], [1, 3, 4, 2], [1, 2, 2]):
        with pytest.raises(MessageError):
            find_bounds(ids, pairs)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "9"])
def test_refuses_slice_limits_that_are_no_positive_whole_numbers(limit: object) -> None:
    with pytest.raises(SettingsError, match="max_slice_nums: expected a whole number from 1, got"):
        PromptOptions(max_slice_nums=limit)
