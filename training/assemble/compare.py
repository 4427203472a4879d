"""`python -m training.assemble.compare A B --corpus DIR`: what the vocoder folder B changes of A, such as one in int8.

On held-out sentences of all voices: the share of speech tokens that are the same, and the cosine of speaker vectors. On
those of the talker's voice: the distances of `training.evaluate_vocoder`, of both from the recording and of B from A.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.token2wav.load.parts import Token2WavParts, load_token2wav
from models.token2wav.prompt.features import prompt_mel
from models.token2wav.settings import SAMPLE_RATE
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_maker import VoiceMaker
from training.evaluate_vocoder import copied, distances, prepared, streamed
from training.speech.corpus import load_corpus
from training.speech.voices import TARGET, VOICES


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs=2, metavar="DIR", help="vocoder folders, the exact one first")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--count", type=int, default=23, help="sentences of each voice")
    parser.add_argument("--chain", action="store_true", help="also sound from speech tokens; needs a trained flow")
    args = parser.parse_args(argv)
    print(json.dumps(compare(*args.folders, args.corpus, args.count, args.chain), indent=1))


@torch.no_grad()
def compare(first: Path, second: Path, corpus_folder: Path, count: int, chain: bool = False) -> dict[str, object]:
    """Shares and distances, as the module says; `changed` compares the sounds of both folders with each other."""
    corpus = load_corpus(corpus_folder)
    both = [load_token2wav(folder) for folder in (first, second)]
    is_target = corpus.voices == [voice.name for voice in VOICES].index(TARGET)
    numbers = [(corpus.held_out & (corpus.voices == voice)).nonzero()[0][:count] for voice in range(len(VOICES))]
    same, total, cosines = 0, 0, []
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for index in np.concatenate(numbers).tolist():
        wave = torch.from_numpy(corpus.wave(index))
        a, b = (VoiceMaker(parts, parts.config).make(wave.numpy(), SAMPLE_RATE) for parts in both)
        same += int((a.speech_tokens == b.speech_tokens).sum())
        total += len(a.speech_tokens)
        cosines.append(float(F.cosine_similarity(a.speaker, b.speaker, dim=-1)))
        if not is_target[index]:
            continue
        sounds = {"copy": [copied(parts.hift, prompt_mel(wave)) for parts in both]}
        if chain:
            sounds["chain"] = [chained(parts, voice) for parts, voice in zip(both, (a, b), strict=True)]
        for kind, (before, after) in sounds.items():
            rows[f"{kind} first"].append(distances(before, wave))
            rows[f"{kind} second"].append(distances(after, wave))
            rows[f"{kind} changed"].append(distances(after, before))
    table: dict[str, object] = {
        "tokens": total,
        "same_tokens": round(same / total, 5),
        "speaker_cosine": {"least": round(min(cosines), 6), "mean": round(float(np.mean(cosines)), 6)},
    }
    return table | {
        name: {key: round(float(np.mean([row[key] for row in found])), 4) for key in found[0]}
        for name, found in rows.items()
    }


def chained(parts: Token2WavParts, voice: Voice) -> Tensor:
    """The sound of a voice's own tokens in served chunks."""
    vocoder = prepared(parts, voice)
    return streamed(vocoder, vocoder.open(voice), voice.speech_tokens.tolist())


if __name__ == "__main__":
    main()
