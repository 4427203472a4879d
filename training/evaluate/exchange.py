"""`python -m training.evaluate.exchange --model DIR`: a written conversation with the served talker, as a document.

A voice says the script's sentences, and the camera shows its pictures. Writes OUT/exchange.md, a transcript, and
OUT/exchange.ogg, stereo Opus at 24 kHz: the person on the left, the talker on the right.
"""

import argparse
import asyncio
import random
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import soundfile
import soxr

from models.errors import ModelError
from training.evaluate.acts import Act, Appear, Case, Happened, Played, Say, Show
from training.evaluate.figures import turns_of
from training.evaluate.material import UNSEEN_VOICES
from training.evaluate.playing import play
from training.evaluate.system import served
from training.grammar.camera import Target
from training.mind.voices import EngineVoice
from training.scenes.labels import Shown
from training.scenes.render import draw_look
from training.speech.voices import VOICES
from training.timelines.speech import RATE, Samples, Synthesizer
from training.timelines.timeline import View
from worker.protocol.wire import SOUND_RATE

NAME = "exchange"
PERSONS = {voice.name: voice for voice in (*VOICES, *UNSEEN_VOICES)}
NOISE = 0.002  # standard deviation of the microphone's white noise: training has no digital silence
MAX_BYTES = 500_000
COMPRESSION = 0.92  # of libsndfile's Opus encoder, 0 to 1: about 45 kbit/s while both channels have sound
PHASE = 0.2  # of its second, in which a sentence begins
STAR = Shown("shape", "star", "blue")
CIRCLE = Shown("shape", "circle", "red")
Script = tuple[str | Shown | Target, ...]
# What is said, what the camera shows from then on, and what appears while the talker watches.
SCRIPT: Script = (
    "hello",
    "my name is Anna",
    "count to five",
    STAR,
    "what do you see",
    "tell me when you see something red",
    Target("something red", color="red"),
    "what is my name",
    "count to twenty",
    "stop",
)
STOPS = ("stop",)
STOP_AFTER = 3  # units of speech


def main(argv: list[str] | None = None) -> int:
    """Play the script and write the files. Returns: 1 if the session broke off or the recording is too large."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="checkpoint folder; starts a gateway and a worker with it")
    source.add_argument("--url", help="ws://host:port of a running gateway")
    parser.add_argument("--work", type=Path, default=Path("tmp/evaluate"), help="folder of voices, logs and data")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the files; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--voice", choices=sorted(PERSONS), default="awb", help="of the person; kal is in no training")
    options = parser.parse_args(argv)
    case = draw_exchange(EngineVoice(PERSONS[options.voice], options.work / "voices"), options.seed)
    with ExitStack() as stack:
        url = options.url
        if url is None:
            url = stack.enter_context(served(options.model, options.work / "system")).url
        played = asyncio.run(play(url, case))
    if played.error:
        print(f"session broke off: {played.error}", file=sys.stderr)
        return 1
    try:
        write_exchange(played, options.out)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(transcript(played))
    return 0


def draw_exchange(speaker: Synthesizer, seed: int, script: Script = SCRIPT) -> Case:
    """The session of a script; looks of pictures and draws of the model depend on the seed."""
    rng = random.Random(f"{NAME} {seed}")
    acts: list[Act] = []
    for line, following in zip(script, (*script[1:], None), strict=True):
        match line:
            case str():
                after = STOP_AFTER if line in STOPS else 0
                acts.append(Say("", line, speaker(line), PHASE, "", after, waits=following not in STOPS))
            case Shown():
                acts.append(Show(View(line, draw_look(line, rng), 0)))
            case Target():
                acts.append(Appear(View(CIRCLE, draw_look(CIRCLE, rng), 0), line, ""))
    return Case(NAME, NAME, NAME, seed, tuple(acts), NOISE)


def write_exchange(played: Played, out: Path) -> None:
    """Write both files. Raises: ModelError for a recording above MAX_BYTES."""
    out.mkdir(parents=True, exist_ok=True)
    sound = out / f"{NAME}.ogg"
    soundfile.write(sound, stereo(played), SOUND_RATE, format="OGG", subtype="OPUS", compression_level=COMPRESSION)
    if (size := sound.stat().st_size) > MAX_BYTES:
        sound.unlink()
        raise ModelError(str(sound), expected=f"at most {MAX_BYTES:,} bytes", got=f"{size:,}; shorten the script")
    (out / f"{NAME}.md").write_text(transcript(played), encoding="utf-8")


def stereo(played: Played) -> np.ndarray:
    """[n, 2] at 24 kHz: the person, and the talker, whose sound of a unit is heard in the second after it."""
    n = (len(played.units) + 1) * SOUND_RATE
    both = np.zeros((n, 2), np.float32)
    for done in played.happened:
        if isinstance(done.act, Say):
            _add(both[:, 0], np.asarray(soxr.resample(done.act.sound, RATE, SOUND_RATE), np.float32), done.start)
    for number, unit in enumerate(played.units):
        _add(both[:, 1], unit.sound, number + 1)
    return both.clip(-1, 1)


def transcript(played: Played) -> str:
    """Who says and shows what, and when, as a Markdown table. Seconds are those of the recording."""
    rows = [(done.start, *_event(done)) for done in played.happened if isinstance(done.act, Say | Show | Appear)]
    rows += [(first + 1.0, "talker", played.text(first, until)) for first, until in turns_of(played)]
    lines = ["| s | | |", "|---|---|---|"]
    lines += [f"| {at:.1f} | {who} | {text} |" for at, who, text in sorted(rows, key=lambda row: row[0]) if text]
    return "\n".join([*lines, ""])


def _event(done: Happened) -> tuple[str, str]:
    match done.act:
        case Say(text=text):
            return "person", text
        case Show(view=View(shown=Shown() as shown)) | Appear(view=View(shown=Shown() as shown)):
            return "camera", f"a {shown.color} {shown.name}"
    return "camera", "nothing"


def _add(channel: np.ndarray, sound: Samples, start: float) -> None:
    first = round(start * SOUND_RATE)
    sound = sound[: len(channel) - first]
    channel[first : first + len(sound)] += sound


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the served system ends too
    sys.exit(main())
