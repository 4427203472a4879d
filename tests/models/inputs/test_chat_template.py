"""The checkpoint's own chat template: tools, options, agreement with our prompt text, and errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint.config import load_preprocessor_config
from models.errors import MessageError, TokenError
from models.inputs.audio import placeholder_groups
from models.inputs.chat_template import ChatTemplate, TemplateMessage, ToolSchema, template_of
from models.inputs.messages import ChatMessage, MessageCall
from models.inputs.prompts import Prompt, PromptOptions, build_prompt, render_chat
from models.inputs.tokens import Tokenizer

ROOT = Path(__file__).parents[3]
TINY = ROOT / "assets" / "tiny"
# A template of the same form as the released one, for text and tools.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('unknown role') }}{% endif %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- if use_tts_template %}{{ '<|tts_bos|>' }}{% endif %}{% endif %}"""
WEATHER: ToolSchema = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def checkpoint(folder: Path, template: str, *leave_out: str, in_settings: bool = False) -> Path:
    """A copy of the tiny checkpoint's tokenizer with a chat template."""
    for file in TINY.glob("*.json"):
        if file.name not in leave_out:
            shutil.copy(file, folder)
    shutil.copy(TINY / "merges.txt", folder)
    if in_settings:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    else:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def template(tmp_path: Path) -> ChatTemplate:
    return ChatTemplate.load(checkpoint(tmp_path, TEMPLATE))


def test_text_is_that_of_our_prompts(template: ChatTemplate) -> None:
    cases = json.loads((ROOT / "tests" / "golden" / "real_tokenizer_cases.json").read_text())["chat_template"]
    assert len(cases) == 15
    for case in cases:
        assert template.render(case["messages"], **case["kwargs"]) == case["text"]
        assert render_chat(case["messages"], **case["kwargs"]) == case["text"]


def test_tools_calls_and_answers_are_rendered(template: ChatTemplate) -> None:
    messages: list[TemplateMessage] = [
        {"role": "user", "content": "Rain in 上海?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "上海"}}}],
        },
        {"role": "tool", "content": "dry"},
    ]
    text = template.render(messages, tools=[WEATHER], add_generation_prompt=True)
    assert text == (
        f"<|im_start|>system\nTools:\n{json.dumps(WEATHER)}<|im_end|>\n"
        "<|im_start|>user\nRain in 上海?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>weather{"city": "上海"}</tool_call><|im_end|>\n'
        "<|im_start|>tool\ndry<|im_end|>\n<|im_start|>assistant\n"
    )
    tokenizer = Tokenizer.load(TINY)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text and tokenizer.id("<tool_call>") in ids


@pytest.mark.parametrize(("leave_out", "in_settings"), [((), True), (("tokenizer.json",), False)])
def test_templates_of_other_layouts(tmp_path: Path, leave_out: tuple[str, ...], in_settings: bool) -> None:
    folder = checkpoint(tmp_path, TEMPLATE, *leave_out, in_settings=in_settings)
    assert ChatTemplate.load(folder).render([{"role": "user", "content": "a"}]) == "<|im_start|>user\na<|im_end|>\n"


def test_a_checkpoint_without_a_template_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "", in_settings=True)
    with pytest.raises(TokenError, match=r"expected a chat template \(chat_template.jinja, or .*\), got none"):
        ChatTemplate.load(folder)
    with pytest.raises(MessageError, match="tools: expected a checkpoint with a chat template, got one without"):
        template_of(folder)


def test_prompts_with_tools_follow_the_template() -> None:
    call = MessageCall("weather", {"city": "上海"})
    messages = (
        ChatMessage("user", ("Rain?",)),
        ChatMessage("assistant", ("",), (call,)),
        ChatMessage("tool", ("dry",)),
    )
    tokenizer, settings = Tokenizer.load(TINY), load_preprocessor_config(TINY)
    options = PromptOptions(tools=(WEATHER,), answer_start="<tool_call>\n")

    def prompt(**given: Any) -> Prompt:
        return build_prompt(messages, tokenizer, settings, placeholder_groups, options, **given)

    text = prompt(template=lambda: template_of(TINY)).text
    assert json.dumps(WEATHER) in text and '{"name": "weather", "arguments": {"city": "上海"}}' in text
    assert "<tool_response>\ndry\n</tool_response>" in text and text.endswith("</think>\n\n<tool_call>\n")
    with pytest.raises(MessageError, match="tools: expected a checkpoint with a chat template, got one without"):
        prompt()


def test_an_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path, TEMPLATE)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenError, match="expected readable tokenizer files, got "):
        ChatTemplate.load(tmp_path)


def test_what_the_template_refuses_is_a_message_error(template: ChatTemplate) -> None:
    with pytest.raises(MessageError, match="messages: expected what the chat template takes, got unknown role"):
        template.render([{"role": "critic", "content": "a"}])  # type: ignore[typeddict-item]


def test_a_template_with_a_syntax_error_is_a_token_error(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="chat template: expected a Jinja template, got "):
        ChatTemplate.load(checkpoint(tmp_path, "{% if %}")).render([{"role": "user", "content": "a"}])
