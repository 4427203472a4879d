"""`python -m models "Hello" --image cat.png`: one chat turn with a checkpoint; prints the answer as it is generated."""

import argparse
import sys
import time
import wave
from pathlib import Path

import numpy as np
import torch

from models.checkpoint.embedded import DEFAULT
from models.errors import AudioError, ModelError
from models.inputs.audio_sizes import SAMPLE_RATE
from models.inputs.image import open_image
from models.inputs.prompts import PromptOptions
from models.sampling.settings import CHAT_TEXT
from models.stages.chat import MAX_NEW_TOKENS, Chat, greedy

MODEL = Path(__file__).parent.parent / DEFAULT


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models", description="One chat turn with a checkpoint.")
    parser.add_argument("text", help="text of the user")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="image before the text; may be given several times"
    )
    parser.add_argument(
        "--sound",
        action="append",
        default=[],
        metavar="WAV",
        help="sound before the text, 16 kHz mono; may be given several times",
    )
    parser.add_argument("--system", help="text of a system message")
    parser.add_argument("--model", default=str(MODEL), metavar="DIR", help="checkpoint folder (default: %(default)s)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--thinking", action="store_true", help="enable thinking before the answer")
    parser.add_argument("--greedy", action="store_true", help="take the best token instead of sampling")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="length limit of the answer (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        return _answer(args)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _answer(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda", expected="a CUDA device", got="none that PyTorch can use")
    start = time.perf_counter()
    images = [open_image(_read(name)) for name in args.image]
    parts = [*images, *map(_sound, args.sound), args.text]
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": parts})
    chat = Chat.load(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    loaded = time.perf_counter()
    sampling = greedy(CHAT_TEXT) if args.greedy else CHAT_TEXT
    options = PromptOptions(enable_thinking=args.thinking)
    times: list[float] = []
    answer = chat.stream(messages, options, sampling=sampling, seed=args.seed, max_new_tokens=args.max_new_tokens)
    for token in answer:
        times.append(time.perf_counter())
        print(token.text, end="", flush=True)
    done = time.perf_counter()
    print()
    first = times[0] if times else done
    print(
        f"[{len(times)} tokens, load {loaded - start:.2f} s, first token {first - loaded:.2f} s, "
        f"{(done - first) / max(len(times) - 1, 1) * 1000:.1f} ms a token]",
        file=sys.stderr,
    )
    return 0


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ModelError(name, expected="a readable file", got=error.strerror) from None


def _sound(name: str) -> np.ndarray:
    """[n] float32 of a 16-bit mono WAV file at 16 kHz."""
    try:
        with wave.open(name, "rb") as file:
            form = (file.getframerate(), file.getnchannels(), file.getsampwidth())
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, RuntimeError, wave.Error) as error:  # RuntimeError: a wrong chunk size
        raise AudioError(name, expected="a WAV file", got=str(error) or "an incomplete chunk") from None
    if form != (SAMPLE_RATE, 1, 2):
        got = "{} Hz, {} channel(s), {} byte(s) a sample".format(*form)
        raise AudioError(name, expected=f"{SAMPLE_RATE} Hz, 1 channel, 2 bytes a sample", got=got)
    if len(data) % 2:
        raise AudioError(name, expected="whole 16-bit samples", got=f"{len(data)} bytes")
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


if __name__ == "__main__":
    sys.exit(main())
