"""A conversation at one precision: what the model chooses at every step of it, and the distributions it chooses from.

The reference precision chooses for itself, except that every second unit has to speak: a model that only listened would
give nothing else to compare. Every other precision is fed the reference's tokens, so that all choices are made in the
same context. Logits are those before a choice is forced. Contains runs of an engine; `card` compares them.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.token2wav.settings import FRAMES_PER_TOKEN
from models.token2wav.voice.voice import Voice
from worker.assembly.parts import EngineParts
from worker.config.session import EngineConfig
from worker.engine import Engine
from worker.loop.job import Job
from worker.loop.observer import Observer
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import UnitResult
from worker.start.warmup import SYSTEM
from worker.start.warmup_session import WarmUpSession, WarmUpUnit

NAME = "quality"
SPEAKS_EVERY = 2  # units; the first one speaks
MAX_MEL_TOKENS = 500  # speech tokens whose mel is computed in one pass
Step = tuple[int, int]  # unit and token of the unit, from 0; token 0 decides whether the unit speaks


@dataclass(frozen=True)
class SpokenCall:
    """One call of the speech model. start: rows held before it; 0 begins a turn. rows: [n, D] conditioning rows."""

    start: int
    rows: Tensor
    speech_tokens: list[int]


@dataclass(frozen=True)
class VoicedTurn:
    """Sound of a turn, [n] float32 at 24 kHz, and its text."""

    pcm: np.ndarray
    text: str


@dataclass
class QualityRun:
    """A conversation at one precision.

    Attributes:
        tokens: fed, by step.
        logits: [V] float32 that the choice of a step is made from, before penalties.
        decisions: logits of listen and speak at token 0, by unit; also of units that have to speak.
        calls: of the speech model, in order.
        speech_logits: [n, C] of each call's speech tokens, in the model's dtype; all but the first are after the token
            before.
        mels: [frames, n_mels] of all speech tokens, in pieces.
        turns: what was said.
    """

    tokens: dict[Step, int] = field(default_factory=dict)
    logits: dict[Step, Tensor] = field(default_factory=dict)
    decisions: dict[int, tuple[float, float]] = field(default_factory=dict)
    calls: list[SpokenCall] = field(default_factory=list)
    speech_logits: list[Tensor] = field(default_factory=list)
    mels: list[Tensor] = field(default_factory=list)
    turns: list[VoicedTurn] = field(default_factory=list)


class ChoiceObserver(Observer):
    """Records steps and speech calls, and feeds the tokens of another recording. forced: None: the choices are fed."""

    def __init__(self, recording: QualityRun, forced: QualityRun | None):
        self._recording, self._forced = recording, forced
        self._logits: dict[int, Tensor] = {}

    def watch(self, engine: Engine) -> None:
        """Record the logits of every step, which the loop does not pass to observers."""
        unit_steps = engine.parts.unit_steps

        def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(slots: Sequence[int], *arguments: Any, **named: Any) -> Any:
                chosen = method(slots, *arguments, **named)
                self._logits = {slot: one.logits for slot, one in zip(slots, chosen, strict=True)}
                return chosen

            return call

        unit_steps.feed, unit_steps.step = recorded(unit_steps.feed), recorded(unit_steps.step)  # type: ignore[method-assign]

    def token_sampled(self, session: str, job: Job, token: int) -> int:
        """Record a choice. Returns: the token of the forced recording."""
        recording, special = self._recording, job.language.special  # type: ignore[attr-defined]  # units only
        unit, step = job.session.n_decided, len(job.decoder.all_ids)  # type: ignore[attr-defined]
        logits = self._logits[job.slot].detach().float().cpu().clone()
        recording.logits[unit, step] = logits
        if step == 0:
            recording.decisions[unit] = float(logits[special.listen]), float(logits[special.speak])
        if self._forced is not None:
            token = self._forced.tokens[unit, step]
        recording.tokens[unit, step] = token
        return token

    def speech_call_ended(
        self, session: str, start: int, rows: Tensor, min_tokens: int, speech_tokens: list[int]
    ) -> None:
        """Record a call of the speech model."""
        self._recording.calls.append(SpokenCall(start, rows.detach().clone(), list(speech_tokens)))


def record(
    config: EngineConfig,
    units: Sequence[WarmUpUnit],
    voice: Voice | None,
    *,
    audio_16k: np.ndarray | None = None,
    forced: QualityRun | None = None,
) -> QualityRun:
    """Run a conversation.

    Args:
        config: of the engine, at the precision to record.
        units: input.
        voice: of the speech; None: text only.
        audio_16k: reference sound for the language model.
        forced: the reference's recording, which decides the tokens; None: this is the reference.
    """
    recording = QualityRun()
    observer = ChoiceObserver(recording, forced)
    with Engine.build(config, observer=observer) as engine:
        observer.watch(engine)
        session = WarmUpSession(engine, NAME, config.session, SystemPrompt.of(SYSTEM, audio_16k, voice))
        session.prepare()
        results = []
        for number, unit in enumerate(units):
            session.send(unit, speaks=True if number % SPEAKS_EVERY == 0 else None)
            results.append(session.result())
        session.handle.close().result()
        recording.turns = spoken_turns(results)
        if recording.calls:
            teacher = recording if forced is None else forced
            engine.submit(_teach, engine.parts, recording, teacher, voice).result()
    del engine, session
    gc.collect()  # the recorded methods refer to the model, whose memory the next run needs
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return recording


def _teach(parts: EngineParts, recording: QualityRun, teacher: QualityRun, voice: Voice | None) -> None:
    """Fill in what the speech model and the flow make of the teacher's speech tokens."""
    with torch.no_grad():
        recording.speech_logits = _speech_logits(parts, recording.calls, teacher.calls)
        if voice is not None and parts.vocoder is not None:
            speech_tokens = [token for call in teacher.calls for token in call.speech_tokens]
            pieces = range(0, len(speech_tokens), MAX_MEL_TOKENS)
            recording.mels = [_mel(parts, speech_tokens[n : n + MAX_MEL_TOKENS], voice) for n in pieces]


