"""The speed of a sound without a change of its pitch, while the sound arrives."""

from fractions import Fraction

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.filter import Graph

from worker.protocol.wire import SOUND_RATE

SLOWEST_STEP = 0.5  # of one atempo filter
BLOCK_BYTES = 960  # 20 ms; the filter holds back a block and up to 60 ms more, whatever the length of a block is


class Tempo:
    """A stream of sound whose speed is changed by libav's `atempo`. Takes about 1 ms for half a second of sound.

    speed: 0.25 to 4.
    """

    def __init__(self, speed: float):
        steps = [speed]
        while steps[-1] < SLOWEST_STEP:
            steps[-1:] = [SLOWEST_STEP, steps[-1] / SLOWEST_STEP]
        self._graph = Graph()
        self._source = self._graph.add_abuffer(
            sample_rate=SOUND_RATE, format="s16", layout="mono", time_base=Fraction(1, SOUND_RATE)
        )
        chain = [self._graph.add("atempo", f"{step:.6f}") for step in steps]
        self._sink = self._graph.add("abuffersink")
        self._graph.link_nodes(self._source, *chain, self._sink).configure()
        self._n_samples = 0

    def push(self, pcm16: bytes) -> bytes:
        """The sound that further sound completes. pcm16: little-endian samples at 24 kHz."""
        return b"".join(self._block(pcm16[at : at + BLOCK_BYTES]) for at in range(0, len(pcm16), BLOCK_BYTES))

    def finish(self) -> bytes:
        """The rest of the sound, once."""
        self._source.push(None)
        return self._pull()

    def _block(self, pcm16: bytes) -> bytes:
        frame = pcm_frame(pcm16)
        frame.pts, frame.time_base = self._n_samples, Fraction(1, SOUND_RATE)
        self._n_samples += frame.samples
        self._source.push(frame)
        return self._pull()

    def _pull(self) -> bytes:
        parts: list[bytes] = []
        while True:
            try:
                frame = self._sink.pull()
            except (av.BlockingIOError, av.EOFError):
                return b"".join(parts)
            assert isinstance(frame, AudioFrame)
            parts.append(frame.to_ndarray().astype("<i2").tobytes())


def pcm_frame(pcm16: bytes) -> AudioFrame:
    """A frame of libav with little-endian mono samples at 24 kHz."""
    frame = AudioFrame.from_ndarray(np.frombuffer(pcm16, "<i2")[None], format="s16", layout="mono")
    frame.sample_rate = SOUND_RATE
    return frame
