"""Text: the chat template, special ids and bounds for the released vocabulary, prompts of the small checkpoint.

Ids of the released vocabulary need its files, which no golden directory holds: name a folder that has them
in DUOLOGUE_REAL_TOKENIZER to have those checked too.
"""

import os
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from models.checkpoint.config import load_preprocessor_config
from models.inputs.audio import placeholder_groups
from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.prompts import PromptOptions, build_prompt, find_bounds, render_chat
from models.inputs.tokens import UNVOICED, Tokenizer, unvoiced_ids
from tests.parity.golden import GoldenDir
from tests.parity.media import picture
from tests.parity.report import Report

CASES = "real_tokenizer_cases.json"
MEDIA = "chat_media"
# Byte-level vocabularies begin with the visible ASCII characters.
FIRST_CHARACTER = ord("!")


def run(golden: GoldenDir, report: Report) -> None:
    if cases := golden.json(CASES):
        _check_without_vocabulary(cases, report)
        if folder := os.environ.get("DUOLOGUE_REAL_TOKENIZER"):
            _check_ids(cases, Tokenizer.load(folder), report)
    stems = [stem for stem in golden.stems("chat_") if "msgs" in golden.meta(stem)]
    if stems:
        tokenizer = Tokenizer.load(golden.checkpoint)
        for stem in stems:
            _check_prompt(stem, golden, tokenizer, report)


def _check_without_vocabulary(cases: dict[str, Any], report: Report) -> None:
    for i, case in enumerate(cases.get("chat_template", [])):
        text = render_chat(case["messages"], **case["kwargs"])
        report.equal("real_tokenizer_cases", f"template {i}", *map(repr, (text, case["text"])))
    special = cases.get("special", {})
    if mixed := cases.get("mixed"):
        for name, pairs in (
            ("image_bound", [("<image>", "</image>"), ("<slice>", "</slice>")]),
            ("audio_bounds", [("<|audio_start|>", "<|audio_end|>")]),
        ):
            marks = {special[start]: special[end] for start, end in pairs}
            report.equal(
                "real_tokenizer_cases", f"mixed {name}", _lists(find_bounds(mixed["input_ids"], marks)), mixed[name]
            )
    if forbidden := cases.get("forbidden_streaming"):
        expected = [ord(c) - FIRST_CHARACTER if c.isascii() else special["<unk>"] for c in UNVOICED]
        report.equal("real_tokenizer_cases", "unvoiced characters", expected, forbidden)


def _check_ids(cases: dict[str, Any], tokenizer: Tokenizer, report: Report) -> None:
    for kind in ("encode", "chat_template"):
        for i, case in enumerate(cases.get(kind, [])):
            report.equal("real_tokenizer_cases", f"{kind} {i} ids", tokenizer.encode(case["text"]), case["ids"])
    report.equal(
        "real_tokenizer_cases",
        "special ids",
        {token: tokenizer.lookup(token) for token in cases.get("special", {})},
        cases.get("special", {}),
    )
    if forbidden := cases.get("forbidden_streaming"):
        report.equal("real_tokenizer_cases", "unvoiced ids", unvoiced_ids(tokenizer), forbidden)


def _check_prompt(stem: str, golden: GoldenDir, tokenizer: Tokenizer, report: Report) -> None:
    meta, tensors = golden.meta(stem), golden.tensors(stem)
    prompt = build_prompt(
        chat_messages(golden, meta["msgs"]),
        tokenizer,
        load_preprocessor_config(golden.checkpoint),
        placeholder_groups,
        chat_options(meta["kwargs"]),
    )
    for name, got in (
        ("input_ids", [list(prompt.ids)]),
        ("image_bound", _lists(prompt.image_bounds)),
        ("audio_bounds", _lists(prompt.audio_bounds)),
    ):
        if (expected := tensors.get(name)) is not None:
            report.equal(stem, name, got, expected)


def chat_messages(golden: GoldenDir, msgs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A case's messages with generated pictures and loaded sounds; silence of equal length for a missing one."""
    waves = golden.tensors(MEDIA)
    return [
        {
            "role": m["role"],
            "content": m["content"] if isinstance(m["content"], str) else [_part(p, waves) for p in m["content"]],
        }
        for m in msgs
    ]


def missing_media(golden: GoldenDir, msgs: list[dict[str, Any]]) -> list[str]:
    """The sounds of a case that are not in the directory."""
    waves = golden.tensors(MEDIA)
    parts = [
        part for m in msgs if not isinstance(m["content"], str) for part in m["content"] if "audio_seconds_seed" in part
    ]
    return [f"{MEDIA}.{name}" for name in sorted({_wave_name(part) for part in parts} - waves.keys())]


def chat_options(kwargs: dict[str, Any]) -> PromptOptions:
    names = {entry.name for entry in fields(PromptOptions)}
    return PromptOptions(**{key: value for key, value in kwargs.items() if key in names})


def _part(part: str | dict[str, Any], waves: dict[str, torch.Tensor]) -> object:
    if isinstance(part, str):
        return part
    if "image" in part:
        return picture(*part["image"])
    if (wave := waves.get(_wave_name(part))) is not None:
        return wave.numpy()
    return np.zeros(round(part["audio_seconds_seed"][0] * SAMPLE_RATE), np.float32)


def _wave_name(part: dict[str, Any]) -> str:
    seconds, seed = part["audio_seconds_seed"]
    return f"wave_{seconds}_{seed}"


def _lists(bounds: object) -> list[list[int]]:
    return [list(bound) for bound in bounds]
