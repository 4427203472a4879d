"""The tiny speech tokenizer and speaker encoder of the golden data."""

from pathlib import Path

import pytest

from models.qwen3_tts.codec.load import SpeechTokenizer
from models.qwen3_tts.codec.speaker_encoder import SpeakerEncoder
from tests.parity.golden import GoldenDir
from tests.parity.qwen3_tts.codec import speaker_of, tokenizer_of


@pytest.fixture(scope="session")
def codec_golden(root: Path) -> GoldenDir:
    return GoldenDir(root / "tests" / "golden" / "qwen3_tts")


@pytest.fixture(scope="session")
def tokenizer(codec_golden: GoldenDir) -> SpeechTokenizer:
    return tokenizer_of(codec_golden)


@pytest.fixture(scope="session")
def speaker_encoder(codec_golden: GoldenDir) -> SpeakerEncoder:
    return speaker_of(codec_golden)
