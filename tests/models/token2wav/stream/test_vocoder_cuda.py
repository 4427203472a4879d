"""The host side on a GPU: captured regions, no device synchronization inside a chunk, the same sound as on the CPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from models.checkpoint.precision import Kind
from models.graphs.growing_memory import mapped_bytes
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.stream.vocoders import (
    chunks_of_turn,
    copies,
    make_tokens,
    make_vocoder,
    make_voice,
    slot_of,
    speak_turn,
    tensors,
    wide_parts,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SHAPES = VocoderShapes(batch=(1, 2), columns=(256,), prompt=(60, 120))
COUNTS = [25, 25, 7, 25, 1]
KERNELS = ("plain", "fused")
# Sums in a different order; a rounding difference of the pitch then affects hundreds of samples.
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_gpu(kernels: str, captured: bool = False, kind: Kind | None = None) -> Vocoder:
    vocoder = make_vocoder(wide_parts("cuda", kind=kind), shapes=SHAPES, kernels=kernels)
    assert vocoder.regions.kernels == ({"flow", "hift"} if kernels == "fused" else set())
    if captured:
        # begin: 2 batches; flow: 2 batches, 3 sizes of tokens, 2 of columns, 2 of steps; hift: 2 x 3.
        assert vocoder.regions.capture() == 2 + 24 + 6 == vocoder.regions.n_captured
    return vocoder


def turns(vocoder: Vocoder, rounds: int = 2) -> list[Tensor]:
    """The sounds of three sessions with two voices and two numbers of steps, for `rounds` turns."""
    opened = [vocoder.open(make_voice(n, 30 + 25 * n), steps) for n, steps in ((0, 2), (1, 2), (0, 1))]
    waves = []
    for number in range(rounds):
        speech_tokens = [make_tokens(10 * number + n, sum(COUNTS) + 13) for n in range(3)]
        chunks = [chunks_of_turn(session, one, COUNTS) for session, one in zip(opened, speech_tokens, strict=True)]
        for together in zip(*chunks, strict=True):
            waves += vocoder.speak(together)
        vocoder.begin_turn(*opened)
    for session in opened:
        vocoder.close(session)
    return [wave.cpu() for wave in waves]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("captured", [False, True])
def test_sound_equals_the_sound_on_the_cpu(kernels: str, captured: bool):
    expected = turns(make_vocoder(wide_parts(), shapes=SHAPES))
    for i, (wave, want) in enumerate(zip(turns(on_gpu(kernels, captured)), expected, strict=True)):
        assert wave.shape == want.shape
        off = (wave - want).square().mean() / want.square().mean()
        assert off < 1e-3, f"wave {i}: expected 30 dB above the difference, got {-10 * off.log10():.1f}"


@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_replay_equals_eager(kernels: str, kind: Kind | None):
    """Sound and state of every slot, after sessions of all sizes used the same graphs."""
    eager, captured = on_gpu(kernels, kind=kind), on_gpu(kernels, captured=True, kind=kind)
    for i, (wave, want) in enumerate(zip(turns(captured), turns(eager), strict=True)):
        assert_close(wave, want, TOLERANCE, f"wave {i}")
    assert captured.regions.n_skipped == 0, "expected a graph for every call"
    for got, want in zip(tensors(captured), tensors(eager), strict=True):
        if got.shape and got.dtype == torch.int64:
            keep = torch.arange(len(got)) != eager.state.scratch
            assert_same(got[keep], want[keep], "tables and lengths")


@pytest.mark.parametrize("kernels", KERNELS)
def test_replay_is_repeatable_after_other_sessions(kernels: str):
    """Bit-identical: no data of another session stays in a graph's inputs, outputs or memory."""
    vocoder = on_gpu(kernels, captured=True)
    speech_tokens = make_tokens(1, sum(COUNTS) + 13)
    session = vocoder.open(make_voice())
    expected = speak_turn(vocoder, session, speech_tokens, COUNTS)
    kept = [wave.clone() for wave in expected]
    turns(vocoder, 1)
    vocoder.begin_turn(session)
    for i, (wave, want) in enumerate(zip(speak_turn(vocoder, session, speech_tokens, COUNTS), expected, strict=True)):
        assert_same(wave.cpu(), want.cpu(), f"chunk {i}")
    for wave, want in zip(expected, kept, strict=True):
        assert_same(wave.cpu(), want.cpu(), "sound that was returned before")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("captured", [False, True])
def test_no_chunk_synchronizes_with_the_device(kernels: str, captured: bool):
    vocoder = on_gpu(kernels, captured)
    sessions = [vocoder.open(make_voice(n)) for n in range(2)]
    chunks = [Chunk(session, make_tokens(session, 28)) for session in sessions]
    vocoder.speak(chunks)
    vocoder.speak(chunks[:1])
    with no_synchronization():
        waves = [vocoder.speak(chunks), vocoder.speak(chunks[:1])]
        vocoder.begin_turn(*sessions)
        waves.append(vocoder.speak([chunk._replace(last=True) for chunk in chunks]))
    assert all(wave.isfinite().all() for call in waves for wave in call)
    with pytest.raises(RuntimeError), no_synchronization():
        waves[0][0].sum().item()


