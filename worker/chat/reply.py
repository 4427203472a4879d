"""The state machine of one turn-based reply's text, between the sampler and the model. Torch-free.

Contains where a reply ends and how its tokens are split into text chunks, one speech call each. Does not contain
sampling, tensors or sound.
"""

from collections.abc import Collection

from worker.loop.results import StopReason
from worker.loop.unit_decoder import DecoderStep

TEXT_CHUNK = 10


class Reply:
    """One reply, from the prompt's logits to its end.

    Order of calls: `start`, then `take` for every sampled token, until a step has `sample` False. `interrupt` may
    replace either call.

        ids             emitted tokens: each was sampled, is no terminator and is fed
        begins_chunk    the next sampled token is the first of a sampler's chunk; the first chunk holds 11 tokens, later
                        ones 10
        stopped         None while tokens are sampled; then "stop" for a terminator, even as the first token (the reply
                        is empty and has no chunk), "length" for the limit, or "interrupted"

    A text chunk is complete when the token after it is known: only that token tells whether the text is finished. So
    one `take` may complete a chunk and place its token at 0 in the next: call `take_chunk` after every `take`, and read
    the chunk's hidden rows before feeding the step. For the same reason one token more than the limit is sampled. It is
    neither emitted nor fed; if it is a terminator, the reply ends with "stop".
    """

    def __init__(self, terminators: Collection[int], *, max_new_tokens: int, compat: bool):
        """Create a reply with nothing sampled yet.

        Args:
            terminators: ids that end the reply.
            max_new_tokens: tokens at most, at least 1.
            compat: as in the public implementation the limit rounds up to whole text chunks, and the last chunk of a
                reply that reaches it does not count as finished, so its speech lacks the end of text.
        """
        assert max_new_tokens >= 1, f"max_new_tokens: expected at least 1, got {max_new_tokens}"
        self._terminators = frozenset(terminators)
        self._limit = -(-max_new_tokens // TEXT_CHUNK) * TEXT_CHUNK if compat else max_new_tokens
        self._compat = compat
        self._started = False
        self._chunk: list[int] = []
        self._complete: tuple[list[int], bool] | None = None
        self.ids: list[int] = []
        self.stopped: StopReason | None = None
        self.begins_chunk = False

    def start(self) -> DecoderStep:
        """The first step: sample."""
        assert not self._started, "start: expected once per reply, got another"
        self._started = self.begins_chunk = True
        return DecoderStep(None, None, True)

    def take(self, token: int) -> DecoderStep:
        """Process a sampled token. A step's place is its token's index within its text chunk, 0 to 9."""
        assert self._started and self.stopped is None, "take: expected a reply that samples, got one before or after"
        if token in self._terminators:
            return self._end("stop", text_finished=True)
        if len(self.ids) == self._limit:
            return self._end("length", text_finished=not self._compat)
        if len(self._chunk) == TEXT_CHUNK:
            self._complete_chunk(text_finished=False)
        place = len(self._chunk)
        self._chunk.append(token)
        self.ids.append(token)
        # The sampler runs one token ahead of the text chunks, so its chunks begin one token late.
        self.begins_chunk = len(self.ids) % TEXT_CHUNK == 1 and len(self.ids) > 1
        return DecoderStep(token, place, True)

    def end(self, why: StopReason) -> DecoderStep:
        """End a reply whose text was known before: all its tokens are taken."""
        assert self._started and self.stopped is None, "end: expected a reply that samples, got one before or after"
        return self._end(why, text_finished=True)

    def interrupt(self) -> DecoderStep:
        """Stop at a token boundary: emitted text stays, chunks that were not taken are not voiced."""
        assert self.stopped is None, "interrupt: expected a reply that goes on, got a complete one"
        self._started = True
        self._chunk, self._complete = [], None
        return self._end("interrupted", text_finished=True)

    def take_chunk(self) -> tuple[list[int], bool] | None:
        """Take the text chunk that the last `take` completed: its ids (1 to 10) and whether the text is finished."""
        complete, self._complete = self._complete, None
        return complete

    def _end(self, why: StopReason, *, text_finished: bool) -> DecoderStep:
        if self._chunk:
            self._complete_chunk(text_finished=text_finished)
        self.begins_chunk = False
        self.stopped = why
        return DecoderStep(None, None, False)

    def _complete_chunk(self, *, text_finished: bool) -> None:
        assert self._complete is None, "take_chunk: expected a call for every chunk, got a chunk that was not taken"
        self._complete = self._chunk, text_finished
        self._chunk = []
