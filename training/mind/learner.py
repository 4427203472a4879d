"""Training steps of the mind: hearing, seeing and the language model, on batches of a pool.

A step has one batch of each task, of about as many rows as its share says, and one optimizer step. The position in the
schedule is the time trained so far over the time planned for the whole training, which may span many runs.
"""

import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inputs.audio import LogMel
from models.inputs.tokens import SpecialTokens
from models.omni import OmniModel
from training.mind.batches import Batch
from training.mind.device_pictures import degrade_pictures
from training.mind.device_sound import degrade_all, degrade_mels, unit_mels
from training.mind.examples import Task
from training.mind.forward import Inputs, Passes, clip_mels, logits_of, run_rows
from training.mind.moments import AUXILIARY, load_small, save_small
from training.mind.parallel import Group
from training.mind.pool import Pool, Stored
from training.mind.records import SILENCE
from training.mind.sight import WatchHeads, class_loss
from training.mind.words.loss import collate_words, word_loss
from training.mind.words.written import WRITTEN, draw_written
from training.scenes.labels import CLASSES
from training.speech.corpus import NO_PHONE, PHONES

RE_WARMUP_STEPS = 100  # of every run
LAST_RATE = 0.03  # learning rate at the end, as a part of the highest
MAX_NORM = 1.0  # of the gradient
QUIET_WEIGHT = 0.2  # of decisions to listen in the loss: most seconds of a conversation have one
PHONE_WEIGHTS = (1.0, 0.2)  # of the loss of phonemes, at the start of the schedule and at its end
SIGHT_WEIGHTS = (0.5, 0.1)  # the same of classes of pictures
WORD_WEIGHT = 0.5  # of the loss of words
WATCH_WEIGHT = 0.3  # of the losses of `WatchHeads`
BLANK_BIAS = 8.0  # at the start, where most rows have no word: two of three rows are blank
PAUSE_WEIGHT = 0.1  # of pauses among phonemes: most of a conversation is silent
TASKS_OF_A_STEP = 2  # the more, the more operations of small batches
MAX_TASK_ROWS = 4 / 3  # of the mean rows of a batch; bounds memory where few tasks have fresh records
# Shares of rows at parts of the schedule; between them they change evenly.
CURRICULUM: tuple[tuple[float, dict[Task, float]], ...] = (
    (0.0, {"text": 0.18, "echo": 0.43, "captions": 0.24, "talk": 0.05, "written": 0.05, "chat": 0.05}),
    (0.15, {"text": 0.18, "echo": 0.33, "captions": 0.14, "talk": 0.21, "written": 0.09, "chat": 0.05}),
    (0.45, {"text": 0.16, "echo": 0.27, "captions": 0.08, "talk": 0.30, "written": 0.12, "chat": 0.07}),
    (0.8, {"text": 0.10, "echo": 0.14, "captions": 0.03, "talk": 0.31, "written": 0.35, "chat": 0.07}),
    (0.94, {"text": 0.10, "echo": 0.14, "captions": 0.03, "talk": 0.32, "written": 0.34, "chat": 0.07}),
    (1.0, {"text": 0.12, "echo": 0.14, "captions": 0.04, "talk": 0.40, "written": 0.21, "chat": 0.09}),
)


@dataclass(frozen=True)
class LearnPlan:
    """One run.

    Args:
        plan_seconds: of training in all runs together, over which the learning rate falls.
        rows: of the language model in a step of this process.
        rate: highest learning rate.
        restarts: the rate begins at its highest again and falls over what is left of the plan.
        task: one task instead of the curriculum.
        degrades: sound and pictures are made worse.
        compiled: the parts that take most of the time are compiled.
        dropout: share of what the layers of a language model add to a row that is left out in training.
        written: share of utterances that training gives as text, see `words.written`; 0: no task of it either.
        group: the processes that train together. Each draws from its own records, with chance of its own.
    """

    work: Path
    device: torch.device
    plan_seconds: float
    rows: int = 49_152
    rate: float = 1e-3
    restarts: bool = False
    task: Task | None = None
    degrades: bool = True
    compiled: bool = False
    dropout: float = 0.0
    written: float = 0.0
    seed: int = 0
    group: Group = field(default_factory=Group)


RESIDUAL = ("out_proj.weight", "o_proj.weight", "fc2.weight", "down_proj.weight")  # what is added to a residual stream


@torch.no_grad()
def quiet_start(model: OmniModel) -> None:
    """Scale random weights so that layers add little to what they read at first: rows differ by their input."""
    for name, weight in model.named_parameters():
        if name.endswith(RESIDUAL):
            weight.mul_(0.2)
        if name.endswith(("embed_positions.weight", "position_embedding.weight")):
            weight.mul_(0.3)


