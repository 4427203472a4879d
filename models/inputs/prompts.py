"""Chat messages to prompt text, token ids, and the bounds of image and audio embeddings. Torch-free.

Contains the released chat template, without its tools, and the placeholders. Uses only sizes of images and lengths of
sounds; the caller supplies the number of embeddings of a sound. Templates of other checkpoints: `chat_template`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from models.checkpoint.config import PreprocessorConfig
from models.errors import MessageError, SettingsError
from models.inputs.chat_template import ChatTemplate, FunctionCall, TemplateMessage, ToolCall, ToolSchema
from models.inputs.image import SlicePlan, plan
from models.inputs.messages import ChatMessage, Picture, check_role, parse_messages
from models.inputs.tokens import Tokenizer

UNK, IMAGE, SLICE, IMAGE_ID, AUDIO = "<unk>", "<image>", "<slice>", "<image_id>", "<|audio_start|>"
ENDS = {IMAGE: "</image>", SLICE: "</slice>", IMAGE_ID: "</image_id>", AUDIO: "<|audio_end|>"}
START, END = "<|im_start|>", "<|im_end|>"
THINK, THOUGHT, SPEECH, SPEECH_END = "<think>", "</think>", "<|tts_bos|>", "<|tts_eos|>"

Bound = tuple[int, int]


class AudioGroups(Protocol):
    """Embeddings of each placeholder of a sound: one group, or with `chunked` one for each unit; none if too short."""

    def __call__(self, n_samples: int, *, chunked: bool) -> Sequence[int]: ...


@dataclass(frozen=True)
class PromptOptions:
    """How a conversation becomes a prompt.

    Attributes:
        max_slice_nums: maximum number of grid cells of an image; None: as in the checkpoint's preprocessor settings.
        use_image_id: number the images; None: as in the checkpoint's preprocessor settings.
        omni_mode: join the parts of a message without line breaks.
        stream_input: as omni_mode, and sound has one placeholder for each unit.
        use_tts_template: open the answer with the marker for voiced text. Sound in the conversation implies it.
        enable_thinking: let the model think first; otherwise the answer opens with an empty think block.
        add_generation_prompt: open the assistant's turn at the end.
        tools: functions that the model may call; they need a chat template.
        answer_start: text that the answer begins with.
    Raises: SettingsError if max_slice_nums is not a positive whole number.
    """

    max_slice_nums: int | None = None
    use_image_id: bool | None = None
    omni_mode: bool = False
    stream_input: bool = False
    use_tts_template: bool = False
    enable_thinking: bool = False
    add_generation_prompt: bool = True
    tools: tuple[ToolSchema, ...] = ()
    answer_start: str = ""

    def __post_init__(self) -> None:
        limit = self.max_slice_nums
        if limit is not None and (type(limit) is not int or limit < 1):
            raise SettingsError("max_slice_nums", expected="a whole number from 1", got=limit)


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image of a prompt. bounds: [start, end) in the ids, one pair for each slice in the order of `image.cut`."""

    image: Picture
    plan: SlicePlan
    bounds: tuple[Bound, ...]


@dataclass(frozen=True, eq=False)
class PlacedAudio:
    """All sound of one message, which the caller joins into one waveform before computing its mel.

    bounds: [start, end) in the ids, to be filled in order with the embeddings of that waveform. Their lengths are
    computed for each sound, so the joined waveform may have an embedding more or less in all.
    """

    waves: tuple[np.ndarray, ...]
    bounds: tuple[Bound, ...]

    @property
    def n_rows(self) -> int:
        """Embeddings within all bounds."""
        return sum(end - start for start, end in self.bounds)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A tokenized prompt. images and audios are in the order of their bounds."""

    text: str
    ids: tuple[int, ...]
    images: tuple[PlacedImage, ...]
    audios: tuple[PlacedAudio, ...]

    @property
    def image_bounds(self) -> tuple[Bound, ...]:
        return tuple(bound for image in self.images for bound in image.bounds)

    @property
    def audio_bounds(self) -> tuple[Bound, ...]:
        return tuple(bound for audio in self.audios for bound in audio.bounds)


def build_prompt(
    messages: object,
    tokenizer: Tokenizer,
    settings: PreprocessorConfig,
    audio_groups: AudioGroups,
    options: PromptOptions | None = None,
    template: Callable[[], ChatTemplate] | None = None,
) -> Prompt:
    """A conversation as one prompt.

    Args:
        messages: as in `messages.parse_messages`.
        audio_groups: embeddings of a sound (`audio.placeholder_groups`).
        template: gives the checkpoint's chat template, for conversations with tools; None: they are refused.
    Raises:
        MessageError: a message is malformed, a sound is too short for one embedding, or a text contains markers that
            enclose media.
        ImageError: an image has no pixels.
        TokenError: a text is not valid Unicode.
    """
    options = options or PromptOptions()
    parsed = parse_messages(messages)
    writer = _Writer(settings, audio_groups, options)
    contents = [writer.content(message) for message in parsed]
    if options.tools or any(message.needs_template for message in parsed):
        text = _render_with_tools(parsed, contents, options, template)
    else:
        text = render_chat(
            [{"role": message.role, "content": content} for message, content in zip(parsed, contents, strict=True)],
            add_generation_prompt=options.add_generation_prompt,
            enable_thinking=options.enable_thinking,
            use_tts_template=options.use_tts_template or bool(writer.audios),
        )
    return writer.place(text + options.answer_start, tokenizer)


def _render_with_tools(
    messages: Sequence[ChatMessage],
    contents: Sequence[str],
    options: PromptOptions,
    template: Callable[[], ChatTemplate] | None,
) -> str:
    """The prompt text by the checkpoint's own template. Raises: MessageError."""
    if template is None:
        raise MessageError("tools", expected="a checkpoint with a chat template", got="one without")
    turns: list[TemplateMessage] = []
    for message, content in zip(messages, contents, strict=True):
        turn = TemplateMessage(role=message.role, content=content)
        if message.calls:
            turn["tool_calls"] = [
                ToolCall(type="function", function=FunctionCall(name=call.name, arguments=dict(call.arguments)))
                for call in message.calls
            ]
        turns.append(turn)
    return template().render(
        turns,
        tools=options.tools,
        add_generation_prompt=options.add_generation_prompt,
        enable_thinking=options.enable_thinking,
        use_tts_template=options.use_tts_template,
    )


