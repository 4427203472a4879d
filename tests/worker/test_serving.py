"""Settings of a worker process from the settings file."""

import pytest
import torch

from worker.config.compile import CompileConfig
from worker.config.service import Config, DuplexSection, ServiceSection
from worker.serving import worker_settings


@pytest.mark.parametrize("has_gpu", [True, False])
def test_auto_compile_follows_the_device(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert worker_settings(Config()).engine.compile.enabled is has_gpu


@pytest.mark.parametrize("enabled", [True, False])
def test_explicit_compile_setting_is_kept(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not enabled)
    config = Config(service=ServiceSection(compile=CompileConfig(enabled=enabled)))
    assert worker_settings(config).engine.compile.enabled is enabled


@pytest.mark.parametrize(
    ("settings", "is_measured"),
    [
        ({}, True),
        ({"max_sessions": 3}, False),
        ({"max_sessions": 3, "admission": "measured"}, True),
        ({"admission": "fixed"}, False),
    ],
)
def test_sessions_are_admitted_by_time_unless_their_number_is_set(settings: dict, is_measured: bool) -> None:
    assert worker_settings(Config(duplex=DuplexSection(**settings))).is_measured is is_measured
