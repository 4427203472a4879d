"""Conversations with tools as text, through the chat template of the checkpoint. Torch-free until a template is loaded.

The prompts of sessions and replies do not use it: `models.inputs.prompts` renders them without Jinja and places images
and sound.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, Self, TypedDict

from models.errors import MessageError, TokenError
from models.inputs.pretrained import load_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class FunctionSchema(TypedDict):
    """A function the model may call. parameters: JSON schema of its arguments."""

    name: str
    description: NotRequired[str]
    parameters: dict[str, Any]


class ToolSchema(TypedDict):
    """One entry of the list of tools, as in the OpenAI API."""

    type: Literal["function"]
    function: FunctionSchema


class FunctionCall(TypedDict):
    """A call that the model made. arguments: by parameter name."""

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """One entry of an assistant message's `tool_calls`."""

    type: Literal["function"]
    function: FunctionCall
    id: NotRequired[str]


class TemplateMessage(TypedDict):
    """One turn of text. tool_calls: of an assistant; tool_call_id: of a tool's answer."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]


@cache
def template_of(folder: Path) -> "ChatTemplate":
    """The template of a checkpoint, loaded once. Raises: MessageError if it has none."""
    try:
        return ChatTemplate.load(folder)
    except TokenError:
        raise MessageError("tools", expected="a checkpoint with a chat template", got="one without") from None


class ChatTemplate:
    """The Jinja template of a checkpoint: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase"):
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The template of a checkpoint folder. Raises: TokenError if it has none, or its tokenizer is unreadable."""
        folder = Path(path)
        try:
            tokenizer = load_pretrained(folder)
        except Exception as error:  # transformers and tokenizers raise many types for a broken file
            raise TokenError(str(folder), expected="readable tokenizer files", got=error) from None
        if not tokenizer.chat_template:
            expected = "a chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
            raise TokenError(str(folder), expected=expected, got="none")
        return cls(tokenizer)

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[ToolSchema] = (),
        add_generation_prompt: bool = False,
        enable_thinking: bool | None = None,
        use_tts_template: bool = False,
    ) -> str:
        """The conversation as prompt text; `Tokenizer.encode` turns it into ids.

        Args:
            messages: text only; the template decides which roles and fields it takes.
            tools: functions the model may call; templates without tools ignore them.
            add_generation_prompt: open the assistant's turn at the end.
            enable_thinking: passed to the template unless None.
            use_tts_template: passed to the template; open the turn for text that is voiced.
        Raises:
            MessageError: the template refuses the conversation.
            TokenError: the template has a syntax error.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        variables: dict[str, Any] = {"use_tts_template": use_tts_template}
        if enable_thinking is not None:
            variables["enable_thinking"] = enable_thinking
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except TemplateSyntaxError as error:
            raise TokenError("chat template", expected="a Jinja template", got=error) from None
        except (TemplateError, TypeError) as error:  # TypeError: a template's filter on a field of another type
            raise MessageError("messages", expected="what the chat template takes", got=error) from None
        assert isinstance(text, str)
        return text