def _speech_logits(parts: EngineParts, calls: Sequence[SpokenCall], teacher: Sequence[SpokenCall]) -> list[Tensor]:
    """Logits of the teacher's speech tokens after the own conditioning rows, turn by turn."""
    model, found = parts.model, []
    tts, config = model.tts, model.config.tts_config
    begin = model.backend.embed(tts.emb_text, torch.tensor([config.audio_bos_token_id], device=model.device))
    for turn in _turns(calls, teacher, begin):
        rows, wanted, end = [], [], 0
        for own, speech_tokens in turn:
            tokens = torch.tensor(speech_tokens, device=model.device)
            rows += [own.to(model.device, model.dtype), tts.emb_code[0](tokens)]
            end += len(own)
            wanted.append((end - 1, len(tokens)))
            end += len(tokens)
        cache = KVCache(
            n_layers=config.num_hidden_layers,
            n_slots=1,
            max_len=end,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        slots, n_new = (torch.tensor([value], device=model.device) for value in (0, end))
        hidden = tts.model(torch.cat(rows)[None], cache, slots, n_new, end, model.backend)[0]
        logits = tts.speech_logits(hidden, model.backend)
        found += [logits[first : first + n].cpu() for first, n in wanted]
    return found


def _turns(
    calls: Sequence[SpokenCall], teacher: Sequence[SpokenCall], begin: Tensor
) -> list[list[tuple[Tensor, list[int]]]]:
    """Own conditioning rows and speech tokens of the teacher's calls, divided where the speech cache was empty.

    Both have the same calls with text. How many calls without text follow, for the rest of a turn's speech, depends on
    the speech tokens that a run draws. begin: [1, D], the only row of a call without text.
    """
    turns: list[list[tuple[Tensor, list[int]]]] = []
    own = iter([call.rows for call in calls if len(call.rows) > 1])
    for call in teacher:
        rows = next(own) if len(call.rows) > 1 else begin
        if call.start == 0 or not turns:
            turns.append([])
        if call.speech_tokens:
            turns[-1].append((rows, call.speech_tokens))
    assert next(own, None) is None, "expected as many calls with text as the teacher's, got more"
    return [turn for turn in turns if turn]


def _mel(parts: EngineParts, speech_tokens: list[int], voice: Voice) -> Tensor:
    """Mel frames [2n, n_mels] of speech tokens, in one pass of the flow."""
    vocoder = parts.vocoder
    assert vocoder is not None, "expected an engine with a vocoder"
    flow, n_prompt = vocoder.parts.flow, len(voice.speech_tokens)
    n_all = n_prompt + len(speech_tokens)
    ids = torch.tensor([[*voice.speech_tokens.tolist(), *speech_tokens]], device=flow.device)
    prompt = torch.zeros(1, FRAMES_PER_TOKEN * n_all, flow.config.n_mels, device=flow.device)
    prompt[:, : voice.n_frames] = voice.mel.to(flow.device)
    mel = flow.offline(
        ids,
        torch.tensor([n_all], device=flow.device),
        prompt.to(flow.dtype),
        flow.speaker(voice.speaker[None].to(flow.device)),
        vocoder.noise[None, : prompt.shape[1]],
        next(iter(vocoder.schedules.values())),
    )
    return mel[0, FRAMES_PER_TOKEN * n_prompt :].float().cpu()


def spoken_turns(results: Sequence[UnitResult]) -> list[VoicedTurn]:
    """The turns that have sound."""
    turns, pcm, text = [], [np.zeros(0, np.float32)], ""
    for number, result in enumerate(results, 1):
        if result.pcm is not None:
            pcm.append(result.pcm)
        text += "" if result.is_listen else result.text
        is_over = result.end_of_turn or (result.is_listen and result.pcm is None) or number == len(results)
        if is_over and len(pcm) > 1:
            turns.append(VoicedTurn(np.concatenate(pcm), text))
        if is_over:
            pcm, text = [np.zeros(0, np.float32)], ""
    return turns
