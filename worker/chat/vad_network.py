"""How likely a window of sound is speech: silero-vad's network for 16 kHz, without a memory of its own.

Knows layers and the package's file of weights. Does not know segments, sessions or thresholds.

The arithmetic is NumPy's: it is far too small for several threads, and torch's, meeting on a busy machine for each of
its operations, can take longer over a window than the window lasts.
"""

import functools
import importlib.metadata
import warnings
from typing import NamedTuple

import numpy as np
import torch

WINDOW = 512
CONTEXT = 64  # samples before the window that the network sees too
WIDTH = 128  # of the recurrent layer

_N_FFT = 256
_HOP = 128
_N_BINS = _N_FFT // 2 + 1
_MIRRORED = 64  # samples after the window, mirrored
_STRIDES = (1, 2, 2, 1)  # of the four convolutions, each over three rows


class NetworkState(NamedTuple):
    """What the recurrent layer carries from window to window: two [128] float32, never written to."""

    hidden: np.ndarray
    cell: np.ndarray


class SpeechNetwork:
    """The weights. Nothing in here changes once made: any number of sessions and threads may share one."""

    def __init__(self) -> None:
        weights = _released_weights()
        self._spectrum = _transposed(weights["stft.forward_basis_buffer"])
        self._layers = []
        for i, stride in enumerate(_STRIDES):
            name = f"encoder.{i}.reparam_conv"
            self._layers.append((_transposed(weights[f"{name}.weight"]), weights[f"{name}.bias"], stride))
        both = [weights["decoder.rnn.weight_ih"], weights["decoder.rnn.weight_hh"]]
        self._gates = _transposed(np.concatenate(both, axis=1))
        self._gates_bias = weights["decoder.rnn.bias_ih"] + weights["decoder.rnn.bias_hh"]
        self._out = weights["decoder.decoder.2.weight"].reshape(WIDTH)
        self._out_bias = weights["decoder.decoder.2.bias"][0]

    def start(self) -> NetworkState:
        """The state before the first window."""
        return NetworkState(np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32))

    def probability(self, sound: np.ndarray, state: NetworkState) -> tuple[float, NetworkState]:
        """How likely a window is speech, from 0 to 1, and the state after it.

        Args:
            sound: [64 + 512] float32, the window and what came before it (zeros at the start).
        """
        mirrored = np.concatenate([sound, sound[-2 : -2 - _MIRRORED : -1]])
        bins = _rows(mirrored, _N_FFT, _HOP) @ self._spectrum
        x = np.hypot(bins[:, :_N_BINS], bins[:, _N_BINS:])
        for weight, bias, stride in self._layers:
            n, width = x.shape
            padded = np.zeros((n + 2, width), np.float32)
            padded[1:-1] = x
            x = np.maximum(_rows(padded.reshape(-1), 3 * width, stride * width) @ weight + bias, 0)
        gates = np.concatenate([x[0], state.hidden]) @ self._gates + self._gates_bias
        keep_in, forget, fresh, keep_out = gates.reshape(4, WIDTH)
        cell = _sigmoid(forget) * state.cell + _sigmoid(keep_in) * np.tanh(fresh)
        hidden = _sigmoid(keep_out) * np.tanh(cell)
        return float(_sigmoid(np.maximum(hidden, 0) @ self._out + self._out_bias)), NetworkState(hidden, cell)


@functools.cache
def shared_network() -> SpeechNetwork:
    """The process's one network, loaded on first use."""
    return SpeechNetwork()


def _released_weights() -> dict[str, np.ndarray]:
    # Importing the package would set torch to one thread for the whole process; its file is all that is needed. The
    # .safetensors file beside it holds an older network.
    path = importlib.metadata.distribution("silero-vad").locate_file("silero_vad/data/silero_vad.jit")
    with warnings.catch_warnings():
        # torch's newer format cannot read the file.
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.load(str(path), map_location="cpu")
    return {name: tensor.numpy() for name, tensor in module._model.state_dict().items()}


def _transposed(weight: np.ndarray) -> np.ndarray:
    """[out, in] or [out, in, taps] as a matrix to multiply rows of (tap after tap, `in` numbers each) with."""
    taps_last = weight.reshape(*weight.shape[:2], -1)
    return np.ascontiguousarray(taps_last.transpose(2, 1, 0).reshape(-1, len(weight)))


def _rows(flat: np.ndarray, length: int, hop: int) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(flat, length)[::hop]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 + 0.5 * np.tanh(0.5 * x)  # exp would overflow
