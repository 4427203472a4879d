"""Grids and sizes, patches, the position table, padded batches, and refused images."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.errors import ImageError, ShapeError
from models.inputs import image as images
from models.inputs.image import (
    PATCH,
    SCALE,
    cut,
    image_patches,
    open_image,
    pad_batch,
    patchify,
    pixel_values,
    plan,
    slice_grid,
)
from models.inputs.positions import TABLE_SIDE, bucket_formula, bucket_table, position_buckets, position_ids
from tests.parity.media import picture

sides = st.integers(1, 6000)
limits = st.integers(1, 12)


def encoded(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


@given(sides, sides, limits)
def test_planned_sizes_are_whole_patches_within_the_limit(width, height, limit):
    sizes = plan(width, height, limit)
    assert sizes.n_slices <= 1 + limit
    for wh in (sizes.source_wh, sizes.cell_wh or sizes.source_wh):
        assert min(wh) >= PATCH and wh[0] % PATCH == 0 and wh[1] % PATCH == 0
    if sizes.grid:
        assert 1 < sizes.grid[0] * sizes.grid[1] <= limit
        assert sizes.refined_wh == (sizes.cell_wh[0] * sizes.grid[0], sizes.cell_wh[1] * sizes.grid[1])


@given(st.integers(200, 4000), st.integers(200, 4000), limits)
def test_slices_of_ordinary_images_keep_aspect_ratio_and_area(width, height, limit):
    sizes = plan(width, height, limit)
    got = sizes.source_wh[0] / sizes.source_wh[1]
    # Half a patch of rounding on either side.
    slack = 1 + PATCH / min(sizes.source_wh)
    assert 1 / slack < got / (width / height) < slack
    if max(width, height) < 6 * min(width, height):
        assert sizes.source_wh[0] * sizes.source_wh[1] <= 1088 * PATCH * PATCH


def test_small_images_and_a_limit_of_one_have_no_grid():
    assert slice_grid(4000, 3000, 1) is None
    assert slice_grid(SCALE, SCALE, 9) is None
    assert slice_grid(SCALE + 1, SCALE, 9) == (2, 1)


@pytest.mark.parametrize(("width", "height", "limit"), [(0, 5, 1), (5, 0, 1), (-1, 5, 1), (5, 5, 0)])
def test_plan_refuses_sizes_and_limits_below_one(width, height, limit):
    with pytest.raises(ImageError, match="expected at least 1"):
        plan(width, height, limit)


def test_cut_gives_the_whole_image_then_cells_in_row_major_order():
    # Two columns and three rows of flat colours: each cell has its own colour.
    colours = np.arange(6, dtype=np.uint8).reshape(3, 2) * 40
    image = Image.fromarray(np.repeat(np.repeat(colours, 448, 0), 448, 1)).convert("RGB")
    sizes = plan(*image.size, 6)
    assert sizes.grid == (2, 3)
    source, *cells = cut(image, sizes)
    assert source.size == sizes.source_wh
    assert [cell.size for cell in cells] == [sizes.cell_wh] * 6
    assert [np.asarray(cell)[200, 200, 0] for cell in cells] == [0, 40, 80, 120, 160, 200]


def test_refuses_extreme_aspect_ratios_before_resizing():
    image = Image.new("RGB", (1, 60_000))
    with pytest.raises(ImageError, match="expected a shape that makes at most 4096 patches"):
        cut(image, plan(*image.size, 1))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_patches_are_a_permutation_of_the_pixels(rows, cols, k):
    image = picture(cols * PATCH, rows * PATCH, k)
    part = patchify(image)
    assert (part.rows, part.cols) == (rows, cols)
    back = part.pixels.reshape(rows, cols, 3, PATCH, PATCH).transpose(0, 3, 1, 4, 2).reshape(rows * PATCH, -1, 3)
    np.testing.assert_array_equal(back, np.asarray(image))
    np.testing.assert_array_equal(part.coords, [(y, x) for y in range(rows) for x in range(cols)])


@pytest.mark.parametrize("image", [Image.new("RGB", (15, 14)), Image.new("L", (14, 14)), Image.new("RGB", (0, 14))])
def test_patchify_refuses_partial_patches(image):
    with pytest.raises(ImageError, match="multiples of 14"):
        patchify(image)


def test_pixel_values_follow_the_formula():
    values = pixel_values(np.arange(256, dtype=np.float32))
    one = np.float32(1)
    expected = [(np.float32(v) / (255 * one) - one / 2) / (one / 2) for v in range(256)]
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array(expected, np.float32))
    assert (values[0], values[255]) == (-1, 1)


def test_stored_buckets_equal_the_formula():
    table = bucket_table()
    assert len(table) == 224
    wrong = [
        n for n in range(1, len(table) + 1) if not np.array_equal(position_buckets(n), bucket_formula(n, TABLE_SIDE))
    ]
    assert wrong == []


@given(st.integers(1, 700), st.sampled_from([1, 7, 32, 64, 70]))
def test_buckets_match_the_exact_fraction_within_rounding(n, side):
    got = position_buckets(n, side)
    # Up to rounding at the edges, the bucket is floor(side * i / n).
    low, high = (np.floor(side * np.arange(n) / n + shift) for shift in (-1e-4, 1e-4))
    assert ((low <= got) & (got <= high)).all(), (got, low, high)
    assert got[0] == 0 and got.max() < side


def test_a_square_of_the_table_size_has_each_position_once():
    np.testing.assert_array_equal(position_ids(32, 32, table_side=32), np.arange(32 * 32))
    assert position_ids(2, 3).tolist() == [0, 23, 46, 2450, 2473, 2496]


def test_batches_are_padded_and_masked():
    wide, small = (patchify(picture(w, 28, 1)) for w in (70, 14))
    batch = pad_batch([wide, small], length=12, size=4)
    assert batch.pixels.shape == (4, 12, 588) and batch.pixels.dtype == np.uint8
    assert batch.mask.sum(axis=1).tolist() == [10, 2, 0, 0]
    np.testing.assert_array_equal(batch.pixels[0, :10], wide.pixels)
    np.testing.assert_array_equal(batch.position_ids[1, :2], small.position_ids)
    np.testing.assert_array_equal(batch.coords[0, :10], wide.coords)
    for array in (batch.pixels, batch.position_ids, batch.coords):
        assert not array[~batch.mask].any()


def test_batch_refuses_what_does_not_fit():
    part = patchify(picture(28, 28, 0))
    with pytest.raises(ShapeError, match="expected at most 3 patches in a slice, got 4"):
        pad_batch([part], length=3)
    with pytest.raises(ShapeError, match="expected 1 to 1 slices, got 2"):
        pad_batch([part, part], size=1)
    with pytest.raises(ShapeError, match="got 0"):
        pad_batch([])


@settings(max_examples=20)
@given(st.sampled_from(["PNG", "BMP", "WEBP", "GIF", "JPEG"]), st.integers(1, 40), st.integers(1, 40))
def test_opens_every_format(form, width, height):
    image = open_image(encoded(picture(width, height, 3), form))
    assert (image.mode, image.size) == ("RGB", (width, height))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_opens_every_pixel_mode_as_rgb(mode):
    image = open_image(Image.new(mode, (30, 20)))
    assert image.mode == "RGB"
    assert [(part.rows, part.cols) for part in image_patches(image, plan(*image.size, 1))] == [(26, 39)]


def test_refuses_a_truncated_jpeg():
    data = encoded(picture(300, 200, 0), "JPEG")
    with pytest.raises(ImageError, match="expected pixels that can be decoded"):
        open_image(data[: len(data) // 2])


@pytest.mark.parametrize(
    "data", [b"", b"not an image", b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n" * 9]
)
def test_refuses_bytes_of_other_formats(data):
    with pytest.raises(ImageError, match="expected bytes of JPEG, PNG"):
        open_image(data)


@settings(max_examples=60)
@given(st.data())
def test_damaged_files_raise_image_errors_only(data):
    raw = bytearray(encoded(picture(40, 30, 1), data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]))))
    for _ in range(data.draw(st.integers(1, 5))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = open_image(bytes(raw))
    except ImageError:
        return
    assert image.mode == "RGB"


def test_refuses_a_huge_image_from_its_header(monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    data = encoded(picture(11, 10, 0), "PNG")
    with pytest.raises(ImageError, match="expected 1 to 100 pixels, got 11 x 10"):
        open_image(data)
    # The rest of the file is not read.
    with pytest.raises(ImageError, match="got 11 x 10"):
        open_image(data[:60])


def test_refuses_sizes_beyond_the_decoder_s_own_limit():
    data = bytearray(encoded(picture(8, 8, 0), "BMP"))
    data[18:26] = (60_000).to_bytes(4, "little") * 2
    with pytest.raises(ImageError, match="bomb"):
        open_image(bytes(data))


@pytest.mark.parametrize("value", [None, "path.png", 3, np.zeros((4, 4, 3), np.uint8)])
def test_refuses_other_types_than_bytes_and_images(value):
    with pytest.raises(ImageError, match="expected encoded bytes or a PIL image"):
        open_image(value)


def test_refuses_an_image_without_pixels():
    with pytest.raises(ImageError, match="got 0 x 5"):
        open_image(Image.new("RGB", (0, 5)))


def test_sixteen_bit_greys_are_scaled_to_eight_bits() -> None:
    shades = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "PNG")
    got = np.asarray(images.open_image(file.getvalue()))
    assert np.array_equal(got, np.repeat((shades >> 8).astype(np.uint8)[..., None], 3, axis=2))
