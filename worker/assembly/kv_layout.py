"""The layout of keys and values of a worker whose settings leave it open. Torch-free.

The worker's start, the planner and the doctor ask `with_kv_layout`. What is built afterwards has slots or pages.
"""

from collections.abc import Callable

from worker.config.session import EngineConfig
from worker.config.weights import KVLayout

# Most sessions that have slots by default: units of one take 2 % longer with pages (one H200).
SLOTS_SESSIONS = 4


def with_kv_layout(config: EngineConfig, *, by_kernels: bool, n_fitting: Callable[[EngineConfig], int]) -> EngineConfig:
    """The settings with `slots` or `pages` in place of `auto`.

    Pages where the project's kernels run a bfloat16 model and hold more than `SLOTS_SESSIONS` sessions: as many as the
    settings name, or else as fit into memory as pages; also where memory holds fewer sessions in slots than as pages.
    The number of slots follows from the layout afterwards.

    Args:
        by_kernels: the project's kernels run the model on a GPU.
        n_fitting: slots that fit into memory with these settings, 0 if none does; called only if the layout depends on
            it.
    """
    if config.kv_layout != "auto":
        return config
    paged, slotted = (config.model_copy(update={"kv_layout": layout}) for layout in ("pages", "slots"))
    # In reference mode a session needs all rows of a slot, and a unit without free pages for its speech fails.
    can_have_pages = by_kernels and config.dtype != "float32" and config.session.compat != "reference"
    if not can_have_pages:
        return slotted
    if config.max_sessions is not None:
        return paged if config.max_sessions > SLOTS_SESSIONS else slotted
    n_paged = n_fitting(paged)
    return paged if n_paged > SLOTS_SESSIONS or n_paged > n_fitting(slotted) else slotted


def layout_of(config: EngineConfig) -> KVLayout:
    """The layout of settings that `with_kv_layout` has returned."""
    layout = config.kv_layout
    assert layout != "auto", "kv_layout: expected slots or pages, as `with_kv_layout` returns it, got auto"
    return layout
