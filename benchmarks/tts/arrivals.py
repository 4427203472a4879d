"""First sound of texts that arrive at random at a running gateway: `python -m benchmarks.tts.arrivals --rps 1,10,20`.

Arrivals do not wait for answers (open loop, Poisson). A first sound counts when a sample is audible, from the moment of
the request. `--help` lists the options.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

RATE = 24_000
AUDIBLE = 10 ** (-40 / 20)  # of full scale
TEXTS = (
    "Good morning, how can I help you today?",
    "The train to the coast leaves at a quarter past nine.",
    "I have put the report on your desk, next to the lamp.",
    "It will rain in the afternoon, so please take a coat.",
)


class Spoken(NamedTuple):
    """One answer. first_s: to its first audible sample; None without one. gaps: times at which playback had run dry."""

    first_s: float | None
    seconds: float
    gaps: int


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tts.arrivals", description=__doc__)
    parser.add_argument("--base-url", default="http://localhost:8006/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="tts-1")
    parser.add_argument("--voice", default="alloy")
    parser.add_argument("--rps", type=lambda text: [float(one) for one in text.split(",")], default=[1.0, 10.0, 20.0])
    parser.add_argument("--requests", type=int, default=200, help="at each rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="result file")
    return parser.parse_args(arguments)


async def speak(http: httpx.AsyncClient, options: argparse.Namespace, number: int) -> Spoken:
    """One request. Raises: httpx.HTTPStatusError for a refused one."""
    body = {
        "model": options.model,
        "voice": options.voice,
        "input": TEXTS[number % len(TEXTS)],
        "response_format": "pcm",
        "seed": number,
    }
    began, n_samples, gaps = time.perf_counter(), 0, 0
    first: float | None = None
    played_until = float("inf")
    async with http.stream("POST", "/audio/speech", json=body) as response:
        response.raise_for_status()
        rest = b""
        async for part in response.aiter_raw():
            now = time.perf_counter()
            rest += part
            whole = len(rest) // 2 * 2
            samples = np.frombuffer(rest[:whole], "<i2").astype(np.float32) / 32768
            rest = rest[whole:]
            if first is None and np.abs(samples).max(initial=0.0) > AUDIBLE:
                first = now - began
            gaps += now > played_until
            played_until = (now if n_samples == 0 else max(now, played_until)) + len(samples) / RATE
            n_samples += len(samples)
    return Spoken(first, n_samples / RATE, gaps)


async def measure(http: httpx.AsyncClient, options: argparse.Namespace, rps: float) -> dict[str, Any]:
    """The figures of one rate."""
    draw, tasks, began = random.Random(options.seed), list[asyncio.Task[Spoken]](), time.perf_counter()
    due = began
    for number in range(options.requests):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(speak(http, options, number)))
        due += draw.expovariate(rps)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - began
    spoken = [one for one in found if isinstance(one, Spoken)]
    firsts = sorted(1000 * one.first_s for one in spoken if one.first_s is not None)
    return {
        "rps": rps,
        "requests": options.requests,
        "failed": options.requests - len(spoken),
        "silent": len(spoken) - len(firsts),
        "first_audio_p50_ms": float(np.percentile(firsts, 50)) if firsts else None,
        "first_audio_p95_ms": float(np.percentile(firsts, 95)) if firsts else None,
        "answers_with_gaps": sum(one.gaps > 0 for one in spoken),
        "audio_s_per_s": sum(one.seconds for one in spoken) / seconds,
    }


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of each rate, printed as they come."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {options.api_key}"}
    async with httpx.AsyncClient(
        base_url=options.base_url, headers=headers, limits=limits, timeout=120.0, trust_env=False
    ) as http:
        await speak(http, options, 0)  # opens the connection, and names a wrong address at once
        rows = []
        for rps in options.rps:
            rows.append(await measure(http, options, rps))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    rows = asyncio.run(run(options))
    if options.json is not None:
        keys = {f"first_audio_p95_ms_{row['rps']:g}rps": row["first_audio_p95_ms"] for row in rows}
        best = max(row["audio_s_per_s"] for row in rows)
        result = {**keys, "audio_s_per_s": best, "command": sys.argv, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
