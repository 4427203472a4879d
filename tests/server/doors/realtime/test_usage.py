import numpy as np
import pytest

from server.doors.core.chat_turn import TurnFinished, TurnSound, TurnStarted, TurnText
from server.doors.realtime.usage import AnswerUsage, TokenUsage
from worker.protocol.chat_messages import ReplyUsage

USED = ReplyUsage(input_tokens=30, input_image_tokens=8, input_audio_tokens=10, text_tokens=5, speech_tokens=12)
SECOND = TurnSound(np.zeros(24_000, np.float32))


def test_the_workers_counts_replace_those_of_what_has_come() -> None:
    total = TokenUsage(text_in=1, audio_out=2)
    used = AnswerUsage(total)
    for event in (TurnStarted(30), TurnText("a"), TurnText("b"), SECOND):
        used.record(event)
    assert total == TokenUsage(text_in=31, text_out=2, audio_out=27), "expected what a cancelled answer has used"
    used.record(TurnFinished("ab", "stop", USED))
    assert total == TokenUsage(text_in=13, audio_in=10, image_in=8, text_out=5, audio_out=14)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_voiced_text_counts_its_speech_alone(*, is_finished: bool) -> None:
    total = TokenUsage(text_in=30, text_out=5)
    used = AnswerUsage(total, counts_input=False)
    for event in (TurnStarted(40), TurnText("a"), SECOND, *[TurnFinished("a", "stop", USED)] * is_finished):
        used.record(event)
    assert total == TokenUsage(text_in=30, text_out=5, audio_out=12 if is_finished else 25)
