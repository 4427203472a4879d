"""How many sessions fit into a GPU's memory, from the checkpoint's configuration alone: no weights are read.

The sizes are those of the modules and slots that a worker builds, on the meta device. Weights of the vocoder are read,
since some of its sizes are in its files only.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.config import load_config
from models.checkpoint.precision import Kind
from models.checkpoint.quantized import quantize
from models.errors import SettingsError
from models.load import build_on_meta, weight_dtype
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from worker.assembly.kv_layout import layout_of, with_kv_layout
from worker.assembly.parts import slot_bytes
from worker.assembly.sizes import POOLED_SPEECH_ROWS, SPEECH_ROWS
from worker.assembly.slot_memory import (
    CONTEXT_BYTES,
    FREE_SHARE,
    MAX_SESSIONS,
    decode_copy_bytes,
    has_room_for_copy,
    most_slots_in,
    one_session_bytes,
    slots_in,
    weight_bytes,
)
from worker.config.session import EngineConfig
from worker.config.weights import KVLayout
from worker.doctor.facts import UnknownFact
from worker.doctor.model_memory import other_models
from worker.doctor.speech_facts import speech_facts
from worker.report.compile_report import CompileReport, ReportError
from worker.start.starting import REPORT_FILE

# Tables that the project's kernels read from the host's memory, so that they take none of the GPU.
HOST_TABLES = ("llm.model.embed_tokens.", "tts.emb_text.", "tts.model.embed_tokens.")
HOST = "text embeddings, in host memory"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a worker on a GPU.

    Attributes:
        weights: of the omni model by part; empty if it is not served.
        others: of the models beside it, by name, with the slots of the speech model.
        host: of text embeddings, which the project's kernels leave in host memory.
        slot: of one session by part; all kinds of sessions have equal slots, except for the rows of shared pools.
        n_slots: that fit; 0 if not even one does.
        asked: slots that the settings name; None: as many as fit.
        one_session: beside the weights, for one slot with its work.
        kv_layout: with slots each has room for a session of any kind, with pages for one with default settings.
    """

    total: int
    weights: dict[str, int]
    host: int
    slot: dict[str, int]
    n_slots: int
    kv_layout: KVLayout
    others: dict[str, int] = field(default_factory=dict)
    asked: int | None = None
    one_session: int = 0

    @property
    def free(self) -> int:
        """Bytes that the weights leave."""
        return self.total - sum(self.weights.values()) - sum(self.others.values())

    @property
    def rest(self) -> int:
        """Bytes for voices, activations, CUDA graphs and the CUDA context."""
        return self.free - self.n_slots * sum(self.slot.values())

    @property
    def fits(self) -> bool:
        """Whether the sessions that the settings ask for fit, at least one; without the omni model, all models."""
        return self.n_slots >= (self.asked or 1) if self.weights else self.free >= CONTEXT_BYTES


def plan_memory(config: EngineConfig, total: int, *, by_kernels: bool = True) -> MemoryPlan:
    """The memory of a worker with these settings.

    Args:
        config: of the engine; `model_path` is a folder with at least `config.json`.
        total: bytes of the GPU.
        by_kernels: the project's kernels run the model.
    Raises: ConfigError; CheckpointError for an incomplete vocoder folder; SettingsError for another model whose
        checkpoint is missing or incomplete.
    """
    others = _other_models(config)
    if not config.omni:
        return MemoryPlan(total, {}, 0, {}, 0, "slots", others)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    model = build_on_meta(load_config(config.model_path)).to(dtype)
    weights: dict[str, int] = {}
    host = 0
    for name, tensor in model.state_dict().items():
        n_bytes = _stored_bytes(tensor, weight_dtype(name, dtype), config.precision.kind_of(name, tuple(tensor.shape)))
        if by_kernels and name.startswith(HOST_TABLES):
            host += n_bytes
        else:
            part = name.partition(".")[0]
            weights[part] = weights.get(part, 0) + n_bytes
    model_bytes = host + sum(weights.values())
    flow_parts = None
    if model.config.init_tts and config.token2wav_folder.is_dir():
        loaded = load_flow_and_hift(config.token2wav_folder, dtype=dtype, hift_dtype=dtype)
        weights["flow"] = sum(
            _stored_bytes(tensor, dtype, config.precision.flow_kind_of(name, tuple(tensor.shape)))
            for name, tensor in loaded.flow.state_dict().items()
        )
        weights["hift"] = weight_bytes(loaded.hift)
        flow_parts = FlowAndHift(loaded.flow.to("meta"), loaded.hift.to("meta"))

    def free() -> int:
        return max(0, total - sum(weights.values()) - sum(others.values()))

    def n_fitting(given: EngineConfig) -> int:
        return slots_in(free(), total, sum(slot_bytes(model, flow_parts, given).values()), model_bytes)

    resolved = partial(with_kv_layout, config, by_kernels=by_kernels, n_fitting=n_fitting)
    if by_kernels and config.keeps_decode_copy(total):
        copy, slot = decode_copy_bytes(model, config.precision), slot_bytes(model, flow_parts, resolved())
        if has_room_for_copy(free(), copy, slot, config):
            weights["decode copy"] = copy
    config = resolved()  # after the copy, which takes room of slots
    slot = slot_bytes(model, flow_parts, config)
    one = sum(slot.values())
    if config.max_sessions is None:
        n_slots = n_fitting(config)
    else:
        n_slots = min(config.max_sessions, most_slots_in(free(), one, model_bytes))
    needed = one_session_bytes(one, model_bytes)
    return MemoryPlan(total, weights, host, slot, n_slots, layout_of(config), others, config.max_sessions, needed)


