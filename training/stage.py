"""`python -m training.stage hift --corpus DIR --work DIR --seconds 400`: one stage of the vocoder's training.

Reads and writes `WORK/STAGE/checkpoint.pt` and appends to `WORK/STAGE/log.jsonl`. The averaged weights are saved with
each checkpoint as `WORK/weights/STAGE.safetensors`. The flow needs those of the tokenizer and of the speaker encoder.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from models.token2wav.prompt.campplus import CampPlus
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer
from training.flow import train_flow
from training.hift import train_hift
from training.loop import DivergedError, RunPlan, best_device, read_weights, weights_file
from training.sizes import SPEAKER, TOKENIZER
from training.speaker import train_speaker
from training.speech.corpus import load_corpus
from training.speech.voices import VOICES
from training.tokenizer import train_tokenizer
from training.weights import derive, new_speaker_encoder, new_tokenizer

STAGES = ("hift", "tokenizer", "speaker", "flow")
DIVERGED = 3  # exit status
LABELLED = [voice.name for voice in VOICES if voice.engine != "espeak-ng"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0, help="of this run")
    parser.add_argument("--until", type=float, help="Unix time of the end, in place of --seconds")
    parser.add_argument("--progress", type=float, nargs=2, default=(0.0, 1.0), help="part of the schedule")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--initial", type=Path, help="folder of weights to start from without a checkpoint")
    parser.add_argument("--batch", type=int, help="pieces of a step")
    parser.add_argument("--log-every", type=int, default=100)
    args = parser.parse_args(argv)
    begun = time.time()
    device = best_device()
    weights = args.work / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    plan = RunPlan(
        folder=args.work / args.stage,
        device=device,
        until=args.until or begun + args.seconds,
        weights=weights,
        start=args.progress[0],
        end=args.progress[1],
        graphs=device.type == "cuda" and not args.eager,
        log_every=args.log_every,
        rate=args.rate,
        batch=args.batch,
        initial=args.initial,
    )
    corpus = load_corpus(args.corpus, LABELLED if args.stage in ("hift", "flow") else None)
    print(f"{args.stage}: {corpus.hours:.2f} h of speech on {device}", flush=True)
    plan.log_setup("corpus")
    try:
        match args.stage:
            case "hift":
                train_hift(corpus, plan)
            case "tokenizer":
                train_tokenizer(corpus, plan)
            case "speaker":
                train_speaker(corpus, plan)
            case _:
                train_flow(corpus, plan, *front_networks(weights, device))
    except DivergedError as error:
        print(error, file=sys.stderr)
        return DIVERGED
    return 0


def front_networks(weights: Path, device: torch.device) -> tuple[S3Tokenizer, CampPlus]:
    """The trained tokenizer and speaker encoder, ready to run."""
    tokenizer, speaker = new_tokenizer(TOKENIZER).to(device), new_speaker_encoder(SPEAKER).to(device)
    tokenizer.load_state_dict(read_weights(weights_file(weights, "tokenizer"), device))
    speaker.load_state_dict(read_weights(weights_file(weights, "speaker"), device))
    with torch.no_grad():
        derive(tokenizer)
    return tokenizer.eval(), speaker.eval()


if __name__ == "__main__":
    sys.exit(main())
