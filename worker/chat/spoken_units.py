"""The text of a reply over the seconds in which it is spoken, as a duplex session would speak it. Torch-free."""

from dataclasses import dataclass

from worker.loop.language import Language

CHARS_PER_S = 14  # of fluent speech
MAX_CHARS, MAX_TOKENS = 27, 9  # of one second
# A turn ends with a word that ends with one of these if it has as many characters: those of training are this short.
TURN_ENDS = {30: ".!?。！？", 60: ",;:，；：、"}


@dataclass(frozen=True)
class SpokenUnit:
    """One second's text. ends_turn: what follows is spoken as a turn of its own."""

    ids: list[int]
    ends_turn: bool


class SpokenUnits:
    """Divides the tokens of one reply among units, word by word, and a long reply among turns.

    A word belongs to the second in which it begins; a unit that is full passes its next word on. The last unit of a
    turn ends with `<|turn_eos|>`.
    """

    def __init__(self, language: Language):
        self._language = language
        self._unit: list[int] = []
        self._word: list[int] = []  # further tokens may belong to it
        self._n_chars = self._n_units = 0  # of the turn: characters in front of the word, and complete units
        self._is_first_turn = True
        self._may_end = False  # the turn ends here if another word follows

    def push(self, ids: list[int], *, last: bool) -> list[SpokenUnit]:
        """Take further tokens. last: the text ends with them. Returns: units that are complete now."""
        units = []
        for token in ids:
            if self._word and (self._language.text([token])[:1].isspace() or len(self._word) == MAX_TOKENS):
                units += self._place_word()
            self._word.append(token)
        if last:
            if self._word:
                units += self._place_word()
            if self._unit:
                units.append(self._end_turn())
        return units

    def _place_word(self) -> list[SpokenUnit]:
        """Append the word to its unit, unless it is blank. Returns: units that are complete with it."""
        word, units = self._word, []
        self._word = []
        text = self._language.text(word)
        if not text.strip():
            return []
        if self._may_end:
            units.append(self._end_turn())
        if not (self._is_first_turn or self._n_chars):
            text = text.lstrip()  # as the first word of a reply
            word = self._language.tokenizer.encode_plain(text)
        is_later = self._n_chars // CHARS_PER_S > self._n_units
        is_full = len(self._unit) + len(word) > MAX_TOKENS or len(self._language.text(self._unit) + text) > MAX_CHARS
        if self._unit and (is_later or is_full):
            units.append(SpokenUnit(self._unit, ends_turn=False))
            self._unit = []
            self._n_units += 1
        self._unit += word
        self._n_chars += len(text)
        self._may_end = any(self._n_chars >= least and text[-1] in ends for least, ends in TURN_ENDS.items())
        return units

    def _end_turn(self) -> SpokenUnit:
        unit = SpokenUnit([*self._unit, self._language.special.turn_eos], ends_turn=True)
        self._unit, self._n_chars, self._n_units = [], 0, 0
        self._is_first_turn = self._may_end = False
        return unit
