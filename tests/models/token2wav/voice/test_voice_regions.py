"""The networks that prepare voices at bucketed lengths: the same voices, and nothing compiles after warm-up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from models.errors import ShapeError
from models.graphs.region_graphs import compile_counters
from models.token2wav.load.flow_yaml import load_flow_config
from models.token2wav.load.parts import load_voice_parts
from models.token2wav.voice.voice_maker import VoiceMaker
from models.token2wav.voice.voice_regions import VoiceRegions, VoiceShapes
from tests.models.compare import assert_close
from tests.models.token2wav.prompt.prompt_sounds import prompt

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_voices_equal_eager_ones_and_nothing_compiles_late(tiny: Path) -> None:
    """Traced operation by operation, at two buckets and several lengths."""
    folder = tiny / "assets/token2wav"
    parts, config = load_voice_parts(folder), load_flow_config(folder / "flow.yaml")
    plain, maker = VoiceMaker(parts, config), VoiceMaker(parts, config, is_bucketed=True)
    sounds = [prompt(seconds, 16_000, seed=seed) for seed, seconds in enumerate((0.5, 1.9, 1.0))]
    expected = [plain.make(sound, 16_000) for sound in sounds]
    maker.regions = VoiceRegions(parts.speech_tokenizer, parts.speaker_encoder, VoiceShapes(sound=(100, 200)))
    before = compile_counters()
    maker.regions.compile(by_layer=True, backend="eager")
    maker.regions.warm_up()
    warm = compile_counters()
    for sound, voice in zip(sounds, expected, strict=True):
        made = maker.make(sound, 16_000)
        assert torch.equal(made.speech_tokens, voice.speech_tokens) and torch.equal(made.mel, voice.mel)
        assert_close(made.speaker, voice.speaker, TOLERANCE)
    assert compile_counters() == warm, f"expected nothing compiled after warm-up, got {compile_counters()} after {warm}"
    assert warm["graphs"] > before["graphs"] and warm["graph_breaks"] == before["graph_breaks"]
    assert maker.regions.n_skipped == 0
    with pytest.raises(ShapeError, match=r"voice_tokens: sound: expected at most one of \(100, 200\), got 300"):
        maker.make(prompt(3.0, 16_000), 16_000)
