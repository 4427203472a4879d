"""Probability that a window of sound contains speech: silero-vad's released ONNX model for 16 kHz, run by onnxruntime.

Contains the model file's location and its call, and the division of a session's sound into windows. Does not contain
thresholds or segments.
"""

import functools
import importlib.metadata
from typing import TYPE_CHECKING

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE

if TYPE_CHECKING:
    import onnxruntime

WINDOW = 512
CONTEXT = 64  # samples before the window that are part of the network's input
STATE_SHAPE = (2, 1, 128)  # hidden and cell state of the recurrent layer, batch, width

_MODEL_FILE = "silero_vad/data/silero_vad.onnx"
_LOG_ERRORS = 3  # onnxruntime's severity level; at the default level it warns about unused constants of the file


class SpeechNetwork:
    """The model. It holds no state between calls, so sessions and threads may share one instance."""

    def __init__(self) -> None:
        self._session = _inference_session()
        self._rate = np.array(SAMPLE_RATE, np.int64)

    def start(self) -> np.ndarray:
        """The state before the first window: zeros, `STATE_SHAPE`, float32."""
        return np.zeros(STATE_SHAPE, np.float32)

    def probability(self, sound: np.ndarray, state: np.ndarray) -> tuple[float, np.ndarray]:
        """Probability that a window contains speech, from 0 to 1, and the state after it.

        Args:
            sound: [64 + 512] float32, the window and the samples before it (zeros at the start).
            state: [2, 1, 128] float32, from `start` or the previous window; not written to.
        """
        [p], after = self.probabilities(sound[None], state)
        return float(p), after

    def probabilities(self, sounds: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for a window of each of `n` sounds, [n] float32; a third of the time of one by one.

        Args:
            sounds: [n, 64 + 512] float32.
            states: [2, n, 128] float32; not written to.
        """
        output, after = self._session.run(None, {"input": sounds, "state": states, "sr": self._rate})
        return output[:, 0], after


class SpeechWindows:
    """The windows of one session's sound, however it is split, and the network's state between them.

    state: after the windows so far, `STATE_SHAPE`; a caller of `add` that runs the network replaces it.
    """

    def __init__(self, network: SpeechNetwork):
        self._network, self.state = network, network.start()
        self._sound = np.zeros(CONTEXT, np.float32)  # from the samples before the next window on

    def add(self, samples: np.ndarray) -> list[np.ndarray]:
        """The windows that sound, [n] float32 at 16 kHz, completes, each with the samples before it, [64 + 512]."""
        sound = np.concatenate((self._sound, samples))
        n_whole = (len(sound) - CONTEXT) // WINDOW * WINDOW
        self._sound = sound[n_whole:].copy()
        return [sound[at : at + CONTEXT + WINDOW] for at in range(0, n_whole, WINDOW)]

    def push(self, samples: np.ndarray) -> list[float]:
        """The probabilities of the windows that sound, [n] float32 at 16 kHz, completes. About 0.2 ms for each."""
        found: list[float] = []
        for window in self.add(samples):
            p, self.state = self._network.probability(window, self.state)
            found.append(p)
        return found


@functools.cache
def shared_network() -> SpeechNetwork:
    """The process's only instance, loaded on first use."""
    return SpeechNetwork()


def _inference_session() -> "onnxruntime.InferenceSession":
    # Imported here: a process without half-duplex conversations does not load the library.
    import onnxruntime

    # Importing silero_vad would import torchaudio and set torch to one thread for the whole process, so the file is
    # located through the package's metadata.
    path = importlib.metadata.distribution("silero-vad").locate_file(_MODEL_FILE)
    options = onnxruntime.SessionOptions()
    # The caller's thread runs the model: it is too small for a thread pool, and a pool per process would spin.
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_ERRORS
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
