"""Image slices that are encoded on a stream of their own, beside calls of the same graphs on the main stream."""

from pathlib import Path

import pytest
import torch

from models.load import load_model
from models.sampling.text import TokenSet, TokenSets
from models.stages.early_images import EarlyImages
from models.stages.region_table import Shapes
from models.stages.runner import Runner
from tests.models.stages.test_runner_media import TOLERANCE, picture

pytestmark = pytest.mark.gpu
N_ROUNDS = 20


@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_equal_those_of_the_main_stream(tiny: Path, is_captured: bool) -> None:
    model = load_model(tiny, device="cuda")
    sets = TokenSets.build([TokenSet()], model.config.vocab_size, model.device)
    shapes = Shapes(batch=(1,), slices=(2,), patches=(64,))
    runner = Runner(model, sets, n_slots=2, llm_len=16, tts_len=16, shapes=shapes, early_slices=4)
    if is_captured:
        runner.regions.capture(["vision"])
    images = EarlyImages(runner)
    parts = [picture(8, 8, seed) for seed in range(6)]
    expected = [rows.clone() for part in parts for rows in runner.encode_images([part])]
    for number in range(N_ROUNDS):
        images.expect(0, parts[:2])
        images.expect(1, parts[2:4])
        images.encode_next()
        between = runner.encode_images(parts[4:])  # of a unit that arrives meanwhile
        images.encode_next()
        slots = [(0, parts[0]), (1, parts[2]), (0, parts[1]), (1, parts[3])]
        got = [*images.encode(slots), *between]
        for at, rows in zip((0, 2, 1, 3, 4, 5), got, strict=True):
            error = float((rows - expected[at]).abs().max())
            assert error <= TOLERANCE, f"round {number}, image {at}: expected the same rows, got {error} off"
        images.forget(0)
        images.forget(1)
    torch.cuda.synchronize()
    assert (images.n_encoded, images.n_used, images.is_busy) == (4 * N_ROUNDS, 4 * N_ROUNDS, False)