def build_segment(
    message: ChatMessage,
    tokenizer: Tokenizer,
    settings: PreprocessorConfig,
    audio_groups: AudioGroups,
    options: PromptOptions,
    *,
    prefix: str = "",
) -> Prompt:
    """The content of one message after `prefix`, without the template; for a turn that arrives in several messages.

    Raises: as `build_prompt`.
    """
    writer = _Writer(settings, audio_groups, options)
    return writer.place(prefix + writer.content(message), tokenizer)


def render_chat(
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = False,
    enable_thinking: bool | None = None,
    use_tts_template: bool = False,
) -> str:
    """The chat template applied to messages of text.

    Thoughts of assistant turns before the last user turn are dropped. After it they stay in a think block, and a final
    assistant message has a think block even without a thought.

    Args:
        messages: mappings with `role` and `content`.
        add_generation_prompt: open the assistant's turn at the end.
        enable_thinking: False opens that turn with an empty think block; True and None do not.
        use_tts_template: open that turn with the marker for voiced text.
    Raises: MessageError for an unknown role.
    """
    last_user = max((i for i, turn in enumerate(messages) if turn["role"] == "user"), default=len(messages) - 1)
    text = ""
    for i, turn in enumerate(messages):
        role, content = check_role(f"messages[{i}]", turn["role"]), turn["content"]
        if role == "assistant":
            thought, content = _split_thought(content)
            if i > last_user and (thought or i == len(messages) - 1):
                content = _think_block(thought.strip("\n")) + content.lstrip("\n")
        text += f"{START}{role}\n{content}{END}\n"
    if add_generation_prompt:
        text += open_answer(enable_thinking=enable_thinking, use_tts_template=use_tts_template)
    return text


def open_answer(*, enable_thinking: bool | None, use_tts_template: bool) -> str:
    """The text that opens an assistant's turn, before the generated answer."""
    thought = _think_block("") if enable_thinking is False else ""
    return f"{START}assistant\n{thought}{SPEECH if use_tts_template else ''}"


def close_answer(*, is_complete: bool) -> str:
    """The text that closes an assistant's turn whose end token is not in the context.

    Args:
        is_complete: False for an interrupted answer, whose speech is closed first.
    """
    return f"{'' if is_complete else SPEECH_END}{END}\n"


def image_placeholder(sizes: SlicePlan, n_rows: int, *, number: int | None) -> str:
    """Text of one image: its number unless None, the whole image, then the grid's cells with a line for each grid row.

    Args:
        n_rows: embeddings of each slice.
    """
    head = "" if number is None else f"{IMAGE_ID}{number}{ENDS[IMAGE_ID]}"
    cols, rows = sizes.grid or (0, 0)
    return head + _enclosed(IMAGE, n_rows) + "\n".join([_enclosed(SLICE, n_rows) * cols] * rows)


def audio_placeholder(groups: Sequence[int]) -> str:
    """Text of one sound: a pair of markers around each group of placeholders."""
    return "".join(_enclosed(AUDIO, n_rows) for n_rows in groups)


