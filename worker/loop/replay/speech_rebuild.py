"""Restores the state of speech model and vocoder after a rebuilt unit, so that the speech of its turn continues.

The speech model gets the conditioning rows and the speech tokens of the newest unit that has text, and those of the
units after it that spoke the rest of its turn; earlier units of the turn are left out. The vocoder starts again with
the tokens that have no sound yet.
"""

import torch

from models.errors import NumericsError
from models.stages.unit_steps import UnitSteps
from worker.loop.replay.replay_job import ReplayJob
from worker.loop.voice_manager import VoiceManager


def rebuild_speech(unit_steps: UnitSteps, voices: VoiceManager, job: ReplayJob) -> None:
    """Prepare the slot to continue the speech of the job's turn. It must have the hidden states of the unit's tokens.

    Raises: NumericsError; ShapeError or ContextOverflowError for more tokens than fit; SlotError as `Speaker.check`.
    """
    session, slot, decided, speaker = job.session, job.slot, job.decided, unit_steps.speaker
    assert speaker is not None, "expected a speech model"
    if not decided.drains:
        voices.cut(session)
    (rows,) = speaker.condition([slot], [[] if decided.drains else job.spoken_ids], [False])
    rows = torch.cat((rows, speaker.token_rows(list(decided.spoken)).to(rows.dtype)))
    before = unit_steps.counters(slot)
    # The first token that the call draws is dropped: the next call draws from the same random numbers.
    speaker.begin([slot], [rows], min_speech_tokens=[0], max_speech_tokens=[1])
    (call,) = speaker.end([slot])
    unit_steps.rewind_speech(slot, before._replace(speech_rows=speaker.rows(slot)))
    if call.bad:
        raise NumericsError(f"speech of session {session.id}", expected="finite logits", got="NaN or infinity")
    speech = session.speech
    speech.begin_unit()
    speech.add(decided.spoken)
    speech.set_draining(not session.turn_open)
    if decided.drains:
        speech.count_drained(len(decided.spoken))
    if speech.windows is not None:
        speech.windows.resume(decided.unvoiced)
