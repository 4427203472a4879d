"""`python -m training.run_mind --work DIR --out DIR --seconds 560`: one call of the training of the mind or of speech.

Processes on all cores make records while the device trains on those that are there. A call continues from WORK, or
where that is lost from the small files that an earlier call left in OUT (`--initial`). The state is saved every minute
and at the end, also after SIGTERM, so a call may be stopped at any time.

OUT gets six files: `mind_weights.pt`, `mind_moments.pt`, the same of `speech`, `log.jsonl` and `report.json`.

With several devices, `torchrun --nproc-per-node N -m training.run_mind ...` starts a process for each. The processes
divide the rows of a step and make records of their own; the first one saves and decides when to stop. The others write
their logs to `WORK/logN.jsonl`.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import get_args

import torch

from models.checkpoint.config import load_config
from models.random_weights import random_model
from training.mind.examples import Examples, Task
from training.mind.filling import PoolFiller
from training.mind.learner import Learner, LearnPlan, quiet_start
from training.mind.measure import measure, measure_loss
from training.mind.parallel import Group
from training.mind.pool import Pool, PoolSizes, Stored
from training.mind.produce import SHARD, SPEECH_SHARD, SPOKEN_LESSONS, ProducerPlan, Producers
from training.mind.sight import SightTrainer
from training.mind.speak import VOCODER, SpeechLearner, TargetSpeech
from training.mind.stock.sentences import load_spoken
from training.mind.words.written import WRITTEN
from training.talker.checkpoint import write_random

SAVE_S = 60.0
LOG_S = 10.0
MAX_WAIT_S = 60.0  # for records of all tasks
WAIT_S = 0.1  # between polls for records at the start
END_S = 6.0  # kept for the last save
MEASURE_SHARE, MAX_MEASURE_S = 0.06, 40.0  # of a call's time, for the figures at its end
FIRST_NUMBER = 10_000_000  # records of a call begin at a multiple of this
NUMBERS_OF_A_PROCESS = 10**12  # between the records of two processes of a call
COMPILER_CORES = 4  # of a process; with fewer free ones the producers wait while it compiles
POOL_BYTES = {"cuda": 70e9, "cpu": 1e9}
HELD_OUT_BYTES = {"cuda": 6e9, "cpu": 5e8}


@dataclass(frozen=True)
class Call:
    """Arguments of one call; see the options of the command."""

    work: Path
    out: Path
    seconds: float
    stage: str
    plan_seconds: float
    until_end: bool
    initial: Path | None
    producers: int
    rows: int
    rate: float
    restart: bool
    dropout: float
    written: float
    task: Task | None
    device: torch.device
    compiled: bool
    silent: bool
    stock: bool
    vocoder: Path
    spoken: list[Path]
    pool_bytes: float
    lesson_s: float
    conversation_s: float
    max_steps: int | None
    sight_seconds: float
    gather_seconds: float
    mind: Path | None
    group: Group = field(default_factory=Group)


STOP = threading.Event()  # a process of a group was asked to end


class Stopped(Exception):
    """The process was asked to end."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="state and records; kept between calls where possible")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=("mind", "speech"), default="mind")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call, everything included")
    parser.add_argument("--plan-seconds", type=float, default=4200.0, help="of training in all calls of this stage")
    parser.add_argument(
        "--until-end", action="store_true", help="the plan ends with this call, in place of --plan-seconds"
    )
    parser.add_argument("--initial", type=Path, help="OUT of an earlier call, where WORK is lost")
    parser.add_argument("--producers", type=int, default=max(1, _cores() - 2), help="of each process")
    parser.add_argument("--rows", type=int, default=49_152, help="of the language model in a step of all processes")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--restart", action="store_true", help="the rate begins anew and falls until --plan-seconds")
    parser.add_argument("--dropout", type=float, default=0.1, help="share of what layers add that training leaves out")
    parser.add_argument("--written", type=float, default=0.25, help="share of utterances given as text in training")
    parser.add_argument("--task", choices=get_args(Task), help="one task instead of the curriculum")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="compile the model; about a minute at the start",
    )
    parser.add_argument("--silent", action="store_true", help="noise in place of speech: no speech engines needed")
    parser.add_argument(
        "--stock",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="utterances and pictures of the mind's records recur in new conversations",
    )
    parser.add_argument("--vocoder", type=Path, default=VOCODER, help="folder with the speech tokenizer of the talker")
    parser.add_argument("--spoken", type=Path, nargs="+", default=[], help="for speech: files of stock/sentences.py")
    parser.add_argument("--pool-bytes", type=float, help="memory of the device for records")
    parser.add_argument("--lesson-s", type=float, default=28.0)
    parser.add_argument("--conversation-s", type=float, default=60.0)
    parser.add_argument("--max-steps", type=int, help="of this call")
    parser.add_argument("--sight-seconds", type=float, default=0.0, help="of pictures alone, before the rest")
    parser.add_argument("--gather-seconds", type=float, default=0.0, help="of making records before all training")
    parser.add_argument(
        "--mind", type=Path, help="for speech: OUT of a training of the mind at the same time, whose states it follows"
    )
    args = vars(parser.parse_args(argv))
    if missing := [str(file) for file in args["spoken"] if not file.is_file()]:
        parser.error(f"--spoken: expected files, got {', '.join(missing)}")
    for name in ("mind", "spoken"):
        if args[name] and args["stage"] != "speech":
            parser.error(f"--{name}: expected --stage speech with it")
    if args["task"] == WRITTEN and not args["written"]:
        parser.error(f"--task {WRITTEN}: expected a --written above zero with it")
    group, args["device"] = Group.of_environment(args["device"])
    for name in ("mind", "sight_seconds"):
        if args[name] and group.size > 1:
            parser.error(f"--{name.replace('_', '-')}: expected one process with it, got {group.size}")
    args["pool_bytes"] = args["pool_bytes"] or POOL_BYTES[args["device"].type]
    # In a group an exception would leave the other processes in a call that waits for this one.
    signal.signal(signal.SIGTERM, _stop if group.size == 1 else lambda *_: STOP.set())
    return run(Call(**args, group=group))


