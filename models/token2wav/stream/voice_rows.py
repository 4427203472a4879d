"""Rows of a new voice in the flow's state: their place, and memory for them."""

import torch

from models.errors import SlotError
from models.token2wav.flow.flow_state import FlowState
from models.token2wav.voice.voice_slots import Key, VoiceSlots


def take_rows(voices: VoiceSlots, state: FlowState, key: Key, n_frames: int) -> tuple[int, int]:
    """A slot for a new voice and the first of its rows, with memory for all of them.

    If the device has too little memory, all unused voices are evicted, and their rows are used.

    Args:
        voices: receives the voice.
        state: grows.
        key: of the voice.
        n_frames: mel frames of its prompt.
    Raises: SlotError if the voices in use leave too little room or the device has too little memory; any other error of
        the device. The voice has no slot then.
    """
    slot, start = voices.allocate(key, n_frames)
    try:
        state.grow_voices(start + n_frames)
        return slot, start
    except torch.OutOfMemoryError:
        voices.evict(slot)
        voices.evict_unused()
    except BaseException:
        voices.evict(slot)
        raise
    slot, start = voices.allocate(key, n_frames)
    try:
        state.grow_voices(start + n_frames)
    except BaseException as error:
        voices.evict(slot)
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        expected = f"memory of the device for {start + n_frames} mel frames of all voices"
        raise SlotError("voice", expected=expected, got=f"too little ({error})") from error
    return slot, start