class Failing:
    """Regions of a vocoder, one of which raises before or after it runs."""

    def __init__(self, vocoder: Vocoder, region: str, when: str):
        self.plain, self.failing = vocoder.regions, (region, when)

    def run(self, function: Callable[..., Any], *given: Any, **static: Any) -> Any:
        return self(self.plain.name_of(function), *given, **static)

    def __call__(self, name: str, *given: Any, **static: Any) -> Any:
        if self.failing == (name, "before"):
            raise torch.OutOfMemoryError("no room")
        result = self.plain(name, *given, **static)
        if self.failing == (name, "after"):
            raise torch.OutOfMemoryError("no room")
        return result


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("captured", [False, True])
def test_failed_call_has_no_effect(kernels: str, captured: bool, monkeypatch: pytest.MonkeyPatch):
    """Bit-identical sounds afterwards. NaN stays in its session too."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    vocoder = on_gpu(kernels, captured)
    plain, sessions = vocoder.regions, [vocoder.open(make_voice(n)) for n in range(2)]
    speech_tokens = [make_tokens(n, sum(COUNTS) + 13) for n in range(2)]
    calls = list(
        zip(
            *(chunks_of_turn(session, one, COUNTS) for session, one in zip(sessions, speech_tokens, strict=True)),
            strict=True,
        )
    )
    expected = [vocoder.speak(chunks) for chunks in calls]
    vocoder.begin_turn(*sessions)
    for chunks, wanted in zip(calls, expected, strict=True):
        for region, when in (("flow", "before"), ("flow", "after"), ("hift", "before"), ("hift", "after")):
            vocoder.regions = Failing(vocoder, region, when)
            with pytest.raises(torch.OutOfMemoryError):
                vocoder.speak(chunks)
            vocoder.regions = plain
        for got, want in zip(vocoder.speak(chunks), wanted, strict=True):
            assert_same(got.cpu(), want.cpu(), "sound after failures")
    vocoder.begin_turn(*sessions)
    slot, state = slot_of(vocoder, sessions[1]), vocoder.state
    torch.cuda.synchronize()  # `begin_turn` writes on the vocoder's own stream
    state.dit_tails[0][slot] = float("nan")
    for chunks, wanted in zip(calls[:3], expected, strict=False):
        got = vocoder.speak(chunks)
        assert_same(got[0].cpu(), wanted[0].cpu(), "sound of a session next to one with NaN")
        assert not got[1].isfinite().all()


def test_captured_regions_allocate_no_memory():
    vocoder = on_gpu("fused", captured=True)
    addresses = [tensor.data_ptr() for tensor in tensors(vocoder)]
    turns(vocoder, 1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(6):
        turns(vocoder, 1)
    assert torch.cuda.memory_reserved() == before
    assert [tensor.data_ptr() for tensor in tensors(vocoder)] == addresses


def test_capture_does_not_change_slots():
    vocoder = on_gpu("fused")
    before = copies(vocoder)
    vocoder.regions.capture()
    state, scratch = vocoder.state, vocoder.state.scratch
    for table in state.tables:
        assert table.length.tolist() == [0] * len(table.length)
    after = dict(zip(map(id, tensors(vocoder)), before, strict=True))
    for tensor in (*state.slot_tensors(), *vocoder.vocode_state.tensors()):
        keep = torch.arange(len(tensor)) != scratch
        assert_same(tensor[keep].cpu(), after[id(tensor)][keep].cpu(), "slots of sessions and voices")


def test_bfloat16_sound_has_the_level_of_float32():
    """Finite and repeatable, too."""
    vocoder, exact = make_vocoder(wide_parts("cuda", torch.bfloat16), shapes=SHAPES), on_gpu("plain")
    first, second = turns(vocoder, 1), turns(vocoder, 1)
    for i, (wave, again, want) in enumerate(zip(first, second, turns(exact, 1), strict=True)):
        assert_same(wave, again, f"wave {i}")
        if len(wave):
            level = 20 * (wave.std() / want.std()).log10().abs()
            assert level < 2, f"wave {i}: expected the level of float32 within 2 dB, got {level:.1f} dB off"


def test_voices_take_memory_when_they_are_prepared():
    """After the capture; the sound is that of a state that holds everything from the start. Unloading gives it back."""
    gc.collect()
    device = torch.device("cuda")
    before = mapped_bytes(device)
    # For each step five units of 2 MiB or more at 1.5 KiB a row: sessions need a part of the first.
    sizes = FlowSizes(n_sessions=2, n_voices=60, max_steps=2, max_prompt=120, voice_frames=7200)
    vocoder, other = (make_vocoder(wide_parts("cuda"), sizes=sizes, shapes=SHAPES, kernels="fused") for _ in range(2))
    assert vocoder.regions.capture()
    held, addresses = [vocoder.held_bytes], [tensor.data_ptr() for tensor in tensors(vocoder)]
    for number in range(65):
        vocoder.prepare(make_voice(number, 60))
        held.append(vocoder.held_bytes)
    assert held == sorted(held) and len(set(held)) > 3 and held[0] < vocoder.n_bytes
    assert held[60:] == 6 * held[-1:], "expected rows of evicted voices to be used again"
    assert [tensor.data_ptr() for tensor in tensors(vocoder)] == addresses
    other.state.grow_voices(sizes.voice_frames)
    assert other.held_bytes == held[-1] and mapped_bytes(device) - before > 2 * (held[-1] - held[0])
    for number in (59, 64):  # the last rows of all voices, and rows used again
        waves = []
        for one in (vocoder, other):
            session = one.open(make_voice(number, 60))
            waves.append(torch.cat(speak_turn(one, session, make_tokens(1, 60), COUNTS[:2])))
            one.close(session)
        assert_close(waves[0], waves[1], TOLERANCE, f"sound of voice {number}")
    plain = make_vocoder(wide_parts("cuda"), sizes=sizes, shapes=SHAPES, kernels="plain")
    assert plain.held_bytes == held[-1], "expected everything from the start without kernels"
    del vocoder, other, one, plain
    gc.collect()
    assert mapped_bytes(device) == before
