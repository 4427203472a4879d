"""`python -m benchmarks.turns.make_questions`: the set of spoken questions, `questions/questions.ogg` and its JSON.

Speaks each phrase with flite, espeak-ng or festival (Debian's packages flite, espeak-ng, festival, festvox-us-slt-hts)
and writes all of them into one file, and what the voices say where they hesitate into `fillers.ogg`. Where a phrase
begins and ends is measured on the file as it is read back, so the times hold for what is played.
"""

import io
import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import soundfile
import soxr

RATE = 16_000
FOLDER = Path(__file__).parent / "questions"
LEVEL = 10 ** (-23 / 20)  # RMS of a phrase
FRAME = RATE // 100
EDGE = 10 ** (-40 / 20)  # of the loudest frame: quieter frames at both ends are no speech
GAP_S = 0.3  # between phrases in the file
FILLERS = ("um,", "uh,", "er, let me see,")
# A phrase after a comma or dash follows a pause; the others follow the question's last phrase.
QUESTIONS = (
    ("What time is it now?",),
    ("When I get home,", "what should I cook for dinner?"),
    ("Could you turn on the light?",),
    ("If it rains tomorrow,", "do I need an umbrella?"),
    ("How far is the station from here?",),
    ("The red book on the table,", "who wrote it?"),
    ("Can you hear me?",),
    ("After the meeting,", "before lunch,", "who is free to talk?"),
    ("What do you see in this picture?",),
    ("My sister lives in Norway,", "how cold is it there in winter?"),
    ("Which of these two roads is shorter?",),
    ("Let me think,", "what was the name of that song?"),
    ("How do I spell necessary?",),
    ("On Monday,", "on Tuesday,", "and on Friday, when do we open?"),
    ("Where did I leave my keys?",),
    ("Excuse me,", "is this seat taken?"),
    ("How many apples are in the bowl?",),
    ("Before we begin,", "could you tell me your name?"),
    ("Why is the sky blue?",),
    ("In the second part of the film,", "why did he go back?"),
    ("Please tell me a short story.",),
    ("I have two cups of flour,", "is that enough for a cake?"),
    ("What should I do next?",),
    ("To get there by nine,", "when do I have to leave?"),
)


def flite(voice: str) -> Callable[[str], bytes]:
    """A voice of flite. Returns: text to a WAV file."""
    return lambda text: _to_file(["flite", "-voice", voice, "-t", text, "-o"])


def espeak(voice: str) -> Callable[[str], bytes]:
    """A voice of espeak-ng."""
    return lambda text: _run(["espeak-ng", "-v", voice, "-s", "155", "--stdout", text])


def festival(voice: str) -> Callable[[str], bytes]:
    """A voice of festival."""
    return lambda text: _to_file(["text2wave", "-eval", f"({voice})", "-o"], text)


VOICES = {
    "flite-slt": flite("slt"),
    "flite-rms": flite("rms"),
    "espeak-us": espeak("en-us"),
    "flite-awb": flite("awb"),
    "festival-slt": festival("voice_cmu_us_slt_arctic_hts"),
    "espeak-gb-f3": espeak("en-gb+f3"),
}


def _run(command: list[str], text: str = "") -> bytes:
    return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout


def _to_file(command: list[str], text: str = "") -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        _run([*command, file.name], text)
        return Path(file.name).read_bytes()


def spoken_span(samples: np.ndarray) -> tuple[int, int]:
    """First and last sample of speech, [n] float32 at 16 kHz: the frames that are not far below the loudest one."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    levels = np.sqrt((frames.astype(np.float64) ** 2).mean(1))
    loud = np.flatnonzero(levels > EDGE * levels.max())
    return int(loud[0]) * FRAME, (int(loud[-1]) + 1) * FRAME


def phrase(text: str, speak: Callable[[str], bytes]) -> np.ndarray:
    """The sound of a phrase without silence at its ends."""
    # A phrase that is not the last one is spoken as such: its comma keeps the voice from falling.
    sound, rate = soundfile.read(io.BytesIO(speak(text)), dtype="float32")
    sound = soxr.resample(sound, rate, RATE).astype(np.float32)
    first, last = spoken_span(sound)
    sound = sound[first:last]
    return sound * (LEVEL / np.sqrt((sound.astype(np.float64) ** 2).mean()))


def phrases() -> Iterator[tuple[int, str, np.ndarray]]:
    """Question, voice and sound of every phrase."""
    for number, parts in enumerate(QUESTIONS):
        voice = list(VOICES)[number % len(VOICES)]
        for text in parts:
            yield number, voice, phrase(text, VOICES[voice])


def written(path: Path, sounds: Sequence[np.ndarray]) -> list[list[int]]:
    """Write sounds into one file, with silence between them. Returns: first and last sample of each as it is read."""
    gap, parts, begins = np.zeros(int(GAP_S * RATE), np.float32), list[np.ndarray](), [0]
    for sound in sounds:
        parts += [sound.clip(-1, 1), gap]
        begins.append(begins[-1] + len(sound) + len(gap))
    soundfile.write(path, np.concatenate(parts), RATE, format="OGG", subtype="OPUS", compression_level=0.9)
    played, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE, f"{path}: expected {RATE} Hz, got {rate}"
    margin, spans = len(gap) // 3, list[list[int]]()
    for begin, sound in zip(begins, sounds, strict=False):
        start = max(begin - margin, 0)
        first, last = spoken_span(played[start : begin + len(sound) + margin])
        spans.append([start + first, start + last])
    return spans


def main() -> None:
    spoken, spans_of = list(phrases()), defaultdict[int, list[list[int]]](list)
    spans = written(FOLDER / "questions.ogg", [sound for _, _, sound in spoken])
    for (number, _, _), span in zip(spoken, spans, strict=True):
        spans_of[number].append(span)
    voices = {number: voice for number, voice, _ in spoken}
    lines = [
        json.dumps({"text": " ".join(parts), "voice": voices[number], "phrases": spans_of[number]})
        for number, parts in enumerate(QUESTIONS)
    ]
    (FOLDER / "questions.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    make_fillers()


def make_fillers() -> None:
    """Write the fillers of all voices."""
    spoken = [(voice, phrase(text, speak)) for voice, speak in VOICES.items() for text in FILLERS]
    fillers = defaultdict[str, list[list[int]]](list)
    for (voice, _), span in zip(spoken, written(FOLDER / "fillers.ogg", [sound for _, sound in spoken]), strict=True):
        fillers[voice].append(span)
    lines = [f"{json.dumps(voice)}: {json.dumps(spans)}" for voice, spans in fillers.items()]
    (FOLDER / "fillers.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
