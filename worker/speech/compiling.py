"""Compiles and captures a speech model as `service.compile` says, before it speaks.

Where the project's kernels do not run the talker, one layer of each chosen target compiles, in the mode and with the
sizes that the omni model's layers have. A target that fails runs eagerly.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.fx.experimental._config as symbol_config

from models.graphs.region_graphs import RegionTable
from worker.assembly.backend_flags import uses_kernels
from worker.compile.errors import reason_of
from worker.compile.graph_compiler import UNCAPTURED
from worker.compile.state import RegionState
from worker.compile.targets import NO_AUTOTUNE
from worker.config.compile import CompileConfig, SpeechTarget
from worker.config.session import EngineConfig
from worker.speech.parts import SpeechParts

LOG = logging.getLogger(__name__)
Table = Literal["talker", "codec"]
STACKS: dict[SpeechTarget, tuple[Table, str]] = {
    "talker": ("talker", "talker.model"),
    "code_predictor": ("talker", "talker.code_predictor.model"),
    "codec": ("codec", "decoder"),
}
SAMPLER = "draw_codes"  # of the target `code_predictor`; on a CPU it would take minutes of C++
Progress = Callable[[str, int, int], None]


def compile_speech(
    parts: SpeechParts, config: EngineConfig, progress: Progress, *, backend: Any = "inductor"
) -> dict[str, RegionState]:
    """Compile layers, unless kernels run them, and capture all regions on a GPU. Call it on the engine thread.

    Args:
        progress: called with (what, done, total).
        backend: of torch.compile.

    Returns: the state of each region that is captured, or has a reason why it is not. Failures are logged.
    """
    device, compile = parts.runner.model.device, config.compile
    if not compile.enabled_on(device.type):
        return {}
    tables: dict[Table, RegionTable] = {"talker": parts.runner.table, "codec": parts.streams.codec.regions}
    captures, failed = device.type == "cuda" and compile.captures, dict[str, RegionState]()
    if not uses_kernels(compile, device):
        mode: str = UNCAPTURED[compile.mode] if captures else compile.mode
        for table in tables.values():
            table.marks_steps = compile.mode != "default" and not captures
        failed = _compile_layers(tables, compile, mode, device, progress, backend)
    return {**failed, **(_capture(tables, progress, failed) if captures else {})}


def release_speech(parts: SpeechParts) -> None:
    """Drop graphs, compiled code and kernels, which hold references to the model."""
    for table in (parts.runner.table, parts.streams.codec.regions):
        table.drop_graphs()
        table.uncompile()
        table.marks_steps = False
    parts.runner.model.use_kernels(False)


def _compile_layers(
    tables: dict[Table, RegionTable],
    config: CompileConfig,
    mode: str,
    device: torch.device,
    progress: Progress,
    backend: Any,
) -> dict[str, RegionState]:
    """Compile the chosen targets, and run every region of them at every size. Returns: regions of failed targets."""
    failed: dict[str, RegionState] = {}
    for n_done, target in enumerate(config.speech_targets):
        progress(f"layers of the speech model: {target}", n_done, len(config.speech_targets))
        name, stack = STACKS[target]
        table = tables[name]
        regions = [one.name for one in table.table.values() if stack in one.part.split(", ")]
        stacks = dict(_stack_modes(target, mode, is_gpu=device.type == "cuda"))
        try:
            with symbol_config.patch(use_duck_shape=False):
                for part, part_mode in stacks.items():
                    options = {"mode": part_mode} if backend == "inductor" else {}  # only inductor has modes
                    table.compile_parts([part], dynamic=config.dynamic, backend=backend, **options)
                table.warm_up(regions)
        except Exception as error:
            LOG.warning("speech model: %s stays eager: %s", target, reason_of(error), exc_info=error)
            table.uncompile([], list(stacks))
            table.clear_scratch()
            reason = f"{target}: {reason_of(error)}"
            failed |= {
                f"speech.{one}": RegionState(f"speech.{one}", f"speech.{name}", reason=reason) for one in regions
            }
    return failed


def _stack_modes(target: SpeechTarget, mode: str, *, is_gpu: bool) -> Iterator[tuple[str, str]]:
    """The parts of a target that compile, each with its mode."""
    yield STACKS[target][1], mode
    if target == "code_predictor" and is_gpu:
        yield SAMPLER, NO_AUTOTUNE.get(mode, mode)


def _capture(
    tables: dict[Table, RegionTable], progress: Progress, eager: dict[str, RegionState]
) -> dict[str, RegionState]:
    """Capture all regions. One that cannot be captured runs as it is. eager: regions that did not compile."""
    names = [(part, name) for part, table in tables.items() for name in table.table]
    found: dict[str, RegionState] = {}
    for n_done, (part, name) in enumerate(names):
        progress(f"graphs of the speech model: {name}", n_done, len(names))
        table, key = tables[part], f"speech.{name}"
        try:
            facts = table.capture_region(name, stage=part)
            reason = eager[key].reason if key in eager else None
            sizes = table.captured_sizes(name)
            found[key] = RegionState(key, f"speech.{part}", sizes=sizes, reason=reason, **asdict(facts))
        except Exception as error:
            LOG.warning("speech model: region %s runs without graphs: %s", name, error)
            table.drop_graphs([name])
            found[key] = RegionState(key, f"speech.{part}", reason=str(error))
    return found
