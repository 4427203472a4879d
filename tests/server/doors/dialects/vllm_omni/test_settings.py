"""Reading what vLLM-Omni clients send."""

import pytest

from server.doors.dialects.vllm_omni.settings import OmniInput
from server.doors.errors import ApiError


@pytest.mark.parametrize("text", ["not base64!", "\u00e9", "AAA"])
def test_sound_must_be_base64(text: str) -> None:
    with pytest.raises(ApiError, match="audio: expected base64"):
        OmniInput().decode(text, "pcm16", 16_000)
