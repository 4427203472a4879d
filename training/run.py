"""`python -m training.run --work DIR --out DIR --seconds 560`: all stages of the vocoder's training on one GPU machine.

Makes the corpus, then trains HiFT beside the speech tokenizer and the speaker encoder, and the flow once these two have
weights. Each stage is a process that continues from its checkpoint in WORK, so the plan may be divided among calls:
`--part 1` and `--part 2`. `--stages` leaves stages out, whose weights then come from `--initial`. A stage that fails is
started again without CUDA graphs, or with a lower rate if it diverged; the log gets the last lines of its output.
The last part writes the vocoder folder, evaluates it and saves samples.

OUT gets at most eight files: weights of each stage, logs, and in the last part `samples.tar` and `table.json`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from models.errors import ModelError
from training.loop import weights_file
from training.stage import DIVERGED, STAGES

SAVE_SECONDS = 6.0  # kept for the last checkpoint of a stage
FRONT_SECONDS = 190.0  # of tokenizer and speaker encoder, at least
EVALUATE_SECONDS = 75.0
POLL_SECONDS = 1.0
STATUS_SECONDS = 30.0
ATTEMPTS = 3
FAILURE_LINES = 20  # of output, in the log
FRONT = ("tokenizer", "speaker")  # stages whose weights the flow needs
CONTINUED_HIFT = (0.5, 1.0)  # part of the schedule for HiFT from weights without a checkpoint
THREADS = str(max(1, (os.cpu_count() or 4) // 4))  # of each stage


class Share(NamedTuple):
    """The parts of the schedules of HiFT and of the flow that one call covers."""

    hift: tuple[float, float]
    flow: tuple[float, float]
    front: bool  # trains tokenizer and speaker encoder
    last: bool


SHARES = {
    "1": Share((0.0, 0.45), (0.0, 0.3), True, False),
    "2": Share((0.45, 1.0), (0.3, 1.0), False, True),
    "whole": Share((0.0, 1.0), (0.0, 1.0), True, True),
}


@dataclass
class StageProcess:
    """One stage as a process, started again after a failure."""

    name: str
    arguments: list[str]
    work: Path
    end: float  # time.monotonic at which its training is over
    rate: float = 1.0
    eager: bool = False
    attempts: int = 0
    process: subprocess.Popen[bytes] | None = None
    state: str = field(default="new")  # new, running, done, failed

    def start(self) -> None:
        seconds = self.end - time.monotonic() - SAVE_SECONDS
        if seconds < 10 or self.attempts == ATTEMPTS:
            self.state = "failed"
            print(f"[{self.name}: failed; {seconds:.0f} s left after {self.attempts} attempts]", flush=True)
            return
        self.attempts += 1
        command = [sys.executable, "-m", "training.stage", self.name, *self.arguments]
        command += [
            "--until",
            f"{time.time() + seconds:.1f}",
            "--rate",
            str(self.rate),
            *(["--eager"] if self.eager else []),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": THREADS, "PYTHONUNBUFFERED": "1"}
        with (self.work / f"{self.name}.txt").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        self.state = "running"
        print(f"[{self.name}: started for {seconds:.0f} s, attempt {self.attempts}]", flush=True)

    def poll(self) -> None:
        """Notice the end of the process, and start it again after a failure."""
        if self.state != "running" or self.process is None or (status := self.process.poll()) is None:
            return
        if status == 0:
            self.state = "done"
            print(f"[{self.name}: done: {self.last_line()}]", flush=True)
            return
        self.log_failure(f"exit status {status}")
        if status == DIVERGED:
            self.rate *= 0.4
        else:
            self.eager = True
        self.start()

    def stop(self) -> None:
        """End a process that outlasts its time."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            self.state = "failed"
            self.log_failure("stopped at the end of its time")

    def log_failure(self, reason: str) -> None:
        """Print how the process ended, and append that and the last lines of its output to the log of the stage."""
        lines = self.tail(FAILURE_LINES)
        print(f"[{self.name}: {reason}]\n{lines}", flush=True)
        folder = self.work / self.name
        folder.mkdir(exist_ok=True)
        row = {"failure": reason, "attempt": self.attempts, "output": lines.splitlines()}
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")

    def last_line(self) -> str:
        return self.tail(1)

    def tail(self, lines: int) -> str:
        file = self.work / f"{self.name}.txt"
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="corpus, checkpoints and logs; kept between calls")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=SHARES, default="whole")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call, everything included")
    parser.add_argument("--hours", type=float, default=9.0, help="of speech")
    parser.add_argument("--data-seconds", type=float, default=110.0)
    parser.add_argument("--front-seconds", type=float, default=FRONT_SECONDS)
    parser.add_argument("--initial", type=Path, help="weights of an earlier call, where WORK is lost")
    parser.add_argument("--stages", type=stage_names, default=STAGES, help="of this call, with commas (default: all)")
    parser.add_argument("--batch", type=int)
    args = parser.parse_args(argv)
    begun = time.monotonic()
    end = begun + args.seconds
    share = SHARES[args.part]
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = args.work / "corpus"
    weights = args.work / "weights"
    weights.mkdir(exist_ok=True)
    for file in [] if args.initial is None else args.initial.glob("*.safetensors"):
        if not (weights / file.name).exists():
            shutil.copy(file, weights)
    make_corpus(corpus, args.hours, args.data_seconds)
    training_end = end - (EVALUATE_SECONDS if share.last else 10)
    stages = start_stages(args, share, corpus, training_end)
    watch(stages, args.work, args.out, training_end)
    if share.last:
        evaluate(args.work, args.out, corpus, end - time.monotonic())
    collect(args.work, args.out)
    print(f"[{time.monotonic() - begun:.0f} s: {', '.join(f'{one.name} {one.state}' for one in stages)}]", flush=True)
    return 0


