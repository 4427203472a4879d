"""The number of solver steps of the flow, which a checkpoint's `flow.yaml` may name."""

from models.token2wav.load.flow_yaml import load_flow_config
from models.token2wav.load.parts import FLOW_YAML
from worker.config.session import EngineConfig


def with_solver_steps(config: EngineConfig) -> EngineConfig:
    """The settings with a number of steps: their own, else that of their sessions, else that of the local checkpoint.

    Raises: ConfigError for a file that is not as `load_flow_config` expects.
    """
    steps, file = config.euler_steps or config.session.euler_steps, config.token2wav_folder / FLOW_YAML
    if steps is None and file.is_file():
        steps = load_flow_config(file).n_timesteps
    return config.model_copy(update={"euler_steps": steps or config.solver_steps})