def run(call: Call) -> int:
    """Train until the time is over. Returns: exit status; 1 without a step."""
    begun = time.monotonic()
    end = begun + call.seconds
    for folder in (call.work, call.out):
        folder.mkdir(parents=True, exist_ok=True)
    if call.group.is_first:
        _prepare_folders(call)
    call.group.agreed(0)  # the others wait for the files
    examples = Examples(call.work / "talker", seconds=call.conversation_s, lesson_s=call.lesson_s)
    logs = call.out / "log.jsonl" if call.group.is_first else call.work / f"log{call.group.rank}.jsonl"
    log = _log_to(logs, begun)
    learner, found = _learner(call, examples)
    log({"stage": call.stage, "continues": found, "progress": learner.progress, "device": str(call.device)})
    pool = Pool(PoolSizes.of_bytes(call.pool_bytes), call.device)
    held_out = Pool(PoolSizes.of_bytes(HELD_OUT_BYTES[call.device.type]), call.device)
    producers, filler = Producers(_producer_plan(call, examples, learner), call.producers), None
    try:
        filler = PoolFiller(producers, pool, held_out)
        _gather(call, filler, begun)
        if call.sight_seconds:
            _train_sight(call, learner, producers, log)
            filler.check()
        n_steps = _train(call, learner, producers, filler, pool, end, log)
        filler.stop()
        filler.check()
        call.group.leave()
        if STOP.is_set() or not call.group.is_first:
            return 0
        log({"figures": _measure(call, learner, held_out, filler.unseen, examples)})
        return 0 if n_steps else 1
    except (Stopped, KeyboardInterrupt):
        if call.group.is_first:
            learner.save(call.out)
        log({"stopped": True, "step": learner.step_number})
        return 0
    finally:
        if filler is not None:
            filler.stop()
        producers.stop()


