"""The state machine of one unit's text, between the sampler and the model: one token at a time. Torch-free.

Contains which tokens end a unit, open or close a turn and are spoken, and the unit's outcome. Does not contain sampling
(forbidden tokens and penalties belong to the sampler), tensors or sound. It names the unit's terminator; finalize feeds
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from models.inputs.tokens import SpecialTokens

MAX_SPAN = 1024  # tokens of a span of the side lane, which then ends


@dataclass(frozen=True)
class ControlTokens:
    """Ids of the tokens that control a unit."""

    listen: int
    speak: int
    chunk_eos: int
    chunk_tts_eos: int
    turn_eos: int
    tts_bos: int

    @classmethod
    def of(cls, special: SpecialTokens) -> Self:
        """The ids of a checkpoint's tokenizer."""
        return cls(
            listen=special.listen,
            speak=special.speak,
            chunk_eos=special.chunk_eos,
            chunk_tts_eos=special.chunk_tts_eos,
            turn_eos=special.turn_eos,
            tts_bos=special.tts_bos,
        )


class SideLane(NamedTuple):
    """Ids around a span of text that is not spoken."""

    start: int
    end: int


class SideState(NamedTuple):
    """The side lane of a unit.

    ids: of a span that goes on from the unit before; None: none does. most: tokens in this unit, markers included; 0
    ends a span that goes on, and drops it.
    """

    lane: SideLane
    ids: tuple[int, ...] | None
    most: int


class DecoderStep(NamedTuple):
    """The next action.

    feed: token to feed to the model; None feeds nothing. place: its index among the spoken tokens, which is its row
    in the buffer of hidden states; None if it is not spoken. sample: sample another token afterwards; False means that
    the text is complete.
    """

    feed: int | None
    place: int | None
    sample: bool


class TurnCap(NamedTuple):
    """The limit of a turn's text. n_tokens: spoken before this unit. most: tokens at most; 0 is no limit."""

    n_tokens: int = 0
    most: int = 0


NO_CAP = TurnCap()


