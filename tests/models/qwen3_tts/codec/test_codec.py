"""The codec over slots: any chunks of any mix of slots give the offline sound; checks of input; reference sounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import AudioError, SettingsError, ShapeError, SlotError, TokenError
from models.layers.transformer import Derived
from models.qwen3_tts.codec.codec import CodeChunk, SpeechCodec
from models.qwen3_tts.codec.config import FRAME_SAMPLES
from models.qwen3_tts.codec.load import SpeechTokenizer
from models.qwen3_tts.codec.region_table import CodecShapes
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from tests.models.compare import assert_close
from tests.parity.golden import GoldenDir
from tests.parity.qwen3_tts.codec import tokenizer_of

SLOTS = 3
SHAPES = CodecShapes(batch=(1, 2, 4), frames=(1, 2, 4, 8), sounds=(1, 2), sound_frames=(5, 17))
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def codec(tokenizer: SpeechTokenizer, speaker_encoder: SpeakerEncoder) -> SpeechCodec:
    return SpeechCodec(tokenizer, speaker_encoder, n_slots=SLOTS, shapes=SHAPES)


def codes_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, (n, 16))


def offline(tokenizer: SpeechTokenizer, codes: np.ndarray) -> Tensor:
    """The sound of all codes in one chunk of a state of its own."""
    decoder, n = tokenizer.decoder, len(codes)
    with torch.no_grad():
        state = decoder.new_state(1, n)
        return decoder(state, torch.tensor([0]), torch.from_numpy(codes)[None], torch.tensor([n]))[0]


# One call: for each slot the frames of its chunk, or 0 to stay out, and whether a new stream begins in it.
CALLS = st.lists(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), min_size=SLOTS, max_size=SLOTS), min_size=1, max_size=6
)


@given(calls=CALLS)
@settings(max_examples=8)
def test_any_chunks_of_any_slots_give_the_offline_sound(codec: SpeechCodec, tokenizer: SpeechTokenizer, calls) -> None:
    streams: list[tuple[list[np.ndarray], list[Tensor]]] = []
    current: dict[int, int] = {}
    for number, call in enumerate(calls):
        begun = [slot for slot, (n, fresh) in enumerate(call) if n and (slot not in current or fresh == 0)]
        for slot in begun:
            current[slot] = len(streams)
            streams.append(([], []))
        if begun:
            codec.begin(begun)
        chunks = [CodeChunk(slot, codes_of(n, 10 * number + slot)) for slot, (n, _) in enumerate(call) if n]
        if not chunks:
            continue
        order = sorted(chunks, key=lambda chunk: (len(chunk.codes), chunk.slot))  # rows are not in the order of slots
        for chunk, wave in zip(order, codec.decode(order), strict=True):
            codes, waves = streams[current[chunk.slot]]
            codes.append(chunk.codes)
            waves.append(wave)
    for codes, waves in streams:
        expected = offline(tokenizer, np.concatenate(codes))
        assert_close(torch.cat(waves), expected, TOLERANCE)


def test_single_frames_in_bfloat16_are_as_the_whole(codec_golden: GoldenDir) -> None:
    tokenizer, codes = tokenizer_of(codec_golden).to(torch.bfloat16), codes_of(9)
    for module in tokenizer.modules():
        if isinstance(module, Derived):
            module.derive("cpu", torch.bfloat16)
    codec = SpeechCodec(tokenizer, n_slots=1, shapes=CodecShapes(batch=(1,), frames=(1,)))
    codec.begin([0])
    single = torch.cat([codec.decode([CodeChunk(0, code[None])])[0] for code in codes]).double()
    whole = offline(tokenizer, codes).double()
    snr_db = 10 * torch.log10(whole.square().sum() / (single - whole).square().sum().clamp_min(1e-20))
    assert snr_db >= 60, f"expected at least 60 dB, got {snr_db:.1f}"


def test_more_chunks_than_the_largest_batch(tokenizer: SpeechTokenizer) -> None:
    codec = SpeechCodec(tokenizer, n_slots=5, shapes=CodecShapes(batch=(2,), frames=(2,)))
    codes = [codes_of(1 + slot % 2, slot) for slot in range(5)]
    codec.begin(range(5))
    waves = codec.decode([CodeChunk(slot, part) for slot, part in enumerate(codes)])
    for part, wave in zip(codes, waves, strict=True):
        assert_close(wave, offline(tokenizer, part), TOLERANCE)


def test_primed_slot_continues_the_reference(codec: SpeechCodec, tokenizer: SpeechTokenizer) -> None:
    """Sound after a reference equals the end of the sound of both, also from a saved state."""
    reference, speech = codes_of(19, 1), codes_of(6, 2)
    expected = offline(tokenizer, np.concatenate((reference, speech)))[19 * FRAME_SAMPLES :]
    codec.begin([0])
    codec.decode_all(0, reference)
    saved = codec.state.save(0)
    assert_close(codec.decode_all(0, speech), expected, TOLERANCE)
    codec.state.load(2, saved)
    [wave] = codec.decode([CodeChunk(2, speech)])
    assert_close(wave, expected, TOLERANCE)


def test_failed_call_leaves_the_slots_unchanged(codec: SpeechCodec, tokenizer: SpeechTokenizer, monkeypatch) -> None:
    codes = codes_of(9, 3)
    codec.begin([1])
    first = codec.decode_all(1, codes[:4])

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer.decoder.decoder[-1], "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            codec.decode([CodeChunk(1, codes_of(5, 4))])
    again = codec.decode_all(1, codes[4:])
    assert_close(torch.cat((first, again)), offline(tokenizer, codes), TOLERANCE)


def test_state_stays_at_its_addresses(codec: SpeechCodec) -> None:
    before = [tensor.data_ptr() for tensor in codec.state.tensors()]
    codec.begin([0, 1, 2])
    codec.decode([CodeChunk(slot, codes_of(3)) for slot in range(SLOTS)])
    assert [tensor.data_ptr() for tensor in codec.state.tensors()] == before
    assert codec.state.positions[:SLOTS].tolist() == [3, 3, 3]
    assert codec.state.n_bytes == sum(tensor.nbytes for tensor in codec.state.tensors())


def test_not_a_number_does_not_outlive_its_stream(codec: SpeechCodec, tokenizer: SpeechTokenizer) -> None:
    for tensor in codec.state.tensors():
        tensor[0] = torch.nan if tensor.is_floating_point() else 5
    codec.begin([0])
    codes = codes_of(3)
    assert_close(codec.decode_all(0, codes), offline(tokenizer, codes), TOLERANCE)


@pytest.mark.parametrize(
    ("chunks", "error", "message"),
    [
        ([], SlotError, "expected different ones of 0 to 2, got []"),
        ([(0, codes_of(1)), (0, codes_of(1))], SlotError, "got [0, 0]"),
        ([(3, codes_of(1))], SlotError, "got [3]"),
        ([(0, codes_of(9))], ShapeError, "frames: expected at most one of (1, 2, 4, 8), got 9"),
        ([(0, codes_of(1) + 64)], TokenError, "codes of slot 0: expected codes of 0 to 63"),
        ([(0, codes_of(1) - 64)], TokenError, "codes of slot 0: expected codes of 0 to 63"),
        ([(0, codes_of(0))], TokenError, "expected int64 [1 or more, 16], got int64 [0, 16]"),
        ([(0, codes_of(2)[:, :15])], TokenError, "got int64 [2, 15]"),
        ([(0, codes_of(2).astype(np.float32))], TokenError, "got float32 [2, 16]"),
    ],
)
def test_wrong_chunks_are_refused(codec: SpeechCodec, chunks, error, message) -> None:
    before = [tensor.clone() for tensor in codec.state.tensors()]
    with pytest.raises(error) as raised:
        codec.decode([CodeChunk(*chunk) for chunk in chunks])
    assert message in str(raised.value)
    assert all(torch.equal(*pair) for pair in zip(before, codec.state.tensors(), strict=True))


def test_reference_sound_at_a_bucket(codec: SpeechCodec, tokenizer: SpeechTokenizer, codec_golden) -> None:
    tensors = codec_golden.tensors("speech_encoder")
    sound, expected = tensors["batch.wave_q1"].numpy() / np.float32(20_000), tensors["batch.codes1_alone"]
    assert np.array_equal(codec.encode(sound, silence=0), expected.numpy())
    quiet = codec.encode(sound)
    assert quiet.shape == (17, 16), "expected the frames of the sound and half a second"
    assert np.array_equal(quiet[:10], expected[:10].numpy()), "expected silence to change the last frames only"


def test_speaker_vector_at_a_bucket(codec: SpeechCodec, codec_golden) -> None:
    tensors = codec_golden.tensors("speaker_encoder")
    vector = codec.speaker(tensors["w0.wave_q"].numpy() / np.float32(20_000))
    assert vector.dtype == np.float32
    assert_close(torch.from_numpy(vector), tensors["w0.embedding"], TOLERANCE)


def test_wrong_reference_sounds_are_refused(codec: SpeechCodec, tokenizer: SpeechTokenizer) -> None:
    with pytest.raises(AudioError, match=r"at most 32640 samples \(1.36 s\), silence at the end included, got 32641"):
        codec.encode(np.zeros(20_641, np.float32))
    with pytest.raises(AudioError, match="expected at least 2048 samples, got 2047"):
        codec.speaker(np.zeros(2047, np.float32))
    with pytest.raises(AudioError, match="expected finite samples"):
        codec.speaker(np.full(4000, np.nan, np.float32))
    with pytest.raises(SettingsError, match="expected 0 samples or more, got -1"):
        codec.encode(np.zeros(5000, np.float32), silence=-1)
    without = SpeechCodec(tokenizer, n_slots=1, shapes=SHAPES)
    with pytest.raises(SettingsError, match="expected a checkpoint with a speaker encoder, got none"):
        without.speaker(np.zeros(5000, np.float32))
    with pytest.raises(SettingsError, match="expected at least 1, got 0"):
        SpeechCodec(tokenizer, n_slots=0)


def test_decoding_is_one_graph(codec: SpeechCodec, tokenizer: SpeechTokenizer) -> None:
    """Tracing raises at a graph break."""
    codes = codes_of(3, 5)
    codec.regions.compile(["codec_decode"], backend="eager")
    try:
        codec.begin([0])
        assert_close(codec.decode_all(0, codes), offline(tokenizer, codes), TOLERANCE)
    finally:
        codec.regions.uncompile()


def test_warm_up_leaves_the_slots_unchanged(codec: SpeechCodec) -> None:
    codec.begin([0])
    codec.decode_all(0, codes_of(3))
    before = [tensor[:SLOTS].clone() for tensor in codec.state.tensors()]
    codec.regions.warm_up()
    assert all(torch.equal(old, new[:SLOTS]) for old, new in zip(before, codec.state.tensors(), strict=True))
    scratch = [tensor[codec.state.scratch] for tensor in codec.state.tensors()]
    assert not any(tensor.any() for tensor in scratch), "expected an empty scratch slot"