def find_bounds(ids: Sequence[int], pairs: Mapping[int, int]) -> list[Bound]:
    """[start, end) between each pair of markers, in order.

    Args:
        pairs: id of the start marker -> id of its end marker.
    Raises: MessageError if a marker is unpaired or inside another pair.
    """
    bounds: list[Bound] = []
    start, wanted = 0, None
    ends = set(pairs.values())
    for i, token in enumerate(ids):
        if token not in pairs and token not in ends:
            continue
        if token != wanted and (wanted is not None or token in ends):
            raise MessageError(
                "media markers in text", expected="only those of media", got=f"an unpaired one at token {i}"
            )
        if wanted is None:
            start, wanted = i + 1, pairs[token]
        else:
            bounds.append((start, i))
            wanted = None
    if wanted is not None:
        raise MessageError(
            "media markers in text", expected="an end for each start", got=f"none after token {start - 1}"
        )
    return bounds


class _Writer:
    """Builds the text of messages with placeholders, and collects the media that the placeholders stand for."""

    def __init__(self, settings: PreprocessorConfig, audio_groups: AudioGroups, options: PromptOptions):
        self.settings, self.audio_groups, self.options = settings, audio_groups, options
        self.max_slice_nums = settings.max_slice_nums if options.max_slice_nums is None else options.max_slice_nums
        self.numbered = settings.use_image_id if options.use_image_id is None else options.use_image_id
        self.images: list[tuple[Picture, SlicePlan]] = []
        self.audios: list[tuple[list[np.ndarray], list[int]]] = []  # per message: sounds, lengths of placeholders

    def content(self, message: ChatMessage) -> str:
        """The text of one message."""
        waves: list[np.ndarray] = []
        groups: list[int] = []
        texts: list[str] = []
        for part in message.parts:
            if isinstance(part, np.ndarray):
                rows = self.audio_groups(len(part), chunked=self.options.stream_input)
                if not rows:
                    expected = "enough samples for one embedding"
                    raise MessageError("sound", expected=expected, got=f"{len(part)} samples")
                waves.append(part)
                groups += rows
                texts.append(audio_placeholder(rows))
            else:
                texts.append(part if isinstance(part, str) else self._image(part))
        if waves:
            self.audios.append((waves, groups))
        return ("" if self.options.omni_mode or self.options.stream_input else "\n").join(texts)

    def _image(self, image: Picture) -> str:
        settings = self.settings
        sizes = plan(*image.size, self.max_slice_nums, scale=settings.scale_resolution, patch=settings.patch_size)
        number = len(self.images) if self.numbered else None
        self.images.append((image, sizes))
        return image_placeholder(sizes, settings.image_feature_size, number=number)

    def place(self, text: str, tokenizer: Tokenizer) -> Prompt:
        """The prompt of `text`, with the collected media at their bounds. Raises: as `build_prompt`."""
        special = tokenizer.special
        # `<|listen|>` in a transcript is a decision of the model and not part of what was said.
        ids = tuple(token for token in tokenizer.encode(text) if token != special.listen)
        image_marks = {special.image_start: special.image_end, special.slice_start: special.slice_end}
        image_bounds = find_bounds(ids, image_marks)
        audio_bounds = find_bounds(ids, {special.audio_start: special.audio_end})
        n_rows = [self.settings.image_feature_size] * sum(sizes.n_slices for _, sizes in self.images)
        _check_lengths("image", image_bounds, n_rows)
        _check_lengths("audio", audio_bounds, [n for _, groups in self.audios for n in groups])
        pictures, sounds = iter(image_bounds), iter(audio_bounds)
        return Prompt(
            text,
            ids,
            tuple(
                PlacedImage(image, sizes, tuple(next(pictures) for _ in range(sizes.n_slices)))
                for image, sizes in self.images
            ),
            tuple(PlacedAudio(tuple(waves), tuple(next(sounds) for _ in groups)) for waves, groups in self.audios),
        )


def _check_lengths(what: str, bounds: Sequence[Bound], expected: Sequence[int]) -> None:
    got = [end - start for start, end in bounds]
    if got != list(expected):
        raise MessageError(f"{what} markers in text", expected=f"placeholders of lengths {list(expected)}", got=got)


def _enclosed(start: str, n_rows: int) -> str:
    return start + UNK * n_rows + ENDS[start]


def _think_block(thought: str) -> str:
    return f"{THINK}\n{thought}\n{THOUGHT}\n\n"


def _split_thought(content: str) -> tuple[str, str]:
    """The thought of an assistant turn, empty if there is none, and the text after it."""
    if THOUGHT not in content:
        return "", content
    thought = content.split(THOUGHT)[0].rstrip("\n").split(THINK)[-1].lstrip("\n")
    return thought, content.split(THOUGHT)[-1].lstrip("\n")
