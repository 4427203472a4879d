"""Frames of whole answers, many at a time, with one host read a frame. Does not contain sound."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from models.errors import NumericsError, SettingsError
from models.qwen3_tts import frame_steps
from models.qwen3_tts.prompt import Array, SpeechPrompt
from models.qwen3_tts.runaway import CodesEnd
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.settings import FrameSampling


@dataclass(frozen=True)
class CodesRequest:
    """One answer to generate. seed: 0..2**64-1, decides its draws whatever runs beside it."""

    prompt: SpeechPrompt
    max_frames: int
    seed: int = 0
    sampling: FrameSampling = field(default_factory=FrameSampling)


@dataclass(frozen=True)
class GeneratedCodes:
    """Codes of an answer: int64 [frames, 16], and why there are no more."""

    codes: Array
    end: CodesEnd


def generate_codes(runner: TalkerRunner, requests: Sequence[CodesRequest]) -> list[GeneratedCodes]:
    """The codes of each request, in order. Requests beyond the runner's free slots start as others end.

    Raises: SettingsError for a prompt whose text is still open, ContextOverflowError for a prompt that does not fit a
        slot, NumericsError if logits are not finite.
    """
    for request in requests:
        if request.prompt.is_open:
            raise SettingsError("prompt", expected="its whole text", got="a text that is still open")
    waiting = deque(enumerate(requests))
    running: dict[int, int] = {}  # slot -> number of the request
    frames: list[list[Array]] = [[] for _ in requests]
    ends: list[CodesEnd] = [CodesEnd.LENGTH] * len(requests)
    try:
        while waiting or running:
            _join(runner, waiting, running)
            slots = list(running)
            codes, outcomes = (result.cpu().numpy() for result in runner.frame(slots))
            for row, slot in enumerate(slots):
                outcome, number = int(outcomes[row]), running[slot]
                if outcome in (frame_steps.FRAME, frame_steps.LAST_FRAME):
                    frames[number].append(codes[row].copy())
                if outcome == frame_steps.BAD:
                    raise NumericsError("logits of the talker", expected="finite numbers", got="NaN or infinity")
                if outcome == frame_steps.ENDED:
                    ends[number] = CodesEnd.STOP
                if outcome in (frame_steps.LAST_FRAME, frame_steps.ENDED):
                    del running[slot]
                    runner.close(slot)
    finally:
        for slot in running:
            runner.close(slot)
    stacked = [np.stack(some) if some else np.zeros((0, 16), np.int64) for some in frames]
    return [GeneratedCodes(codes, end) for codes, end in zip(stacked, ends, strict=True)]


def _join(runner: TalkerRunner, waiting: deque[tuple[int, CodesRequest]], running: dict[int, int]) -> None:
    """Give free slots to waiting requests, and feed their prompts."""
    prompts: dict[int, SpeechPrompt] = {}
    for slot in runner.free_slots[: len(waiting)]:
        number, request = waiting.popleft()
        limit = min(request.max_frames, runner.frames_that_fit(request.prompt))
        runner.open(slot, request.sampling, seed=request.seed, max_frames=limit)
        running[slot] = number
        prompts[slot] = request.prompt
    if prompts:
        runner.feed(prompts)
