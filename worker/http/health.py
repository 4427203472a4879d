"""The body of a worker's /health. Reads host state only, so that it never waits for the engine's thread."""

import platform
import time
from collections.abc import Collection
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from models.checkpoint.index import converted_to
from worker.assembly.load_times import Loading
from worker.compile.compile_engine import count
from worker.compile.state import CompileResult
from worker.config.embedded import has_random_weights
from worker.engine import Engine
from worker.http.socket_conversation import SocketConversation
from worker.loaded import Loaded
from worker.loop.early.early_pictures import EarlyPictureCounts
from worker.protocol.messages import PROTOCOL_VERSION
from worker.report.measures import allocator, device_memory
from worker.service import Service
from worker.slots import SlotUse
from worker.start.memory import memory_bytes, own_bytes
from worker.status import WIRE_NAMES, State
from worker.version import VERSION, package_version

STARTING = (State.LOADING, State.COMPILING, State.WARMING_UP, State.UNLOADED)


def health(
    service: Service, conversations: Collection[SocketConversation[Any]], totals: dict[str, float]
) -> dict[str, Any]:
    """The body of /health; all keys are always present.

    Args:
        service: the worker's service.
        conversations: the open conversations.
        totals: those of `WorkerMetrics`.
    """
    service.check()
    standing, loaded, settings = service.status.now, service.loaded, service.settings
    engine, compile_result = (None, None) if loaded is None else (loaded.engine, loaded.started.compile_result)
    owner = engine or service.speech
    paused = sum(one.paused for one in conversations)
    worker_status = WIRE_NAMES[standing.state]
    if standing.state is State.BUSY:
        worker_status = _busy_name(service, paused)
    admission = service.admission()
    slots = {"total": service.n_slots, "free": service.n_free, "paused": paused}
    rows = [one.n_rows for one in conversations]  # clients choose the names, which may be equal
    failed = standing.state is State.FAILED
    return {
        "status": "error" if failed else "initializing" if standing.state in STARTING else "healthy",
        "worker_status": worker_status,
        "gpu_id": settings.gpu_id,
        "model_loaded": service.is_ready,
        "current_session_id": next((one.name for one in conversations), None),
        "total_requests": int(totals["requests"]),
        "avg_inference_time_ms": round(totals["ms"] / totals["requests"], 1) if totals["requests"] else 0.0,
        "early_units": {
            "speculations": int(totals["speculations"]),
            "committed": int(totals["committed"]),
            "wasted_ms": round(totals["wasted_ms"], 1),
            "default": settings.engine.session.early_unit,
        },
        "early_pictures": _early_pictures(engine),
        "kv_cache_length": max(rows, default=0),
        "state": standing.state.value,
        "error": standing.error,
        "progress": {**asdict(standing.progress), "seconds": round(time.monotonic() - standing.since, 1)},
        "start_seconds": {state.value: round(s, 2) for state, s in service.status.start_seconds.items()},
        "slots": slots,
        "admission": None if admission is None else admission.body(),
        "sessions": [
            {"session_id": one.name, "units": one.n_units, "paused": one.paused, "kv_rows": n_rows}
            for one, n_rows in zip(conversations, rows, strict=True)
        ],
        "model": {
            "path": str(settings.engine.model_path),
            "random_weights": has_random_weights(settings.engine.model_path),
            "dtype": None if engine is None else str(engine.parts.model.dtype).removeprefix("torch."),
            "precision": str(settings.engine.precision),
            "precision_label": settings.engine.precision.label,
            "converted_to": converted_to(settings.engine.model_path),
            "speaks": None if engine is None else engine.has_vocoder,
            "side_lane": None if engine is None else engine.parts.language.side_lane is not None,
            "weights": None if engine is None else _weights(engine.parts.loading),
        },
        "models": {
            "omni": loaded is not None,
            "speech": None if service.speech is None else service.speech.body(),
            "speech_path": None if settings.engine.speech_path is None else str(settings.engine.speech_path),
            "speech_error": service.speech_error,
            "conversion": service.conversions.body(),
            "conversion_path": None if settings.engine.s3gen_path is None else str(settings.engine.s3gen_path),
            "conversion_error": service.conversions.error,
        },
        "device": _device(None if owner is None else owner.device, settings.engine.device),
        "kv": {
            "used": sum(rows),
            "total": 0 if engine is None else engine.n_context_rows,
            "layout": None if engine is None else engine.parts.kv_layout,
        },
        "memory": _memory(engine, compile_result),
        "memory_share": round(service.memory.share(own_bytes()), 3) if service.is_ready else None,
        "allocator": allocator() if engine is not None and engine.device.type == "cuda" else None,
        "compile": {
            "enabled": settings.engine.compile.enabled,
            "mode": settings.engine.compile.mode,
            "dynamic": settings.engine.compile.dynamic,
            "cuda_graphs": settings.engine.compile.cuda_graphs,
            "toggles": {} if compile_result is None else compile_result.backend_flags,
            "notes": [] if compile_result is None else compile_result.notes,
            "targets": {name: asdict(target) for name, target in list(service.targets.items())},
            "regions": _regions(service, compile_result),
            "counts": {} if loaded is None else asdict(count(loaded.engine.parts)),
            "after_warm_up": {} if loaded is None else _late(loaded),
            "cache": None if loaded is None or loaded.started.cache is None else asdict(loaded.started.cache),
        },
        "versions": {**versions(), "driver": None if loaded is None else loaded.started.report.header.driver},
    }


def _busy_name(service: Service, n_paused: int) -> str:
    """The status of the public implementation, which has one session per worker, for the sessions of a busy one."""
    uses = service.uses
    if n_paused and n_paused == uses.total():
        return "duplex_paused"
    return next((use.value for use in SlotUse if uses[use]), SlotUse.CHAT)  # none: of texts and conversions alone


@cache
def versions() -> dict[str, str | int | None]:
    """The versions of the worker, its protocol and its libraries."""
    return {
        "duologue": VERSION,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "cuda": torch.version.cuda,
    }


def _device(device: torch.device | None, configured: str) -> dict[str, Any]:
    if device is None:
        return {"type": None, "name": None, "asked": configured}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"type": str(device), "name": name, "asked": configured}


def _regions(service: Service, compile_result: CompileResult | None) -> dict[str, Any]:
    """The regions of all models by name."""
    omni = {} if compile_result is None else compile_result.regions
    speech = {} if service.speech is None else service.speech.regions
    return {name: asdict(region) for name, region in (omni | speech).items()}


def _early_pictures(engine: Engine | None) -> dict[str, float]:
    counts = EarlyPictureCounts(0, 0, 0, 0.0) if engine is None else engine.early_pictures
    return {**counts._asdict(), "spent_ms": round(counts.spent_ms, 1)}


def _weights(loading: Loading | None) -> dict[str, float] | None:
    if loading is None:
        return None
    return {"bytes": loading.n_bytes, "seconds": loading.seconds, "gb_per_s": loading.gb_per_s}


def _late(loaded: Loaded) -> dict[str, int]:
    return {**asdict(loaded.late.check()), "recompiles": loaded.watch.counts().recompiles}


def _memory(engine: Engine | None, compile_result: CompileResult | None) -> dict[str, int]:
    numbers = {"resident": memory_bytes(None)}
    if engine is not None and engine.device.type == "cuda":
        numbers |= device_memory(engine.device)
        regions = {} if compile_result is None else compile_result.regions
        numbers["graphs"] = sum(region.n_bytes for region in regions.values())
    return numbers
