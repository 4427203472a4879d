"""`python -m training.run --work DIR --out DIR --seconds 560`: all stages of the vocoder's training on one GPU machine.

Makes the corpus, then trains HiFT beside the speech tokenizer and the speaker encoder, and the flow once these two have
weights. Each stage is a process that continues from its checkpoint in WORK, so the plan may be divided among calls:
`--part 1` and `--part 2`. A stage that fails is started again without CUDA graphs, or with a lower rate if it diverged.
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

from training.stage import DIVERGED, STAGES

SAVE_SECONDS = 6.0  # kept for the last checkpoint of a stage
FRONT_SECONDS = 190.0  # of tokenizer and speaker encoder, at least
EVALUATE_SECONDS = 75.0
POLL_SECONDS = 1.0
STATUS_SECONDS = 30.0
ATTEMPTS = 3
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
        print(f"[{self.name}: exit status {status}]\n{self.tail()}", flush=True)
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

    def last_line(self) -> str:
        return self.tail(1)

    def tail(self, lines: int = 15) -> str:
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
    parser.add_argument("--batch", type=int)
    args = parser.parse_args(argv)
    begun = time.monotonic()
    end = begun + args.seconds
    share = SHARES[args.part]
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = args.work / "corpus"
    if args.initial is not None and not (args.work / "weights").exists():
        shutil.copytree(args.initial, args.work / "weights")
    make_corpus(corpus, args.hours, args.data_seconds)
    training_end = end - (EVALUATE_SECONDS if share.last else 10)
    stages = start_stages(args, share, corpus, training_end)
    watch(stages, args.work, args.out, training_end)
    if share.last:
        evaluate(args.work, args.out, corpus, end - time.monotonic())
    collect(args.work, args.out)
    print(f"[{time.monotonic() - begun:.0f} s: {', '.join(f'{one.name} {one.state}' for one in stages)}]", flush=True)
    return 0


def make_corpus(corpus: Path, hours: float, seconds: float) -> None:
    command = [sys.executable, "-m", "training.speech.generate", "--out", str(corpus)]
    command += ["--hours", str(hours), "--minutes", str(seconds / 60)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"[corpus: {done.stdout.strip()} {done.stderr[-1500:]}]", flush=True)


def start_stages(args: argparse.Namespace, share: Share, corpus: Path, training_end: float) -> list[StageProcess]:
    """The stages of this call; those that need no other are running."""
    common = ["--corpus", str(corpus), "--work", str(args.work)]
    if args.batch:
        common += ["--batch", str(args.batch)]
    if args.initial is not None:
        common += ["--initial", str(args.initial)]

    def stage(name: str, progress: tuple[float, float], stage_end: float) -> StageProcess:
        return StageProcess(name, [*common, "--progress", *map(str, progress)], args.work, stage_end)

    front_end = time.monotonic() + args.front_seconds
    stages = [stage("hift", share.hift, training_end)]
    weights = args.work / "weights"
    if share.front or not all((weights / f"{name}.pt").exists() for name in ("tokenizer", "speaker")):
        stages += [stage(name, (0.0, 1.0), front_end) for name in ("tokenizer", "speaker")]
        stages[-1].end -= args.front_seconds * 0.5  # the speaker encoder needs less
    for one in stages:
        one.start()
    return [*stages, stage("flow", share.flow, training_end)]


def watch(stages: list[StageProcess], work: Path, out: Path, training_end: float) -> None:
    """Wait for all stages; start the flow when its inputs exist; print states and copy finished weights."""
    told = time.monotonic()
    by_name = {one.name: one for one in stages}
    flow = by_name["flow"]
    while time.monotonic() < training_end + 20:
        for one in stages:
            one.poll()
        front = [by_name[name].state for name in ("tokenizer", "speaker") if name in by_name]
        if flow.state == "new" and not {"new", "running"} & set(front):
            ready = all((work / "weights" / f"{name}.pt").exists() for name in ("tokenizer", "speaker"))
            if ready:
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
    command = [sys.executable, "-m", "training.evaluate", "--weights", str(work / "weights"), "--corpus", str(corpus)]
    command += ["--samples", str(samples), "--table", str(out / "table.json"), "--count", "10"]
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
        if (file := work / "weights" / f"{name}.pt").exists():
            shutil.copy(file, out / file.name)
    rows = []
    for name in STAGES:
        file = work / name / "log.jsonl"
        if file.exists():
            rows += [json.dumps({"stage": name, **json.loads(line)}) for line in file.read_text().splitlines()]
    (out / "logs.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
