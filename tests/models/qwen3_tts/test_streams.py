"""Speech of many requests: streamed sound equals offline sound, whatever runs beside it; ends and waits."""

import numpy as np
import pytest

from models.errors import SettingsError, SlotError
from models.qwen3_tts import runaway
from models.qwen3_tts.codec.codec import SpeechCodec
from models.qwen3_tts.codec.config import FRAME_SAMPLES
from models.qwen3_tts.codec.load import SpeechTokenizer
from models.qwen3_tts.codec.region_table import CodecShapes
from models.qwen3_tts.generate import CodesRequest, generate_codes
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.prompt import Array, PromptText, SpeechPrompt, SpeechVoice, lay_out
from models.qwen3_tts.runaway import CodesEnd, RunawayLimits
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.streams import SpeechStreams, SpokenPart, SpokenRequest
from tests.models.qwen3_tts.test_runner import MAX_LEN, ROLE, SHAPES, prompt

TOLERANCE = 5e-6


def streams_of(model: Qwen3TTS, tokenizer: SpeechTokenizer, n_slots: int = 2) -> SpeechStreams:
    runner = TalkerRunner(model, n_slots=n_slots, max_len=MAX_LEN, shapes=SHAPES)
    return SpeechStreams(runner, SpeechCodec(tokenizer, n_slots=n_slots, shapes=CodecShapes(batch=(1, 2))))


@pytest.fixture(scope="module")
def streams(custom_model: Qwen3TTS, speech_tokenizer: SpeechTokenizer) -> SpeechStreams:
    return streams_of(custom_model, speech_tokenizer)


def spoken(streams: SpeechStreams, seed: int, frames: int) -> SpokenRequest:
    return SpokenRequest(prompt(streams.runner, seed), 1, seed=seed, limits=RunawayLimits(max_frames=frames))


def offline(streams: SpeechStreams, request: SpokenRequest) -> Array:
    """The sound of the request's codes, decoded at once."""
    limit = request.limits.frame_cap(request.n_text)
    (got,) = generate_codes(streams.runner, [CodesRequest(request.prompt, limit, request.seed)])
    before = 0 if request.reference_codes is None else len(request.reference_codes)
    codes = got.codes if not before else np.concatenate((request.reference_codes, got.codes))
    streams.codec.begin([0])
    return streams.codec.decode_all(0, codes).cpu().numpy()[FRAME_SAMPLES * before :]


def run(streams: SpeechStreams, slots: set[int]) -> dict[int, list[SpokenPart]]:
    """The parts of each slot, until all have ended or wait."""
    parts: dict[int, list[SpokenPart]] = {slot: [] for slot in slots}
    while streams.can_step:
        for part in streams.step():
            parts[part.slot].append(part)
    return parts


def assert_sound(parts: list[SpokenPart], expected: Array) -> None:
    got = np.concatenate([part.samples for part in parts])
    assert got.shape == expected.shape, f"expected {expected.shape}, got {got.shape}"
    assert np.abs(got - expected).max() <= TOLERANCE


def test_streamed_sound_equals_offline_sound(streams: SpeechStreams) -> None:
    requests = [spoken(streams, 3, 9), spoken(streams, 8, 4)]
    expected = [offline(streams, request) for request in requests]
    first = streams.start(requests[0])
    early = [part for _ in range(2) for part in streams.step()]
    second = streams.start(requests[1])
    with pytest.raises(SlotError, match=r"expected one of the free slots \[\]"):
        streams.start(requests[1])
    parts = run(streams, {first, second})
    assert_sound(early + parts[first], expected[0])
    assert_sound(parts[second], expected[1])
    sizes = [len(part.samples) // FRAME_SAMPLES for part in early + parts[first]]
    assert sizes == [1, 2, 4, 2], "chunks grow; the last has what is left"
    assert [part.end for part in parts[second]] == [None, None, CodesEnd.LENGTH]
    assert streams.runner.free_slots == [0, 1] and not streams.can_step


def test_live_text_waits_with_all_its_sound_sent(streams: SpeechStreams) -> None:
    whole = prompt(streams.runner, 8, streams_text=True)
    request = SpokenRequest(whole, 9, seed=6, limits=RunawayLimits(max_frames=12))
    expected = offline(streams, request)
    live = SpeechPrompt(whole.text, whole.codes, whole.speaker_row, None, whole.trailing[:3], is_open=True)
    slot = streams.start(SpokenRequest(live, 4, seed=6, limits=request.limits))
    parts = run(streams, {slot})[slot]
    assert sum(len(part.samples) for part in parts) == 4 * FRAME_SAMPLES, "one frame, and one for each token"
    assert parts[-1].end is None and streams.step() == []
    streams.append_text(slot, [], is_open=True)
    assert not streams.can_step
    streams.append_text(slot, whole.trailing[3:], is_open=False)
    parts += run(streams, {slot})[slot]
    assert_sound(parts, expected)
    with pytest.raises(SlotError, match=r"slot \d: expected one of the running ones \[\]"):
        streams.append_text(slot, [1], is_open=False)
    streams.cancel(slot)  # of a request that has ended: no effect
    assert streams.runner.free_slots == [0, 1]


def test_reference_codes_are_continued(base_model: Qwen3TTS, speech_tokenizer: SpeechTokenizer) -> None:
    streams = streams_of(base_model, speech_tokenizer, n_slots=1)
    codes = np.random.default_rng(0).integers(0, 64, (11, 16))
    voice = SpeechVoice(embedding=np.ones(64, np.float32), reference_codes=codes)
    laid_out = lay_out(base_model.config, PromptText(role=ROLE, text=(40, 41), reference=(50,)), voice)
    request = SpokenRequest(laid_out, 2, codes, limits=RunawayLimits(max_frames=3))
    expected = offline(streams, request)
    slot = streams.start(request)
    assert_sound(run(streams, {slot})[slot], expected)


def test_silence_ends_an_answer(streams: SpeechStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runaway, "SILENT_PEAK", 2.0)
    limits = RunawayLimits(silent_seconds=0.4)
    slot = streams.start(SpokenRequest(prompt(streams.runner, 3), 5, seed=3, limits=limits))
    parts = run(streams, {slot})[slot]
    assert parts[-1].end is CodesEnd.SILENCE
    assert sum(len(part.samples) for part in parts) == 7 * FRAME_SAMPLES, "the chunk in which the fifth frame is"


def test_bad_numbers_end_one_request(streams: SpeechStreams) -> None:
    bad, good = (streams.start(spoken(streams, seed, 2)) for seed in (3, 8))
    streams.runner.state.hidden[bad] = float("nan")
    parts = run(streams, {bad, good})
    assert [(part.end, len(part.samples)) for part in parts[bad]] == [(CodesEnd.FAILED, 0)]
    assert parts[good][-1].end is CodesEnd.LENGTH


def test_settings_that_do_not_fit_are_refused(streams: SpeechStreams) -> None:
    with pytest.raises(SettingsError, match="ramp: expected chunks of 1 to 8 frames"):
        SpeechStreams(streams.runner, streams.codec, ramp=(1, 9))
    large = TalkerRunner(streams.runner.model, n_slots=3, max_len=MAX_LEN, shapes=SHAPES)
    with pytest.raises(SettingsError, match="codec slots: expected at least 3, got 2"):
        SpeechStreams(large, streams.codec)
