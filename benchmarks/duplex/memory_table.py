"""What holds a GPU's memory: weights, slots, graphs' pools and the rest, and the peak of each phase of a start.

On a CPU the sizes of weights and slots are known, and the process's resident memory. Does not start engines.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from models.graphs.growing_memory import mapped_bytes
from worker.assembly.parts import EngineParts
from worker.compile.state import CompileResult
from worker.start.memory import memory_bytes

GB = 1e9


def phase_memory(device: torch.device) -> dict[str, int]:
    """Bytes at the end of a phase and at its peak; starts to measure the next peak."""
    found = {"held": memory_bytes(device)}
    if device.type == "cuda":
        mapped = mapped_bytes(device)
        found["allocated"] = torch.cuda.memory_allocated(device) + mapped
        found["peak"] = torch.cuda.max_memory_reserved(device) + mapped
        found["peak_allocated"] = torch.cuda.max_memory_allocated(device) + mapped
        torch.cuda.reset_peak_memory_stats(device)
    return found


def start_peak(phases: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The peaks of all phases together, by the names of `report.peak_memory`; empty on a CPU."""
    names = {"reserved_bytes": "peak", "allocated_bytes": "peak_allocated"}
    rows = [row for row in phases.values() if "peak" in row]
    return {name: max(row[column] for row in rows) for name, column in names.items()} if rows else {}


def held_parts(parts: EngineParts, result: CompileResult) -> dict[str, int]:
    """Bytes on the engine's device by part: weights, state of all slots, pools of CUDA graphs."""
    device = parts.model.device
    found = {f"weights {name}": n_bytes for name, n_bytes in _weights(parts.model, device).items()}
    if parts.vocoder is not None:
        for name, module in (("flow", parts.vocoder.parts.flow), ("hift", parts.vocoder.parts.hift)):
            found[f"weights {name}"] = sum(_weights(module, device).values())
    found |= {f"slots {name}": n_bytes for name, n_bytes in parts.unit_steps.state.part_bytes().items()}
    if parts.vocoder is not None:
        found["slots vocoder"] = parts.vocoder.held_bytes
    found["graphs"] = sum(region.n_bytes for region in result.regions.values())
    return found


def _weights(module: nn.Module, device: torch.device) -> dict[str, int]:
    """Bytes on `device` by the first part of the name; tensors that share memory count once."""
    found: defaultdict[str, int] = defaultdict(int)
    seen = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[name.partition(".")[0]] += storage.nbytes()
    return dict(found)


def memory_lines(start: Mapping[str, Any], serving: Mapping[str, int] | None = None) -> list[str]:
    """The table of one start. serving: peak of the load that followed, as `report.peak_memory`."""
    held, phases = start["held_parts"], start["phase_memory"]
    lines = [f"memory, GB, {start['max_sessions']} slots of {start['llm_len']} rows"]
    lines += [f"  {name:24}{n_bytes / GB:9.3f}" for name, n_bytes in held.items() if n_bytes]
    last = list(phases.values())[-1]
    if "allocated" in last:
        lines.append(f"  {'rest of reserved memory':24}{(last['held'] - sum(held.values())) / GB:9.3f}")
        lines.append(f"  {'phase of the start':24}{'held':>9}{'allocated':>11}{'peak':>9}{'allocated':>11}")
        for name, row in phases.items():
            values = [row[column] / GB for column in ("held", "allocated", "peak", "peak_allocated")]
            lines.append(f"  {name:24}{values[0]:9.3f}{values[1]:11.3f}{values[2]:9.3f}{values[3]:11.3f}")
        peak = max(row["peak"] for row in phases.values())
        if serving is not None:
            more = (peak - serving["reserved_bytes"]) / GB
            lines.append(
                f"  peak of the start {peak / GB:.3f}, of the load {serving['reserved_bytes'] / GB:.3f}: {more:+.3f}"
            )
    return lines
