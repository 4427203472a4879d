"""What the host side does after a failure of the device, and which buckets it asks for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.errors import ShapeError, SlotError
from models.graphs import compile_counters
from models.token2wav.conformer import RelativeAttention
from models.token2wav.flow_state import FlowSizes
from models.token2wav.load import load_flow_and_hift
from models.token2wav.region_table import VocoderShapes
from models.token2wav.vocoder import Chunk, Vocoder
from tests.models.compare import assert_same
from tests.models.token2wav.vocoders import FOLDER, make_codes, make_vocoder, make_voice

CODES = make_codes(0, 28)


class Watched:
    """Regions of a vocoder with a record of the buckets asked for; those named in `failing` raise."""

    def __init__(self, vocoder: Vocoder):
        self.plain, self.failing, self.buckets = vocoder.graphs, set(), []
        vocoder.graphs = self

    def __call__(self, name: str, bucket: dict[str, int], *tensors: Tensor, **static: Any) -> Any:
        self.buckets.append((name, bucket))
        if name in self.failing:
            raise torch.OutOfMemoryError("no room")
        return self.plain(name, bucket, *tensors, **static)


@pytest.mark.parametrize("failing", ["flow", "hift"])
def test_a_turn_that_failed_half_way_is_over(failing: str):
    vocoder = make_vocoder()
    one, two, other = (vocoder.open(make_voice(), n) for n in (2, 1, 2))
    watched = Watched(vocoder)
    first = vocoder.speak([Chunk(one, CODES)])
    watched.failing = {failing}
    with pytest.raises(torch.OutOfMemoryError):
        vocoder.speak([Chunk(one, CODES), Chunk(two, CODES)])
    watched.failing = set()
    for session in (one, two):
        with pytest.raises(
            SlotError, match=rf"session {session}: expected a turn in order, .* got one of which a chunk"
        ):
            vocoder.speak([Chunk(session, CODES), Chunk(other, CODES)])
    assert_same(vocoder.speak([Chunk(other, CODES)])[0], first[0])
    vocoder.begin_turn(one)
    assert_same(vocoder.speak([Chunk(one, CODES)])[0], first[0])
    vocoder.close(two)
    assert vocoder.n_free == 3


def test_a_new_turn_asks_for_the_buckets_of_the_first():
    vocoder = make_vocoder(shapes=VocoderShapes(batch=(1,), columns=(176, 256), prompt=(60, 120)))
    session, watched = vocoder.open(make_voice()), Watched(vocoder)
    turns = []
    for _ in range(2):
        watched.buckets.clear()
        for _ in range(4):
            vocoder.speak([Chunk(session, CODES)])
        turns.append(list(watched.buckets))
        vocoder.begin_turn(session)
    assert turns[0] == turns[1]
    columns = [bucket["columns"] for name, bucket in turns[0] if name == "flow"]
    assert columns == [176, 176, 256, 256], "a turn sees more and more, up to a bound"


def test_batches_hold_no_more_than_there_are_sessions():
    assert make_vocoder(sizes=FlowSizes(1, 1, 2, max_prompt=120, voice_frames=120)).shapes.batch == (1,)
    assert make_vocoder(sizes=FlowSizes(3, 1, 2, max_prompt=120, voice_frames=120)).shapes.batch == (1, 2, 3)
    assert make_vocoder(sizes=FlowSizes(9, 1, 2, max_prompt=120, voice_frames=120)).shapes.batch == (1, 2, 4)


def test_a_new_voice_compiles_nothing():
    torch._dynamo.reset()
    vocoder = make_vocoder(load_flow_and_hift(FOLDER), steps=(1,))
    vocoder.regions.compile(["flow"], by_layer=True, backend="eager")
    vocoder.open(make_voice(0, 30))
    session = vocoder.open(make_voice(1, 31))
    vocoder.speak([Chunk(session, CODES)])
    before = compile_counters()
    vocoder.open(make_voice(2, 32))
    vocoder.offline(CODES, make_voice(2, 33))
    assert compile_counters() == before
    torch._dynamo.reset()


def test_warm_up_empties_the_scratch_slot():
    vocoder = make_vocoder()
    vocoder.regions.warm_up()
    for tensor in vocoder.vocode_state.tensors():
        assert not tensor[vocoder.state.scratch].any()


def test_distances_of_every_bucket_are_ready(monkeypatch: pytest.MonkeyPatch):
    """Chunks at the default sizes: the longest prompt, the largest chunk."""
    vocoder = make_vocoder(shapes=None, sizes=FlowSizes(1, 1, max_steps=2, voice_frames=1500))
    session = vocoder.open(make_voice(0, 750))
    monkeypatch.setattr(RelativeAttention, "_project", lambda *_: pytest.fail("projected again"))
    for _ in range(4):
        vocoder.speak([Chunk(session, CODES)])
    vocoder.speak([Chunk(session, CODES, last=True)])


def test_one_pass_has_a_longest_utterance():
    vocoder = make_vocoder()
    with pytest.raises(ShapeError, match=r"codes in one pass: expected at most 2018 with this voice.* got 2019"):
        vocoder.offline([1] * 2019, make_voice(0, 30))
