"""Text that a client inserts between two units: the job that feeds its rows.

Does not contain what the rows are (`Language.message`), nor sound and decisions.
"""

from dataclasses import dataclass
from typing import ClassVar

from models.errors import ContextOverflowError
from worker.loop.job import Job, Layout
from worker.loop.results import InsertedText
from worker.loop.session import TextInput
from worker.loop.window import Drop, Rebuild

# Texts between two units: a few parts of a prefill, so that the unit after them is not late.
MAX_TEXT_ROWS = 2048
MAX_TEXT_CHARS = 16 * MAX_TEXT_ROWS  # real text has about four characters for each row


@dataclass(eq=False)
class TextJob(Job):
    """An inserted text in flight. Units of other sessions come first: its parts are those of a background job.

    Args:
        inserted: the text.
        max_length: most context rows that leave room for a unit.
    """

    is_background: ClassVar[bool] = True

    inserted: TextInput
    max_length: int

    def begin(self) -> Layout:
        session, n_rows = self.session, len(self.inserted.ids)
        limits = [MAX_TEXT_ROWS - session.n_inserted, self.max_length - session.window.length]
        if (room := session.window.room()) is not None:
            limits.append(room)
        if n_rows > min(limits):
            what, expected = f"text inserted into session {session.id}", f"at most {max(min(limits), 0)} rows"
            raise ContextOverflowError(what, expected=expected, got=n_rows)
        return Layout([*session.pending, *self.inserted.ids], [], [])

    def on_text_complete(self) -> None:
        self.is_text_done = True
        self.session.set_pending([])
        self.session.count_inserted(len(self.layout.ids))

    def result(self) -> InsertedText:
        return InsertedText(self.session.id, len(self.inserted.ids))

    def expected_context_len(self) -> int:
        return self.session.window.length

    def close(self) -> list[Drop | Rebuild]:
        return self.session.register_unit(len(self.inserted.ids), "text", (), "", True)
