"""Units whose decisions are known: they rebuild a context by prefills, without sampling and without speech."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    the unit. The turn goes on in the text; its speech begins anew with the next unit that speaks.
    """

    decided: DecidedUnit
    unit_steps: UnitSteps

    def begin(self) -> Layout | None:
        """Lay out the unit with the tokens that it fed. Raises: SettingsError for tokens that are no unit's."""
        layout = super().begin()
        if layout is None or self.decoder is None:
            return layout
        sampled = iter(self.decided.sampled)
        while True:
            if self.step.feed is not None:
                layout.ids.append(self.step.feed)
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
