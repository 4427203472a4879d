"""The engine's thread: the device that it selects."""

import pytest
import torch

from worker.engine_thread import EngineThread


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:1", 1), ("cpu", None)])
def test_selects_a_device_with_an_index(name: str, index: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses to select `cuda` without an index, which is what the setting `auto` means."""
    selected: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    thread = EngineThread(torch.device(name))
    thread.start()
    assert thread.submit(lambda: "done").result(5) == "done"
    thread.close()
    assert selected == ([] if index is None else [index])
