"""Decisions that stand in for those of trained weights: speak when the user has been silent."""

from dataclasses import dataclass, replace

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE
from worker.loop.duplex_job import DuplexJob
from worker.loop.job import Job
from worker.loop.observer import Observer

PREFIX = "omni_turns_"  # of the sessions whose decisions are scripted; the warm-up keeps its own
LEVEL = 10 ** (-35 / 20)  # RMS of a frame; the questions' phrases are at -23 dB
FRAME = SAMPLE_RATE // 100
SPOKEN_FRAMES = 10  # of a unit, from which on the user has spoken in it
TEXT_TOKENS = 8  # of a speaking unit


@dataclass(frozen=True)
class _Turn:
    """A session between two units. has_asked: the user has spoken since the last answer. n_units: of the open turn."""

    has_asked: bool = False
    n_units: int = 0


class SilenceScript(Observer):
    """Replaces sampled tokens of sessions whose name begins with `PREFIX`; the sampler still runs.

    A unit opens a turn if the user has spoken since the last turn and the unit ends with `silence_ms` of silence,
    whether it was received or stands for the rest of an early unit. A turn has `answer_units` units of `TEXT_TOKENS`
    tokens; all other units listen. The script hears only the level of the sound, so it cannot tell a pause inside a
    sentence from its end.
    """

    def __init__(self, *, silence_ms: int, answer_units: int):
        self._n_silent, self._answer_units = silence_ms // 10, answer_units
        self._turns: dict[str, _Turn] = {}
        self._before: dict[str, _Turn] = {}

    def token_sampled(self, session: str, job: Job, token: int) -> int:
        if not session.startswith(PREFIX) or not isinstance(job, DuplexJob) or job.decoder is None:
            return token
        ids, n_chosen = job.language.control_tokens, len(job.decoder.all_ids)
        if n_chosen == 0:
            return ids.speak if self._speaks(session, job) else ids.listen
        if n_chosen <= TEXT_TOKENS:
            return ord("a") + n_chosen
        ends_turn = self._turns[session].n_units >= self._answer_units and n_chosen == TEXT_TOKENS + 1
        return ids.turn_eos if ends_turn else ids.chunk_eos

    def unit_taken_back(self, session: str) -> None:
        if session in self._before:
            self._turns[session] = self._before[session]

    def _speaks(self, session: str, job: DuplexJob) -> bool:
        turn = self._before[session] = self._turns.get(session, _Turn())
        if job.session.turn_open:
            self._turns[session] = replace(turn, n_units=turn.n_units + 1)
            return True
        levels = np.concatenate([levels_of(unit) for unit in job.audio_units()])
        has_asked, answers = decision(levels, turn.has_asked, self._n_silent)
        self._turns[session] = _Turn(n_units=1) if answers else _Turn(has_asked=has_asked)
        return answers


def decision(levels: np.ndarray, has_asked: bool, n_silent: int) -> tuple[bool, bool]:
    """Whether the user has spoken since the last answer, and whether the unit answers.

    Args:
        levels: [n] RMS of the unit's frames.
        has_asked: whether the user had spoken before this unit.
        n_silent: frames of silence that an answer needs.
    """
    has_asked = has_asked or int((levels > LEVEL).sum()) >= SPOKEN_FRAMES
    return has_asked, has_asked and not (levels[-n_silent:] > LEVEL).any()


def levels_of(samples: np.ndarray) -> np.ndarray:
    """RMS of each frame."""
    frames = samples[len(samples) % FRAME :].reshape(-1, FRAME)
    return np.sqrt(np.square(frames).mean(1))
