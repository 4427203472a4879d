"""`python -m training.speech.generate --out DIR --hours 8`: the speech corpus, as shards of one voice each.

Shard n of a voice holds the same sentences on every machine, so a stopped run continues where it ended: a shard that
exists is kept. Shard 0 of every voice is held out of training. Shards are made in an order that keeps the shares of the
voices, so a run that is stopped by `--minutes` has all voices.

A shard is an NPZ file: `samples` [n] int16 of all utterances at 24 kHz, `lengths` [u] int64 samples of each,
`phones` [p] and `ends` [p] float32 seconds in the utterance, `n_phones` [u] int64 of each, `texts` [u].
"""

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from training.speech.sentences import sentence
from training.speech.voices import RATE, VOICES, SpeechVoice, speak

PER_SHARD = 24  # sentences
SECONDS_PER_SENTENCE = 4.0  # about; gives the number of shards for a duration
SEED = 21


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--minutes", type=float, default=3.0, help="stop after this time with what there is")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    print(json.dumps(generate(args.out, args.hours, args.minutes, args.workers)))


def generate(out: Path, hours: float, minutes: float, workers: int | None) -> dict[str, float]:
    """Make the missing shards. Returns: number of shards, hours of speech in them, seconds taken."""
    begun = time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        end = time.time() + 60 * minutes
        list(pool.map(_make, [(out, voice, number, end) for voice, number in plan(hours)]))
    files = sorted(out.glob("*.npz"))
    n_samples = sum(int(np.load(file)["lengths"].sum()) for file in files)
    return {"shards": len(files), "hours": n_samples / RATE / 3600, "seconds": time.monotonic() - begun}


def plan(hours: float) -> list[tuple[SpeechVoice, int]]:
    """Voice and number of every shard, held-out shards first, then so that any prefix keeps the shares."""
    n_shards = 3600 * hours / SECONDS_PER_SENTENCE / PER_SHARD
    counts = {voice: max(2, round(voice.weight * n_shards)) for voice in VOICES}
    rows = [(0 if number == 0 else number / count, voice, number) for voice, count in counts.items()
            for number in range(count)]  # fmt: skip
    return [(voice, number) for _, voice, number in sorted(rows, key=lambda row: row[0])]


def shard_path(out: Path, voice: SpeechVoice, number: int) -> Path:
    return out / f"{voice.name}_{number:04d}.npz"


def texts_of(voice: SpeechVoice, number: int) -> list[str]:
    """The sentences of one shard. Held-out shards of all voices have the same sentences, which no other shard has."""
    stream = 0 if number == 0 else 1 + [one.name for one in VOICES].index(voice.name)
    return [sentence(SEED + stream, number * PER_SHARD + n) for n in range(PER_SHARD)]


def _make(job: tuple[Path, SpeechVoice, int, float]) -> None:
    out, voice, number, end = job
    path = shard_path(out, voice, number)
    if path.exists() or (time.time() > end and number > 1):
        return
    texts = texts_of(voice, number)
    spoken = speak(voice, texts)
    segments = [segment for one in spoken for segment in one.segments]
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(
            file,
            samples=np.concatenate([one.wave for one in spoken]),
            lengths=np.array([len(one.wave) for one in spoken], np.int64),
            phones=np.array([segment.phone for segment in segments], dtype="U4"),
            ends=np.array([segment.end for segment in segments], np.float32),
            n_phones=np.array([len(one.segments) for one in spoken], np.int64),
            texts=np.array(texts),
        )
    part.replace(path)


if __name__ == "__main__":
    main()
