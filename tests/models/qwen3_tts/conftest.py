"""The tiny language models of the golden data."""

from pathlib import Path

import pytest

from models.qwen3_tts.codec.load import SpeechTokenizer
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.model import Qwen3TTS
from tests.parity.golden import GoldenDir
from tests.parity.qwen3_tts.codec import tokenizer_of


@pytest.fixture(scope="session")
def talker_golden(root: Path) -> GoldenDir:
    return GoldenDir(root / "tests" / "golden" / "qwen3_tts")


@pytest.fixture(scope="session")
def base_model(talker_golden: GoldenDir) -> Qwen3TTS:
    """A Base model; its weights must not be changed."""
    return load_qwen3_tts(talker_golden.model("tiny_a"))


@pytest.fixture(scope="session")
def custom_model(talker_golden: GoldenDir) -> Qwen3TTS:
    """A CustomVoice model with a projection before the code predictor; its weights must not be changed."""
    return load_qwen3_tts(talker_golden.model("tiny_b"))


@pytest.fixture(scope="session")
def speech_tokenizer(talker_golden: GoldenDir) -> SpeechTokenizer:
    """The codec whose codes both models speak."""
    return tokenizer_of(talker_golden)