def _prepare_folders(call: Call) -> None:
    """The checkpoint's folder in WORK, and the files of an earlier call in OUT."""
    if not (talker := call.work / "talker").exists():
        write_random(talker)
    if call.initial is not None:
        for file in call.initial.glob("*.pt"):
            if not (call.out / file.name).exists():
                shutil.copy(file, call.out / file.name)


def _cores() -> int:
    """Cores of each process."""
    return (os.cpu_count() or 2) // int(os.environ.get("WORLD_SIZE", "1"))


def _gather(call: Call, filler: PoolFiller, begun: float) -> None:
    """Let the producers work alone until this part of the call is over."""
    while time.monotonic() < begun + call.gather_seconds:
        filler.check()
        time.sleep(WAIT_S)


def _train_sight(call: Call, learner: Learner, producers: Producers, log: Callable[[object], None]) -> None:
    """Train on pictures alone. Adam's moments of the vision parts are reset after it."""
    trainer = SightTrainer(
        learner.model,
        learner.sights,
        learner.precision,
        rate=call.rate,
        seed=1 + learner.step_number,
        compiled=call.compiled,
    )
    producers.pause()  # compilation needs the cores
    trainer.step(0.0)
    producers.resume()
    trainer.train(call.sight_seconds, log)
    for weight in trainer.weights:
        learner.optimizer.state.pop(weight, None)
    learner.save(call.out)
    log({"sight": trainer.measure(trainer.drawer.draw(trainer.n_pictures))})


def _train(
    call: Call,
    learner: Learner,
    producers: Producers,
    filler: PoolFiller,
    pool: Pool,
    end: float,
    log: Callable[[object], None],
) -> int:
    """Steps, logs and saves. Returns: the number of steps."""
    end -= END_S + _measure_s(call)
    begun = time.monotonic()
    while time.monotonic() < end and not _is_filled(pool, learner, time.monotonic() - begun):
        filler.check()
        if not producers.n_alive:
            log({"error": "no producer is alive"})
            if call.group.size > 1:
                raise RuntimeError(f"process {call.group.rank}: expected producers that are alive, got none")
            return 0
        time.sleep(WAIT_S)
    if call.compiled and time.monotonic() < end:
        pauses = _cores() - call.producers < COMPILER_CORES
        if pauses:
            producers.pause()
        learner.prepare(pool)
        if pauses:
            producers.resume()
    saved = logged = time.monotonic()
    if call.until_end:
        learner.schedule(*call.group.agreed(learner.seconds + max(1.0, end - saved)))
    first, count = learner.step_number, 0
    while True:
        filler.check()
        is_last = call.max_steps is not None and learner.step_number - first >= call.max_steps
        is_over, saves, learner.seconds = call.group.agreed(
            is_last or STOP.is_set() or time.monotonic() >= end, time.monotonic() - saved > SAVE_S, learner.seconds
        )
        if saves or is_over:
            _save(call, learner, log)
            saved = time.monotonic()
        if is_over:
            break
        learner.step(pool)
        count += 1
        if time.monotonic() - logged > LOG_S:
            values = learner.take_log()
            step_s = (time.monotonic() - logged) / count
            logged, count = time.monotonic(), 0
            counts = {"records": dict(pool.n_added), "uses": pool.uses}
            log(values | {"ms_per_step": round(1000 * step_s, 1), **counts})
    log(learner.take_log())
    return learner.step_number - first


def _save(call: Call, learner: Learner, log: Callable[[object], None]) -> None:
    """Save the state, and take the newest mind where one is followed."""
    call.group.share_weights(learner.weights)
    if call.group.is_first:
        learner.save(call.out)
    if call.mind is not None and (call.mind / "mind_weights.pt").exists():
        log({"mind": learner.follow(call.mind)})


