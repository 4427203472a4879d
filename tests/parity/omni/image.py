"""Image preprocessing: grids, sizes, patch strips as bytes, placeholder text."""

import hashlib
import re
from typing import Any

import numpy as np
import torch
from PIL import Image

from models.checkpoint.config import load_preprocessor_config
from models.inputs.image import ImagePatches, SlicePlan, cut, patchify, pixel_values, plan
from models.inputs.prompts import image_placeholder
from tests.parity.golden import GoldenDir
from tests.parity.media import picture
from tests.parity.report import Report

STEM = "image_preprocess"
TABLE = "image_grid_table.json"


def run(golden: GoldenDir, report: Report) -> None:
    for row in golden.json(TABLE) or []:
        (width, height), most = row["wh"], row["max_slice_nums"]
        sizes = plan(width, height, most)
        expected = [row["grid"], row["source_wh"], row["refine_wh"]]
        report.equal("image_grid_table", f"{width}x{height} in {most}", _lists(sizes), expected)
    if STEM not in golden.stems():
        return
    tensors = golden.tensors(STEM)
    for case, meta in golden.meta(STEM).items():
        _check_image(case, meta, tensors, golden, report)


def strip(part: ImagePatches, patch: int = 14) -> np.ndarray:
    """[L, 588] patches to one strip [3, 14, 14 L]."""
    return part.pixels.reshape(-1, 3, patch, patch).transpose(1, 2, 0, 3).reshape(3, patch, -1)


def _check_image(
    case: str, meta: dict[str, Any], tensors: dict[str, torch.Tensor], golden: GoldenDir, report: Report
) -> None:
    image = picture(*meta["size_wh"], meta["k"])
    report.equal_if(f"image {case}", "input sha256", _sha(np.asarray(image)), meta.get("image_sha256"))
    sizes = plan(*image.size, meta["max_slice_nums"])
    slices = cut(image, sizes)
    parts = [patchify(part) for part in slices]
    if {"grid_cols_rows", "source_wh"} <= meta.keys():  # the grid of an image with one slice is null
        report.equal(f"image {case}", "grid, source", _lists(sizes)[:2], [meta["grid_cols_rows"], meta["source_wh"]])
    report.equal_if(f"image {case}", "slices", len(parts), meta.get("num_slices"))
    report.equal_if(f"image {case}", "cell sizes", _cells(slices), meta.get("slice_wh"))
    tgt_sizes = [[part.rows, part.cols] for part in parts]
    report.equal_if(f"image {case}", "tgt_sizes", tgt_sizes, tensors.get(f"{case}.tgt_sizes"))
    for j, (part, expected) in enumerate(zip(parts, meta.get("slices", []), strict=False)):
        bytes_strip = strip(part)
        report.equal_if(f"image {case}", f"slice {j} shape", list(bytes_strip.shape), expected.get("shape"))
        report.equal_if(f"image {case}", f"slice {j} sha256", _sha(bytes_strip), expected.get("u8_sha256"))
        if "f32_sum" in expected:
            # A sum in float64 of ten thousands of float32 values: only the order of addition may differ.
            total, stored_sum = (
                pixel_values(bytes_strip.astype(np.float32)).sum(dtype=np.float64),
                torch.tensor(expected["f32_sum"]),
            )
            report.close(f"image {case}", f"slice {j} pixel sum", torch.tensor(total), stored_sum.double(), 1e-6)
        if (stored := tensors.get(f"{case}.slice{j}.u8")) is not None:
            report.equal(f"image {case}", f"slice {j} differing bytes", int((bytes_strip != stored.numpy()).sum()), 0)
            values = (stored.numpy().astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
            wrong = int((pixel_values(bytes_strip.astype(np.float32)) != values).sum())
            report.equal(f"image {case}", f"slice {j} differing pixel values", wrong, 0)
    n_rows = load_preprocessor_config(golden.checkpoint).image_feature_size
    placeholder = re.sub(r"(?:<unk>)+", _counted, image_placeholder(sizes, n_rows, number=meta["k"]))
    report.equal_if(f"image {case}", "placeholder", placeholder, meta.get("placeholder"))


def _counted(unks: re.Match[str]) -> str:
    return f"<unk>*{len(unks.group()) // len('<unk>')}"


def _cells(slices: list[Image.Image]) -> list[list[int]]:
    return [list(size) for size in sorted({part.size for part in slices[1:]})]


def _lists(sizes: SlicePlan) -> list[object]:
    return [None if pair is None else list(pair) for pair in (sizes.grid, sizes.source_wh, sizes.refined_wh)]


def _sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
