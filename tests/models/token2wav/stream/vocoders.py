"""The tiny vocoder with few slots, random voices, and turns divided into chunks, for tests of the host side."""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint.precision import Kind, Precision
from models.checkpoint.quantized import quantize
from models.layers.weights import assign_weights, on_meta, tensor_shapes
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import FlowAndHift, load_flow_and_hift
from models.token2wav.stream.region_table import VocoderShapes
from models.token2wav.stream.vocoder import Chunk, Vocoder
from models.token2wav.voice.voice import Voice

FOLDER = Path(__file__).parents[4] / "assets" / "tiny" / "assets" / "token2wav"
LOOKAHEAD = 3
SIZES = FlowSizes(n_sessions=5, n_voices=4, max_steps=2, max_prompt=120, voice_frames=300)
SHAPES = VocoderShapes(batch=(1, 2, 4), prompt=(60, 120))
STEPS = (2, 1)


@cache
def shared_parts() -> FlowAndHift:
    """The tiny vocoder's modules; tests must not change or compile them."""
    return load_flow_and_hift(FOLDER)


def source_alone(_hift: Hift, _mel: Tensor, source: Tensor, _n_frames: Tensor) -> Tensor:
    """In place of `Hift.decode`: sound without its convolutions, which have no state and take most of the time.

    The overlap of two windows is then the same in both, so that fading from one to the other changes nothing.
    """
    return 3 * source


@cache
def fast_parts() -> FlowAndHift:
    """As `shared_parts`, without HiFT's convolutions."""
    return without_convolutions(load_flow_and_hift(FOLDER))


def without_convolutions(parts: FlowAndHift) -> FlowAndHift:
    """The same modules; HiFT's sound is its source from now on."""
    parts.hift.decode = partial(source_alone, parts.hift)
    return parts


def wide_parts(device: str = "cpu", dtype: torch.dtype = torch.float32, kind: Kind | None = None) -> FlowAndHift:
    """The same weights with half as many encoder heads of twice the width: the smallest width the kernels support.

    kind: in which the flow's layers are quantised; None: they are not.
    """
    parts = load_flow_and_hift(FOLDER, device=device, dtype=dtype, hift_dtype=dtype)
    encoder = parts.flow.config.encoder
    encoder = encoder.model_copy(update={"heads": encoder.heads // 2})
    with on_meta():
        flow = Flow(parts.flow.config.model_copy(update={"encoder": encoder}))
    shapes = tensor_shapes(flow)
    kind_of, weights = Precision(flow=kind).flow_kind_of, parts.flow.state_dict()
    tensors = {
        name: quantize(weights[name], own) if (own := kind_of(name, shape)) else weights[name].reshape(shape)
        for name, shape in shapes.items()
    }
    return FlowAndHift(assign_weights(flow, tensors, device, dtype), parts.hift)


def make_vocoder(parts: FlowAndHift | None = None, **options: Any) -> Vocoder:
    parts = parts or shared_parts()
    return Vocoder(parts.flow, parts.hift, **{"sizes": SIZES, "shapes": SHAPES, "steps": STEPS, **options})


def make_voice(seed: int = 0, n_speech_tokens: int = 30, n_mels: int = 80, speaker_dim: int = 24) -> Voice:
    generator = torch.Generator().manual_seed(seed)
    return Voice(
        torch.randint(6561, (n_speech_tokens,), generator=generator),
        torch.randn(2 * n_speech_tokens, n_mels, generator=generator) - 5,
        torch.randn(speaker_dim, generator=generator),
    )


def make_tokens(seed: int, n: int) -> list[int]:
    return torch.randint(6561, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunks_of_turn(session: int, speech_tokens: Sequence[int], counts: Sequence[int]) -> Iterator[Chunk]:
    """Chunks of one turn that synthesize `counts` tokens each, with the lookahead, and a last chunk with the rest."""
    first = 0
    for n in counts:
        yield Chunk(session, speech_tokens[first : first + n + LOOKAHEAD])
        first += n
    yield Chunk(session, speech_tokens[first:], last=True)


def speak_turn(vocoder: Vocoder, session: int, speech_tokens: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    """The sounds of a turn, one call per chunk."""
    return [vocoder.speak([chunk])[0] for chunk in chunks_of_turn(session, speech_tokens, counts)]


def slot_of(vocoder: Vocoder, session: int) -> int:
    """The slot that the session's next call reads."""
    return vocoder._sessions[session].slot


def tensors(vocoder: Vocoder) -> list[Tensor]:
    return [*vocoder.state.tensors(), *vocoder.vocode_state.tensors()]


def copies(vocoder: Vocoder) -> list[Tensor]:
    """Copies of the whole state, which takes the memory of all voices."""
    vocoder.state.grow_voices(vocoder.sizes.voice_frames)
    return [tensor.clone() for tensor in tensors(vocoder)]