def _stored_bytes(weight: Tensor, dtype: torch.dtype, kind: Kind | None) -> int:
    """Bytes of a weight as it is loaded: in `dtype`, or quantised as `kind`."""
    if kind is None:
        return weight.numel() * dtype.itemsize
    return len(weight) * quantize(torch.zeros(1, weight.shape[1]), kind).nbytes


def _other_models(config: EngineConfig) -> dict[str, int]:
    """As `other_models`, on a GPU. Raises: SettingsError for a checkpoint that is missing or incomplete."""
    speech = None
    if config.speech_path is not None:
        expected = "a complete Qwen3-TTS folder, or a model id that is in the cache"
        try:
            speech = speech_facts(config.speech_path)
        except UnknownFact as error:
            raise SettingsError("model.speech_path", expected=expected, got=str(error)) from None
        if speech.problems:
            raise SettingsError(
                "model.speech_path", expected=expected, got=f"{config.speech_path}: {speech.problems[0]}"
            )
    if config.s3gen_path is not None and not config.s3gen_path.is_file():
        raise SettingsError("model.s3gen_path", expected="a file", got=config.s3gen_path)
    return other_models(config, speech, on_gpu=True)


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
    lines += [f"  {name:<33}{_size(n_bytes):>12}" for name, n_bytes in plan.others.items()]
    if not plan.weights:
        rest = "are left for" if plan.fits else "are left, too few for"
        return [
            *lines,
            "  no duplex sessions are planned: model.omni is false",
            f"  {_size(max(plan.rest, 0))} {rest} activations, CUDA graphs and the CUDA context",
        ]
    lines += [f"  ({HOST}: {_size(plan.host)})"] if plan.host else []
    if "flow" not in plan.weights:
        lines.append("  (without a vocoder, which the checkpoint does not contain)")
    lines += [f"  slot     {name:<24}{_size(n_bytes):>12}" for name, n_bytes in plan.slot.items()]
    lines.append(f"  weights {_size(sum(plan.weights.values()))}, one slot {_size(sum(plan.slot.values()))}")
    if not plan.n_slots:
        free = _size(max(plan.free, 0))
        return [*lines, f"  no session fits: one needs {_size(plan.one_session)} with its work, {free} are left for it"]
    if not plan.fits:
        lines.append(f"  {plan.asked} sessions do not fit, only {plan.n_slots}")
    what = "1 session" if plan.n_slots == 1 else f"{plan.n_slots} sessions"
    kind = "of any kind" if plan.kv_layout == "slots" else "with default settings"
    lines.append(
        f"  {what} {kind} fit; {_size(plan.rest)} are left for voices, activations, CUDA graphs and the CUDA "
        f"context; the default number of slots leaves {FREE_SHARE:.0%} of the GPU free, and is {MAX_SESSIONS} at most"
    )
    return lines


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**27 else f"{n_bytes / 2**20:.2f} MiB"
