"""The engine's thread: the device that it selects, and how exactly it sleeps."""

import ctypes
import sys

import pytest
import torch

from worker.engine_thread import SLACK_NS, EngineThread

PR_GET_TIMERSLACK = 30


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


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is a setting of Linux")
def test_sleeps_exactly() -> None:
    def slack() -> int:
        return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    others = slack()
    thread = EngineThread(torch.device("cpu"))
    thread.start()
    got = thread.submit(slack).result(5)
    thread.close()
    assert got == SLACK_NS, f"slack of sleeps on the engine's thread: expected {SLACK_NS} ns, got {got}"
    assert slack() == others, "expected other threads as before"
