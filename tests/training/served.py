"""A conversation run by the unit engine with given decisions: the rows that it feeds, and its logits."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from models.inputs.image import image_patches, plan
from models.stages.runner import Rows
from tests.worker.loop.engines import OFF, make_config
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from training.timelines.layout import SYSTEM
from training.timelines.speech import RATE
from training.timelines.timeline import FORCED_UNITS, Timeline
from worker.config.session import SessionConfig
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import UnitResult
from worker.loop.session import UnitInput

LLM_LEN = 2048
CONFIG = SessionConfig(generate_audio=False, window=OFF, seed=1)


@dataclass(frozen=True)
class Served:
    """What the engine has fed and computed.

    Args:
        ids: of all context rows in order; 0 at rows of media.
        is_media: rows of sound and pictures, and of the reference voice.
        logits: [V] of each unit after its prefill.
    """

    ids: list[int]
    is_media: list[bool]
    logits: list[Tensor]
    outcomes: list[UnitResult]


def serve(timeline: Timeline, reference: np.ndarray | None = None) -> Served:
    """Run a conversation on the embedded checkpoint, with the decisions of its units in place of sampled ones."""
    engine = ScriptedEngine(make_config(n_slots=1, llm_len=LLM_LEN, session=CONFIG), short_history=False)
    side = engine.parts.model.config.vision_config.table_side
    engine.script.lines["it"] = [list(unit.tokens) for unit in timeline.units[FORCED_UNITS:]]
    session = engine.open("it", CONFIG, SystemPrompt.of(SYSTEM, reference))
    outcomes = []
    for number, unit in enumerate(timeline.units):
        sound = timeline.sound[number * RATE : (number + 1) * RATE]
        frames = [] if unit.picture is None else [unit.picture.render()]
        cut = [image_patches(frame, plan(*frame.size, 1), table_side=side) for frame in frames]
        engine.sessions.unit(session, UnitInput(sound, cut, False, arrived=0.0))
        engine.settle()
        outcomes += results(engine.take("it")[-1:])
    record = engine.record("it")
    ids: dict[int, int] = {}
    is_media: dict[int, bool] = {}
    for _, past, rows in record.fed:
        if isinstance(rows, Rows):
            given = rows.ids.tolist()
            media = [False] * len(given) if rows.is_row is None else rows.is_row.tolist()
        else:
            given = [rows] if isinstance(rows, int) else list(rows)
            media = [False] * len(given)
        for place, (token, is_row) in enumerate(zip(given, media, strict=True), past):
            ids[place], is_media[place] = (0 if is_row else token), is_row
    order = range(len(ids))
    return Served([ids[i] for i in order], [is_media[i] for i in order], record.logits, outcomes)