def _is_filled(pool: Pool, learner: Learner, waited_s: float) -> bool:
    """Whether there are records of all tasks, for which the model is compiled, or else of any."""
    found = [pool.has(task) for task in learner.tasks]
    return all(found) or (any(found) and (not learner.plan.compiled or waited_s > MAX_WAIT_S))


def _measure_s(call: Call) -> float:
    return min(MAX_MEASURE_S, MEASURE_SHARE * call.seconds)


def _measure(
    call: Call, learner: Learner, held_out: Pool, unseen: Sequence[Stored], examples: Examples
) -> dict[str, float]:
    """Figures on records that training never sees, also written to the report."""
    until = time.monotonic() + _measure_s(call)
    if call.stage == "mind":
        figures = measure(learner, held_out, unseen, examples.tokenizer, until)
    else:
        figures = measure_loss(learner, held_out, unseen, until)
    report = call.out / "report.json"
    earlier = json.loads(report.read_text()) if report.exists() else {}
    counters = {"step": learner.step_number, "progress": learner.progress, "held_out": len(unseen)}
    report.write_text(json.dumps(earlier | {call.stage: counters | figures}, indent=1))
    return figures


def _learner(call: Call, examples: Examples) -> tuple[Learner, str]:
    """The model with the weights of earlier calls, and where they are from."""
    if call.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would prepare each of many shapes
    model = random_model(load_config(examples.folder), device=call.device, seed=0)
    quiet_start(model)
    plan = LearnPlan(
        work=call.work,
        device=call.device,
        plan_seconds=math.inf if call.until_end else call.plan_seconds,
        rows=call.rows // call.group.size,
        rate=call.rate,
        restarts=call.restart,
        task=call.task,
        compiled=call.compiled,
        dropout=call.dropout,
        written=call.written,
        group=call.group,
    )
    special = examples.tokenizer.special
    mind = Learner(model, special, plan)
    found = mind.restore(call.out)
    if call.stage == "mind":
        return mind, found
    if found == "nothing":
        raise SystemExit("speech: expected a trained mind in WORK, OUT or --initial, got none")
    if call.group.is_first:
        mind.save(call.out)  # OUT may be new, or have an older mind
    speech = SpeechLearner(model, special, plan)
    return speech, speech.restore(call.out)


def _producer_plan(call: Call, examples: Examples, learner: Learner) -> ProducerPlan:
    """What the producers make: other records than those of earlier calls."""
    shard = {task: n for task, n in SHARD.items() if task != WRITTEN or call.written}
    if call.stage == "speech":
        shard = dict(SPEECH_SHARD)
        end = learner.model.config.tts_config.speech_eos_id
        spoken = load_spoken(call.spoken)
        speaker = TargetSpeech(call.vocoder, end, kept=spoken)
        examples = replace(examples, speaker=speaker, sentences=tuple(text for (text,) in spoken))
        if spoken:  # lessons of these sentences take little time
            shard["echo"] = SPOKEN_LESSONS
    if call.task is not None:
        shard = {call.task: shard[call.task]}
    return ProducerPlan(
        examples=examples,
        folder=call.work / f"shards{call.group.rank or ''}",
        first=FIRST_NUMBER * (1 + int(learner.seconds)) + NUMBERS_OF_A_PROCESS * call.group.rank,
        shard=tuple(shard.items()),
        silent=call.silent,
        stock=call.stock and call.stage == "mind",  # no two texts of the speech model should be the same
        n_held_out=call.producers if call.group.is_first else 0,
    )


def _log_to(file: Path, begun: float) -> Callable[[object], None]:
    def log(values: object) -> None:
        line = json.dumps({"at": round(time.monotonic() - begun, 1), **dict(values)})  # type: ignore[call-overload]
        with file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        print(line, flush=True)

    return log


def _stop(_: int, __: FrameType | None) -> None:
    raise Stopped


if __name__ == "__main__":
    sys.exit(main())
