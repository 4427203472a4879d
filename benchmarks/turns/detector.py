"""The detector of pauses alone, on the spoken questions: `python -m benchmarks.turns.detector`. No time is measured.

The wait is that from the end of a question to the end of the message in which the pause after it is found; the time of
a unit comes on top. A question is cut off if a pause is found before its end and the user does not speak again
within the same message. What is found does not depend on the machine's speed.

`--script` plays the questions to the script of `benchmarks.turns` instead, without early units: the wait is that to the
end of the second that the script answers, and a question is cut off if it is answered before its end.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.turns.figures import percentiles
from benchmarks.turns.pieces import PieceEnds
from benchmarks.turns.questions import KINDS, RATE, Conditions, PlacedQuestion, UserSound, load_questions, user_sound
from worker.early.pause import PauseDetector, hear
from worker.vad_network import shared_network

PAUSES_MS = (160, 192, 224)  # of the detector, which counts windows of 32 ms
PIECES_MS = ((100, 100), (100, 40), (40, 40))  # in silence, and beside speech
SILENCES_MS = (160, 200, 240)  # of the script
ANSWER_UNITS = 2  # of the script: the second that it answers, and the next one


def found_pauses(sound: UserSound, pause_ms: int, piece_ms: tuple[int, int]) -> list[int]:
    """The last sample of each message that ends in a pause."""
    network, ends = shared_network(), PieceEnds(sound.samples, *piece_ms)
    detector, begin, found = PauseDetector(network, pause_ms), 0, list[int]()
    while (end := ends.next(begin)) is not None:
        [heard] = hear(network, [(detector, sound.samples[begin:end])])
        if heard.is_pause:
            found.append(end)
        begin = end
    return found


def answered_seconds(sound: UserSound, silence_ms: int) -> list[int]:
    """The last sample of each second whose end the script answers."""
    from benchmarks.turns.script import decision, levels_of  # imports torch

    found, has_asked, until = list[int](), False, 0
    for end in range(RATE, len(sound.samples) + 1, RATE):
        if end <= until:  # the answer goes on
            continue
        has_asked, answers = decision(levels_of(sound.samples[end - RATE : end]), has_asked, silence_ms // 10)
        if answers:
            found.append(end)
            has_asked, until = False, end + (ANSWER_UNITS - 1) * RATE
    return found


def row(questions: Sequence[PlacedQuestion], found: Sequence[int], *, are_answers: bool = False) -> dict[str, Any]:
    """The waits in ms, and the share of the questions that are cut off.

    Args:
        are_answers: what was found is an answer, so that a question that is cut off has no wait.
    """
    waits, n_cut = list[float](), 0
    for one in questions:
        own = [end for end in found if one.begin < end <= one.until]
        n_cut += (is_cut := any(end <= one.end for end in own))
        if not (is_cut and are_answers):
            waits += [(end - one.end) / 16 for end in own if end > one.end][:1]
    return {"questions": len(questions), "wait_ms": percentiles(waits), "cut_off": round(n_cut / len(questions), 4)}


def measured(
    sounds: Sequence[UserSound], find: Callable[[UserSound], list[int]], *, are_answers: bool = False
) -> dict[str, Any]:
    """The figures of all sounds together, and by kind of question.

    Args:
        find: the last sample of each message that ends in a pause, or of each second that is answered.
        are_answers: as in `row`.
    """
    questions, found, shift = list[PlacedQuestion](), list[int](), 0
    for sound in sounds:
        found += [end + shift for end in find(sound)]
        for one in sound.questions:
            questions.append(one._replace(begin=one.begin + shift, end=one.end + shift, until=one.until + shift))
        shift += len(sound.samples)
    kinds = {
        kind: row(own, found, are_answers=are_answers)
        for kind in KINDS
        if (own := [one for one in questions if one.kind == kind])
    }
    return {**row(questions, found, are_answers=are_answers), "kinds": kinds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns.detector", description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=48, help="of each session")
    parser.add_argument("--sessions", type=int, default=4, help="order and pauses differ")
    parser.add_argument("--hesitations", type=float, default=0.0, help="share of questions that hesitate")
    parser.add_argument("--snr-db", type=float, default=25.0, help="speech above the noise")
    parser.add_argument("--script", action="store_true", help="the script's answers at the end of a second")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    # The script needs time for its answers.
    conditions = Conditions(hesitations=options.hesitations, snr_db=options.snr_db)
    if not options.script:
        conditions = replace(conditions, answer_s=1.2, lead_s=1.0)
    sounds = [
        user_sound(load_questions(), options.questions, conditions, np.random.default_rng((0, number)))
        for number in range(options.sessions)
    ]
    print(
        f"{'pause':>5} {'pieces':>8} {'kind':>8} {'questions':>9} | {'wait p50':>8} {'p95':>5} | {'cut off':>7}  (ms)"
    )
    rows = []
    if options.script:
        for silence_ms in SILENCES_MS:
            figures = measured(sounds, partial(answered_seconds, silence_ms=silence_ms), are_answers=True)
            rows.append({"silence_ms": silence_ms, **figures})
            print_rows(silence_ms, "second", figures)
    else:
        for pause_ms in PAUSES_MS:
            for piece_ms in PIECES_MS:
                figures = measured(sounds, partial(found_pauses, pause_ms=pause_ms, piece_ms=piece_ms))
                rows.append({"early_pause_ms": pause_ms, "piece_ms": piece_ms, **figures})
                print_rows(pause_ms, "/".join(map(str, piece_ms)), figures)
    if options.json:
        options.json.write_text(json.dumps({"snr_db": options.snr_db, "rows": rows}, indent=1) + "\n")


def print_rows(pause_ms: int, pieces: str, figures: dict[str, Any]) -> None:
    """Print a line for all questions and one for each kind. pieces: sizes of messages, or `second`."""
    for kind, one in (("all", figures), *figures["kinds"].items()):
        wait = one["wait_ms"] or {"p50": np.nan, "p95": np.nan}
        print(
            f"{pause_ms:5} {pieces:>8} {kind:>8} {one['questions']:9} |"
            f" {wait['p50']:8.0f} {wait['p95']:5.0f} | {100 * one['cut_off']:6.1f}%"
        )


if __name__ == "__main__":
    main()