def shares_at(progress: float) -> dict[Task, float]:
    """Shares of tasks at a part of the schedule."""
    for (start, before), (end, after) in itertools.pairwise(CURRICULUM):
        if progress <= end:
            along = (progress - start) / (end - start)
            return {task: (1 - along) * before[task] + along * after[task] for task in before}
    return CURRICULUM[-1][1]


def fresh_shares(shares: dict[Task, float], pool: Pool) -> dict[Task, float]:
    """Those of tasks whose records may still be used, or else of all tasks that have records."""
    found = {task: share for task, share in shares.items() if share and pool.has(task)}
    return {task: share for task, share in found.items() if pool.is_fresh(task)} or found


def rate_at(progress: float, steps: int) -> float:
    """Learning rate as a part of the highest: half a cosine over the schedule, a rise at the start of a run."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
    return min(1.0, (steps + 1) / RE_WARMUP_STEPS) * (LAST_RATE + (1 - LAST_RATE) * cosine)


class Learner:
    """Model, optimizer and step of a run."""

    name: ClassVar[str] = "mind"  # of its files

    def __init__(self, model: OmniModel, special: SpecialTokens, plan: LearnPlan):
        self.model, self.plan, self.special = model, plan, special
        device = plan.device
        self.log_mel = LogMel(device)
        self.passes = (Passes.compiled if plan.compiled else Passes.eager)(plan.dropout)
        # Helps in training that no checkpoint has: phonemes from states of the audio encoder.
        self.phones = nn.Linear(model.config.audio_config.d_model, len(PHONES), device=device)
        nn.init.zeros_(self.phones.weight)
        nn.init.zeros_(self.phones.bias)
        # And what a picture shows, from the mean of its rows.
        self.sights = nn.Linear(model.config.hidden_size, sum(CLASSES), device=device)
        nn.init.zeros_(self.sights.weight)
        nn.init.zeros_(self.sights.bias)
        # And what the person says, from states in the middle of the language model; the last output is the blank.
        self.words = nn.Linear(model.config.hidden_size, model.config.vocab_size + 1, device=device)
        nn.init.zeros_(self.words.weight)
        nn.init.zeros_(self.words.bias)
        nn.init.constant_(self.words.bias[-1:], BLANK_BIAS)
        self.watching = WatchHeads(model.config.hidden_size).to(device)
        self.weights = self._weights()
        for weight in self.weights.values():
            weight.requires_grad_(True)
        decayed = [weight for weight in self.weights.values() if weight.ndim > 1]
        plain = [weight for weight in self.weights.values() if weight.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.98), fused=True)
        self.random = random.Random(self._seed(0))
        self.generator = torch.Generator(device).manual_seed(self._seed(0))
        self.step_number = self.first_step = 0
        self.first_progress = 0.0  # of this run
        self.seconds = 0.0  # trained in all runs
        self.n_drawn = 0  # sequences in all runs
        self._sums: dict[str, list[Tensor]] = {}
        self._owed: dict[Task, float] = {}  # rows of each task that its share is ahead of what was drawn
        if plan.group.size > 1:  # the processes are not to draw the same task in each step
            self._owed = {task: plan.rows * self.random.random() for task in self.tasks}

    # --- state ---------------------------------------------------------------------------------

    def restore(self, small: Path | None) -> str:
        """Continue from the state in the work folder, or else from small files. Returns: what was found."""
        file = self.plan.work / f"{self.name}.pt"
        if file.exists():
            state = torch.load(file, map_location=self.plan.device, weights_only=True)
            with torch.no_grad():
                for key, weight in self.weights.items():
                    weight.copy_(state["weights"][key])
            self.optimizer.load_state_dict(state["optimizer"])
            self.generator.set_state(state["generator"].cpu())
            numbers, found = state["counters"], str(file)
            version, internal, gauss = json.loads(state["random"])
            self.random.setstate((version, tuple(internal), gauss))
        elif small is not None and (small / f"{self.name}_weights.pt").exists():
            numbers, found = load_small(small, self.name, self.weights, self.optimizer), str(small)
            self.random.seed(self._seed(int(numbers["step"])))
            self.generator.manual_seed(self._seed(int(numbers["step"])))
        else:
            return "nothing"
        self.step_number = self.first_step = int(numbers["step"])
        self.seconds, self.n_drawn = float(numbers["seconds"]), int(numbers["drawn"])
        if self.plan.group.rank:  # the state has the chance of the first process
            self.random.seed(self._seed(self.step_number))
            self.generator.manual_seed(self._seed(self.step_number))
        self.first_progress = self.progress
        return found

    def schedule(self, plan_seconds: float) -> None:
        """Let the schedule end after this time of training in all runs."""
        self.plan = replace(self.plan, plan_seconds=plan_seconds)
        self.first_progress = self.progress

    def save(self, small: Path | None = None) -> None:
        """Write the whole state to the work folder, and small files to another one."""
        if not all(bool(weight.isfinite().all()) for weight in self.weights.values()):
            raise FloatingPointError("weights: expected finite values, got others; the last saved state is kept")
        state = {
            "weights": {key: weight.detach() for key, weight in self.weights.items()},
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "random": json.dumps(self.random.getstate()),
            "counters": self._counters(),
        }
        file = self.plan.work / f"{self.name}.pt"
        partial = file.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(file)
        if small is not None:
            save_small(small, self.name, self.weights, self.optimizer, self._counters())

    def follow(self, mind: Path) -> float:
        """Take the weights of another training that is not this learner's own. Returns: its step."""
        raise ValueError(f"{mind}: expected a training of speech, got one of the {self.name}")

    def _seed(self, step: int) -> int:
        """Seed of a step: another one in each process and each step."""
        return (self.plan.seed + step) * self.plan.group.size + self.plan.group.rank

    def _counters(self) -> dict[str, float]:
        return {"step": self.step_number, "seconds": self.seconds, "drawn": self.n_drawn}

    @property
    def progress(self) -> float:
        """Part of the schedule that is done."""
        return self.seconds / self.plan.plan_seconds

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        progress = self.progress
        if self.plan.restarts:
            progress = (progress - self.first_progress) / max(1 - self.first_progress, 1e-6)
        return self.plan.rate * rate_at(progress, self.step_number - self.first_step)

    # --- steps ---------------------------------------------------------------------------------

    def step(self, pool: Pool) -> None:
        """One optimizer step on batches of the tasks that are owed most rows. Counts the time that it takes."""
        begun = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        torch.manual_seed(self._seed(self.step_number))  # of dropout: a run that continues drops the same
        for task, rows in self._next_tasks(pool).items():
            drawn = pool.draw(task, round(rows), self.random)
            self.n_drawn += len(drawn)
            with self.precision():
                loss, measured = self.loss(pool, drawn)
            (loss * (rows / self.plan.rows)).backward()
            for name, value in measured.items():
                self._sums.setdefault(f"{task}_{name}", []).append(value.detach())
        self.plan.group.mean_gradients(self.weights)
        norm = nn.utils.clip_grad_norm_(self.weights.values(), MAX_NORM, foreach=True)
        self._sums.setdefault("norm", []).append(norm)
        # The fused optimizer leaves the step out where this is one.
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_number += 1
        self.seconds += time.monotonic() - begun

    def prepare(self, pool: Pool) -> None:
        """Compile what steps need, with batches of all tasks that change nothing."""
        for task in filter(pool.has, self.tasks):
            for _ in range(2):
                with self.precision():
                    loss, _ = self.loss(pool, pool.draw(task, self.plan.rows // TASKS_OF_A_STEP, self.random))
                loss.backward()
                self.optimizer.zero_grad(set_to_none=True)

    def take_log(self) -> dict[str, float]:
        """Means of what was measured since the last call. Waits for the device."""
        means = {name: float(torch.stack(values).float().nanmean()) for name, values in self._sums.items()}
        self._sums = {}
        counted = {"step": self.step_number, "progress": round(self.progress, 4), "drawn": self.n_drawn}
        return counted | {name: round(value, 4) for name, value in means.items() if math.isfinite(value)}

    def loss(self, pool: Pool, drawn: Sequence[Stored]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of one batch, and what is logged of it."""
        written = self.plan.written if torch.is_grad_enabled() else 0.0
        batch, inputs = self.inputs(pool, drawn, degrades=self.plan.degrades, written=written)
        states = run_rows(self.model, batch, inputs, self.passes)
        logits = logits_of(self.model, states.hidden, batch.learned)
        each = F.cross_entropy(logits, batch.targets, reduction="none")
        quiet = batch.is_decision & (batch.targets == self.special.listen)
        # Decisions about a new picture keep their full weight, because it may show what the model watches for.
        weight = torch.where(quiet & ~batch.is_new_picture, QUIET_WEIGHT, 1.0)
        loss = (each * weight).sum() / weight.sum()
        is_right = logits.argmax(-1) == batch.targets
        measured = {"loss": loss}
        speaks = batch.is_decision & ~quiet
        new, parts = batch.is_new_picture, {"listen": quiet, "speak": speaks, "text": ~batch.is_decision}
        for name, mask in (parts | {"new_listen": quiet & new, "new_speak": speaks & new}).items():
            measured[name] = (is_right & mask).sum() / mask.sum()
        if states.heard is not None and (phones := self.phone_targets(pool, drawn, batch)) is not None:
            phone_loss, measured["phone_errors"] = self.phone_loss(states.heard, phones)
            loss = loss + self._help(PHONE_WEIGHTS) * phone_loss
        if (said := collate_words([one.record.words for one in drawn], batch.ids.shape[1])) is not None:
            measured["words"] = word_loss(self.words, states.middle, said.to(self.plan.device))
            loss = loss + WORD_WEIGHT * measured["words"]
        if states.seen is not None:
            classes = pool.classes_of(drawn)
            sight_loss, errors = class_loss(self.sights, states.seen.mean(1), classes)
            measured["sight_errors"] = errors.nanmean()
            loss = loss + self._help(SIGHT_WEIGHTS) * sight_loss
            watch_loss, watched = self.watching.loss(states.middle, batch, classes)
            measured |= watched
            loss = loss + WATCH_WEIGHT * watch_loss
        return loss, measured

    def _help(self, weights: tuple[float, float]) -> float:
        early, late = weights
        return early + (late - early) * min(self.progress, 1.0)

    def phone_loss(self, heard: Tensor, phones: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of phonemes, and the share of wrong ones among those of speech.

        Args:
            heard: [S, K * 50, D] states of the audio encoder. phones: [S * K * 50].
        """
        guessed = self.phones(heard).flatten(0, 1).float()
        weight = torch.where(phones == SILENCE, PAUSE_WEIGHT, 1.0) * (phones != NO_PHONE)
        each = F.cross_entropy(guessed, phones, ignore_index=NO_PHONE, reduction="none")
        speech = (phones != NO_PHONE) & (phones != SILENCE)
        errors = ((guessed.argmax(-1) != phones) & speech).sum() / speech.sum()
        return (each * weight).sum() / weight.sum().clamp_min(1e-6), errors

    @torch.no_grad()
    def inputs(self, pool: Pool, drawn: Sequence[Stored], degrades: bool, written: float = 0.0) -> tuple[Batch, Inputs]:
        """A batch, and what its encoders read. written: share of utterances that are given as text."""
        device = self.plan.device
        batch = pool.batch(drawn).to(device)
        clips, n_clip = pool.clips_of(drawn)
        pictures, mel = pool.pictures_of(drawn), torch.zeros(len(drawn), 0)
        if len(batch.sound):
            sound = pool.waves_of(drawn)
            mel = unit_mels(self.log_mel, degrade_all(sound, self.generator) if degrades else sound)
            mel = degrade_mels(mel, self.generator) if degrades else mel
        if degrades and len(pictures):
            pictures = degrade_pictures(pictures, self.generator)
        if len(clips):
            clips = clip_mels(self.log_mel, degrade_all(clips, self.generator) if degrades else clips, n_clip)
            clips = degrade_mels(clips, self.generator) if degrades else clips
        words = draw_written([one.record for one in drawn], batch.ids.shape[1], written, self.random)
        return batch, Inputs(mel, clips, n_clip, pictures, None if words is None else words.to(device))

    def phone_targets(self, pool: Pool, drawn: Sequence[Stored], batch: Batch) -> Tensor | None:
        """Phonemes [S * K * 50] at the encoder's rows; None for a task without speech."""
        if all(one.record.task == "captions" or one.record.is_silent for one in drawn):
            return None
        units = pool.phones_of(drawn, NO_PHONE).unflatten(1, (-1, 50)).flatten(0, 1)
        phones = units[batch.segments.clamp_min(0)]
        return torch.where(batch.is_own[..., None], phones, NO_PHONE).flatten()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks of the steps."""
        if self.plan.task:
            return (self.plan.task,)
        return tuple(task for task in CURRICULUM[0][1] if task != WRITTEN or self.plan.written)

    def _weights(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {
            name: one for name, one in self.model.named_parameters() if not name.startswith("tts.")
        }
        modules = (self.phones, self.sights, self.words, self.watching)
        for prefix, module in zip(AUXILIARY, modules, strict=True):
            named |= {prefix + name: one for name, one in module.named_parameters()}
        return named

    def _next_tasks(self, pool: Pool) -> dict[Task, float]:
        """The tasks of a step and their rows: over many steps each task with fresh records has its share."""
        shares = self._shares(pool)
        total = sum(shares.values())
        for task, share in shares.items():
            self._owed[task] = self._owed.get(task, 0.0) + self.plan.rows * share / total
        n_tasks = TASKS_OF_A_STEP if self.plan.group.size == 1 else 1
        most = sorted(shares, key=lambda task: -self._owed[task])[:n_tasks]
        return {task: min(self._owed.pop(task), MAX_TASK_ROWS * self.plan.rows / n_tasks) for task in most}

    def _shares(self, pool: Pool) -> dict[Task, float]:
        shares = {self.plan.task: 1.0} if self.plan.task else shares_at(self.progress)
        return fresh_shares(shares, pool)

    def precision(self) -> AbstractContextManager[Any]:
        """In which the model runs: bfloat16 where it may be, on a GPU."""
        on_gpu = self.plan.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()