def stage_names(text: str) -> tuple[str, ...]:
    """Names of stages, with commas between them."""
    names = tuple(text.split(","))
    if unknown := set(names) - set(STAGES):
        raise argparse.ArgumentTypeError(f"expected {', '.join(STAGES)}, got {', '.join(sorted(unknown))}")
    return names


def make_corpus(corpus: Path, hours: float, seconds: float) -> None:
    command = [sys.executable, "-m", "training.speech.generate", "--out", str(corpus)]
    command += ["--hours", str(hours), "--minutes", str(seconds / 60)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"[corpus: {done.stdout.strip()} {done.stderr[-1500:]}]", flush=True)


def start_stages(args: argparse.Namespace, share: Share, corpus: Path, training_end: float) -> list[StageProcess]:
    """The stages of this call; those that need no other are running.

    Raises: ModelError if the flow has no tokenizer or speaker encoder.
    """
    common = ["--corpus", str(corpus), "--work", str(args.work)]
    if args.batch:
        common += ["--batch", str(args.batch)]
    if args.initial is not None:
        common += ["--initial", str(args.initial)]

    def stage(name: str, progress: tuple[float, float], stage_end: float) -> StageProcess:
        return StageProcess(name, [*common, "--progress", *map(str, progress)], args.work, stage_end)

    weights, now = args.work / "weights", time.monotonic()
    missing = [name for name in FRONT if not weights_file(weights, name).exists()]
    if "flow" in args.stages and (absent := [name for name in missing if name not in args.stages]):
        raise ModelError(str(weights), expected="weights of tokenizer and speaker", got=f"none of {', '.join(absent)}")
    continued = weights_file(weights, "hift").exists() and not (args.work / "hift" / "checkpoint.pt").exists()
    hift = CONTINUED_HIFT if continued and share.hift[0] < CONTINUED_HIFT[0] else share.hift
    ends = {"tokenizer": now + args.front_seconds, "speaker": now + args.front_seconds * 0.5}
    front = [name for name in FRONT if share.front or missing]
    stages = [stage("hift", hift, training_end), *(stage(name, (0.0, 1.0), ends[name]) for name in front)]
    stages = [one for one in [*stages, stage("flow", share.flow, training_end)] if one.name in args.stages]
    for one in stages:
        if one.name != "flow":
            one.start()
    return stages


def watch(stages: list[StageProcess], work: Path, out: Path, training_end: float) -> None:
    """Wait for all stages; start the flow when its inputs exist; print states and copy finished weights."""
    told = time.monotonic()
    by_name = {one.name: one for one in stages}
    flow = by_name.get("flow")
    while time.monotonic() < training_end + 20:
        for one in stages:
            one.poll()
        front = [by_name[name].state for name in FRONT if name in by_name]
        if flow is not None and flow.state == "new" and "running" not in front:
            if all(weights_file(work / "weights", name).exists() for name in FRONT):
                flow.start()
            else:
                flow.state = "failed"
        if all(one.state in ("done", "failed") for one in stages):
            break
        if time.monotonic() - told > STATUS_SECONDS:
            told = time.monotonic()
            for one in stages:
                if one.state == "running":
                    print(one.last_line()[:400], flush=True)
            collect(work, out)
        time.sleep(POLL_SECONDS)
    for one in stages:
        one.stop()


def evaluate(work: Path, out: Path, corpus: Path, seconds: float) -> None:
    """Export the folder, measure it, and save samples; without them if the time is not enough."""
    samples = work / "samples"
    command = [sys.executable, "-m", "training.evaluate_vocoder", "--weights", str(work / "weights")]
    command += ["--corpus", str(corpus), "--samples", str(samples), "--table", str(out / "table.json"), "--count", "10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(seconds - 8, 5))
        print(done.stdout[-3000:] + done.stderr[-3000:], flush=True)
    except subprocess.TimeoutExpired:
        print("[evaluation: not finished in time]", flush=True)
    if samples.exists():
        with tarfile.open(out / "samples.tar", "w") as archive:
            archive.add(samples, arcname="samples")


def collect(work: Path, out: Path) -> None:
    """Copy weights and logs to OUT."""
    for name in STAGES:
        if (file := weights_file(work / "weights", name)).exists():
            shutil.copy(file, out / file.name)
    rows = []
    for name in STAGES:
        file = work / name / "log.jsonl"
        if file.exists():
            rows += [json.dumps({"stage": name, **json.loads(line)}) for line in file.read_text().splitlines()]
    (out / "logs.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
