"""`python -m training.mind.stock.sentences --out spoken.npz --seconds 3600`: sentences of the talker, before training.

Their speech tokens take few bytes, and making them takes most of the time of a training of speech. A call adds
sentences to those that the file has; two files of calls with different `--seed` may be given to one training.
"""

import argparse
import random
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from training.grammar.phrases import fill
from training.mind.speak import VOCODER, TargetSpeech
from training.timelines.lessons import ENDS, draw_read

Spoken = dict[tuple[str, ...], list[int]]  # as `TargetSpeech.kept`, each text in one part
AT_ONCE = 20  # sentences
SAVE_S = 60.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(": ")[2].partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of making sentences")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocoder", type=Path, default=VOCODER, help="folder with the speech tokenizer of the talker")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    speech = TargetSpeech(args.vocoder, end=0, kept=load_spoken([args.out]) if args.out.exists() else {})
    extend(speech, args.seed, args.out, args.seconds)
    n_tokens = sum(map(len, speech.kept.values()))
    print(f"{len(speech.kept)} sentences, {n_tokens / 25 / 3600:.2f} hours")


def extend(speech: TargetSpeech, seed: int, out: Path, seconds: float) -> None:
    """Add sentences to `speech.kept` for a time, at least some, and save them all."""
    rng, saved = random.Random(f"{seed} {len(speech.kept)}"), time.monotonic()
    end = saved + seconds
    while True:
        texts = [draw_read(rng, "train") for _ in range(AT_ONCE)]
        speech.tokens([(one if one[-1] in ENDS else fill("{Text}.", text=one),) for one in texts])
        now = time.monotonic()
        if now >= end or now - saved > SAVE_S:
            save_spoken(out, speech.kept)
            saved = now
        if now >= end:
            return


def save_spoken(file: Path, spoken: Spoken) -> None:
    """Write sentences and their tokens, all at once."""
    texts = np.array([text for (text,) in spoken])
    lengths = np.array([len(tokens) for tokens in spoken.values()], np.int32)
    tokens = np.concatenate([np.array(tokens, np.int16) for tokens in spoken.values()])
    partial = file.with_suffix(".part")
    with partial.open("wb") as target:
        np.savez_compressed(target, texts=texts, lengths=lengths, tokens=tokens)
    partial.replace(file)


def load_spoken(files: Iterable[Path]) -> Spoken:
    """The sentences of files."""
    found: Spoken = {}
    for file in files:
        stored = np.load(file)
        parts = np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1])
        found |= {(str(text),): part.tolist() for text, part in zip(stored["texts"], parts, strict=True)}
    return found


if __name__ == "__main__":
    main()
