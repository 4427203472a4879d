"""Nearly valid messages and damaged files, at every reader of clients' input or at a running server.

`python -m benchmarks.fuzz --messages 1000000 --seed 3` repeats with its seed. Exit status: 1 if something is found.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.fuzz.corpus import add_case, found_by, shrunk
from benchmarks.fuzz.readers import TARGETS, Data, FoundError

SHOWN_CHARS = 600
REPORT_S = 30.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000, help="number of messages of all targets together")
    parser.add_argument("--seed", type=int, default=0, help="repeats the same messages")
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--corpus", type=Path, help="file to which found messages are added, reduced")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"--targets: expected some of {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}")
    return options


def fuzz(n_messages: int, seed: int, names: list[str], corpus: Path | None = None) -> dict[str, Any]:
    """Run messages of these targets. Returns: counts by target, and what was found, each cause once."""
    rng, weights = random.Random(seed), [TARGETS[name].weight for name in names]
    counts, accepted, numbers = Counter[str](), Counter[str](), Counter[str]()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    shown_at = time.monotonic()
    for name in rng.choices(names, weights, k=n_messages):
        target, number = TARGETS[name], numbers[name]
        numbers[name] += 1
        data = target.case(name, seed, number)
        counts[name] += 1
        try:
            accepted[name] += target.check(data)
        except FoundError as error:
            if (name, error.kind) not in found:
                found[name, error.kind] = _find(name, seed, number, data, error, corpus)
            found[name, error.kind]["n"] += 1
        if time.monotonic() - shown_at > REPORT_S:
            shown_at = time.monotonic()
            print(f"{sum(counts.values())} messages, {len(found)} found", file=sys.stderr, flush=True)
    return {"messages": dict(counts), "accepted": dict(accepted), "found": list(found.values())}


def _find(name: str, seed: int, number: int, data: Data, error: FoundError, corpus: Path | None) -> dict[str, Any]:
    target = TARGETS[name]
    if error.kind != "slow":
        data = shrunk(data, lambda one: found_by(target, one) == error.kind)
    text = repr(data)
    print(f"{name}, seed {seed}, message {number}: {error.kind}: {error}\n  {text[:SHOWN_CHARS]}", flush=True)
    if corpus is not None:
        add_case(corpus, name, data, error.kind)
    return {"target": name, "number": number, "kind": error.kind, "error": str(error), "message": text[:4000], "n": 0}


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    result = fuzz(options.messages, options.seed, options.targets, options.corpus)
    for name, n in result["messages"].items():
        print(f"{name:20} {n:8} messages, {result['accepted'].get(name, 0) / n:4.0%} accepted")
    print(f"{sum(result['messages'].values())} messages, {len(result['found'])} found")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if result["found"] else 0)


if __name__ == "__main__":
    main()
