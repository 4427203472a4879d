"""Audio encoder stages: whole clips (`apm_full`), one unit after another (`apm_stream_*`), `audio_projection`."""

import re

import torch

from models.apm import UNIT_FRAMES, project
from models.audio import LogMel, conv_length, token_count
from models.mel_stream import MelStreamState, mel_step
from models.omni import OmniModel
from tests.parity.build import slot_cache
from tests.parity.golden import GoldenDir
from tests.parity.report import Report


def clips(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    """`apm_full`: a batch of clips of different length, encoded together as the public code pads them."""
    tensors, meta = golden.tensors("apm_full"), golden.meta("apm_full")
    pool = model.config.audio_pool_step
    for case in sorted({name.split(".")[0] for name in tensors}):
        mel, lens = tensors[f"{case}.audio_features"], tensors[f"{case}.audio_feature_lens"]
        n_keys = lens.clamp(max=conv_length(mel.shape[-1]))
        chunk = int(max(meta[case]["chunk_length"], 0) * 50)
        hidden = model.apm.encode(mel, torch.full_like(lens, mel.shape[-1]), n_keys, chunk)
        if f"{case}.apm_last_hidden" in tensors:
            report.close(f"apm_full {case}", "hidden", hidden, tensors[f"{case}.apm_last_hidden"])
        rows = project(model.audio_projection_layer, hidden, pool)
        for clip, n_frames in enumerate(lens.tolist()):
            expected = tensors.get(f"{case}.embeds{clip}")
            if expected is not None:
                report.close(f"apm_full {case}", f"embeds{clip}", rows[clip, : token_count(n_frames)], expected)


def units(golden: GoldenDir, model: OmniModel, report: Report, stem: str) -> None:
    """`apm_stream_*`: our own streamed mel of the stored wave, unit after unit through the slot cache."""
    tensors, kind = golden.tensors(stem), stem.removeprefix("apm_stream_")
    mel_meta = golden.meta(f"mel_stream_{kind}")
    stored = [s for s in golden.stems("mel_stream_") if "wave_q" in golden.tensors(s)]
    wave = golden.tensors(stored[0])["wave_q"].float() / 20000
    infos = mel_meta["infos"]
    redundancy = (infos[0]["emitted_frames"] - 100) if infos[0]["emitted_frames"] > 100 else 0
    lengths = golden.meta(stem).get("cache_len_after", [])

    log_mel, state = LogMel(), MelStreamState.allocate(2)
    cache = slot_cache(model, "apm", n_slots=2)
    slots, yes, no = torch.tensor([1]), torch.tensor([True]), torch.tensor([False])
    start = 0
    for unit, info in enumerate(infos):
        samples = wave[start : start + info["consumed"]]
        start += info["consumed"]
        padded = torch.nn.functional.pad(samples, (0, 16640 - len(samples)))[None]
        n_new = torch.tensor([len(samples)])
        mel, first, end = mel_step(log_mel, state, slots, padded, n_new, yes, no, redundancy=redundancy, clip="auto")
        assert mel.shape[-1] == UNIT_FRAMES
        rows, n_rows = model.encode_unit(mel, first, end, cache, slots)
        if f"chunk{unit}.embeds" in tensors:
            report.close(stem, f"chunk{unit}.embeds", rows[0, : n_rows[0]], tensors[f"chunk{unit}.embeds"])
        if unit < len(lengths):
            report.equal(stem, f"chunk{unit} cache length", cache.lengths[1], lengths[unit])
        for name, expected in tensors.items():
            if found := re.fullmatch(rf"after_chunk{unit}\.layer(\d+)\.([kv])", name):
                buffer = getattr(cache, found[2])[int(found[1])]
                report.close(stem, name, buffer[1:2, :, : cache.lengths[1]], expected)


def projection(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    """`audio_projection`: the projector alone and with pooling."""
    tensors = golden.tensors("audio_projection")
    report.close("audio_projection", "projected", model.audio_projection_layer(tensors["input"]), tensors["projected"])
    pooled = project(model.audio_projection_layer, tensors["input"], model.config.audio_pool_step)
    report.close("audio_projection", "pooled", pooled, tensors["pooled"])
