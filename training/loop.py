"""The time-boxed training loop: schedule, gradient clipping, averaged weights, log, checkpoints, CUDA graphs.

A step is a function from the name of a phase to named losses. On a GPU each phase is captured once as a CUDA graph and
replayed, because the networks are small and launches would take most of the time. So a step must not read from the
device, copy from the host or change shapes. Only there cuDNN measures its algorithms: that takes about 25 ms for each
convolution and shape, so whole utterances, whose lengths differ, are never run with it.

Progress runs from 0 to 1 over the planned time of a stage. A run covers a part of it, so that a stage can be divided
among several calls; the learning rate follows the progress.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Step = Callable[[str], dict[str, Tensor]]

WARMUP_STEPS = 200  # of each phase, over which the learning rate rises: its losses and optimizers may be new
LAST_RATE = 0.03  # learning rate at the end, as a part of the highest
CHECKPOINT_SECONDS = 60.0
LOG_SECONDS = 15.0  # a line is written at least this often
EAGER_STEPS = 3  # of each phase before its capture
MAX_AHEAD = 8  # replayed steps that the GPU has not finished; more would make a run outlast its time


@dataclass
class RunPlan:
    """One run of a stage."""

    folder: Path  # of checkpoint and log
    device: torch.device
    until: float  # `time.time()` at which training is over
    weights: Path | None = None  # folder for the averaged weights, saved with each checkpoint
    start: float = 0.0  # progress at the start of the run
    end: float = 1.0
    graphs: bool = False
    log_every: int = 100
    max_steps: int | None = None
    rate: float = 1.0  # factor of all learning rates
    batch: int | None = None  # pieces of a step; None = as many as the stage is tuned for
    initial: Path | None = None  # folder of weights to start from where there is no checkpoint
    marked: float = field(default_factory=time.monotonic)  # end of the last part of the setup

    def write_log(self, row: dict[str, object]) -> None:
        """Append one line to the log of the stage."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{self.folder.name}: {json.dumps(row)}", flush=True)

    def log_setup(self, part: str) -> None:
        """Log the seconds since the last part of the setup."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        self.write_log({"setup": part, "seconds": round(now - self.marked, 2)})
        self.marked = now


@dataclass
class WeightGroup:
    """Weights with one optimizer."""

    weights: list[nn.Parameter]
    rate: float  # highest learning rate
    betas: tuple[float, float] = (0.9, 0.99)
    decay: float = 0.0
    clip: float = 1.0  # largest norm of the gradient
    optimizer: torch.optim.AdamW = field(init=False)
    lr: Tensor = field(init=False)


class DivergedError(RuntimeError):
    """A loss is not finite."""


class OutOfTimeError(RuntimeError):
    """The time of a run is over before its first step."""


class Trainer:
    """Runs the steps of one stage and owns their optimizers, averaged weights and checkpoint."""

    def __init__(
        self,
        plan: RunPlan,
        modules: dict[str, nn.Module],
        groups: dict[str, WeightGroup],
        averaged: tuple[str, ...],
        decay: float = 0.998,
    ):
        """
        Args:
            plan: time and place of this run.
            modules: all modules that a checkpoint holds, on the device.
            groups: their weights, by optimizer.
            averaged: names of the modules that are exported with averaged weights.
            decay: of the average per step.
        """
        self.plan, self.modules, self.groups, self.decay = plan, modules, groups, decay
        self.step_number = 0
        self.averages = {
            name: [weight.detach().clone() for weight in modules[name].state_dict().values()] for name in averaged
        }
        on_gpu = plan.device.type == "cuda"
        for group in groups.values():
            group.lr = torch.zeros((), device=plan.device)
            group.optimizer = torch.optim.AdamW(
                group.weights,
                lr=group.lr if on_gpu else 0.0,
                betas=group.betas,
                weight_decay=group.decay,
                fused=on_gpu,
                capturable=on_gpu,
            )
        plan.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = plan.folder / "checkpoint.pt"
        if self.checkpoint.exists():
            self._load()
        elif plan.initial is not None:
            self._load_weights(plan.initial)

    def descend(self, name: str, loss: Tensor) -> Tensor:
        """One optimizer step of a group. Returns: [] norm of the gradient before clipping."""
        group = self.groups[name]
        gradients = torch.autograd.grad(loss, group.weights, allow_unused=True)
        for weight, gradient in zip(group.weights, gradients, strict=True):
            if gradient is not None and gradient.stride() != weight.stride():
                gradient = torch.empty_like(weight).copy_(gradient)  # the fused optimizer needs the weight's layout
            weight.grad = gradient
        norm = nn.utils.clip_grad_norm_(group.weights, group.clip, foreach=True)
        group.optimizer.step()
        for weight in group.weights:
            weight.grad = None
        return norm

    def average(self) -> None:
        """Move the averaged weights towards the current ones."""
        for name, averages in self.averages.items():
            current = [weight.detach() for weight in self.modules[name].state_dict().values()]
            torch._foreach_lerp_(averages, current, 1 - self.decay)

    def averaged_weights(self, name: str) -> dict[str, Tensor]:
        """The averaged weights of a module under their names."""
        return dict(zip(self.modules[name].state_dict(), self.averages[name], strict=True))

    def run(self, step: Step, phase_at: Callable[[float], str]) -> None:
        """Train until the time is over; the checkpoint is saved at the end.

        Raises: DivergedError; the checkpoint is then of an earlier step. OutOfTimeError without time for a step.
        """
        plan = self.plan
        graphs: dict[str, tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]] = {}
        ahead: deque[torch.cuda.Event] = deque()
        plan.log_setup("first weights")
        seconds = plan.until - time.time()
        if seconds <= 0:
            raise OutOfTimeError(f"expected time for steps after the setup, got {seconds:.1f} s")
        torch.backends.cudnn.benchmark = True  # for all convolutions of a step, whose shapes stay the same
        torch.manual_seed(1000 + self.step_number)
        begun = saved = logged = time.monotonic()
        count, first, phase_first = 0, self.step_number, dict[str, int]()
        for group in self.groups.values():
            self._set_rate(group, 0.0)
        while plan.max_steps is None or self.step_number - first < plan.max_steps:
            now = time.monotonic()
            if now - begun >= seconds:
                break
            progress = plan.start + (plan.end - plan.start) * (now - begun) / seconds
            phase = phase_at(progress)
            steps = self.step_number - phase_first.setdefault(phase, self.step_number)
            for group in self.groups.values():
                self._set_rate(group, group.rate * plan.rate * self._factor(progress, steps))
            if not plan.graphs:
                losses = step(phase)
                self.average()
            elif phase in graphs:
                graph, losses = graphs[phase]
                graph.replay()
                ahead.append(torch.cuda.Event(blocking=True))
                ahead[-1].record()
                if len(ahead) > MAX_AHEAD:
                    ahead.popleft().synchronize()
            else:
                plan.marked = time.monotonic()
                graphs[phase] = self._capture(step, phase)
                losses = graphs[phase][1]
                plan.log_setup(f"capture of {phase}")
            self.step_number += 1
            count += 1
            if self.step_number % plan.log_every == 0 or now - logged > LOG_SECONDS:
                values = {name: float(value) for name, value in losses.items()}
                now = time.monotonic()
                row = {
                    "step": self.step_number,
                    "phase": phase,
                    "progress": round(progress, 4),
                    "ms_per_step": round(1000 * (now - logged) / count, 2),
                    **{name: round(value, 5) for name, value in values.items()},
                }
                logged, count = now, 0
                plan.write_log(row)
                if not all(map(math.isfinite, values.values())):
                    raise DivergedError(f"expected finite losses, got {values}")
                if now - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = now
        if plan.device.type == "cuda":
            torch.cuda.synchronize()
        torch.backends.cudnn.benchmark = False
        self.save()

    def save(self) -> None:
        """Write the checkpoint, unless a weight is not finite."""
        state = {
            "step": self.step_number,
            "modules": {name: module.state_dict() for name, module in self.modules.items()},
            "averages": self.averages,
            "optimizers": {name: group.optimizer.state_dict()["state"] for name, group in self.groups.items()},
        }
        weights = [weight for module in self.modules.values() for weight in module.parameters()]
        if not all(bool(weight.isfinite().all()) for weight in weights):
            raise DivergedError("expected finite weights, got others")
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)
        if self.plan.weights is not None:
            for name in self.averages:
                write_weights(weights_file(self.plan.weights, name), self.averaged_weights(name))

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.plan.device, weights_only=True)
        self.step_number = state["step"]
        for name, module in self.modules.items():
            module.load_state_dict(state["modules"][name])
        for name, averages in self.averages.items():
            for average, stored in zip(averages, state["averages"][name], strict=True):
                average.copy_(stored)
        for name, group in self.groups.items():
            whole = group.optimizer.state_dict()
            group.optimizer.load_state_dict({**whole, "state": state["optimizers"][name]})
            for options in group.optimizer.param_groups:
                options["lr"] = group.lr if self.plan.device.type == "cuda" else 0.0

    def _load_weights(self, folder: Path) -> None:
        for name, averages in self.averages.items():
            if (file := weights_file(folder, name)).exists():
                self.modules[name].load_state_dict(read_weights(file, self.plan.device))
                for average, weight in zip(averages, self.modules[name].state_dict().values(), strict=True):
                    average.copy_(weight)

    def _capture(self, step: Step, phase: str) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
        """The graph of one step, after steps outside it that choose kernels and create the optimizers' state."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(EAGER_STEPS):
                step(phase)
                self.average()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = step(phase)
            self.average()
        graph.replay()
        return graph, losses

    def _set_rate(self, group: WeightGroup, rate: float) -> None:
        if self.plan.device.type == "cuda":
            group.lr.fill_(rate)
        else:
            for options in group.optimizer.param_groups:
                options["lr"] = rate

    @staticmethod
    def _factor(progress: float, steps: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
        return min(1.0, (steps + 1) / WARMUP_STEPS) * (LAST_RATE + (1 - LAST_RATE) * cosine)


def weights_file(folder: Path, name: str) -> Path:
    """The file of a module's weights."""
    return folder / f"{name}.safetensors"


def write_weights(file: Path, weights: dict[str, Tensor]) -> None:
    """Save weights by name in half precision, without the optimizer."""
    part = file.with_suffix(".part")
    save_file({name: weight.to("cpu", torch.float16).contiguous() for name, weight in weights.items()}, part)
    part.replace(file)


def read_weights(file: Path, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Weights of `write_weights` in float32."""
    return {name: weight.float() for name, weight in load_file(file, device=str(device)).items()}


def best_device() -> torch.device:
    """The GPU if there is one, with TF32."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark_limit = 4
    return torch.device("cuda")
