"""Sizes of the regions, and what follows from running without compiling."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from models.errors import SettingsError
from models.token2wav.settings import MEL_RATE
from tests.worker.loop.engines import loaded, make_config
from worker.assembly.parts import _check_room_for_voices, assemble, slot_bytes
from worker.assembly.sizes import EAGER_SIZES, EAGER_VOCODER_SIZES, PAGE_ROWS, speech_pages
from worker.config.compile import CompileConfig
from worker.loop.sessions import Sessions
from worker.loop.voice_manager import VoiceManager


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_model_on_a_cpu_that_is_not_compiled_has_many_sizes_and_reads_in_place(*, is_compiled: bool) -> None:
    config = make_config(compile=CompileConfig(enabled=is_compiled))
    parts = assemble(*loaded(), config)
    state = parts.unit_steps.state
    assert state.speech is not None and state.apm is not None and parts.vocoder is not None
    for cache in (state.llm, state.apm, state.speech.cache):
        assert cache.runs_eager == (not is_compiled)
    rows, n_tokens = parts.unit_steps.runner.shapes.rows, parts.vocoder.shapes.speech_tokens
    assert (rows == EAGER_SIZES["rows"]) == (not is_compiled), rows
    assert (n_tokens == EAGER_VOCODER_SIZES["speech_tokens"]) == (not is_compiled), n_tokens


def test_a_pool_of_speech_rows_has_1024_for_each_slot_and_room_for_one_cache() -> None:
    model, paged, apart = loaded()[0], make_config(kv_layout="pages"), make_config(kv_layout="slots")
    assert PAGE_ROWS % 64 == 0, f"rows of a page: expected whole tiles of 64 keys, got {PAGE_ROWS}"
    assert speech_pages(model, apart, 9) is None
    for n_slots, n_rows in ((1, 4096), (4, 4096), (5, 5 * 1024), (96, 96 * 1024)):
        got = speech_pages(model, paged, n_slots)
        assert got is not None and (got.rows, got.n * got.rows) == (PAGE_ROWS, n_rows), f"{n_slots} slots: got {got}"
    held = {config.kv_layout: slot_bytes(model, None, config) for config in (apart, paged)}
    tts = model.config.tts_config
    row = 2 * 4 * tts.num_hidden_layers * tts.num_key_value_heads * tts.head_dim
    saved = held["slots"]["speech"] - held["pages"]["speech"]
    assert saved == (4096 - 1024) * row, f"expected {(4096 - 1024) * row} bytes less in a slot, got {saved}"


def test_units_that_are_rebuilt_share_a_prefill_of_four_times_the_size() -> None:
    steps = assemble(*loaded(), make_config(compile=CompileConfig(enabled=False))).unit_steps
    got = {n_rows: steps.joint_prefill_bucket(n_rows) for n_rows in (10, 20, 79, 85, 300, 10_000)}
    assert got == {10: 64, 20: 128, 79: 512, 85: 512, 300: 512, 10_000: 512}


@pytest.mark.parametrize(("voices_s", "longest"), [(60, 30), (20, 20)])
def test_a_voice_is_no_longer_than_all_voices(voices_s: float, longest: float) -> None:
    parts = assemble(*loaded(), config := make_config(voices_s=voices_s))
    assert parts.vocoder is not None and parts.vocoder.sizes.voice_frames == voices_s * MEL_RATE
    for vocoder, expected in ((parts.vocoder, longest), (None, 30)):
        voices = VoiceManager(parts.unit_steps, vocoder)
        sessions = Sessions(parts.unit_steps, mock.Mock(), voices, mock.Mock(), config)
        assert sessions.max_prompt_s == expected, f"seconds: expected {expected}, got {sessions.max_prompt_s}"


def test_refuses_voices_that_the_free_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * gib, 80 * gib))

    def vocoder(device: str, missing: int) -> Any:
        return SimpleNamespace(device=torch.device(device), n_bytes=5 * gib + missing, held_bytes=5 * gib)

    _check_room_for_voices(vocoder("cuda", 2 * gib), 60.0)
    _check_room_for_voices(vocoder("cpu", 9 * gib), 60.0)
    with pytest.raises(SettingsError, match=r"voices_s: expected .* 2\.0 GiB of free GPU memory, got 90, .* 3\.0 GiB"):
        _check_room_for_voices(vocoder("cuda", 3 * gib), 90.0)
