"""A small engine with scripted tokens, and a log of the loop's callbacks: for tests of turns and speech."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.token2wav.settings import SILENCE_TOKEN
from models.token2wav.stream.vocoder import Chunk
from models.token2wav.stream.windows import Window
from tests.worker.loop.engines import QUIET, SmallEngine, make_config, make_prompt, voice
from worker.config.session import EngineConfig, SessionConfig
from worker.loop.observer import Observer
from worker.loop.results import Event, Failure, UnitResult
from worker.loop.session import Session

SILENCE = (SILENCE_TOKEN,) * 3


class Spoken(NamedTuple):
    """A speech call. start: rows held before it. n_rows: rows it fed. least: speech tokens it had to draw."""

    start: int
    n_rows: int
    least: int
    speech_tokens: list[int]


@dataclass
class LoopLog:
    """Callbacks of the loop for one session, in order.

    fed: kind, rows held before and rows of every `Observer.rows_fed`. n_samples: samples in all results.
    """

    fed: list[tuple[str, int, Any]] = field(default_factory=list)
    heard: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    spoke: list[Spoken] = field(default_factory=list)
    voiced: list[Window] = field(default_factory=list)
    n_samples: int = 0

    @property
    def speech_tokens(self) -> list[int]:
        """All speech tokens drawn, in order."""
        return [token for call in self.spoke for token in call.speech_tokens]

    @property
    def voiced_tokens(self) -> list[tuple[int, ...]]:
        """Speech tokens that the vocoder voiced per turn, the leading silence included."""
        turns: list[tuple[int, ...]] = [()]
        for window in self.voiced:
            turns[-1] += window.speech_tokens if window.last else window.speech_tokens[: -len(SILENCE)]
            if window.last:
                turns.append(())
        return turns if turns[-1] else turns[:-1]


class ScriptedTokens(Observer):
    """Replaces a unit's sampled tokens by the next line of its session; a unit without a line listens.

    is_off: keep the sampled tokens. before_token: called before each token with the job and its number of tokens.
    """

    def __init__(self) -> None:
        self.is_off = False
        self.lines: dict[str, list[list[int]]] = defaultdict(list)
        self.record: dict[str, LoopLog] = defaultdict(LoopLog)
        self.before_token: Callable[[Any, int], None] | None = None

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        if self.is_off:
            return token
        said = getattr(job, "said", None)
        if said is None:
            lines, special = self.lines[session], job.language.special
            job.line = lines.pop(0) if lines else [special.listen]
            job.said = said = []
        if self.before_token is not None:
            self.before_token(job, len(said))
        said.append(job.line[len(said)] if len(said) < len(job.line) else job.language.special.chunk_eos)
        return said[-1]

    def rows_fed(self, session: str, what: str, past: int, rows: Any) -> None:
        self.record[session].fed.append((what, past, rows))

    def audio_encoded(self, session: str, rows: Tensor) -> None:
        self.record[session].heard.append(rows.clone())

    def prefilled(self, session: str, logits: Tensor) -> None:
        self.record[session].logits.append(logits.clone())

    def speech_call_ended(self, session: str, start: int, rows: Tensor, least: int, speech_tokens: list[int]) -> None:
        self.record[session].spoke.append(Spoken(start, len(rows), least, speech_tokens))

    def window_voiced(self, session: str, speech_tokens: tuple[int, ...], last: bool) -> None:
        self.record[session].voiced.append(Window(speech_tokens, last))

    def result_sent(self, session: str, event: Event) -> None:
        if isinstance(event, UnitResult) and event.pcm is not None:
            self.record[session].n_samples += len(event.pcm)


class ScriptedEngine(SmallEngine):
    """`SmallEngine` with scripted tokens."""

    def __init__(self, config: EngineConfig | None = None, **options: Any):
        self.script = ScriptedTokens()
        super().__init__(config or make_config(), self.script, **options)
        self.tokenizer, self.special = self.parts.language.tokenizer, self.parts.language.special

    def ids(self, text: str) -> list[int]:
        """Tokens of `text`, special ones by name: `<|speak|>Hello<|turn_eos|>`."""
        return self.tokenizer.encode(text)

    def start(self, name: str, config: SessionConfig = QUIET, *lines: str | list[int], **prompt: Any) -> Session:
        """A prepared session with a line for each unit. prompt: see `make_prompt`."""
        if config.generate_audio:
            prompt = {"speaker": 0, **prompt}
        self.script.lines[name] = [self.ids(line) if isinstance(line, str) else line for line in lines]
        return self.open(name, config, make_prompt(**prompt))

    def record(self, name: str) -> LoopLog:
        return self.script.record[name]

    def run(self, session: Session, n: int, **settings: Any) -> list[UnitResult | Failure]:
        """Run `n` units of different sound, one by one. Returns: their outcomes."""
        first = session.n_units
        return [self.run_unit(session, first + i, **settings) for i in range(n)]

    def end_with(self, session: Session, token: int | None) -> None:
        """Set the end token of the session's speech; None: no token ends it."""
        self.unit_steps.state.speech.sampler.eos_id[session.slot] = -1 if token is None else token

    def rows(self, session: Session) -> int:
        """Context rows as the device counts them."""
        return int(self.unit_steps.state.llm.lengths[session.slot])

    def clear(self) -> None:
        """Close all sessions and clear scripts and logs."""
        self.close_all()
        self.script.lines.clear()
        self.script.record.clear()
        self.script.before_token, self.script.is_off = None, False

    def assert_silent_voice(self, session: Session) -> None:
        """The session's speech state equals that of a new session: speech cache, windows and vocoder.

        The check uses the session's vocoder slot, so the session cannot continue its turn afterwards.
        """
        state, one = self.unit_steps.state.speech, session.slot
        held = int(state.cache.lengths[one]), int(state.cache.positions[one]), int(state.sampler.count[one])
        assert held == (0, 0, 0), f"rows, positions and history of the speech cache: expected none, got {held}"
        assert self.unit_steps.speech_rows(one) == 0, f"rows counted: got {self.unit_steps.speech_rows(one)}"
        waiting = session.speech.windows.waiting
        assert waiting == SILENCE, f"waiting speech tokens: expected silence, got {waiting}"
        assert not session.speech.draining, "expected nothing left to drain"
        speech_tokens = tuple(range(100, 107))
        new = self.vocoder.open(voice(0), session.config.euler_steps)
        own, fresh = (
            self.vocoder.speak([Chunk(slot, speech_tokens, True)])[0] for slot in (session.speech.vocoder_slot, new)
        )
        self.vocoder.close(new)
        assert torch.equal(own, fresh), "sound of a new turn: expected a fresh vocoder's, got another"


def results(outcomes: Sequence[Any]) -> list[UnitResult]:
    """The outcomes, after a check that none is a failure."""
    bad = [repr(one.error) for one in outcomes if isinstance(one, Failure)]
    assert not bad, f"expected no failures, got {bad}"
    return list(outcomes)
