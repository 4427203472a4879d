"""`python -m benchmarks.quality --set model.weights=int8`: a quality card of a precision, on the same weights.

    python -m benchmarks.quality --reference model.dtype=float32 --set model.dtype=bfloat16
    python -m benchmarks.quality --model-path openbmb/MiniCPM-o-4_5 --set model.weights=fp8 --asr "asr --plain"

The reference has the settings of the file and of `--reference`; the tested precision has those of `--set` beside them.
The conversation is a media file, second by second; every second unit has to speak. Both run without compilation.
Exit status: 1 if too little was compared, 2 for an error.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality.card import Transcriber, compare
from benchmarks.quality.quality_run import VoicedTurn, record
from models.errors import ModelError, SettingsError
from worker.assembly.hub import with_local_checkpoint
from worker.config.service import load_config
from worker.config.session import EngineConfig
from worker.loop.results import SOUND_RATE
from worker.start.voices import ReferenceSound, Voices
from worker.start.warmup import extract

TOO_FEW, USAGE = 1, 2


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="setting of the tested precision"
    )
    parser.add_argument("--reference", action="append", default=[], metavar="KEY=VALUE", help="setting of both")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; default: config.json at the root")
    parser.add_argument("--model-path", metavar="DIR", help="checkpoint folder or model id")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--input", type=Path, metavar="FILE", help="media file; default: the video of the warm-up")
    parser.add_argument("--units", type=int, default=60, metavar="N", help="most seconds of it; default: %(default)s")
    parser.add_argument(
        "--asr", metavar="COMMAND", help="prints the words of a WAV file, whose path is appended; gives the word errors"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the card here too")
    return parser


def given(pairs: list[str]) -> dict[str, object]:
    """Settings from `key=value`; a value is JSON or text. Raises: SettingsError."""
    found: dict[str, object] = {}
    for pair in pairs:
        key, is_given, value = pair.partition("=")
        if not is_given or not key:
            raise SettingsError("setting", expected="KEY=VALUE", got=pair)
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def transcriber_of(command: str) -> Transcriber:
    """Runs a command on each turn's sound. Raises, when called: SettingsError if the command fails."""

    def transcribe(turn: VoicedTurn) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "turn.wav")
            with wave.open(str(path), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(SOUND_RATE)
                file.writeframes((np.clip(turn.pcm, -1, 1) * 32_767).astype("<i2").tobytes())
            done = subprocess.run([*shlex.split(command), str(path)], capture_output=True, text=True)
        if done.returncode:
            raise SettingsError("--asr", expected="exit status 0", got=f"{done.returncode}: {done.stderr[-500:]}")
        return done.stdout

    return transcribe


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        return _run(options)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


def _run(options: argparse.Namespace) -> int:
    flags: dict[str, object] = {"model.model_path": options.model_path, "model.device": options.device}
    flags |= {"service.compile.enabled": False, **given(options.reference)}
    config, _ = load_config(options.config, flags=flags, environ=os.environ)
    tested, _ = load_config(options.config, flags={**flags, **given(options.set)}, environ=os.environ)
    engines: list[EngineConfig] = []
    for one in (config, tested):
        session = one.duplex.session.model_copy(update={"seed": one.duplex.session.seed or 0})
        engine = with_local_checkpoint(one.engine())
        engines.append(engine.model_copy(update={"max_sessions": 1, "session": session}))
    units = extract(options.input or config.service.warmup_video, options.units)
    voice = audio_16k = None
    if config.audio.ref_audio_path is not None and engines[0].token2wav_folder.is_dir():
        sound = ReferenceSound.read(config.audio.ref_audio_path)
        voices = Voices(engines[0].token2wav_folder, device="cpu", cache=config.service.cache_dir / "voices")
        audio_16k, voice = sound.audio_16k(), voices.of(sound)
    reference = record(engines[0], units, voice, audio_16k=audio_16k)
    forced = record(engines[1], units, voice, audio_16k=audio_16k, forced=reference)
    card = compare(reference, forced, transcriber_of(options.asr) if options.asr else None)
    too_few = card.too_few(has_speech=voice is not None and engines[0].session.generate_audio)
    title = f"{', '.join(options.set) or 'the same settings'} against {', '.join(options.reference) or 'the settings'}"
    print("\n".join([f"{engines[0].model_path.name}: {title}", *card.lines()]))
    if options.json is not None:
        document: dict[str, Any] = {"model": engines[0].model_path.name, "set": options.set, "card": card.to_json()}
        document |= {"reference": options.reference, "too_few": too_few}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    for shortage in too_few:
        print(f"error: too little was compared: {shortage}", file=sys.stderr)
    return TOO_FEW if too_few else 0


if __name__ == "__main__":
    sys.exit(main())
