"""The language models on a GPU: captured regions, no device synchronization in a frame, the codes of the CPU."""

import gc
from collections.abc import Iterator

import pytest
import torch

from models.graphs.region_graphs import compile_counters
from models.qwen3_tts.generate import generate_codes
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.settings import FrameSampling
from tests.models.qwen3_tts.test_runner import MAX_LEN, N_SLOTS, SHAPES, prompt, request
from tests.parity.golden import GoldenDir

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SEEDS = (3, 8, 13, 20, 29)


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def runner_on(golden: GoldenDir, device: str, *, kernels: bool = False, n_slots: int = N_SLOTS) -> TalkerRunner:
    model = load_qwen3_tts(golden.model("tiny_b"), device=device)
    if kernels:
        model.use_kernels(True)
    return TalkerRunner(model, n_slots=n_slots, max_len=MAX_LEN, shapes=SHAPES)


def codes_of(runner: TalkerRunner) -> list[list[list[int]]]:
    return [one.codes.tolist() for one in generate_codes(runner, [request(runner, seed) for seed in SEEDS])]


@pytest.mark.parametrize("kernels", [False, True])
def test_captured_codes_equal_the_cpu(talker_golden: GoldenDir, kernels: bool) -> None:
    runner = runner_on(talker_golden, "cuda", kernels=kernels)
    eager = codes_of(runner)
    runner.table.capture()
    runner.table.seal()
    assert codes_of(runner) == eager
    assert eager == codes_of(runner_on(talker_golden, "cpu"))
    assert runner.table.n_skipped == 0


def test_codes_do_not_depend_on_the_batch(talker_golden: GoldenDir) -> None:
    together, alone = (runner_on(talker_golden, "cuda", kernels=True, n_slots=n) for n in (N_SLOTS, 1))
    for runner in (together, alone):
        runner.table.capture()
    assert codes_of(together) == codes_of(alone)


def test_frames_do_not_synchronize(talker_golden: GoldenDir) -> None:
    runner = runner_on(talker_golden, "cuda", kernels=True)
    runner.table.capture()
    for slot in (0, 1):
        runner.open(slot, FrameSampling(), seed=slot, max_frames=20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.feed({slot: prompt(runner, slot) for slot in (0, 1)})
        for _ in range(4):
            runner.frame([0, 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_compiles_after_warm_up(talker_golden: GoldenDir) -> None:
    runner = runner_on(talker_golden, "cuda")
    expected = codes_of(runner)
    runner.table.compile(by_layer=True)
    runner.table.capture()
    before = compile_counters()
    assert codes_of(runner) == expected
    assert compile_counters() == before and runner.table.n_skipped == 0
    runner.table.uncompile()


def test_dropped_runner_gives_the_memory_of_live_graphs_back(talker_golden: GoldenDir) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    runner = runner_on(talker_golden, "cuda", kernels=True)
    runner.table.capture()
    codes_of(runner)
    held = torch.cuda.memory_reserved()
    runner.table.drop_graphs()
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    now = torch.cuda.memory_reserved()
    assert held > before, f"expected memory of graphs, got {held} after {before} bytes"
    # Library workspaces stay with the process.
    assert now - before <= 0.1 * (held - before) + 64 * 2**20, f"expected about {before} bytes, got {now} of {held}"
