"""docs/protocol.md matches the code."""

import json
import re
from pathlib import Path

import pytest

from worker.protocol.codes import ErrorCode
from worker.protocol.doc import chat_sections, half_duplex_sections, sections, streaming_sections
from worker.protocol.gateway_messages import RESUME_CLIENT
from worker.protocol.messages import CLIENT, SERVER, read_server, read_text


@pytest.fixture(scope="module")
def document(root: Path) -> str:
    return (root / "docs" / "protocol.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "section",
    f"{sections()}\n{half_duplex_sections()}\n{chat_sections()}\n{streaming_sections()}".split("\n\n#"),
    ids=lambda section: section.strip("# ").split("\n")[0],
)
def test_document_contains_every_message(document: str, section: str) -> None:
    assert section.strip() in document, f"expected what python -m worker.protocol.doc prints, got no\n{section}"


def test_document_contains_no_other_message(document: str) -> None:
    got = set(re.findall(r"^### `(\w+)`$", document, re.M))
    assert got == CLIENT.classes.keys() | RESUME_CLIENT.classes.keys() | SERVER.classes.keys()


def test_document_lists_all_codes(document: str) -> None:
    got = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", document, re.M)
    assert got == list(ErrorCode), f"expected {list(ErrorCode)}, got {got}"


def test_examples_are_valid_messages(document: str) -> None:
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", document, re.S)]
    assert len(examples) > 4
    for example in examples:
        name = example["type"]
        got = read_text(json.dumps(example)) if name in CLIENT.classes else read_server(json.dumps(example))
        assert not example.keys() - type(got).model_fields.keys() - type(got).model_computed_fields.keys(), example


def test_every_field_is_described() -> None:
    for cls in (*CLIENT.classes.values(), *RESUME_CLIENT.classes.values(), *SERVER.classes.values()):
        for name, info in (cls.model_fields | cls.model_computed_fields).items():
            assert info.description or name == "type", f"{cls.__name__}.{name}: expected a description, got none"
