"""Chat and speech on a GPU choose the same tokens as on the CPU."""

from pathlib import Path

import pytest
import torch

from models.load import load_model
from models.sampling.settings import SpeechSampling
from models.stages.chat import Chat, greedy
from tests.models.stages.conversations import picture, sound, user
from tests.models.stages.speech_calls import BatchedStream
from tests.models.stages.speech_helpers import make_speaker, rows

pytestmark = pytest.mark.gpu

TALKS = {
    "text": user("Hello"),
    "everything": user(picture(90, 60), "look", sound(30000), "and", sound(9000, 1)),
    "long": user(sound(31 * 16000), "long"),
}


@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
def test_chat_gives_the_same_tokens(tiny: Path, talk: list) -> None:
    results = [
        Chat.load(tiny, device=device).reply(talk, sampling=greedy(), max_new_tokens=24, stop_ids=()).ids
        for device in ("cpu", "cuda")
    ]
    assert results[0] == results[1]


def test_bfloat16_chat_is_deterministic(tiny: Path) -> None:
    chat = Chat.load(tiny, device="cuda", dtype=torch.bfloat16, n_slots=2)
    answers = [chat.reply(TALKS["everything"], seed=3, max_new_tokens=24, stop_ids=()) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(answers[0].ids) == 24


@pytest.mark.parametrize("kind", ["full_attention", "sliding_window", "sliding_recompute", "reindex"])
def test_speech_gives_the_same_tokens(tiny: Path, kind: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        speaker = make_speaker(load_model(tiny, device=device))
        speaker.start_turn(1, SpeechSampling(greedy=True))
        stream = BatchedStream(speaker, 1, kind, window=20, max_speech_tokens=30)
        chunks = [stream.push(rows(n, n).to(device), final=n == 5) for n in (7, 3, 6, 5)]
        speaker.start_turn(0, SpeechSampling(greedy=True))
        units = speaker.unit([0, 1], [rows(4).to(device), rows(2).to(device)], may_end=[True, False])
        results.append((chunks, stream.flush(), units))
    assert results[0] == results[1]
