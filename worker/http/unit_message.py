"""From a unit's outcome to what its client reads. Torch-free."""

import time
from dataclasses import asdict, dataclass

import numpy as np

from worker.loop.results import SOUND_RATE, UNIT_MS, PartialResult, UnitResult
from worker.protocol.messages import Partial, Result
from worker.protocol.wire import Sound


@dataclass(eq=False)
class UnitClock:
    """When a chunk came and when it was its turn, in monotonic seconds."""

    received: float
    begun: float


def partial_message(event: PartialResult, part: int) -> Partial:
    """part: counts the unit's pieces from 1."""
    return Partial(current_time=event.unit, part=part, text=event.text, audio_data=_sound(event.pcm))


def result_message(
    event: UnitResult, clock: UnitClock, *, ends_turn: bool, speaks: bool, n_parts: int, n_behind: int
) -> Result:
    """
    Args:
        ends_turn: a turn that the client has heard of ends here. speaks: the session has a voice.
        n_parts: partial results that went out before. n_behind: chunks that wait.
    """
    times, now = event.times, time.monotonic()
    wall_ms = 1000 * (now - clock.begun)
    lag_ms = 1000 * (clock.begun - clock.received) + times.wait
    # What comes after the result has left is not known yet.
    stages = {name: value for name, value in asdict(times).items() if name not in ("finalize", "total")}
    return Result(
        is_listen=event.is_listen,
        text="" if event.is_listen else event.text,
        audio_data=None if event.is_listen or n_parts else _sound(_whole_second(event, speaks)),
        end_of_turn=ends_turn,
        current_time=event.index,
        cost_llm_ms=times.decode,
        cost_tts_prep_ms=times.condition,
        cost_tts_ms=times.speech,
        cost_token2wav_ms=times.sound,
        # Stages that ran beside each other count in full: this may be more than has passed since the unit was fed.
        cost_all_ms=times.decode + times.condition + times.speech + times.sound,
        n_tokens=event.n_tokens,
        n_tts_tokens=event.n_speech_tokens,
        server_send_ts=time.time(),
        wall_clock_ms=wall_ms,
        kv_cache_length=event.context_len,
        vision_slices=event.n_slices,
        lag_ms=lag_ms,
        backlog_units=n_behind,
        n_caught_up=event.n_caught_up,
        stages=stages,
        headroom_ms=UNIT_MS - 1000 * (now - clock.received),
        n_parts=n_parts,
    )


def _whole_second(event: UnitResult, speaks: bool) -> np.ndarray | None:
    """Players lay chunks end to end: within a turn none may be shorter than its second."""
    if event.end_of_turn or not speaks:
        return event.pcm
    sound = np.zeros(0, np.float32) if event.pcm is None else event.pcm
    return np.concatenate((np.zeros(max(SOUND_RATE - len(sound), 0), np.float32), sound))


def _sound(pcm: np.ndarray | None) -> Sound | None:
    return None if pcm is None or not len(pcm) else Sound(pcm)
