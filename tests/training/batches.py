"""Predictions for records without a degradation, on the CPU."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.inputs.audio import LogMel
from models.omni import OmniModel
from tests.worker.loop.engines import loaded
from training.mind.batches import Batch
from training.mind.device_sound import unit_mels
from training.mind.forward import Inputs, clip_mels, logits_of, run_rows
from training.mind.pool import Pool, PoolSizes
from training.mind.records import Record

SIZES = PoolSizes(samples=16_000 * 200, pictures=64, clip_samples=16_000 * 30)


@dataclass(frozen=True)
class Predicted:
    """Logits [N, V] of learned rows, the batch, and all states [B, T, D]."""

    logits: Tensor
    batch: Batch
    hidden: Tensor


def predict(model: OmniModel, records: Sequence[Record], grad: bool = False) -> Predicted:
    """The training pass over records."""
    pool, log_mel = Pool(SIZES, torch.device("cpu")), LogMel()
    stored = pool.add(records)
    batch = pool.batch(stored)
    clips, n_clip = pool.clips_of(stored)
    mel = unit_mels(log_mel, pool.waves_of(stored)) if len(batch.sound) else torch.zeros(0)
    clip_mel = clip_mels(log_mel, clips, n_clip) if len(clips) else clips
    with torch.set_grad_enabled(grad):
        states = run_rows(model, batch, Inputs(mel, clip_mel, n_clip, pool.pictures_of(stored)))
        return Predicted(logits_of(model, states.hidden, batch.learned), batch, states.hidden)


def tiny_model() -> OmniModel:
    """A copy of the embedded model whose weights may change."""
    return copy.deepcopy(loaded()[0])
