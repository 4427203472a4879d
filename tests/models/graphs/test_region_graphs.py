"""The region table: every region compiles as one graph, and a long mixed session triggers no compilation."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from models.errors import SettingsError, ShapeError
from models.graphs.captured import Captured
from models.graphs.region_graphs import compile_counters
from models.graphs.shape_table import ShapeTable
from models.load import load_model
from models.omni import OmniModel
from models.sampling.settings import CHAT_TEXT, DUPLEX_SPEECH
from models.sampling.text import TokenSet, TokenSets
from models.stages import region_table
from models.stages.region_table import Regions, Shapes
from models.stages.runner import Runner

SMALL = Shapes(
    batch=(2,),
    slices=(2,),
    patches=(64,),
    clip_frames=(200,),
    samples=(16640,),
    rows=(96,),
    kv=(512,),
    spoken=(24,),
    tokens=(24,),
    speech_kv=(256,),
)
# Regions that a unit runs. The others are parts of these, or run before and after a session.
SERVING = (
    *("mel_unit", "audio_unit", "audio_overlap", "vision", "llm_evict", "unit_prefill", "unit_step"),
    *("spoken_rows", "speech_begin", "speech_step"),
)
WHOLE = ("mel_unit",)
# Greedy: a random draw at the border of two tokens would depend on rounding.
TEXT, SPEECH_TOKENS = replace(CHAT_TEXT, greedy=True), replace(DUPLEX_SPEECH, greedy=True)
UNITS = 13
FIRST_SAMPLES, SAMPLES = 16480, 16000


@pytest.fixture
def model(tiny) -> OmniModel:
    return load_model(tiny)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps of the speech loop: traced as a whole, each step repeats the same operations."""
    monkeypatch.setattr(region_table, "SPEECH_STEPS", (1, 2))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_runner(model: OmniModel, shapes: Shapes = SMALL, device: str = "cpu") -> Runner:
    sets = TokenSets.build([TokenSet()], model.config.vocab_size, device)
    return Runner(model, sets, n_slots=3, llm_len=shapes.kv[-1], tts_len=shapes.speech_kv[-1], shapes=shapes)


