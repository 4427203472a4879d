"""Vision stages: encoder and position buckets (`vpm`), `resampler`, and whole images (`vision_e2e`)."""

import numpy as np
import torch

from models.checkpoint.config import load_preprocessor_config
from models.inputs.image import image_patches, pad_batch, plan
from models.inputs.positions import position_buckets, position_ids
from models.omni import OmniModel
from tests.parity.golden import GoldenDir
from tests.parity.media import picture
from tests.parity.report import Report


def run_vpm(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    tensors, side = golden.tensors("vpm"), model.config.vision_config.table_side
    if {"bucket_table", "bucket_len"} <= tensors.keys():
        table, lengths = tensors["bucket_table"], tensors["bucket_len"]
        wrong = [
            n
            for n in range(1, len(table))
            if not np.array_equal(position_buckets(n, side), table[n, : lengths[n]].numpy())
        ]
        report.equal("vpm", "bucket table: sides that differ", wrong, [])
    for case in sorted(name.removesuffix(".pixel_values_q") for name in tensors if name.endswith(".pixel_values_q")):
        if not report.has_inputs(f"vpm {case}", tensors, f"{case}.tgt_sizes"):
            continue
        strips = tensors[f"{case}.pixel_values_q"].float() / 127.5
        ids, _, mask = _layout(tensors[f"{case}.tgt_sizes"], strips.shape[-1] // strips.shape[-2], side)
        if (expected := tensors.get(f"{case}.patch_attention_mask")) is not None:
            report.equal(f"vpm {case}", "mask", mask, expected[:, 0])
        patches = _strips_to_rows(strips)
        embeddings, expected = model.vpm.embeddings(patches, ids), tensors.get(f"{case}.embeddings")
        if expected is not None:
            if expected.shape != embeddings.shape:  # long cases keep every 16th row
                embeddings, kept = embeddings[:, ::16], mask[:, ::16]
            else:
                kept = mask
            report.close(f"vpm {case}", "embeddings", embeddings[kept], expected[kept])
        hidden = model.vpm(patches, ids, mask, model.backend)
        if (expected := tensors.get(f"{case}.last_hidden_state")) is not None:
            report.close(f"vpm {case}", "hidden", hidden[mask], expected[mask])


def run_resampler(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    """Cases without an input use the encoder's expected output, and are skipped if that is missing."""
    tensors, vpm = golden.tensors("resampler"), golden.tensors("vpm")
    for case in sorted({name.split(".")[0] for name in tensors if name.endswith(".output")}):
        hidden = tensors.get(f"{case}.input", vpm.get(f"{case}.last_hidden_state"))
        sizes = tensors.get(f"{case}.tgt_sizes", vpm.get(f"{case}.tgt_sizes"))
        if hidden is None or sizes is None:
            continue
        _, coords, mask = _layout(sizes, hidden.shape[1], model.config.vision_config.table_side)
        report.close(f"resampler {case}", "rows", model.resampler(hidden, coords, mask), tensors[f"{case}.output"])
    for name, expected in tensors.items():
        if name.startswith("pos_embed"):
            rows, cols = (torch.arange(n) * 10 for n in expected.shape[:2])
            grid = torch.stack(torch.meshgrid(rows, cols, indexing="ij"), dim=-1)
            report.close("resampler", name, model.resampler.positions(grid), expected)


def run_images(golden: GoldenDir, model: OmniModel, report: Report) -> None:
    tensors, meta = golden.tensors("vision_e2e"), golden.meta("vision_e2e")
    side = model.config.vision_config.table_side
    scale = load_preprocessor_config(golden.checkpoint).scale_resolution
    for case, about in meta.items():
        parts = []
        for width, height, k in about.get("images", [about.get("image")]):
            sizes = plan(width, height, about["max_slice_nums"], scale=scale)
            parts += image_patches(picture(width, height, k), sizes, table_side=side)
        grids = [[part.rows, part.cols] for part in parts]
        report.equal_if(f"vision_e2e {case}", "grid of each slice", grids, tensors.get(f"{case}.tgt_sizes"))
        if f"{case}.embeds" not in tensors:
            continue
        batch = pad_batch(parts, max(len(part.pixels) for part in parts) + 7)
        arrays = (batch.pixels, batch.position_ids, batch.coords, batch.mask)
        rows = model.encode_images(*map(torch.from_numpy, arrays))
        report.close(f"vision_e2e {case}", "rows", rows, tensors[f"{case}.embeds"])


def _layout(sizes: torch.Tensor, length: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Position ids, coordinates and mask of slices given by their (rows, cols), padded to `length`."""
    ids = torch.zeros(len(sizes), length, dtype=torch.int64)
    coords, mask = torch.zeros(*ids.shape, 2, dtype=torch.int64), torch.zeros(ids.shape, dtype=torch.bool)
    for row, (rows, cols) in enumerate(sizes.tolist()):
        n = rows * cols
        ids[row, :n] = torch.from_numpy(position_ids(rows, cols, table_side=side))
        coords[row, :n] = torch.stack((torch.arange(n) // cols, torch.arange(n) % cols), dim=-1)
        mask[row, :n] = True
    return ids, coords, mask


def _strips_to_rows(strips: torch.Tensor) -> torch.Tensor:
    """[B, 3, P, P L] strips of patches side by side -> [B, L, 3 P P] rows ordered (channel, y, x)."""
    B, channels, side, width = strips.shape
    split = strips.view(B, channels, side, width // side, side)
    return split.permute(0, 3, 1, 2, 4).reshape(B, width // side, -1)
