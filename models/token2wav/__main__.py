"""`python -m models.token2wav speech_tokens.json --voice me.wav --out out.wav`: speech tokens to a sound file.

`python -m models.token2wav convert in.wav --voice me.wav --out out.wav` speaks the tokens of a sound in another voice.
`--model` is a vocoder folder, or a checkpoint file of S3Gen.

The only file of the vocoder that reads arguments and prints.

Without `--stream` all tokens are synthesized in one pass, 960 samples per token. With `--stream` they arrive 25 at a
time, as in a conversation, and the sound starts with the 120 ms of silence of every turn, which are three more tokens.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from models.atomic_file import check_target
from models.checkpoint.embedded import DEFAULT
from models.errors import ModelError, SettingsError, TokenError
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift, load_voice_parts
from models.token2wav.prompt.prompt_sound import MIN_SECONDS
from models.token2wav.prompt.sound_file import read_sound, write_sound
from models.token2wav.prompt.source_tokens import speech_tokens_of
from models.token2wav.s3gen.load import load_s3gen
from models.token2wav.settings import FRAMES_PER_TOKEN, SAMPLE_RATE
from models.token2wav.stream.region_table import VocoderShapes, columns_for
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.stream.windows import CHUNK_TOKENS, TokenWindows
from models.token2wav.voice.maker_digest import maker_digest
from models.token2wav.voice.voice import Voice
from models.token2wav.voice.voice_cache import VoiceCache
from models.token2wav.voice.voice_maker import VoiceMaker

VOCODER = Path(__file__).parents[2] / DEFAULT / "assets" / "token2wav"
STEPS = 10
MAX_STEPS = 100
MAX_SOURCE_SECONDS = 600  # of a sound to convert
MAX_SEED = 2**63 - 1


Sound = tuple[Tensor, int]  # samples and their rate in Hz


class Speech(NamedTuple):
    """Synthesized sound and its latency."""

    wave: Tensor  # [n] float32 at 24 kHz on the CPU
    first_s: float  # seconds from the first tokens to the first sound


class Times(NamedTuple):
    """When a run started, had its model, and had its voice, in seconds of `time.perf_counter`."""

    begun: float
    loaded: float
    prepared: float


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = _convert_arguments(argv[1:]) if argv[:1] == ["convert"] else _token_arguments(argv)
    try:
        return _run(args)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _token_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.token2wav",
        description="Speech tokens to a sound file. `convert` as the first argument converts a sound instead.",
    )
    parser.add_argument(
        "speech_tokens", metavar="TOKENS.json", help='a JSON list of speech tokens, or {"codes": [...]}'
    )
    _add_shared(parser)
    parser.add_argument("--compat", choices=["reference"], help="join chunks exactly as the public implementation")
    parser.set_defaults(sound=None)
    return parser.parse_args(argv)


def _convert_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.token2wav convert", description="The speech of a sound file in another voice."
    )
    seconds = f"{MIN_SECONDS} to {MAX_SOURCE_SECONDS} s"
    parser.add_argument("sound", metavar="IN", help=f"sound file with {seconds} of speech")
    _add_shared(parser)
    parser.set_defaults(speech_tokens=None, compat=None)
    return parser.parse_args(argv)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--voice", required=True, metavar="SOUND", help="sound file with 0.5 to 30 s of the voice")
    parser.add_argument("--out", required=True, metavar="WAV", help="output file: 24 kHz, mono, 16 bits")
    parser.add_argument("--stream", action="store_true", help="synthesize chunk by chunk, as in a conversation")
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"Euler steps (default: {STEPS}, or 2 for S3Gen's mean flow)"
    )
    parser.add_argument(
        "--model",
        default=str(VOCODER),
        metavar="PATH",
        help="vocoder folder, or a checkpoint file of S3Gen (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="type of the flow")
    parser.add_argument("--cache", metavar="DIR", help="folder for prepared voices")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the flow's noise")


def _run(args: argparse.Namespace) -> int:
    is_s3gen = Path(args.model).is_file()
    _check(args, is_s3gen=is_s3gen)
    source = _read_tokens(args.speech_tokens) if args.sound is None else _read_source(args.sound)
    sound = read_sound(args.voice)
    speech, times = (_speak_by_s3gen if is_s3gen else _speak)(args, source, sound)
    return _finish(args, speech, times)


def _read_source(name: str) -> Sound:
    """The first channel of a sound to convert, and its rate."""
    wave, rate = read_sound(name, max_seconds=MAX_SOURCE_SECONDS)
    return wave[0], rate


def _speak(args: argparse.Namespace, source: list[int] | Sound, sound: Sound) -> tuple[Speech, Times]:
    """What `source` says, in the voice of `sound`, by the vocoder."""
    begun = time.perf_counter()
    parts = load_flow_and_hift(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    if isinstance(source, list):
        speech_tokens = source
        _check_tokens(args, speech_tokens, parts.flow.config.vocab_size)
    else:
        tokenizer = load_voice_parts(args.model, device=args.device).speech_tokenizer
        speech_tokens = speech_tokens_of(tokenizer, *source).tolist()
    loaded = time.perf_counter()
    voice = _voice(args, parts, *sound)
    vocoder = _vocoder(args, parts, voice)
    if args.stream:
        vocoder.prepare(voice)
    times = Times(begun, loaded, time.perf_counter())
    if args.stream:
        return _stream(vocoder, voice, speech_tokens, args.compat), times
    return _whole(vocoder, voice, speech_tokens), times


def _speak_by_s3gen(args: argparse.Namespace, source: list[int] | Sound, sound: Sound) -> tuple[Speech, Times]:
    """What `source` says, in the voice of `sound`, by S3Gen."""
    begun = time.perf_counter()
    model = load_s3gen(args.model, device=args.device, dtype=getattr(torch, args.dtype))
    wave, rate = sound
    with torch.no_grad():
        if isinstance(source, list):
            _check_tokens(args, source, model.config.flow.vocab_size)
            speech_tokens = torch.tensor(source)
        else:
            speech_tokens = speech_tokens_of(model.tokenizer, *source)
        loaded = time.perf_counter()
        voice = model.prepare_voice(wave[0], rate)
        times = Times(begun, loaded, time.perf_counter())
        speech = model.sound(speech_tokens, voice, seed=args.seed, n_steps=args.steps).cpu()
    return Speech(speech, time.perf_counter() - times.prepared), times


def _check_tokens(args: argparse.Namespace, speech_tokens: list[int], vocab_size: int) -> None:
    if (wrong := next((token for token in speech_tokens if not 0 <= token < vocab_size), None)) is not None:
        raise TokenError(f"{args.speech_tokens}: speech tokens", expected=f"0 to {vocab_size - 1}", got=wrong)


def _finish(args: argparse.Namespace, speech: Speech, times: Times) -> int:
    """Write the sound and print the figures."""
    done = time.perf_counter()
    try:
        write_sound(args.out, speech.wave)
    except OSError as error:
        raise _cannot_write(args.out, error) from None
    seconds, wall = len(speech.wave) / SAMPLE_RATE, done - times.prepared
    first = f", first sound after {speech.first_s:.3f} s" if args.stream else ""
    print(
        f"[{seconds:.2f} s of sound: load {times.loaded - times.begun:.2f} s, "
        f"voice {times.prepared - times.loaded:.2f} s, "
        f"tokens to sound {wall:.2f} s, {seconds / wall:.2f} times real time{first}]",
        file=sys.stderr,
    )
    return 0


def _check(args: argparse.Namespace, *, is_s3gen: bool) -> None:
    """Check the arguments that do not depend on the model, and set the default of --steps."""
    for name in ("stream", "cache", "compat"):
        if is_s3gen and getattr(args, name):
            raise SettingsError(f"--{name}", expected="a vocoder folder in --model", got=f"{args.model}, a file")
    if args.steps is None and not is_s3gen:
        args.steps = STEPS
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda", expected="a CUDA device", got="none that PyTorch can use")
    for name, value, least, most in (("steps", args.steps, 1, MAX_STEPS), ("seed", args.seed, 0, MAX_SEED)):
        if value is not None and not least <= value <= most:
            raise SettingsError(f"--{name}", expected=f"{least} to {most}", got=value)
    try:
        check_target(Path(args.out))
    except OSError as error:
        raise _cannot_write(args.out, error) from None


def _cannot_write(name: str, error: OSError) -> ModelError:
    return ModelError(name, expected="a path that can be written", got=error.strerror)


def _read_tokens(name: str) -> list[int]:
    try:
        data = json.loads(Path(name).read_bytes())
    except OSError as error:
        raise ModelError(name, expected="a readable file", got=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise TokenError(name, expected="JSON", got=error) from None
    speech_tokens = data.get("codes") if isinstance(data, dict) else data
    if not isinstance(speech_tokens, list):
        expected = 'a list of speech tokens, or {"codes": [...]}'
        raise TokenError(name, expected=expected, got=type(speech_tokens).__name__)
    if not speech_tokens:
        raise TokenError(f"{name}: speech tokens", expected="at least one", got="none")
    if (wrong := next((token for token in speech_tokens if type(token) is not int), None)) is not None:
        raise TokenError(f"{name}: speech tokens", expected="whole numbers", got=repr(wrong)[:40])
    return speech_tokens


def _voice(args: argparse.Namespace, parts: FlowAndHift, wave: Tensor, rate: int) -> Voice:
    """The voice from the cache, or from the networks that prepare voices, which are loaded only then."""
    config = parts.flow.config

    def make(wave: Tensor, rate: int) -> Voice:
        return VoiceMaker(load_voice_parts(args.model, device=args.device), config).make(wave, rate)

    if args.cache is None:
        return make(wave, rate)
    cache = VoiceCache(args.cache, maker_digest(args.model, config.n_mels, args.cache))
    voice = cache.get_or_make(wave, rate, make)
    if cache.problem:
        print(f"voice not cached: {cache.problem}", file=sys.stderr)
    return voice


def _vocoder(args: argparse.Namespace, parts: FlowAndHift, voice: Voice) -> Vocoder:
    """A vocoder for one session with this voice; a whole utterance needs no slots, so the sizes are minimal."""
    n_prompt = voice.n_frames if args.stream else FRAMES_PER_TOKEN
    sizes = FlowSizes(
        n_sessions=1,
        n_voices=1,
        max_steps=args.steps,
        max_chunk=CHUNK_TOKENS + parts.flow.config.encoder.lookahead,
        max_prompt=n_prompt,
        voice_frames=n_prompt,
    )
    columns = columns_for(n_prompt, sizes.max_chunk)
    shapes = VocoderShapes(batch=(1,), columns=(columns,), prompt=(n_prompt,))
    return Vocoder(
        parts.flow, parts.hift, sizes=sizes, shapes=shapes, steps=(args.steps,), compat=args.compat, seed=args.seed
    )


def _whole(vocoder: Vocoder, voice: Voice, speech_tokens: list[int]) -> Speech:
    begun = time.perf_counter()
    with _bar(len(speech_tokens)) as bar:
        wave = vocoder.offline(speech_tokens, voice).cpu()
        bar.update(len(speech_tokens))
    return Speech(wave, time.perf_counter() - begun)


def _stream(vocoder: Vocoder, voice: Voice, speech_tokens: list[int], compat: Literal["reference"] | None) -> Speech:
    session = vocoder.open(voice)
    windows = TokenWindows(lookahead=vocoder.lookahead, compat=compat)
    waves: list[Tensor] = []
    first_s, begun = 0.0, time.perf_counter()
    with _bar(len(speech_tokens) + windows.n_waiting) as bar:
        for start in range(0, len(speech_tokens), CHUNK_TOKENS):
            end = start + CHUNK_TOKENS
            for window in windows.push(speech_tokens[start:end], last=end >= len(speech_tokens)):
                chunk = Chunk(session, window.speech_tokens, window.last)
                [wave] = vocoder.speak([chunk])
                waves.append(wave.cpu())
                first_s = first_s or time.perf_counter() - begun
                bar.update(chunk.n_synthesized(vocoder.lookahead))
    vocoder.close(session)
    return Speech(torch.cat(waves), first_s)


def _bar(n_speech_tokens: int) -> tqdm:
    """A progress bar of synthesized tokens, on stderr if that is a terminal."""
    return tqdm(total=n_speech_tokens, desc="synthesized", unit="token", leave=False, mininterval=0, disable=None)


if __name__ == "__main__":
    sys.exit(main())
