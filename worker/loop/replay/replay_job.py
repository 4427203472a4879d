"""Units whose decisions are known: they rebuild a context by prefills, without sampling and without sound."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from models.errors import SettingsError
from models.sampling.settings import signed_seed
from models.stages.unit_steps import UnitSteps
from worker.loop.duplex_job import DuplexJob
from worker.loop.job import NO_STEP, Layout
from worker.loop.results import DecidedUnit
from worker.loop.unit_decoder import DecoderStep, UnitDecoder


@dataclass(eq=False)
class ReplayJob(DuplexJob):
    """A unit that is decided already.

    Its rows are those that the unit left in the context: input and fed tokens. The text sampler ends as it was after
    the unit. The turn goes on, also in its speech if the unit has the speech tokens (`rebuild_speech`).

    Attributes:
        fed: the fed tokens, which are the last rows of the layout, and their places among the spoken ones.
    """

    gathers: ClassVar[bool] = False  # its rows are fed later, several units at once
    decided: DecidedUnit
    unit_steps: UnitSteps
    fed: list[tuple[int, int | None]] = field(default_factory=list, init=False)

    def begin(self) -> Layout | None:
        """Lay out the unit with the tokens that it fed. Raises: SettingsError for tokens that are no unit's."""
        layout = super().begin()
        if layout is None or self.decoder is None:
            return layout
        self._check_speech_tokens()
        sampled = iter(self.decided.sampled)
        while True:
            if self.step.feed is not None:
                layout.ids.append(self.step.feed)
                self.fed.append((self.step.feed, self.step.place))
                self.on_fed()
            if not self.step.sample:
                break
            self._take_next(sampled)
        if next(sampled, None) is not None:
            raise _no_unit(self.decided)
        self.step = NO_STEP
        return layout

    def _take_next(self, sampled: Iterator[int]) -> None:
        token = next(sampled, None)
        if token is None or not 0 <= token < self.unit_steps.runner.model.config.vocab_size:
            raise _no_unit(self.decided)
        self.on_token(token)

    def _listens(self) -> bool:
        return self.decided.listens

    def _first_step(self, decoder: UnitDecoder) -> DecoderStep:
        is_cut = self.decided.is_interrupted and not self.decided.sampled
        return decoder.interrupt() if is_cut else decoder.start()

    def _next_step(self, decoder: UnitDecoder, token: int) -> DecoderStep:
        is_last = len(self.samples) == len(self.decided.sampled) - 1
        self.samples.append(token)
        return decoder.interrupt() if self.decided.is_interrupted and is_last else decoder.take(token)

    def emit_partial(self, text: str = "", pcm: np.ndarray | None = None) -> None:
        """Emit nothing: the client has it."""

    def on_text_complete(self) -> None:
        """Count the unit in the session and in the sampler."""
        super().on_text_complete()
        decided = self.decided
        self.session.number_units(decided.unit)
        self.session.set_seed(decided.seed)
        replay_samples(self.unit_steps, self.slot, decided)
        if decided.is_silenced:
            self.interrupt()

    def _plan_speech(self) -> None:
        """Draw no speech: the client has heard it."""
        self._voices_old_turn = self.decided.drains
        if self.speaks_on:
            self._ends_turn = False
        elif not self.session.reference and not self.voices.is_fresh(self.session):
            self.voices.cut(self.session)

    @property
    def speaks_on(self) -> bool:
        """Whether the speech of the turn goes on with the next unit."""
        wants = bool(self.decided.spoken) and self.decoder is not None and not self.session.reference
        return wants and self.voices.can_speak(self.session)

    @property
    def spoken_ids(self) -> list[int]:
        """The unit's text tokens that are spoken."""
        return list(self._decided.spoken)

    def _check_speech_tokens(self) -> None:
        if not self.speaks_on:
            return
        most = self.unit_steps.runner.model.config.tts_config.speech_eos_id
        for name in ("spoken", "unvoiced"):
            tokens = getattr(self.decided, name)
            if not all(0 <= token < most for token in tokens):
                expected = f"speech tokens from 0 to {most - 1}"
                raise SettingsError(f"decided.{name}", expected=expected, got=str(tokens)[:100])


def replay_samples(unit_steps: UnitSteps, slot: int, decided: DecidedUnit) -> None:
    """Leave the slot's text sampler as it was after the unit."""
    at, text = unit_steps.counters(slot), unit_steps.state.text
    for number, token in enumerate(decided.remembered, at.remembered):
        text.history[slot, number % text.history.shape[1]] = token
    n_remembered = at.remembered + len(decided.remembered)
    at = at._replace(draws=at.draws + len(decided.sampled), remembered=n_remembered)
    text.seed[slot], text.draws[slot], text.count[slot] = signed_seed(decided.seed), at.draws, at.remembered
    unit_steps.set_counters(slot, at)


def _no_unit(decided: DecidedUnit) -> SettingsError:
    got = f"{len(decided.sampled)} tokens {str(decided.sampled)[:100]}"
    return SettingsError("decided.sampled", expected="the tokens that one unit has sampled", got=got)
