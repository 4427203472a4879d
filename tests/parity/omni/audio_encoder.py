"""Audio encoder stages: whole clips (`apm_full`), streamed units (`apm_stream_*`), `audio_projection`."""

import re

import torch

from models.inputs.audio import LogMel, conv_length, token_count
from models.inputs.mel_stream import MelStreamState, mel_step
from models.layers.apm import project
from models.omni import OmniModel
from tests.parity.build import slot_cache
from tests.parity.golden import GoldenDir
from tests.parity.omni.mel import sound_in_units
from tests.parity.report import Report


def clips(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    """`apm_full`: clips of different length in one batch, padded as in the public implementation."""
    tensors, meta = golden.tensors("apm_full"), golden.meta("apm_full")
    pool = model.config.audio_pool_step
    for case in sorted({name.split(".")[0] for name in tensors}):
        inputs = tensors.keys() | meta.keys()  # the length of the encoder's chunks is in the manifest
        if not report.has_inputs(
            f"apm_full {case}", inputs, f"{case}.audio_features", f"{case}.audio_feature_lens", case
        ):
            continue
        mel, lens = tensors[f"{case}.audio_features"], tensors[f"{case}.audio_feature_lens"]
        n_keys = lens.clamp(max=conv_length(mel.shape[-1]))
        chunk = int(max(meta[case]["chunk_length"], 0) * 50)
        hidden = model.apm.encode(mel, torch.full_like(lens, mel.shape[-1]), n_keys, chunk)
        report.close_if(f"apm_full {case}", "hidden", hidden, tensors.get(f"{case}.apm_last_hidden"))
        rows = project(model.audio_projection_layer, hidden, pool)
        for clip, n_frames in enumerate(lens.tolist()):
            own = rows[clip, : token_count(n_frames)]
            report.close_if(f"apm_full {case}", f"embeds{clip}", own, tensors.get(f"{case}.embeds{clip}"))


def units(golden: GoldenDir, model: OmniModel, report: Report, stem: str) -> None:
    """`apm_stream_*`: streamed mel of the stored wave, unit by unit through the slot cache."""
    tensors, lengths = golden.tensors(stem), golden.meta(stem).get("cache_len_after", [])
    sound = sound_in_units(golden, f"mel_stream_{stem.removeprefix('apm_stream_')}")
    if sound is None:
        return
    log_mel, state = LogMel(), MelStreamState.allocate(2)
    cache = slot_cache(model, "apm", n_slots=2)
    slots, yes, no = torch.tensor([1]), torch.tensor([True]), torch.tensor([False])
    for unit, (_, push, n_new) in enumerate(sound.pushes):
        mel, first, end = mel_step(log_mel, state, slots, push, n_new, yes, no, redundancy=sound.redundancy)
        rows, n_rows = model.encode_unit(mel, first, end, cache, slots)
        report.close_if(stem, f"chunk{unit}.embeds", rows[0, : n_rows[0]], tensors.get(f"chunk{unit}.embeds"))
        if unit < len(lengths):
            report.equal(stem, f"chunk{unit} cache length", cache.lengths[1], lengths[unit])
        for name, expected in tensors.items():
            if found := re.fullmatch(rf"after_chunk{unit}\.layer(\d+)\.([kv])", name):
                buffer = getattr(cache, found[2])[int(found[1])]
                report.close(stem, name, buffer[1:2, :, : cache.lengths[1]], expected)


def projection(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    """`audio_projection`: the projector alone and with pooling."""
    case, tensors, projector = "audio_projection", golden.tensors("audio_projection"), model.audio_projection_layer
    if report.has_inputs(case, tensors, "input"):
        report.close_if(case, "projected", projector(tensors["input"]), tensors.get("projected"))
        pooled = project(projector, tensors["input"], model.config.audio_pool_step)
        report.close_if(case, "pooled", pooled, tensors.get("pooled"))
