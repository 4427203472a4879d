"""A whole utterance to sound in one pass, without slots. Does not contain sessions or regions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.errors import ShapeError
from models.graphs.compiler import force_eager
from models.token2wav.flow.flow import Flow, Schedule
from models.token2wav.hift.hift import Hift
from models.token2wav.settings import FRAMES_PER_TOKEN, SAMPLES_PER_TOKEN
from models.token2wav.stream.noise import NOISE_FRAMES
from models.token2wav.stream.vocode import MelChunk, VocodeRules, VocodeState, vocode
from models.token2wav.voice.voice import Voice


def synthesize(
    flow: Flow,
    hift: Hift,
    speech_tokens: Sequence[int],
    voice: Voice,
    *,
    schedule: Schedule,
    noise: Tensor,
    rules: VocodeRules,
) -> Tensor:
    """Sound of a whole utterance, [960 * len(speech_tokens)] float32 at 24 kHz.

    Args:
        flow: tokens to mel.
        hift: mel to sound.
        speech_tokens: in range, at least one.
        voice: checked against the flow.
        schedule: Euler steps.
        noise: [NOISE_FRAMES, n_mels] float32.
        rules: of the vocoder.
    Raises: ShapeError if prompt and speech together are longer than the noise.
    """
    device = flow.device
    n_prompt, n_all = len(voice.speech_tokens), len(voice.speech_tokens) + len(speech_tokens)
    max_tokens = NOISE_FRAMES // FRAMES_PER_TOKEN - n_prompt
    if len(speech_tokens) > max_tokens:
        expected = f"at most {max_tokens} with this voice; stream more"
        raise ShapeError("speech tokens in one pass", expected=expected, got=len(speech_tokens))
    # Uncompiled: each utterance has a different length, so a compiled graph would not be used again.
    with torch.no_grad(), force_eager():
        ids = torch.tensor([[*voice.speech_tokens.tolist(), *speech_tokens]], device=device)
        prompt = torch.zeros(1, FRAMES_PER_TOKEN * n_all, flow.config.n_mels, device=device)
        prompt[:, : voice.n_frames] = voice.mel.to(device)
        mel = flow.offline(
            ids,
            torch.tensor([n_all], device=device),
            prompt.to(flow.dtype),
            flow.speaker(voice.speaker[None].to(device)),
            noise[None, : prompt.shape[1]],
            schedule,
        )[:, FRAMES_PER_TOKEN * n_prompt :]
        state = VocodeState.allocate(0, flow.config.n_mels, device)
        slot, n_frames = torch.tensor([[0], [mel.shape[1]]], device=device)
        whole = torch.ones(1, dtype=torch.bool, device=device)
        wave, _ = vocode(hift, state, slot, MelChunk(mel.transpose(1, 2), n_frames, whole), rules)
    return wave[0, : SAMPLES_PER_TOKEN * len(speech_tokens)]
