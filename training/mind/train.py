"""Trains hearing, seeing and the language model on conversations: `python -m training.mind.train --help`.

A run writes its state to the work folder and continues from it, so it can be stopped at any time. The speech model
(`tts`) is not trained here; its weights are kept.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from models.checkpoint.config import load_config
from models.inputs.tokens import Tokenizer
from models.load import load_model
from models.random_weights import random_model
from training.checkpoint import write_checkpoint
from training.grammar.phrases import Split
from training.mind.examples import Examples, Task
from training.mind.forward import loss_of, predict
from training.mind.voices import engine_voices
from training.timelines.speech import Synthesizer, noise_bursts
from training.timelines.windows import TrainingWindow

WARMUP_STEPS = 200
LAST_RATE = 0.05  # learning rate at the end, as a part of the highest
MAX_NORM = 1.0  # of the gradient
TASKS: tuple[tuple[Task, float], ...] = (("echo", 0.25), ("captions", 0.15), ("talk", 0.5), ("chat", 0.1))  # shares
WINDOW = TrainingWindow(mode="context")
N_EVALUATED = 16  # sequences of the held-out split


@dataclass(frozen=True)
class MindPlan:
    """One run.

    Args:
        start: checkpoint whose configuration and tokenizer are used.
        work: folder of the state, the log and the result.
        steps: of the whole training, over which the learning rate falls.
        seconds: of this run at most.
        keeps_weights: begin with the weights of `start` instead of random ones.
        quiet_weight: of decisions to listen in the loss.
        voices: of the person.
    """

    start: Path
    work: Path
    device: torch.device
    steps: int
    seconds: float = math.inf
    batch: int = 8
    length_s: float = 60.0
    rate: float = 1e-3
    workers: int = 0
    tasks: tuple[tuple[Task, float], ...] = TASKS
    window: TrainingWindow = WINDOW
    keeps_weights: bool = False
    quiet_weight: float = 0.2
    voices: tuple[Synthesizer, ...] = (noise_bursts,)
    save_every: int = 200
    log_every: int = 20


class MindTrainer:
    """Model, optimizer and step of a run."""

    trains_speech: ClassVar[bool] = False  # the weights of `tts` instead of all others
    name: ClassVar[str] = "mind"  # of the state and the log

    def __init__(self, plan: MindPlan):
        self.plan = plan
        plan.work.mkdir(parents=True, exist_ok=True)
        if plan.keeps_weights:
            self.model = load_model(plan.start, device=plan.device)
        else:
            self.model = random_model(load_config(plan.start), device=plan.device, seed=0)
        self.weights = {
            name: weight.requires_grad_(True)
            for name, weight in self.model.named_parameters()
            if name.startswith("tts.") == self.trains_speech
        }
        decayed = [weight for weight in self.weights.values() if weight.ndim > 1]
        plain = [weight for weight in self.weights.values() if weight.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98))
        self.step = 0
        self.examples = self._examples("train")
        self.listen = Tokenizer.load(plan.start).special.listen
        if self.state_file.exists():
            self._restore()

    @property
    def state_file(self) -> Path:
        return self.plan.work / f"{self.name}.pt"

    def run(self) -> None:
        """Train until the last step or the end of this run's time, then write state and checkpoint."""
        plan, begun = self.plan, time.monotonic()
        indices = range(self.step * plan.batch, plan.steps * plan.batch)
        loader = DataLoader(
            self.examples,
            batch_size=plan.batch,
            sampler=indices,
            num_workers=plan.workers,
            collate_fn=list,
            persistent_workers=plan.workers > 0,
        )
        for batch in loader:
            logged = self._train(batch)
            if self.step % plan.log_every == 0 or self.step == plan.steps:
                self._log(logged | {"seconds": time.monotonic() - begun})
            if self.step % plan.save_every == 0:
                self.save()
            if time.monotonic() - begun > plan.seconds:
                break
        self.save()
        write_checkpoint(plan.work / "checkpoint", self.model.state_dict())

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracies on sequences of phrases that training never sees."""
        examples = self._examples("held_out")
        return self._measure([examples[i] for i in range(N_EVALUATED)])[1]

    def save(self) -> None:
        """Write the state, which replaces the earlier one at once."""
        state = {"weights": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        partial = self.state_file.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self.state_file)

    def _restore(self) -> None:
        state = torch.load(self.state_file, map_location=self.plan.device, weights_only=True)
        self.model.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])

    def _examples(self, split: Split) -> Any:
        """Sequences by number, in the form that `_measure` takes."""
        plan = self.plan
        return Examples(plan.start, dict(plan.tasks), plan.length_s, plan.window, plan.voices, split)

    def _train(self, batch: list[Any]) -> dict[str, float]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate * rate_at(self.step, self.plan.steps)
        loss, logged = self._measure(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.weights.values(), MAX_NORM)
        self.optimizer.step()
        self.step += 1
        return logged | {"norm": float(norm)}

    def _measure(self, batch: list[Any]) -> tuple[Tensor, dict[str, float]]:
        """Loss, and the shares of decisions and text tokens that are predicted."""
        listen = self.listen
        got = predict(self.model, batch)
        loss = loss_of(got, listen, self.plan.quiet_weight)
        is_right = got.logits.argmax(dim=-1) == got.targets
        speaks = got.is_decision & (got.targets != listen)
        shares = {"listen": got.is_decision & ~speaks, "speak": speaks, "text": ~got.is_decision}
        measured = {name: float(is_right[mask].float().mean()) for name, mask in shares.items() if mask.any()}
        return loss, {"loss": float(loss.detach()), **measured}

    def _log(self, values: dict[str, float]) -> None:
        line = json.dumps({"step": self.step, **{name: round(value, 4) for name, value in values.items()}})
        with (self.plan.work / f"{self.name}.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")
        print(line, flush=True)


def rate_at(step: int, steps: int) -> float:
    """Learning rate as a part of the highest: a rise, then half a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every run."""
    parser.add_argument("--start", type=Path, required=True, help="checkpoint made by training.checkpoint")
    parser.add_argument("--work", type=Path, required=True, help="folder of the state, the log and the result")
    parser.add_argument("--steps", type=int, required=True, help="of the whole training")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of this run at most")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length-s", type=float, default=60.0, help="seconds of a conversation")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--workers", type=int, default=0, help="processes that make sequences")
    parser.add_argument("--task", choices=get_args(Task), help="one task instead of the mixture")
    parser.add_argument("--voice-cache", type=Path, help="folder of utterances that are made once")
    parser.add_argument("--keep-weights", action="store_true", help="begin with the weights of --start")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def plan_of(args: argparse.Namespace, tasks: tuple[tuple[Task, float], ...] = TASKS) -> MindPlan:
    """The plan of parsed arguments. tasks: the mixture unless one is chosen."""
    return MindPlan(
        start=args.start,
        work=args.work,
        device=torch.device(args.device),
        steps=args.steps,
        seconds=args.seconds,
        batch=args.batch,
        length_s=args.length_s,
        rate=args.rate,
        workers=args.workers,
        keeps_weights=args.keep_weights,
        tasks=((args.task, 1.0),) if args.task else tasks,
        voices=engine_voices(args.voice_cache),
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    torch.set_float32_matmul_precision("high")
    trainer = MindTrainer(plan_of(parser.parse_args(argv)))
    trainer.run()
    print(json.dumps({"held_out": trainer.evaluate()}))


if __name__ == "__main__":
    main()
