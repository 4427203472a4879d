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
        output, after = self._session.run(None, {"input": sound[None], "state": state, "sr": self._rate})
        return float(output[0, 0]), after


class SpeechWindows:
    """Probabilities of one session's sound, window by window, however the sound is split."""

    def __init__(self, network: SpeechNetwork):
        self._network = network
        self._state = network.start()
        self._before = np.zeros(CONTEXT, np.float32)
        self._rest = np.zeros(0, np.float32)

    def push(self, samples: np.ndarray) -> list[float]:
        """The probabilities of the windows that sound, [n] float32 at 16 kHz, completes. About 0.2 ms for each."""
        sound = np.concatenate((self._rest, samples))
        n_whole = len(sound) // WINDOW * WINDOW
        self._rest = sound[n_whole:].copy()
        found: list[float] = []
        for window in sound[:n_whole].reshape(-1, WINDOW):
            p, self._state = self._network.probability(np.concatenate((self._before, window)), self._state)
            self._before = window[-CONTEXT:].copy()
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
