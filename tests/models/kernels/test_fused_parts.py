"""`TritonBackend` against `TorchBackend`: hidden states, and the content of caches.

On a CPU the kernels run in Triton's interpreter. Tolerance: 2e-5 between two orders of the same float32 sums.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.checkpoint.config import OmniConfig, load_config
from models.checkpoint.precision import Kind, Precision
from models.inputs.audio import UNIT_COLUMNS
from models.kernels import fused_decoder, paired_rows, quantized_gemm
from models.kernels.backend import TritonBackend
from models.kernels.bf12 import Bf12Matrix, encode
from models.kernels.fused_decoder import CopiedWeight, FusedDecoder
from models.kernels.packed_linear import pack_weights
from models.kernels.skinny_gemm import MAX_ROWS
from models.layers.kv_cache import KVCache, SavedRows
from models.layers.kv_pages import PageSizes
from models.omni import OmniModel
from models.random_weights import random_model
from tests.models.compare import assert_close, assert_same
from tests.parity.build import slot_cache

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("exact_products")

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
TOLERANCE = 2e-5
# int8 is not here: on a CPU, PyTorch's product of it rounds its input.
QUANTISED = Precision(llm="int4", head="fp8", tts="fp8", vpm="fp8", apm="int4")
MAX_LEN = 48


def shallow(tiny: Path) -> OmniConfig:
    """The widths of the embedded model with few layers and positions."""
    config = load_config(tiny)
    changes = {
        "num_hidden_layers": 2,
        "vision_config": config.vision_config.model_copy(update={"num_hidden_layers": 1}),
        "audio_config": config.audio_config.model_copy(update={"encoder_layers": 1, "max_source_positions": 160}),
        "tts_config": config.tts_config.model_copy(update={"num_hidden_layers": 2}),
    }
    return config.model_copy(update=changes)


@pytest.fixture(scope="module", params=DEVICES)
def model(request: pytest.FixtureRequest, tiny: Path) -> OmniModel:
    return random_model(shallow(tiny), device=request.param)


def with_both_backends(model: OmniModel, run) -> tuple[list[Tensor], list[Tensor]]:
    """Results of `run` with the Triton backend and with the PyTorch backend."""
    results = []
    for on in (True, False):
        model.use_kernels(on)
        with torch.no_grad():
            results.append(run())
    return results[0], results[1]


def live(cache: KVCache, n: dict[int, int]) -> list[Tensor]:
    """Counters, and the valid rows of slots."""
    rows = [tensor[slot, :, :count] for slot, count in n.items() for tensor in (*cache.k, *cache.v)]
    return [cache.lengths[:-1].float(), cache.positions[:-1].float(), *rows]


@pytest.mark.parametrize("part", ["llm", "tts"])
def test_decoder_equals_torch_backend(model: OmniModel, part: str) -> None:
    backbone, device = getattr(model, part).model, model.device
    width, generator = backbone.embed_tokens.embedding_dim, torch.Generator().manual_seed(3)
    rows = torch.randn(3, 20, width, generator=generator).to(device) * 0.1
    slots = torch.tensor([2, 0, 3], device=device)  # 3 is the scratch slot: a padding row

    def run() -> list[Tensor]:
        cache = slot_cache(model, part, n_slots=3, max_len=MAX_LEN)
        cache.windows[0] = 9
        out = []
        for start, n_rows, counts in ((0, 17, (17, 12, 0)), (17, 1, (1, 1, 0)), (18, 1, (0, 1, 0))):
            n_new = torch.tensor(counts, device=device)
            hidden = backbone(rows[:, start : start + n_rows], cache, slots, n_new, MAX_LEN, model.backend)
            out += [hidden[row, :count] for row, count in enumerate(counts)]
        return [*out, *live(cache, {2: 18, 0: 14})]

    for got, expected in zip(*with_both_backends(model, run), strict=True):
        assert_close(got, expected, TOLERANCE, f"{part}, Triton against PyTorch")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_rows", [5, 70])
def test_copies_in_12_bits_equal_torch_backend(tiny: Path, device: str, n_rows: int) -> None:
    """n_rows: 70 are too many for the copies, so that the weights themselves are multiplied."""
    config = shallow(tiny)
    wide = {"hidden_size": 256, "num_attention_heads": 256 // config.head_dim, "num_hidden_layers": 1}
    model = random_model(config.model_copy(update=wide), device=device)
    for layer in model.llm.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.bfloat16().float()
    model.decode_copy = True
    generator, slots = torch.Generator().manual_seed(8), torch.tensor([0], device=device)
    rows = torch.randn(1, n_rows, model.config.hidden_size, generator=generator).to(device) * 0.1

    def run() -> list[Tensor]:
        cache = slot_cache(model, "llm", n_slots=1, max_len=80)
        hidden = model.llm.model(rows, cache, slots, torch.tensor([n_rows], device=device), 80, model.backend)
        return [hidden, model.llm.logits(hidden[:, -1], model.backend), *live(cache, {0: n_rows})]

    exact, expected = with_both_backends(model, run)
    for got, wanted in zip(exact, expected, strict=True):
        assert_close(got, wanted, TOLERANCE, "with copies, Triton against PyTorch")
    model.use_kernels(True)
    backend = model.backend
    assert isinstance(backend, TritonBackend) and model.has_decode_copy
    first, head = backend._decoders[model.llm.model].layers[0], backend._heads[model.llm.lm_head]
    copied = {name: one for name, one in first._asdict().items() if isinstance(one, CopiedWeight)}
    assert list(copied) == ["qkv", "o", "gate_up"], f"expected all weights whose columns are whole groups, got {copied}"
    few = n_rows <= MAX_ROWS
    read = {name: [copy] for name, (_, copy) in copied.items()}
    # Few rows read each of them: without its numbers the results differ. Many rows read none of the layer's: nothing
    # differs without the numbers of all.
    emptied = read if few else {"the layer's": [copy for (copy,) in read.values()]}
    for name, copies in {**emptied, "head": [head[1]]}.items():
        kept = [copy.values.clone() for copy in copies]
        for copy in copies:
            copy.values.zero_()
        with torch.no_grad():
            hidden, logits = run()[:2]
        for copy, values in zip(copies, kept, strict=True):
            copy.values.copy_(values)
        is_read = {"hidden": not torch.equal(hidden, exact[0]), "logits": not torch.equal(logits, exact[1])}
        assert is_read == {"hidden": few and name != "head", "logits": few or name == "head"}, f"{name}: {is_read}"


def test_without_memory_for_copies_kernels_run_without_them(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = shallow(tiny)
    model = random_model(config.model_copy(update={"hidden_size": 256, "num_attention_heads": 256 // config.head_dim}))
    for layer in model.llm.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.bfloat16().float()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    n_left = 3

    def encode_some(weight: Tensor) -> Bf12Matrix | None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise torch.OutOfMemoryError("no memory is left")
        return encode(weight)

    monkeypatch.setattr(fused_decoder, "encode", encode_some)
    model.decode_copy = True
    model.use_kernels(True)
    assert model.kernels and not model.has_decode_copy
    for name, tensor in model.state_dict().items():
        assert_same(tensor, before[name], name)
    model.use_kernels(False)
    n_left = 1000
    model.use_kernels(True)
    assert model.has_decode_copy
    model.use_kernels(False)
    assert not model.has_decode_copy


def test_quantised_weights_have_no_copy(tiny: Path) -> None:
    model = random_model(shallow(tiny), precision=QUANTISED)
    model.decode_copy = True
    model.use_kernels(True)
    assert model.kernels and not model.has_decode_copy


def test_shared_scratch_slot_changes_no_bit(model: OmniModel) -> None:
    backbone, device = model.tts.model, model.device
    rows = torch.randn(1, 8, backbone.embed_tokens.embedding_dim, generator=torch.Generator().manual_seed(6))
    rows, slot = rows.to(device) * 0.1, torch.tensor([0], device=device)

    def run(shared_scratch: bool) -> list[Tensor]:
        cache = slot_cache(model, "tts", n_slots=1, max_len=16, shared_scratch=shared_scratch)
        assert cache.k[0].is_contiguous() is not shared_scratch
        out = []
        for start, n_rows, n_new in ((0, 7, 5), (5, 2, 2)):  # padding first
            out.append(
                backbone(
                    rows[:, start : start + n_rows],
                    cache,
                    slot,
                    torch.tensor([n_new], device=device),
                    16,
                    model.backend,
                )
            )
        return [out[0][:, :5], out[1], *live(cache, {0: 16})]

    model.use_kernels(True)
    with torch.no_grad():
        for got, expected in zip(run(True), run(False), strict=True):
            assert_same(got, expected, "shared scratch slot against one per layer")


@pytest.mark.parametrize("window", [None, 40])
def test_pages_of_a_pool_change_no_bit(model: OmniModel, window: int | None) -> None:
    """The new rows of a slot begin in one page and end in the next. window: of that slot, in rows."""
    backbone, device = model.llm.model, model.device
    width, generator = backbone.embed_tokens.embedding_dim, torch.Generator().manual_seed(7)
    rows = torch.randn(2, 3, width, generator=generator).to(device) * 0.1
    slots, n_new = torch.tensor([1, 0], device=device), torch.tensor([3, 1], device=device)
    held = torch.randn(62, model.config.num_key_value_heads, model.config.head_dim, generator=generator)
    held = held.transpose(0, 1).to(device)

    def run(page_sizes: PageSizes | None) -> list[Tensor]:
        cache = slot_cache(model, "llm", n_slots=2, max_len=130, page_sizes=page_sizes)
        for slot, n_rows in ((1, 64), (0, 64), (1, 128)):  # the pages of a slot are not neighbours
            cache.pages.reserve(slot, n_rows)
        if window is not None:
            cache.has_windows = True
            cache.windows[1] = window
        for slot, n_rows in ((1, 62), (0, 7)):
            own = torch.stack([held[:, :n_rows]] * len(cache.k))
            cache.load(slot, SavedRows(own, own))
        hidden = backbone(rows, cache, slots, n_new, 130, model.backend)
        return [hidden[0], hidden[1, :1], *cache.save(1, 65), *cache.save(0, 8)]

    model.use_kernels(True)
    with torch.no_grad():
        for got, expected in zip(run(PageSizes(64, 3)), run(None), strict=True):
            assert_same(got, expected, "pages of a pool against rows for each slot")


def test_audio_encoder_equals_torch_backend(model: OmniModel) -> None:
    generator = torch.Generator().manual_seed(4)
    mel = torch.randn(2, 2, 80, UNIT_COLUMNS, generator=generator).to(model.device) * 0.5
    slots = torch.tensor([1, 0], device=model.device)

    def run() -> list[Tensor]:
        cache = slot_cache(model, "apm", n_slots=2)
        out = []
        for unit, (first, end) in enumerate((((2, 2), (104, 70)), ((0, 0), (104, 0)))):
            edges = (torch.tensor(edge, device=model.device) for edge in (first, end))
            hidden, n_new = model.apm.stream(mel[unit], *edges, cache, slots, model.backend)
            out += [hidden[row, :n] for row, n in enumerate(n_new.tolist())]
        return [*out, *live(cache, {1: 100, 0: 34})]

    for got, expected in zip(*with_both_backends(model, run), strict=True):
        assert_close(got, expected, TOLERANCE, "apm, Triton against PyTorch")


def test_vision_encoder_equals_torch_backend(model: OmniModel) -> None:
    generator, n_patches = torch.Generator().manual_seed(5), (40, 23, 0)
    patches = torch.randn(3, 40, 588, generator=generator).to(model.device)
    ids = torch.randint(0, model.config.vision_config.table_side**2, (3, 40), generator=generator).to(model.device)
    mask = torch.arange(40, device=model.device) < torch.tensor(n_patches, device=model.device)[:, None]

    def run() -> list[Tensor]:
        hidden = model.vpm(patches, ids, mask, model.backend)
        return [hidden[row, :n] for row, n in enumerate(n_patches)]

    for got, expected in zip(*with_both_backends(model, run), strict=True):
        assert_close(got, expected, 2 * TOLERANCE, "vpm, Triton against PyTorch")


def test_packed_weights_are_shared_and_unchanged(tiny: Path) -> None:
    fresh, packed = random_model(shallow(tiny)), random_model(shallow(tiny))
    packed.use_kernels(True)
    names = fresh.state_dict()
    assert list(packed.state_dict()) == list(names)
    for name, tensor in packed.state_dict().items():
        assert_same(tensor, names[name], name)
    attention, fused = packed.llm.model.layers[0].self_attn, FusedDecoder(packed.llm.model).layers[0]
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        got = layer.weight.untyped_storage().data_ptr()
        assert got == fused.qkv.untyped_storage().data_ptr(), "expected a view of the packed weights, got a copy"
    packed.use_kernels(False)
    assert not packed.kernels


@pytest.mark.gpu
def test_packing_never_reserves_the_weights_twice() -> None:
    pairs = [[torch.nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(2)] for _ in range(8)]
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    packed = [pack_weights(pair) for pair in pairs]
    grown = torch.cuda.max_memory_reserved() - before
    assert grown <= 2 * packed[0].nbytes, f"expected the memory of one packed weight more, got {grown} bytes"


@pytest.mark.parametrize("device", DEVICES)
def test_quantised_layers_equal_torch_backend(tiny: Path, device: str) -> None:
    config = shallow(tiny).model_copy(update={"num_hidden_layers": 1})
    model = random_model(config, device=device, precision=QUANTISED)
    test_vision_encoder_equals_torch_backend(model)
    n_new, slots = torch.tensor([2, 1], device=device), torch.tensor([1, 0], device=device)
    ids = torch.arange(4, device=device).view(2, 2)

    def run() -> list[Tensor]:
        cache = slot_cache(model, "llm", n_slots=2, max_len=16)
        hidden, logits = model.llm.prefill(model.llm.embed(ids, model.backend), cache, slots, n_new, 16, model.backend)
        return [hidden[0], hidden[1, :1], logits, *live(cache, {1: 2, 0: 1})]

    for got, expected in zip(*with_both_backends(model, run), strict=True):
        assert_close(got, expected, 5 * TOLERANCE, "quantised llm, Triton against PyTorch")
    attention = model.llm.model.layers[0].self_attn
    packed = attention.q_proj.weight.values.untyped_storage().data_ptr()
    assert packed == attention.v_proj.weight.values.untyped_storage().data_ptr(), "expected one packed matrix"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_decoder_with_pairs_of_8_bit_numbers(
    tiny: Path, device: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = shallow(tiny).model_copy(update={"intermediate_size": 256})
    model = random_model(config, device=device, dtype=torch.bfloat16, precision=Precision(llm=kind))
    ids = torch.arange(4, device=device).view(2, 2)
    n_new, slots = torch.tensor([2, 1], device=device), torch.tensor([1, 0], device=device)
    monkeypatch.setattr(paired_rows, "SMALL_WEIGHT", 0)
    monkeypatch.setattr(paired_rows, "multiplies_pairs", lambda device: True)
    products: list[tuple[int, ...]] = []
    product = quantized_gemm.paired_product
    monkeypatch.setattr(
        quantized_gemm,
        "paired_product",
        lambda x, *args, **options: (products.append(x.shape), product(x, *args, **options)),
    )

    def run() -> list[Tensor]:
        sizes = {"kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "dtype": torch.bfloat16}
        cache = KVCache(n_layers=2, n_slots=2, max_len=16, device=device, **sizes)
        hidden, _ = model.llm.prefill(model.llm.embed(ids, model.backend), cache, slots, n_new, 16, model.backend)
        return [hidden[0].float(), hidden[1, :1].float()]

    for got, expected in zip(*with_both_backends(model, run), strict=True):
        off = ((got - expected).norm() / expected.norm()).item()
        assert off < 2e-2, f"expected a relative difference of at most 2e-2, got {off:.3g}"
    assert products == [(2, 2, 128), (2, 2, 128), (2, 2, 128), (4, 256)] * 2, "expected pairs in both layers"
