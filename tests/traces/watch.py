"""Records a unit while it runs: rows fed, logits, tokens, log-mel, speech calls, windows of speech tokens.

Uses the loop's callbacks and wraps the regions. Does not contain the expected values.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from models.stages.runner import Rows
from models.stages.unit_steps import UnitSteps
from worker.loop.observer import Observer
from worker.loop.results import Event
from worker.loop.unit_loop import UnitLoop


@dataclass(frozen=True)
class Feed:
    """Rows fed to the context. past: rows held before. ids: None at media rows. rows: [n, D]."""

    past: int
    ids: list[int | None]
    rows: Tensor


@dataclass(frozen=True)
class Choice:
    """One call of the sampler. logits: [V]. token: its result. remembered: tokens in its history before."""

    logits: Tensor
    token: int
    remembered: int


@dataclass
class RecordedSpeechCall:
    """One speech call. start: position of its first row. rows: [n, D]. n_after: rows in the cache afterwards."""

    start: int
    rows: Tensor
    least: int
    most: int
    speech_tokens: list[int] = field(default_factory=list)
    n_after: int = 0


@dataclass
class UnitLog:
    """Callbacks of one unit. mel: [n_mels, T] of its sound. n_prefilled, n_generated: context rows at that time."""

    feeds: dict[str, list[Feed]] = field(default_factory=dict)
    audio: list[Tensor] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)
    mel: Tensor | None = None
    pending_logits: Tensor | None = None
    n_prefilled: int | None = None
    choices: list[Choice] = field(default_factory=list)
    speech: list[RecordedSpeechCall] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    event: Event | None = None
    n_generated: int = 0


class Watcher(Observer):
    """Keeps a log per session; `fresh` begins the next unit. It wraps the regions of its engine."""

    def __init__(self, unit_steps: UnitSteps):
        self._unit_steps, self._state = unit_steps, unit_steps.state
        self.logs: dict[str, UnitLog] = {}
        self._names: dict[int, str] = {}
        self._chosen_from: dict[int, tuple[Tensor, int]] = {}
        table = unit_steps.regions
        self._run, table.run = table.run, self._recorded

    def join(self, session: str, slot: int) -> None:
        self._names[slot] = session

    def fresh(self, session: str) -> UnitLog:
        self.logs[session] = UnitLog()
        return self.logs[session]

    # --- callbacks of the loop ----------------------------------------------------------------------

    def rows_fed(self, session: str, what: str, past: int, rows: Any) -> None:
        model = self._unit_steps.runner.model
        if not isinstance(rows, Rows):
            listed = [rows] if isinstance(rows, int) else list(rows)
            rows = Rows.mixed(listed, [])
        embeds = model.llm.model.embed_tokens(rows.ids.to(model.device))
        shown: list[int | None] = rows.ids.tolist()
        if rows.media is not None:
            embeds[rows.is_row] = rows.media
            shown = [None if is_row else one for one, is_row in zip(shown, rows.is_row.tolist(), strict=True)]
        self.logs[session].feeds.setdefault(what, []).append(Feed(past, shown, embeds))

    def audio_encoded(self, session: str, rows: Tensor) -> None:
        self.logs[session].audio.append(rows.clone())

    def images_encoded(self, session: str, rows: list[Tensor]) -> None:
        self.logs[session].images += [slice_rows.clone() for slice_rows in rows]

    def prefilled(self, session: str, logits: Tensor) -> None:
        log = self.logs[session]
        log.pending_logits, log.n_prefilled = logits.clone(), self._rows_of(session)

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        logits, remembered = self._chosen_from[job.slot]
        self.logs[session].choices.append(Choice(logits, token, remembered))
        return token

    def speech_call_ended(self, session: str, start: int, rows: Tensor, least: int, speech_tokens: list[int]) -> None:
        call = self.logs[session].speech[-1]
        call.speech_tokens, call.n_after = (
            list(speech_tokens),
            int(self._state.speech.cache.lengths[self._slot(session)]),
        )

    def window_voiced(self, session: str, speech_tokens: tuple[int, ...], last: bool) -> None:
        self.logs[session].windows.append({"tokens": list(speech_tokens), "last_chunk": last})

    def result_sent(self, session: str, event: Event) -> None:
        log = self.logs[session]
        log.event, log.n_generated = event, self._rows_of(session)

    # --- the regions ---------------------------------------------------------------------------

    def _recorded(self, function: Callable[..., Any], *inputs: Any, **static: Any) -> Any:
        region = function.__name__
        watched = region in ("unit_prefill", "unit_step", "mel_unit", "speech_begin")
        own = [(row, slot) for row, slot in enumerate(inputs[0].tolist()) if slot in self._names] if watched else []
        counts = [int(self._state.text.count[slot]) for _, slot in own]
        if region == "speech_begin":
            self._speech_begins(own, *inputs[1:])
        out = self._run(function, *inputs, **static)
        for (row, slot), remembered in zip(own, counts, strict=True):
            if region in ("unit_prefill", "unit_step"):
                self._chosen_from[slot] = (out[1][row].clone(), remembered)
            elif region == "mel_unit":
                mel, first, end = out
                self.logs[self._names[slot]].mel = mel[row, :, int(first[row]) : int(end[row])].clone()
        return out

    def _speech_begins(
        self, own: list[tuple[int, int]], rows: Tensor, n_rows: Tensor, least: Tensor, most: Tensor
    ) -> None:
        for row, slot in own:
            start = int(self._state.speech.cache.positions[slot])
            seen = RecordedSpeechCall(start, rows[row, : int(n_rows[row])].clone(), int(least[row]), int(most[row]))
            self.logs[self._names[slot]].speech.append(seen)

    def _slot(self, session: str) -> int:
        return next(slot for slot, name in self._names.items() if name == session)

    def _rows_of(self, session: str) -> int:
        return int(self._state.llm.lengths[self._slot(session)])


class RecordingLoop(UnitLoop):
    """A loop that also records each session's current job."""

    def __init__(self, *parts: Any, **settings: Any):
        super().__init__(*parts, **settings)
        self.job_of: dict[str, Any] = {}

    def add(self, job: Any) -> None:
        super().add(job)
        self.job_of[job.session.id] = job
