"""A small engine whose model says what it is told, and a record of what the loop did: for tests of turns and speech."""

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
    """A speech call. start: rows held before it. n_rows: what it fed. least: codes it had to draw."""

    start: int
    n_rows: int
    least: int
    speech_tokens: list[int]


@dataclass
class LoopLog:
    """What the loop did for one session. fed: `Observer.fed`'s kind, rows held before and rows, one after the other.
    n_samples: of all sound in results.
    """

    fed: list[tuple[str, int, Any]] = field(default_factory=list)
    heard: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    spoke: list[Spoken] = field(default_factory=list)
    voiced: list[Window] = field(default_factory=list)
    n_samples: int = 0

    @property
    def speech_tokens(self) -> list[int]:
        """All codes drawn, in order."""
        return [code for call in self.spoke for code in call.speech_tokens]

    @property
    def voiced_codes(self) -> list[tuple[int, ...]]:
        """What the vocoder got of each turn, every code once, the silence in front included."""
        turns: list[tuple[int, ...]] = [()]
        for window in self.voiced:
            turns[-1] += window.speech_tokens if window.last else window.speech_tokens[: -len(SILENCE)]
            if window.last:
                turns.append(())
        return turns if turns[-1] else turns[:-1]


class Puppet(Observer):
    """Each unit that decides says the next of its session's lines, then ends; without a line it listens.

    is_off: let the model say what it likes. before_token: called with the job and how many tokens its unit has said,
    before the next one.
    """

    def __init__(self) -> None:
        self.is_off = False
        self.lines: dict[str, list[list[int]]] = defaultdict(list)
        self.record: dict[str, LoopLog] = defaultdict(LoopLog)
        self.before_token: Callable[[Any, int], None] | None = None

    def token(self, session: str, job: Any, token: int) -> int:
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

    def fed(self, session: str, what: str, past: int, rows: Any) -> None:
        self.record[session].fed.append((what, past, rows))

    def heard(self, session: str, rows: Tensor) -> None:
        self.record[session].heard.append(rows.clone())

    def prefilled(self, session: str, logits: Tensor) -> None:
        self.record[session].logits.append(logits.clone())

    def spoke(self, session: str, start: int, rows: Tensor, least: int, speech_tokens: list[int]) -> None:
        self.record[session].spoke.append(Spoken(start, len(rows), least, speech_tokens))

    def voiced(self, session: str, speech_tokens: tuple[int, ...], last: bool) -> None:
        self.record[session].voiced.append(Window(speech_tokens, last))

    def done(self, session: str, event: Event) -> None:
        if isinstance(event, UnitResult) and event.pcm is not None:
            self.record[session].n_samples += len(event.pcm)


class PuppetEngine(SmallEngine):
    """`SmallEngine` with a puppet."""

    def __init__(self, config: EngineConfig | None = None, **options: bool):
        self.puppet = Puppet()
        super().__init__(config or make_config(), self.puppet, **options)
        self.tokenizer, self.special = self.parts.language.tokenizer, self.parts.language.special

    def ids(self, text: str) -> list[int]:
        """`text` as tokens, special ones by their names: `<|speak|>Hello<|turn_eos|>`."""
        return self.tokenizer.encode(text)

    def start(self, name: str, config: SessionConfig = QUIET, *lines: str | list[int], **prompt: Any) -> Session:
        """A prepared session and what it will say, a line for each unit. prompt: see `make_prompt`."""
        if config.generate_audio:
            prompt = {"speaker": 0, **prompt}
        self.puppet.lines[name] = [self.ids(line) if isinstance(line, str) else line for line in lines]
        return self.open(name, config, make_prompt(**prompt))

    def record(self, name: str) -> LoopLog:
        return self.puppet.record[name]

    def run(self, session: Session, n: int, **knobs: Any) -> list[UnitResult | Failure]:
        """`n` units of sound, one after the other, a different sound each."""
        first = session.n_units
        return [self.say(session, first + i, **knobs) for i in range(n)]

    def end_with(self, session: Session, code: int | None) -> None:
        """Which code ends the session's speech from now on; None: no code does."""
        self.duplex.state.speech.sampler.eos_id[session.slot] = -1 if code is None else code

    def rows(self, session: Session) -> int:
        """Context rows as the device counts them."""
        return int(self.duplex.state.llm.lengths[session.slot])

    def clear(self) -> None:
        """End all sessions and forget what they did."""
        self.close_all()
        self.puppet.lines.clear()
        self.puppet.record.clear()
        self.puppet.before_token, self.puppet.is_off = None, False

    def assert_silent_voice(self, session: Session) -> None:
        """The session's speech is as a new session's: codes, windows and the vocoder's own state.

        The vocoder is tried out, so the session cannot speak on.
        """
        state, one = self.duplex.state.speech, session.slot
        held = int(state.cache.lengths[one]), int(state.cache.positions[one]), int(state.sampler.count[one])
        assert held == (0, 0, 0), f"rows, positions and codes of the code model: expected none, got {held}"
        assert self.duplex.speech_rows(one) == 0, f"rows counted: got {self.duplex.runner.speech_rows[one]}"
        waiting = session.voice.windows.waiting
        assert waiting == SILENCE, f"codes on their way to the vocoder: expected silence, got {waiting}"
        assert not session.voice.draining, "expected nothing left to drain"
        speech_tokens = tuple(range(100, 107))
        new = self.vocoder.open(voice(0), session.config.euler_steps)
        own, fresh = (self.vocoder.speak([Chunk(slot, speech_tokens, True)])[0] for slot in (session.voice.slot, new))
        self.vocoder.close(new)
        assert torch.equal(own, fresh), "sound of a new turn: expected a fresh vocoder's, got another"


def results(outcomes: Sequence[Any]) -> list[UnitResult]:
    """The outcomes, none of which may be a failure."""
    bad = [repr(one.error) for one in outcomes if isinstance(one, Failure)]
    assert not bad, f"expected no failures, got {bad}"
    return list(outcomes)
