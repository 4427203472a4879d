"""A festival process that speaks one text after the other: starting one takes longer than most sentences."""

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from models.errors import ModelError

DONE = "done"


class Festival:
    """A running festival with a voice. It ends with this process."""

    def __init__(self, command: Sequence[str], voice: str):
        self._process = subprocess.Popen(
            [*command, "--pipe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.n_texts = 0
        name = voice.removeprefix("voice_")
        # An unknown voice is only a message on stderr, and the one before stays.
        if self._tell(f"({voice})", '(format t "%s\\n" current-voice)') != [name]:
            self.close()
            raise ModelError("festival", expected=f"the voice {name}", got="another one")

    def speak(self, text: str, wave: Path, segments: Path) -> None:
        """Write the sound of a text and the times of its phonemes. Raises: ModelError if there is no sound."""
        self.n_texts += 1
        quoted = text.replace("\\", "").replace('"', "")
        self._tell(
            "(set! utt nil)",  # otherwise a text that fails would leave the sound of the one before
            f'(set! utt (utt.synth (Utterance Text "{quoted}")))',
            f'(utt.save.wave utt "{wave}" \'riff)',
            f'(utt.save.segs utt "{segments}")',
        )
        if not wave.exists() or not segments.exists():
            raise ModelError("festival", expected="sound and phonemes", got=f"none of {text!r}")

    def close(self) -> None:
        """End the process."""
        # Closing the pipe flushes what is still buffered, which fails if the process has ended.
        with contextlib.suppress(BrokenPipeError), self._process as process:
            process.kill()

    def _tell(self, *commands: str) -> list[str]:
        """Give commands and wait until they are done. Returns: the words that they print."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n".join([*commands, f'(format t "%s\\n" "{DONE}")', "(fflush nil)\n"]))
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise ModelError("festival", expected="a running process", got="one that has ended") from error
        printed: list[str] = []
        for line in self._process.stdout:
            printed += line.split()
            if printed and printed[-1].endswith(DONE):  # what is printed before may lack the end of its line
                return printed[:-1]
        raise ModelError("festival", expected="a running process", got="one that has ended")
