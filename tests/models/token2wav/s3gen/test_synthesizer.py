"""S3Gen for many requests: batches equal single calls; buckets; checks of input."""

import pytest
import torch
from torch import Tensor

from models.errors import AudioError, SettingsError, ShapeError, TokenError
from models.layers.weights import assign_weights, on_meta
from models.token2wav.s3gen.model import S3Gen
from models.token2wav.s3gen.region_table import S3Shapes
from models.token2wav.s3gen.synthesizer import S3Synthesizer, Utterance
from tests.models.compare import assert_close
from tests.models.token2wav.prompt.prompt_sounds import prompt
from tests.models.token2wav.s3gen import tiny_s3gen

SHAPES = S3Shapes(batch=(1, 2), speech_tokens=(8, 20), prompt=(12,), sound=(60, 1000))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> S3Gen:
    return tiny_s3gen.make()


@pytest.fixture(scope="module")
def synthesizer(model: S3Gen) -> S3Synthesizer:
    return S3Synthesizer(model, SHAPES, steps=(2, 1))


def tokens(n: int, seed: int) -> Tensor:
    return torch.randint(tiny_s3gen.VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


def alone(model: S3Gen, utterance: Utterance, n_steps: int) -> Tensor:
    with torch.no_grad():
        return model.sound(utterance.speech_tokens, utterance.voice, seed=utterance.seed, n_steps=n_steps)


@pytest.mark.parametrize("n_steps", [1, 2])
def test_batches_equal_single_calls(synthesizer: S3Synthesizer, model: S3Gen, n_steps: int) -> None:
    """Five utterances of two sizes of bucket, with prompts of even and odd length."""
    utterances = [
        Utterance(tokens(n, n), tiny_s3gen.voice(m, frames, seed=m), seed=n)
        for n, m, frames in ((8, 12, 24), (20, 5, 10), (3, 6, 13), (9, 12, 25), (1, 1, 2))
    ]
    for got, utterance in zip(synthesizer.speak(utterances, n_steps=n_steps), utterances, strict=True):
        assert_close(got, alone(model, utterance, n_steps), TOLERANCE)


def test_mean_flow_batch_equals_single_calls() -> None:
    model = tiny_s3gen.make(meanflow=True)
    synthesizer = S3Synthesizer(model, SHAPES)
    assert tuple(synthesizer.regions.grids) == (2,)
    utterances = [Utterance(tokens(n, n), tiny_s3gen.voice(6, 12), seed=n) for n in (5, 7)]
    for got, utterance in zip(synthesizer.speak(utterances), utterances, strict=True):
        assert_close(got, alone(model, utterance, 2), TOLERANCE)


def test_prepared_voices_equal_single_calls(synthesizer: S3Synthesizer, model: S3Gen) -> None:
    sounds = [
        (torch.from_numpy(prompt(seconds, rate, seed=seed)[0]), rate)
        for seed, (seconds, rate) in enumerate(((0.5, 16_000), (1.2, 44_100), (0.3, 24_000)))
    ]
    for got, (sound, rate) in zip(synthesizer.prepare(sounds), sounds, strict=True):
        with torch.no_grad():
            expected = model.prepare_voice(sound, rate)
        assert torch.equal(got.speech_tokens, expected.speech_tokens)
        assert_close(got.mel, expected.mel, 0)
        assert_close(got.speaker, expected.speaker, TOLERANCE)


def test_every_bucket_runs(synthesizer: S3Synthesizer) -> None:
    regions = synthesizer.regions
    calls = {name: len(regions.calls(name)) for name in regions.table}
    expected = {"s3_tokens": 4, "s3_speaker": 4, "s3_encode": 4, "s3_solve": 8, "s3_pitch": 4, "s3_decode": 4}
    assert calls == expected
    regions.warm_up()


def test_wrong_requests_are_refused(synthesizer: S3Synthesizer, model: S3Gen) -> None:
    voice = tiny_s3gen.voice(6, 12)
    for utterance, error, message in (
        (Utterance(tokens(21, 0), voice), ShapeError, r"speech_tokens: expected at most one of \(8, 20\), got 21"),
        (
            Utterance(tokens(5, 0), tiny_s3gen.voice(13, 26)),
            ShapeError,
            r"prompt: expected at most one of \(12,\), got 13",
        ),
        (Utterance(tokens(0, 0), voice), TokenError, "expected more than 0, got 0"),
        (Utterance(tokens(5, 0) + tiny_s3gen.VOCAB, voice), TokenError, r"expected tokens in 0\.\.39"),
        (Utterance(tokens(5, 0), tiny_s3gen.voice(5, 12)), ShapeError, "prompt tokens: expected at least 6"),
    ):
        with pytest.raises(error, match=message):
            synthesizer.speak([utterance])
    with pytest.raises(SettingsError, match=r"euler steps: expected one of \(2, 1\), got 3"):
        synthesizer.speak([Utterance(tokens(5, 0), voice)], n_steps=3)
    with pytest.raises(SettingsError, match="expected at least one number"):
        S3Synthesizer(model, SHAPES, steps=())
    with pytest.raises(AudioError, match="expected at least 1920 samples"):
        synthesizer.prepare([(torch.zeros(1000), 24_000)])


@pytest.mark.gpu
def test_captured_components_equal_the_eager_ones() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        model = tiny_s3gen.make()
        weights = {name: tensor.cuda() for name, tensor in model.state_dict().items()}
        with on_meta():
            model = S3Gen(model.config)
        synthesizer = S3Synthesizer(assign_weights(model, weights, "cuda", torch.float32), SHAPES, steps=(2,))
        utterances = [Utterance(tokens(n, n), tiny_s3gen.voice(6, 13), seed=n) for n in (8, 5, 20)]
        eager = synthesizer.speak(utterances)
        synthesizer.regions.capture()
        for got, expected in zip(synthesizer.speak(utterances), eager, strict=True):
            assert_close(got, expected, TOLERANCE)
        assert synthesizer.regions.n_skipped == 0
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
