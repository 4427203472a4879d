"""How many sessions fit into a GPU's memory, from the checkpoint's configuration alone: no weights are read.

The sizes are those of the modules and slots that a worker builds, on the meta device. Weights of the vocoder are read,
since some of its sizes are in its files only.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from models.checkpoint.config import load_config
from models.checkpoint.quantized import quantize
from models.load import build_on_meta, weight_dtype
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from worker.assembly.kv_layout import layout_of, with_kv_layout
from worker.assembly.parts import slot_bytes
from worker.assembly.sizes import POOLED_SPEECH_ROWS, SPEECH_ROWS
from worker.assembly.slot_memory import (
    FREE_SHARE,
    MAX_SESSIONS,
    decode_copy_bytes,
    has_room_for_copy,
    most_slots_in,
    slots_in,
)
from worker.config.session import EngineConfig
from worker.config.weights import KVLayout
from worker.report.compile_report import CompileReport, ReportError
from worker.start.starting import REPORT_FILE

# Tables that the project's kernels read from the host's memory, so that they take none of the GPU.
HOST_TABLES = ("llm.model.embed_tokens.", "tts.emb_text.", "tts.model.embed_tokens.")
HOST = "text embeddings, in host memory"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a worker on a GPU.

    Attributes:
        weights: by part.
        host: of text embeddings, which the project's kernels leave in host memory.
        slot: of one session by part; all kinds of sessions have equal slots, except for the rows of shared pools.
        n_slots: that fit; 0 if not even one does.
        kv_layout: with slots each has room for a session of any kind, with pages for one with default settings.
    """

    total: int
    weights: dict[str, int]
    host: int
    slot: dict[str, int]
    n_slots: int
    kv_layout: KVLayout

    @property
    def free(self) -> int:
        """Bytes that the weights leave."""
        return self.total - sum(self.weights.values())

    @property
    def rest(self) -> int:
        """Bytes for voices, activations, CUDA graphs and the CUDA context."""
        return self.free - self.n_slots * sum(self.slot.values())


def plan_memory(config: EngineConfig, total: int, *, by_kernels: bool = True) -> MemoryPlan:
    """The memory of a worker with these settings.

    Args:
        config: of the engine; `model_path` is a folder with at least `config.json`.
        total: bytes of the GPU.
        by_kernels: the project's kernels run the model.
    Raises: ConfigError; CheckpointError for an incomplete vocoder folder.
    """
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    model = build_on_meta(load_config(config.model_path)).to(dtype)
    weights: dict[str, int] = {}
    host = 0
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        kind = config.precision.kind_of(name, shape)
        if kind is None:
            n_bytes = math.prod(shape) * weight_dtype(name, dtype).itemsize
        else:
            n_bytes = shape[0] * quantize(torch.zeros(1, shape[1]), kind).nbytes
        if by_kernels and name.startswith(HOST_TABLES):
            host += n_bytes
        else:
            part = name.partition(".")[0]
            weights[part] = weights.get(part, 0) + n_bytes
    flow_parts = None
    if model.config.init_tts and config.token2wav_folder.is_dir():
        loaded = load_flow_and_hift(config.token2wav_folder, dtype=dtype, hift_dtype=dtype)
        weights["flow"], weights["hift"] = _n_bytes(loaded.flow), _n_bytes(loaded.hift)
        flow_parts = FlowAndHift(loaded.flow.to("meta"), loaded.hift.to("meta"))

    def free() -> int:
        return max(0, total - sum(weights.values()))

    def n_fitting(given: EngineConfig) -> int:
        return slots_in(free(), total, sum(slot_bytes(model, flow_parts, given).values()))

    resolved = partial(with_kv_layout, config, by_kernels=by_kernels, n_fitting=n_fitting)
    if by_kernels and config.keeps_decode_copy(total):
        copy, slot = decode_copy_bytes(model, config.precision), slot_bytes(model, flow_parts, resolved())
        if has_room_for_copy(free(), copy, slot, config):
            weights["decode copy"] = copy
    config = resolved()  # after the copy, which takes room of slots
    slot = slot_bytes(model, flow_parts, config)
    if config.max_sessions is None:
        n_slots = n_fitting(config)
    else:
        n_slots = min(config.max_sessions, most_slots_in(free(), sum(slot.values())))
    return MemoryPlan(total, weights, host, slot, n_slots, layout_of(config))


def _n_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def graphs_line(cache_dir: Path) -> str:
    """Memory of the CUDA graphs that the last start with this cache has captured, or why it is not known."""
    try:
        report = CompileReport.from_json((cache_dir / REPORT_FILE).read_bytes())
    except (OSError, ReportError):
        return "  CUDA graphs: not measured, since no worker has started with this service.cache_dir"
    held = [row.memory.compiled_bytes or 0 for row in report.rows if row.memory and row.memory.kind == "graph pool"]
    if not sum(held):
        return "  CUDA graphs: none were captured by the last start"
    header = report.header
    return f"  CUDA graphs: {_size(sum(held))} at the last start ({header.what}, {header.device}, {header.date})"


def layout_line(config: EngineConfig, layout: KVLayout) -> str:
    """The model, and the rows of its sessions with this layout."""
    if layout == "slots":
        return f"{config.model_path}: slots of {config.llm_len} rows"
    n_rows = config.rows_of(config.session)
    return (
        f"{config.model_path}: pages of a pool, {n_rows} rows for a default session, {config.llm_len} at most; "
        f"of the speech model {POOLED_SPEECH_ROWS} rows for each slot, {SPEECH_ROWS} at most"
    )


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The plan as text."""
    lines = [f"memory: {_size(plan.total)}"]
    lines += [f"  weights  {name:<24}{_size(n_bytes):>12}" for name, n_bytes in plan.weights.items()]
    lines += [f"  ({HOST}: {_size(plan.host)})"] if plan.host else []
    if "flow" not in plan.weights:
        lines.append("  (without a vocoder, which the checkpoint does not contain)")
    lines += [f"  slot     {name:<24}{_size(n_bytes):>12}" for name, n_bytes in plan.slot.items()]
    lines.append(f"  weights {_size(sum(plan.weights.values()))}, one slot {_size(sum(plan.slot.values()))}")
    if not plan.n_slots:
        return [*lines, "  no session fits"]
    what = "1 session" if plan.n_slots == 1 else f"{plan.n_slots} sessions"
    kind = "of any kind" if plan.kv_layout == "slots" else "with default settings"
    lines.append(
        f"  {what} {kind} fit; {_size(plan.rest)} are left for voices, activations, CUDA graphs and the CUDA "
        f"context; the default number of slots leaves {FREE_SHARE:.0%} of the GPU free, and is {MAX_SESSIONS} at most"
    )
    return lines


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**27 else f"{n_bytes / 2**20:.2f} MiB"
