"""The messages of a unit's outcome. Torch-free."""

import time
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from worker.early.trial import EarlyEnd
from worker.loop.results import SOUND_RATE, UNIT_MS, PartialResult, StageTimes, UnitResult
from worker.protocol.messages import Partial, Result
from worker.protocol.unit_counters import Mark, UnitUsage
from worker.protocol.wire import Sound

# A unit is finalized after its result is sent, so `finalize` and `total` are not known yet.
SENT_STAGES = [one.name for one in fields(StageTimes) if one.name not in ("finalize", "total", "load", "gaps")]


@dataclass(eq=False)
class UnitClock:
    """Times of a chunk in monotonic seconds: its arrival, and the start of its unit.

    is_replay: the unit was decided before.
    """

    received: float
    started: float
    is_replay: bool = False


def partial_message(event: PartialResult, part: int) -> Partial:
    """The message for a partial result. part: its number within the unit, from 1."""
    return Partial(current_time=event.unit, part=part, text=event.text, audio_data=_sound(event.pcm))


def result_message(
    event: UnitResult, clock: UnitClock, *, ends_turn: bool, speaks: bool, n_parts: int, backlog: int
) -> Result:
    """The message for a result.

    Args:
        event: the result.
        clock: the times of its chunk.
        ends_turn: whether this unit ends a turn that was announced to the client.
        speaks: whether the session produces sound.
        n_parts: partial results that were sent for this unit.
        backlog: chunks that wait after this one.
    """
    times, now = event.times, time.monotonic()
    wall_ms = 1000 * (now - clock.started)
    lag_ms = 1000 * (clock.started - clock.received) + times.wait
    stages = {name: getattr(times, name) for name in SENT_STAGES}
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
        # Overlapping stages count in full, so the sum may exceed the time since prefill.
        cost_all_ms=times.decode + times.condition + times.speech + times.sound,
        n_tokens=event.n_tokens,
        n_tts_tokens=event.n_speech_tokens,
        server_send_ts=time.time(),
        wall_clock_ms=wall_ms,
        kv_cache_length=event.context_len,
        vision_slices=event.n_slices,
        lag_ms=lag_ms,
        backlog_units=backlog,
        n_caught_up=event.n_caught_up,
        stages=stages,
        headroom_ms=UNIT_MS - 1000 * (now - clock.received),
        n_parts=n_parts,
        turn_limit=True if event.turn_limit else None,
        side_texts=list(event.side_texts) or None,
        incomplete=True if event.is_incomplete else None,
        **_early(event),
    )


def _early(event: UnitResult) -> dict[str, Any]:
    """The fields of a unit that has run before its second was full."""
    if event.early is None or event.early.end is not EarlyEnd.COMMITTED:
        return {}
    return {"early": True, "shift_ms": event.early.shift_ms}


class TurnCounters:
    """How much text and sound of the open turn was sent."""

    def __init__(self) -> None:
        self._n_chars = self._n_samples = 0

    def counted(self, message: Result, event: UnitResult) -> Result:
        """The message of a result, with `usage` and `marks`; none of a unit of which nothing was sent."""
        marks = []
        if not event.is_listen or message.n_parts:
            self._n_chars += len(event.text)
            self._n_samples += _n_sent(message, event)
            marks.append(Mark(text_chars=self._n_chars, audio_ms=1000 * self._n_samples / SOUND_RATE))
        if event.end_of_turn or (event.is_listen and event.tokens):  # without tokens the unit has decided nothing
            self._n_chars = self._n_samples = 0
        usage = UnitUsage(
            text_rows=event.rows.text,
            audio_rows=event.rows.audio,
            image_rows=event.rows.image,
            text_tokens=event.n_tokens,
            speech_tokens=event.n_speech_tokens,
            side_tokens=event.n_side_tokens,
        )
        return message.model_copy(update={"usage": usage, "marks": marks})


def _n_sent(message: Result, event: UnitResult) -> int:
    """Samples of the unit's sound. Sound that was sent in parts is not padded."""
    if message.n_parts:
        return 0 if event.pcm is None else len(event.pcm)
    return 0 if message.audio_data is None else len(message.audio_data.samples("sound"))


def _whole_second(event: UnitResult, speaks: bool) -> np.ndarray | None:
    """The unit's sound, padded in front to one second within a turn: players play chunks back to back."""
    if event.end_of_turn or not speaks:
        return event.pcm
    sound = np.zeros(0, np.float32) if event.pcm is None else event.pcm
    return np.concatenate((np.zeros(max(SOUND_RATE - len(sound), 0), np.float32), sound))


def _sound(pcm: np.ndarray | None) -> Sound | None:
    return None if pcm is None or not len(pcm) else Sound(pcm)
