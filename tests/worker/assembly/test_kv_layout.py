"""The layout of keys and values that `auto` resolves to, and where the result is used and reported."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from models.omni import OmniModel
from tests.worker.loop.engines import loaded, make_config, make_parts
from worker.assembly import parts as building
from worker.assembly.kv_layout import layout_of, with_kv_layout
from worker.assembly.parts import assemble
from worker.assembly.slot_memory import WORK_BYTES, WORK_SLOT_BYTES
from worker.compile.cache import cache_facts
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig, SessionConfig
from worker.engine import Engine
from worker.trace.header import header_of

GPU_BYTES = 80 << 30


def resolved(by_kernels: bool = True, fit: tuple[int, int] | None = None, **settings: Any) -> str:
    """The layout of a worker with memory for so many sessions, in slots and as pages; None: nothing may ask for it."""

    def n_fitting(config: EngineConfig) -> int:
        assert fit is not None, "expected a layout that does not depend on memory"
        return fit[layout_of(config) == "pages"]

    return layout_of(with_kv_layout(EngineConfig(**settings), by_kernels=by_kernels, n_fitting=n_fitting))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fit": (4, 4)}, "slots"),
        ({"fit": (4, 5)}, "pages"),
        ({"fit": (5, 5)}, "pages"),
        ({"fit": (2, 4)}, "pages"),  # slots would hold half as many
        ({"fit": (0, 0)}, "slots"),
        ({"max_sessions": 4}, "slots"),
        ({"max_sessions": 5}, "pages"),
        ({"by_kernels": False}, "slots"),
        ({"by_kernels": False, "max_sessions": 64}, "slots"),
        ({"dtype": "float32", "max_sessions": 64}, "slots"),
        ({"dtype": "bfloat16", "max_sessions": 64, "weights": "fp8"}, "pages"),
        ({"session": SessionConfig(compat="reference"), "max_sessions": 64}, "slots"),
        ({"kv_layout": "slots", "max_sessions": 64}, "slots"),
        ({"kv_layout": "pages", "max_sessions": 1, "by_kernels": False}, "pages"),
    ],
)
def test_pages_are_for_many_sessions_and_little_memory_by_kernels(settings: dict[str, Any], expected: str) -> None:
    got = resolved(**settings)
    assert got == expected, f"{settings}: expected {expected}, got {got}"


def test_layout_that_is_open_is_no_layout() -> None:
    with pytest.raises(AssertionError, match="got auto"):
        layout_of(EngineConfig())


def test_a_cpu_has_slots_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(8, compile=CompileConfig(enabled=False))
    parts = assemble(*loaded(), config)
    assert (config.kv_layout, parts.kv_layout, parts.n_slots) == ("auto", "slots", 8)
    monkeypatch.setattr(OmniModel, "kernels", True)  # in Triton's interpreter
    assert assemble(*loaded(), config).kv_layout == "slots"


def test_engine_cache_and_trace_have_the_layout_in_use() -> None:
    config = make_config()

    def chosen(given: EngineConfig, **_: object) -> EngineConfig:
        return given.model_copy(update={"kv_layout": "pages"})

    keys = [cache_facts(make_parts(config), config.compile)["model"]]
    with mock.patch.object(building, "with_kv_layout", chosen):
        parts = make_parts(config)
    state = parts.unit_steps.state
    assert config.kv_layout == "auto" and parts.kv_layout == "pages"
    assert state.llm.pages.is_pool and state.speech is not None and state.speech.cache.pages.is_pool
    assert Engine(parts, config).config.kv_layout == "pages"
    assert header_of(parts, config)["engine"]["kv_layout"] == "pages"
    paged = make_parts(make_config(kv_layout="pages"))
    keys += [cache_facts(one, config.compile)["model"] for one in (parts, paged)]
    assert keys[0] != keys[1] == keys[2], f"expected the key of pages, got {keys}"


def test_a_gpus_free_memory_decides_without_a_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with kernels on a GPU whose slots take 1.7 GB, and 0.8 GB as pages."""
    model, asked = loaded()[0], list[str]()

    def one_slot(_model: object, _flow_parts: object, config: EngineConfig) -> dict[str, int]:
        asked.append(layout_of(config))
        return {"llm": 1_700_000_000 if asked[-1] == "slots" else 800_000_000}

    monkeypatch.setattr(OmniModel, "device", torch.device("cuda", 0))
    monkeypatch.setattr(OmniModel, "kernels", True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=GPU_BYTES))
    monkeypatch.setattr(building, "slot_bytes", one_slot)
    config = EngineConfig()
    least = int(0.1 * GPU_BYTES) + WORK_BYTES + 800_000_000 + 5 * (800_000_000 + WORK_SLOT_BYTES)
    for free, layout, n_slots in (
        (least, "pages", 5),
        (least - 1, "pages", 4),
        (60 << 30, "pages", 51),
        (10**8, "slots", 0),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, GPU_BYTES))
        got = building._with_kv_layout(model, None, config, by_kernels=True)
        assert got.kv_layout == layout, f"{free} bytes free: expected {layout}, got {got.kv_layout}"
        assert building._n_fitting(model, None, got) == n_slots
    asked.clear()
    few, many = (config.model_copy(update={"max_sessions": n}) for n in (4, 5))
    layouts = [building._with_kv_layout(model, None, one, by_kernels=True).kv_layout for one in (few, many)]
    assert layouts == ["slots", "pages"]
    assert building._with_kv_layout(model, None, config, by_kernels=False).kv_layout == "slots"
    assert not asked, "expected the given number of sessions, or kernels that have failed, to decide"


def test_room_for_a_copy_is_that_beside_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is the default for at most four sessions, which have slots."""
    model, asked = loaded()[0], list[str]()

    def one_slot(_model: object, _flow_parts: object, config: EngineConfig) -> dict[str, int]:
        asked.append(layout_of(config))
        return {"llm": 1_700_000_000}

    monkeypatch.setattr(OmniModel, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=GPU_BYTES))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, GPU_BYTES))
    monkeypatch.setattr(building, "slot_bytes", one_slot)
    assert building._keeps_decode_copy(model, None, EngineConfig(max_sessions=4))
    assert asked == ["slots"]
