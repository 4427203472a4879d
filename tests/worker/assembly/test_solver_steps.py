"""The solver steps of an engine: from its settings, from those of its sessions, or from the checkpoint."""

from pathlib import Path

import pytest

from assets.build_tiny_vocoder import flow_yaml
from models.token2wav.settings import FlowConfig
from worker.assembly.solver_steps import with_solver_steps
from worker.config.session import EngineConfig, SessionConfig
from worker.config.settings import SettingError

OF_SESSIONS = SessionConfig(euler_steps=7)


@pytest.mark.parametrize(
    ("of_checkpoint", "config", "expected"),
    [
        (5, EngineConfig(), 5),
        (10, EngineConfig(), 10),
        (None, EngineConfig(), 10),
        (5, EngineConfig(session=OF_SESSIONS), 7),
        (5, EngineConfig(euler_steps=3), 3),
    ],
)
def test_steps(tmp_path: Path, of_checkpoint: int | None, config: EngineConfig, expected: int) -> None:
    if of_checkpoint is not None:
        (tmp_path / "flow.yaml").write_text(flow_yaml(FlowConfig(n_timesteps=of_checkpoint)))
    got = with_solver_steps(config.model_copy(update={"token2wav_path": tmp_path}))
    assert got.euler_steps == expected
    with pytest.raises(SettingError, match=f"euler_steps: expected null or {expected}"):
        got.check_session(SessionConfig(euler_steps=9))