class UnitDecoder:
    """One unit's text, from the prefill's logits to the terminator.

    Order of calls: `start`, then `take` for every sampled token, until a step has `sample` False. `interrupt` may
    replace either call. The outcome is valid from that last step on:

        terminator   id that finalize feeds in front of `</unit>`; None where implicit mode feeds none
        spoken       fed ids that condition speech, in order: all but the first, which is fed and never voiced
        all_ids      every id the unit adds to the record, terminator included; in implicit mode a sampled
                     terminator is recorded though it is not fed
        res_ids      fed ids that were sampled, without `<|speak|>`
        is_listen    the unit is silent, whatever `spoken` holds
        end_of_turn  the assistant's turn ends with this unit
        turn_open    the next unit must not listen unless it is forced to
        forced_end   override or interrupt cut off an open turn: its speech must be reset
        turn_limited the limit of a turn's text has ended the turn
        n_turn_tokens spoken tokens of the turn that goes on

    With a side lane, a span between its two markers may stand at any place of the unit's text, also in front of its
    decision. Its tokens are fed and recorded, but neither spoken nor counted by the limits of speech. A span that
    reaches `SideState.most` cuts the unit there, and goes on with the next unit that samples:

        side_ids     ids of the span that goes on, without its markers; None: none does
        side_spans   spans that are complete with this unit
        n_side       tokens of the side lane in this unit

    After the last token that the limit allows, `<|turn_eos|>` takes the place of the next sampled token and ends the
    unit, also beyond `max_tokens`.

    `compat` reproduces errors of the public implementation:
        case                                            compat                       otherwise
        `<|turn_eos|>`, then `<|listen|>`               silent, turn does not end    speak, end of turn: nothing is lost
        character cap right after `<|turn_eos|>`        end of turn, yet turn open   end of turn, turn closed
        override that closes an open turn               no end of turn               end of turn
        listening forced, max_tokens 1, explicit mode   an empty speak unit          listen
    """

    def __init__(
        self,
        ids: ControlTokens,
        *,
        max_tokens: int,
        max_chars: int = 28,
        explicit: bool = True,
        compat: bool,
        length: Callable[[Sequence[int]], int],
        turn_open: bool,
        force: bool = False,
        override: bool = False,
        cap: TurnCap = NO_CAP,
        side: SideState | None = None,
    ):
        """Create the decoder of a unit with nothing sampled yet.

        Args:
            max_tokens: at least 1; explicit mode feeds one less and cuts there, implicit mode feeds all of them.
            max_chars: a token that extends the spoken text to this many characters is dropped and ends the unit.
            explicit: the terminator enters the context.
            compat: reproduce errors of the public implementation, see above.
            length: number of characters in the text of spoken ids, special tokens skipped.
            turn_open: the turn of the unit before goes on.
            force: listen without sampling; an open turn stays open.
            override: listen without sampling; an open turn is closed first.
            cap: limit of the turn's text.
            side: the side lane; None: the unit has none.
        """
        assert max_tokens >= 1, f"max_tokens: expected at least 1, got {max_tokens}"
        self._ids = ids
        self._limit = max_tokens - 1 if explicit else max_tokens
        self._max_chars, self._length = max_chars, length
        self._explicit, self._compat = explicit, compat
        self._forced, self._override = force or override, override
        self._began_open = turn_open
        self._cap = cap
        self._n_fed = 0
        self._started = self._done = False

        self.terminator: int | None = None
        self.spoken: list[int] = []
        self.all_ids: list[int] = []
        self.res_ids: list[int] = []
        self.is_listen = False
        self.end_of_turn = False
        self.turn_open = turn_open
        self.forced_end = False
        self.turn_limited = False
        self.n_turn_tokens = cap.n_tokens
        self._side = side
        self.side_ids = None if side is None or side.ids is None else list(side.ids)
        self.side_spans: list[tuple[int, ...]] = []
        self.n_side = 0

    @property
    def is_beside(self) -> bool:
        """Whether the next token belongs to a span of the side lane."""
        return self.side_ids is not None

    @property
    def is_undecided(self) -> bool:
        """Whether the unit may still listen or speak."""
        return self._n_fed == 0

    def start(self) -> DecoderStep:
        """The first step: sample, or the whole unit if listening is forced or no token is allowed."""
        assert not self._started, "start: expected once per unit, got another"
        self._started = True
        closing = None
        if self._override and self.turn_open:
            closing = self._close_turn()
            self.end_of_turn = not self._compat
        if self._forced and not (self._compat and self._limit == 0):
            self.is_listen = True
            return self._end(self._ids.listen, feed=closing)
        if self._limit == 0:
            return self._cut(feed=closing)
        return DecoderStep(None, None, True)

    def take(self, token: int) -> DecoderStep:
        """Process a sampled token."""
        assert self._started and not self._done, "take: expected a unit that samples, got one before or after"
        ids, side = self._ids, self._side
        if side is not None and self.side_ids is not None:
            return self._take_beside(token, side, self.side_ids)
        if self._is_capped and token != ids.turn_eos:
            self.turn_limited = True
            step = self._feed(ids.turn_eos)
            return self._cut(step.feed, step.place) if step.sample else step
        if side is not None and token == side.lane.start:
            self.side_ids = []
            return self._feed_beside(token, side)
        if token == ids.listen:
            if self.turn_open:
                return self._feed(ids.tts_bos)
            # A closed turn after a fed token means that `<|turn_eos|>` was the last one.
            self.is_listen = self._compat or self._n_fed == 0
            self.end_of_turn = not self.is_listen
            return self._end(ids.listen)
        if token in (ids.chunk_eos, ids.chunk_tts_eos):
            return self._end(token)
        return self._feed(token)

    def interrupt(self) -> DecoderStep:
        """Stop speaking: the unit is silent and ends the turn; the rest of its text is not voiced."""
        assert not self._done, "interrupt: expected a unit that goes on, got a complete one"
        self._started = True
        self.forced_end = self._began_open or self.turn_open or bool(self.spoken)
        closing = self._close_turn() if self.turn_open else None
        self.spoken = []
        self.is_listen = self.end_of_turn = True
        return self._end(self._ids.listen, feed=closing)

    def end_turn(self) -> list[int]:
        """Close the turn after the unit is complete. Returns: ids that finalize feeds in front of its terminator."""
        assert self._done, "end_turn: expected a complete unit, got one that goes on"
        if not self.turn_open:
            return []
        self.turn_open, self.n_turn_tokens = False, 0
        self.all_ids.insert(len(self.all_ids) - (self.terminator is not None), self._ids.turn_eos)
        return [self._ids.turn_eos]

    def _feed(self, token: int) -> DecoderStep:
        spoken = self._n_fed > 0
        if spoken and self._length([*self.spoken, token]) >= self._max_chars:
            if self._compat:
                self.turn_open = True
            return self._cut()
        place = len(self.spoken) if spoken else None
        self.all_ids.append(token)
        if token != self._ids.speak:
            self.res_ids.append(token)
        if spoken:
            self.spoken.append(token)
        self._n_fed += 1
        self.end_of_turn = token == self._ids.turn_eos
        self.turn_open = not self.end_of_turn
        self.n_turn_tokens = 0 if self.end_of_turn else self.n_turn_tokens + spoken
        if self._n_fed >= self._limit and not self._is_capped:
            return self._cut(feed=token, place=place)
        return DecoderStep(token, place, True)

    def _take_beside(self, token: int, side: SideState, span: list[int]) -> DecoderStep:
        if side.most == 0 or len(span) >= MAX_SPAN:
            token = side.lane.end
        if token != side.lane.end:
            span.append(token)
            return self._feed_beside(token, side)
        self.side_ids = None
        if side.most > 0:
            self.side_spans.append(tuple(span))
        return self._feed_beside(token, side)

    def _feed_beside(self, token: int, side: SideState) -> DecoderStep:
        self.all_ids.append(token)
        self.res_ids.append(token)
        self.n_side += 1
        if self.n_side < side.most or side.most == 0:
            return DecoderStep(token, None, True)
        self.is_listen = self._n_fed == 0 and not self.turn_open
        return self._cut(feed=token)

    @property
    def _is_capped(self) -> bool:
        """Whether the open turn has as many tokens as its limit allows."""
        return 0 < self._cap.most <= self.n_turn_tokens and self.turn_open

    def _close_turn(self) -> int:
        self.all_ids.append(self._ids.turn_eos)
        self.turn_open, self.n_turn_tokens = False, 0
        self.forced_end = True
        return self._ids.turn_eos

    def _cut(self, feed: int | None = None, place: int | None = None) -> DecoderStep:
        """End a full unit. Unlike a sampled terminator, a cut in implicit mode is not recorded."""
        if self._explicit:
            return self._end(self._ids.chunk_eos, feed, place)
        self._done = True
        return DecoderStep(feed, place, False)

    def _end(self, terminator: int, feed: int | None = None, place: int | None = None) -> DecoderStep:
        self.all_ids.append(terminator)
        if self._explicit:
            self.terminator = terminator
        self._done = True
        return DecoderStep(feed, place, False)
