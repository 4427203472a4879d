"""Table of regions of the language models: sizes, example inputs and the repeated layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from models.graphs.captured import Bucket, Example, StaticSettings
from models.graphs.region_graphs import Region, RegionTable
from models.graphs.shape_table import ShapeTable
from models.graphs.shared_function import SharedFunction
from models.layers.transformer import DecoderLayer
from models.qwen3_tts import regions
from models.qwen3_tts.draws import draw_codes
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.state import GROUPS, TalkerState

PROMPT_ROWS_AT_ONCE = 2048  # rows of one prefill over all slots
CANDIDATES = 64  # codes that a draw sorts; more only where a slot's settings need them


@dataclass(frozen=True)
class TalkerShapes(ShapeTable):
    """Sizes of the language models' axes."""

    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rows: tuple[int, ...] = (16, 32, 64, 128, 256, 512)  # of prompts, fed at once
    kv: tuple[int, ...] = (256, 512, 1024, 2048)  # cache rows read
    text: tuple[int, ...] = (16, 128)  # text tokens appended at once

    def max_prefill_batch(self, n_rows: int) -> int:
        """Largest number of slots in one prefill of `n_rows` rows each."""
        return max([size for size in self.batch if size * n_rows <= PROMPT_ROWS_AT_ONCE], default=self.batch[0])


class TalkerRegions(RegionTable):
    """All regions of the language models over their slots."""

    stacks: ClassVar = {
        "talker.model": ((DecoderLayer, ("forward",)),),
        "talker.code_predictor.model": ((DecoderLayer, ("forward",)),),
    }

    def __init__(self, model: Qwen3TTS, state: TalkerState, shapes: TalkerShapes):
        functions: dict[str, SharedFunction[..., Tensor]] = {"draw_codes": SharedFunction(draw_codes)}
        table = _table(model, state, shapes, functions["draw_codes"])
        super().__init__(model, table, shapes, functions, device=model.device)
        self.state = state

    def clear_scratch(self) -> None:
        """Empty the scratch slot."""
        self.state.reset(torch.tensor([self.state.scratch], device=self._device))


def _has_prefill(shapes: TalkerShapes, bucket: Bucket) -> bool:
    """Whether the table has this prefill bucket: not both a large batch and many rows, and no more than it reads."""
    return bucket["batch"] <= shapes.max_prefill_batch(bucket["rows"]) and bucket["rows"] <= bucket["kv"]


def _table(
    model: Qwen3TTS, state: TalkerState, shapes: TalkerShapes, draw: SharedFunction[..., Tensor]
) -> Iterator[Region]:
    """The rows of the table. Example inputs are random: zeros would hide unwritten outputs and run faster."""
    config, device = model.config.talker_config, model.device

    def scratch(n: int) -> Tensor:
        return torch.full((n,), state.scratch, device=device)

    def full(n: int, value: int) -> Tensor:
        return torch.full((n,), value, dtype=torch.int64, device=device)

    def yes(n: int) -> Tensor:
        return torch.ones(n, dtype=torch.bool, device=device)

    def slots_example(b: Bucket) -> Example:
        return (scratch(b["batch"]),), {}

    def prompt_example(b: Bucket) -> Example:
        n, rows = b["batch"], b["rows"]
        text = torch.randint(0, config.text_vocab_size, (n, rows), device=device)
        codes = torch.randint(-1, config.n_codes, (n, rows, GROUPS), device=device)
        speakers = torch.randn(n, config.hidden_size, device=device)
        return (scratch(n), text, codes, speakers, full(n, 0), full(n, rows)), {"kv_len": b["kv"]}

    def text_example(b: Bucket) -> Example:
        n, tokens = b["batch"], b["text"]
        ids = torch.randint(0, config.text_vocab_size, (n, tokens), device=device)
        return (scratch(n), ids, full(n, tokens), yes(n)), {}

    def start_example(b: Bucket) -> Example:
        return (scratch(b["batch"]), yes(b["batch"])), {}

    def first_example(b: Bucket) -> Example:
        return (scratch(b["batch"]),), {"candidates": CANDIDATES}

    def frame_example(b: Bucket) -> Example:
        return (scratch(b["batch"]),), {"kv_len": b["kv"], "candidates": CANDIDATES}

    batch = {"batch": "batch"}
    yield Region("reset", "state", regions.reset, (state,), batch, slots_example)
    axes = {**batch, "rows": "rows", "kv": "kv"}
    few = partial(_has_prefill, shapes)
    bound = (model, state)
    yield Region("feed_prompt", "talker.model", regions.feed_prompt, bound, axes, prompt_example, has=few)
    axes = {**batch, "text": "text"}
    yield Region("append_text", "state", regions.append_text, (state,), axes, text_example)
    yield Region("start", "state", regions.start, (state,), batch, start_example)
    draws = (model, state, draw)
    variants: tuple[StaticSettings, ...] = ({"candidates": CANDIDATES}, {"candidates": None})
    parts = "talker.code_predictor.model, draw_codes"
    yield Region("first_frame", parts, regions.first_frame, draws, batch, first_example, variants)
    axes = {**batch, "kv": "kv"}
    yield Region("frame", f"talker.model, {parts}", regions.frame, draws, axes, frame_example, variants)