def outputs(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if value is None else [tensor for part in value for tensor in outputs(part)]


def live_units(runner: Runner) -> Iterator[tuple[str, torch.Tensor]]:
    """Two sessions of `UNITS` units, every region in every unit; yields the ids and rows of each unit.

    Every 12 units the audio encoder restarts from its recent units. Session 1 joins at unit 3, leaves at unit 8 and a
    new one takes its slot: first, later and restarting units share batches.
    """
    regions, state, config = runner.regions, runner.state, runner.model.config
    generator = torch.Generator().manual_seed(11)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    slots, pad = torch.tensor([0, 1]), state.scratch
    for slot in (0, 1):
        state.text.configure(slot, TEXT, seed=slot)
        state.speech.sampler.configure(slot, SPEECH_TOKENS, config.tts_config.speech_eos_id, seed=slot)
    patch = config.vision_config.patch_size
    for unit in range(UNITS):
        if unit == 8:
            regions("reset", torch.tensor([1, pad]))
            state.text.configure(1, TEXT, seed=5)
            state.speech.sampler.configure(1, SPEECH_TOKENS, config.tts_config.speech_eos_id, seed=5)
        on = torch.tensor([True, unit >= 3])
        live = torch.where(on, slots, pad)
        first = torch.tensor([unit == 0, unit in (3, 8)])
        n_new = torch.where(on, torch.where(first, FIRST_SAMPLES, SAMPLES), 0)
        mel, begin, end = regions("mel_unit", live, 0.1 * noise(2, 16640), n_new, on, ~on, redundancy=2, clip="auto")
        audio, n_rows = regions("audio_unit", live, mel, begin, end)
        pixels = torch.randint(0, 256, (2, 64, 3 * patch * patch), dtype=torch.uint8, generator=generator)
        seen = regions(
            "vision",
            pixels,
            torch.randint(0, config.vision_config.table_side**2, (2, 64), generator=generator),
            torch.randint(0, 8, (2, 64, 2), generator=generator),
            torch.arange(64) < torch.tensor([[64], [40]]),
        )
        rows = torch.zeros(2, 96, config.hidden_size)
        rows[:, 2:66], rows[:, 67:77] = seen, audio
        is_row = torch.zeros(2, 96, dtype=torch.bool)
        is_row[:, 2:66] = is_row[:, 67:77] = True
        ids = torch.randint(0, config.vocab_size, (2, 96), generator=generator)
        full = state.llm.lengths[live] + 90 > 512
        drop = torch.where(full, state.llm.lengths[live] - 200, 0)
        regions("llm_evict", live, torch.full((2,), 20), drop, rotates=True)
        regions("audio_overlap", live, on & (unit % 12 == 11))
        fed = torch.where(on, 77, 0)
        packed, _ = regions("unit_prefill", live, ids, rows, is_row, fed, on, kv_len=512)
        chosen = [packed[0].clone()]
        for place in range(3):
            places = torch.full((2,), place)
            packed, _ = regions("unit_step", live, packed[0].clone(), on, places, on.clone(), kv_len=512)
            chosen.append(packed[0].clone())
        spoken = torch.randint(0, config.tts_config.num_text_tokens, (2, 24), generator=generator)
        n_text = torch.tensor([unit % 4, 3])
        conditions = regions("spoken_rows", live, spoken, n_text, ~on)
        n_conditions = n_text + 1 + ~on
        if unit % 3 == 0:
            state.speech.cache.reset(live)
        fewest, limit = torch.full((2,), 6), torch.full((2,), 6)
        regions("speech_begin", live, conditions, torch.where(on, n_conditions, 0), fewest, limit, kv_len=256)
        for _ in range(5):
            regions("speech_step", live, kv_len=256, n_steps=1)
        yield "ids", torch.stack(chosen)[:, on]
        yield "audio rows", torch.where((torch.arange(10) < n_rows[:, None])[..., None], audio, 0)[on]
        yield "speech_tokens", state.speech.speech_tokens[slots[on], :6]
        yield "lengths", torch.stack((state.llm.lengths, state.apm.lengths, state.speech.cache.lengths))[:, :2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_units_compile_nothing_after_warm_up_and_equal_eager(model):
    runner = make_runner(model)
    # Traced and run operation by operation: the next test covers generated code.
    runner.regions.compile(SERVING, backend="eager")
    before = compile_counters()
    runner.regions.warm_up(SERVING)
    warm = compile_counters()
    n_graphs = sum(len(runner.regions.table[name].variants) for name in SERVING)
    assert warm["graph_breaks"] == before["graph_breaks"]
    assert warm["graphs"] - before["graphs"] == n_graphs, "one bucket each: one graph per region and variant"

    # An unused session slot of the eager twin shows what the same calls give without any compiler.
    eager = make_runner(model)
    for (name, got), (_, expected) in zip(live_units(runner), live_units(eager), strict=True):
        assert_close(name, got, expected, 1e-4)
    after = compile_counters()
    assert after == warm, f"compiled after warm-up: expected {warm}, got {after}"
    # Restarted with ten units after unit 11.
    assert int(runner.state.apm.lengths[0]) == (10 + UNITS - 12) * 50


def assert_close(name: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    delta = (got.double() - expected.double()).abs().max().item() if got.numel() else 0.0
    assert delta <= tolerance, f"{name}: max difference {delta:.3g} above {tolerance}\nexpected {expected}\ngot {got}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_regions_compiled_whole_equal_eager_to_rounding(model):
    """Same example, same state: mean difference below 1e-6, largest below 1e-5, in outputs and in slots.

    Traced and decomposed as for code generation, but without it: on a CPU they are served eagerly. Of the other
    regions only layers are compiled, which tests/test_compile_equivalence.py covers.
    """
    runner = make_runner(model)
    regions = runner.regions
    for name in WHOLE:
        region = regions.table[name]
        for bucket in region.buckets(runner.shapes):
            tensors, static = region.example(bucket)
            # Rows that share the scratch slot would race; each gets its own.
            tensors = [torch.arange(len(t)) if is_slots(t, runner.state.scratch) else t for t in tensors]
            results = []
            for compiled in (False, True):
                runner.state.reset(torch.arange(runner.state.n_slots + 1))
                regions.uncompile()
                if compiled:
                    regions.compile([name], backend="aot_eager_decomp_partition")
                out = [tensor.clone() for tensor in outputs(regions(name, *tensors, **static))]
                results.append(out + [tensor.clone() for tensor in runner.state.tensors()])
            for expected, got in zip(*results, strict=True):
                delta = (got.double() - expected.double()).abs().nan_to_num(0.0)
                scale = max(1.0, expected.double().abs().nan_to_num(0.0, 0.0, 0.0).max().item() if got.numel() else 1)
                worst, mean = (delta.max().item(), delta.mean().item()) if got.numel() else (0.0, 0.0)
                assert worst <= 1e-5 * scale and mean <= 1e-6 * scale, (
                    f"{name} {bucket}: max {worst:.3g}, mean {mean:.3g}, scale {scale:.3g}"
                )


def is_slots(tensor: torch.Tensor, scratch: int) -> bool:
    return tensor.dim() == 1 and tensor.dtype == torch.int64 and bool((tensor == scratch).all())


def test_every_bucket_compiles_to_exactly_one_graph(model):
    """Two sizes per axis, traced without code generation: the test counts graphs."""
    shapes = Shapes(
        batch=(1, 2),
        samples=(16640,),
        rows=(16,),
        kv=(128, 256),
        spoken=(4, 8),
        tokens=(8,),
        speech_kv=(64,),
    )
    runner = make_runner(model, shapes)
    names = ["unit_step", "spoken_rows"]
    runner.regions.compile(names, backend="eager")
    before = compile_counters()
    runner.regions.warm_up(names)
    warm = compile_counters()
    regions = [runner.regions.table[name] for name in names]
    n_buckets = sum(len(region.variants) for region in regions for _ in region.buckets(runner.shapes))
    assert warm["graphs"] - before["graphs"] == n_buckets
    assert warm["graph_breaks"] == before["graph_breaks"]
    runner.regions.warm_up(names)
    assert compile_counters() == warm


def test_layers_share_one_graph_and_uncompile_undoes_it(model):
    assert len(model.llm.model.layers) > 1
    runner = make_runner(model)
    runner.regions.compile(["unit_step"], by_layer=True, backend="aot_eager")
    before = compile_counters()
    runner.regions.warm_up(["unit_step"])
    assert compile_counters()["graphs"] - before["graphs"] == 2, "expected one for all layers and one for `choose`"
    runner.regions.uncompile()
    torch._dynamo.reset()
    before = compile_counters()
    runner.regions.warm_up(["unit_step"])
    assert compile_counters() == before


def test_warm_up_does_not_change_session_slots(model):
    runner = make_runner(model)
    for tensor in runner.state.tensors():
        tensor[0].fill_(1)
    before = [tensor[: runner.state.n_slots].clone() for tensor in runner.state.tensors()]
    runner.regions.warm_up()
    for expected, tensor in zip(before, runner.state.tensors(), strict=True):
        assert torch.equal(expected, tensor[: runner.state.n_slots])


def test_error_of_an_oversized_input_names_region_and_sizes():
    with pytest.raises(ShapeError, match=r"unit_prefill: rows: expected at most one of \(96,\), got 97"):
        SMALL.fit("unit_prefill", "rows", 97)
    assert SMALL.fit("unit_prefill", "rows", 96) == 96
    with pytest.raises(SettingsError, match=r"shapes.batch.*got \(2, 1\)"):
        Shapes(batch=(2, 1))
    assert Shapes(kv=(512, 2048)).capped(kv=1000).kv == (512, 1000)


def test_refuses_unknown_region(model):
    with pytest.raises(SettingsError, match="got llm_decoed"):
        Regions.compile(make_runner(model).regions, ["llm_decoed"])


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_regions_equal_eager(tiny, compiled):
    """Replayed outputs of every region equal an eager run on the same inputs and state."""
    model = load_model(tiny, device="cuda")
    runner, twin = make_runner(model, device="cuda"), make_runner(model, device="cuda")
    regions = runner.regions
    if compiled:
        regions.compile()
    for name, region in regions.table.items():
        for bucket in region.buckets(runner.shapes):
            captured = Captured(regions, name, bucket)
            for static in captured.inputs:
                if is_slots(static, runner.state.scratch):
                    static.copy_(torch.arange(len(static)))
            results = []
            for each, run in ((twin, twin.regions), (runner, None)):
                each.state.reset(torch.arange(each.state.n_slots + 1, device="cuda"))
                _, options = region.example(bucket)
                out = run(name, *captured.inputs, **options) if run else captured(*captured.inputs)
                torch.cuda.synchronize()
                results.append([tensor.clone() for tensor in outputs(out)])
                results[-1] += [tensor[: each.state.n_slots].clone() for tensor in each.state.tensors()]
            for expected, got in zip(*results, strict=True):
                assert_close(f"{name} {bucket}", got, expected, 1e-4)


@pytest.mark.parametrize(
    ("n", "most", "expected"),
    [
        *((1, 32, [1]), (3, 32, [3]), (5, 32, [4, 1]), (6, 32, [4, 2]), (7, 32, [7]), (12, 32, [8, 4]), (13, 32, [13])),
        *((21, 16, [16, 4, 1]), (23, 16, [16, 7]), (40, 40, [40]), (33, 40, [33]), (0, 40, [])),
    ],
)
def test_calls_that_would_be_mostly_padding_are_split(n: int, most: int, expected: list[int]) -> None:
    got = ShapeTable(batch=(1, 2, 4, 8, 16, 32, 40)).parts("batch", n, most)
    assert got == expected, f"{n} entries: expected calls of {expected}, got {got}"


def test_fewer_entries_than_the_smallest_size_are_one_call() -> None:
    assert ShapeTable(batch=(8, 16)).parts("batch", 1, 16) == [1]
    assert ShapeTable(batch=(8, 16)).parts("batch", 19, 16) == [16, 3]


def test_tensors_on_a_cpu_are_those_of_inference_mode_until_something_compiles(model: OmniModel) -> None:
    regions = make_runner(model).regions
    [(bucket, _)] = regions.calls("mel_unit")
    tensors, static = regions.example("mel_unit", bucket)
    assert all(tensor.is_inference() for tensor in outputs(regions("mel_unit", *tensors, **static)))
    regions.compile(["mel_unit"], backend="eager")
    assert not any(tensor.is_inference() for tensor in outputs(regions("mel_unit", *tensors, **static)))
