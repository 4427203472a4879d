"""`python -m training.ear SAMPLES`: word errors of an independent recogniser on files of `training.evaluate_vocoder`.

The errors of `source` (the recorded voice) are the measure: `copy` and `chain` are judged as points above them. Needs
pocketsphinx (the extra `training`), whose US English model comes with it.
"""

import argparse
import json
import re
from pathlib import Path

import soundfile
import soxr

from training.edits import edit_distance

RATE = 16_000
KINDS = ("source", "copy", "chain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("samples", type=Path)
    print(json.dumps(word_errors(parser.parse_args().samples), indent=1))


def word_errors(samples: Path) -> dict[str, float]:
    """Edits per word of each kind of sound that there is."""
    from pocketsphinx import Decoder

    decoder = Decoder(samprate=RATE)
    errors = {}
    for kind in KINDS:
        edits = total = 0
        for file in sorted(samples.glob(f"*_{kind}.wav")):
            wave, rate = soundfile.read(file, dtype="float32")
            low = (soxr.resample(wave, rate, RATE).clip(-1, 1) * 32_767).astype("int16")
            decoder.start_utt()
            decoder.process_raw(low.tobytes(), full_utt=True)
            decoder.end_utt()
            heard = decoder.hyp().hypstr if decoder.hyp() else ""
            expected = words(samples.joinpath(f"{file.name[:2]}.txt").read_text())
            edits += edit_distance(words(heard), expected)
            total += len(expected)
        if total:
            errors[kind] = round(edits / total, 4)
    return errors


def words(text: str) -> list[str]:
    """The words of a text in lower case without punctuation."""
    return re.findall(r"[a-z']+", text.lower())


if __name__ == "__main__":
    main()
