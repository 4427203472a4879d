"""`python -m training.evaluate --model DIR`: the talker through the served system, against what it must reach.

Starts a gateway and a worker with the checkpoint, or takes the gateway at `--url`, plays held-out requests, scenes,
watches and interruptions over the duplex protocol, then one long conversation, and prints the table of figures.
`training/README.md` explains the figures; `--quick` plays a small part, `--gate` answers to some voices in 20 s.
"""

import argparse
import asyncio
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from training.evaluate import figures, speech, targets
from training.evaluate.acts import Case, Played
from training.evaluate.material import FULL, GATE, QUICK, Voices, draw_cases, draw_conversation
from training.evaluate.playing import play, play_all
from training.evaluate.system import served
from training.speech.voices import ENGINES
from worker.config.pairs import with_pairs

CONVERSATION = "conversation"
PARTS = ("requests", "scenes", "watch", "interruptions", CONVERSATION)
GATE_PARTS = ("requests", "scenes")
HEARD_REPLIES = {"full": 60, "quick": 10}


def main(argv: list[str] | None = None) -> int:
    """Run the evaluation. Returns: 1 if a session broke off or a figure is worse than its bound, else 0."""
    options = parse(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("training").setLevel(logging.INFO if options.verbose else logging.WARNING)
    begun = time.monotonic()
    sizes = GATE if options.gate else QUICK if options.quick else FULL
    ear = None if options.no_ear else speech.Ear()
    voices = Voices.of_engines(options.work / "voices", ("flite",) if options.gate else ENGINES)
    cases = [one for one in draw_cases(sizes, voices, options.seed, split=options.split) if one.part in options.parts]
    minutes = sizes.minutes if options.minutes is None else options.minutes
    is_long = minutes > 0 and CONVERSATION in options.parts
    long = draw_conversation(minutes, voices, options.seed, split=options.split) if is_long else None
    with ExitStack() as stack:
        url, start_s = options.url, None
        if url is None:
            system = stack.enter_context(served(options.model, options.work / "system"))
            url, start_s = system.url, system.start_s
        played, conversation = asyncio.run(play_material(url, cases, long, options))
    found = figures.figures_of(played)
    if start_s is not None:
        found["start to ready"] = figures.Measured(start_s, start_s, start_s, 1)
    if conversation is not None:
        found |= figures.figures_of_conversation(conversation)
        if options.model is not None:
            encoder = speech.speaker_encoder(options.model)
            found["voice, first and last minute"] = speech.voice_kept(conversation, encoder)
    if ear is not None:
        replies = speech.replies_of(played, HEARD_REPLIES["quick" if options.quick else "full"])
        found["word errors above the voice"] = speech.word_errors_above_voice(ear, replies, options.work / "voices")
    everything = [*played, *([] if conversation is None else [conversation])]
    result = {
        "command": ["python", "-m", "training.evaluate", *(sys.argv[1:] if argv is None else argv)],
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.processor() or platform.machine()},
        "seconds": round(time.monotonic() - begun, 1),
        "seed": options.seed,
        "figures": targets.as_json(found),
        "skills": figures.outcomes_by_skill(played),
        "sessions": {one.case.name: len(one.units) for one in everything},
        "records": figures.records_of(everything),
    }
    print(targets.table(found))
    failed = [f"session {one.case.name} broke off: {one.error}" for one in everything if one.error]
    if options.json:
        _write(options.json, result)
    if options.write_bounds:
        _write(options.write_bounds, targets.bounds_of(found))
    if options.bounds:
        failed += targets.failures(found, targets.read_bounds(options.bounds))
    for line in failed:
        print(line)
    return 1 if failed else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options. Exits with a usage error if there is neither a model nor a URL."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="checkpoint folder; starts a gateway and a worker with it")
    source.add_argument("--url", help="ws://host:port of a running gateway")
    parser.add_argument("--work", type=Path, default=Path("tmp/evaluate"), help="folder of voices, logs and data")
    parser.add_argument("--quick", action="store_true", help="a small part of the material")
    parser.add_argument("--gate", action="store_true", help="some requests and scenes by flite, text alone")
    parser.add_argument("--seed", type=int, default=0, help="of the material; default: %(default)s")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--minutes", type=float, help="length of the long conversation; 0: none; default: by size")
    parser.add_argument("--concurrency", type=int, choices=(1, 2), default=2, help="sessions at once")
    parser.add_argument("--real-time", action="store_true", help="send a unit each second, not as fast as possible")
    parser.add_argument("--verbose", action="store_true", help="a line for each session")
    parser.add_argument(
        "--split", choices=("held_out", "train"), default="held_out", help="phrases; default: %(default)s"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the sessions, such as window.mode"
    )
    parser.add_argument("--no-ear", action="store_true", help="do not count word errors, which needs pocketsphinx")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--bounds", type=Path, help="file of bounds; exit status 1 if a figure is worse")
    parser.add_argument("--write-bounds", type=Path, help="file for bounds made of this run")
    options = parser.parse_args(argv)
    if options.gate:
        options.parts, options.no_ear = GATE_PARTS, True
        options.set = ["generate_audio=false", *options.set]
    return options


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"expected {', '.join(PARTS)}, got {', '.join(unknown)}")
    return names


async def play_material(
    url: str, cases: Sequence[Case], long: Case | None, options: argparse.Namespace
) -> tuple[list[Played], Played | None]:
    """Play all cases, then the long conversation alone and in real time, so that its times are those of one person.

    Played faster, the eviction after a unit, which takes 60 ms, would delay the next unit.
    """
    settings = with_pairs({}, options.set, plain_text=True)
    played = await play_all(url, cases, concurrency=options.concurrency, real_time=options.real_time, settings=settings)
    return played, None if long is None else await play(url, long, real_time=True, settings=settings)


def _write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the served system ends too
    sys.exit(main())
