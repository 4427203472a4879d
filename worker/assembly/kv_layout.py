"""The layout of keys and values of a worker whose settings leave it open. Torch-free.

The worker's start, the planner and the doctor ask `with_kv_layout`. What is built afterwards has slots or pages.
"""

from collections.abc import Callable

from worker.config.session import EngineConfig
from worker.config.weights import KVLayout

# Most sessions that have slots by default: more of them fit as pages, but units of one take 2 % longer (one H200).
SLOTS_SESSIONS = 4


def with_kv_layout(config: EngineConfig, *, by_kernels: bool, n_fitting: Callable[[EngineConfig], int]) -> EngineConfig:
    """The settings with `slots` or `pages` in place of `auto`.

    Pages where the project's kernels run a bfloat16 model and hold more than `SLOTS_SESSIONS` sessions: as many as the
    settings name, or else as fit into memory as pages. The number of slots follows from the layout afterwards.

    Args:
        by_kernels: the project's kernels run the model on a GPU.
        n_fitting: slots that fit into memory with these settings, 0 if none does; called with pages, and only if the
            layout depends on it.
    """
    if config.kv_layout != "auto":
        return config
    paged = config.model_copy(update={"kv_layout": "pages"})
    # In reference mode a session needs all rows of a slot, and a unit without free pages for its speech fails.
    can_have_pages = by_kernels and config.dtype != "float32" and config.session.compat != "reference"
    if can_have_pages and (config.max_sessions or n_fitting(paged)) > SLOTS_SESSIONS:
        return paged
    return config.model_copy(update={"kv_layout": "slots"})


def layout_of(config: EngineConfig) -> KVLayout:
    """The layout of settings that `with_kv_layout` has returned."""
    layout = config.kv_layout
    assert layout != "auto", "kv_layout: expected slots or pages, as `with_kv_layout` returns it, got auto"
    return layout
