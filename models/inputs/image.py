"""Images and video frames to slices, patches and padded batches. NumPy and PIL only.

Pixels stay bytes: the device normalizes them, with the formula of `pixel_values`.

Sizes named `wh` are (width, height) as in PIL, and grids are (columns, rows). Everything about patches is
(rows, columns).
"""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError, WebPImagePlugin  # noqa: F401  (without it, the first WEBP makes PIL import all its formats)

from models.errors import ImageError, ShapeError
from models.inputs.positions import TABLE_SIDE, position_ids

if TYPE_CHECKING:
    from torch import Tensor

PATCH = 14
SCALE = 448  # a slice has about SCALE * SCALE pixels
LENGTH = 1088  # patches of a padded slice; enough for aspect ratios up to about 20
MAX_PIXELS = 8192 * 8192  # of a decoded image; below PIL's own limit
MAX_PATCHES = 4096  # per slice; only images with an extreme aspect ratio exceed it
# Formats that clients may send. PIL has dozens more, and some of them start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")

Size = tuple[int, int]
Floats = TypeVar("Floats", np.ndarray, "Tensor")


@dataclass(frozen=True)
class SlicePlan:
    """How one image is cut: the whole image at size source_wh, then the cells of a grid over it at size refined_wh.

    grid and refined_wh are both None for an image of one slice.
    """

    source_wh: Size
    grid: Size | None = None
    refined_wh: Size | None = None

    @property
    def n_slices(self) -> int:
        """The whole image and the cells of the grid."""
        return 1 + (self.grid[0] * self.grid[1] if self.grid else 0)

    @property
    def cell_wh(self) -> Size | None:
        """Size of one cell; None without a grid."""
        if self.grid is None or self.refined_wh is None:
            return None
        return self.refined_wh[0] // self.grid[0], self.refined_wh[1] // self.grid[1]


@dataclass(frozen=True, eq=False)
class ImagePatches:
    """One slice as L = rows * cols patches in row-major order.

    Attributes:
        pixels: [L, 588] uint8, each row ordered (channel, y, x).
        position_ids: [L] int64, rows of the encoder's position table.
        coords: [L, 2] int64 (row, column).
    """

    pixels: np.ndarray
    rows: int
    cols: int
    position_ids: np.ndarray
    coords: np.ndarray


@dataclass(frozen=True, eq=False)
class ImageBatch:
    """Slices padded with zeros to one shape.

    Attributes:
        pixels: [B, L, 588] uint8.
        position_ids: [B, L] int64.
        coords: [B, L, 2] int64.
        mask: [B, L] bool, true for patches, false for padding.
    """

    pixels: np.ndarray
    position_ids: np.ndarray
    coords: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class EncodedImage:
    """An image whose pixels are decoded by `open_image`, each time anew: it takes the memory of its file only.

    Attributes:
        data: the file.
        size: (width, height) from its header.
    """

    data: bytes
    size: Size

    @classmethod
    def of(cls, data: bytes) -> "EncodedImage":
        """An image whose header is valid. Raises: ImageError as `open_image`, except for damaged pixels."""
        return cls(data, _unread(data).size)

    @property
    def n_pixels(self) -> int:
        return self.size[0] * self.size[1]


def open_image(data: bytes | Image.Image | EncodedImage) -> Image.Image:
    """An encoded or decoded image as RGB with 8 bits a channel; an EXIF orientation is not applied.

    Raises: ImageError if the bytes are empty, truncated or not in one of FORMATS, or the image has no pixels or more
        than MAX_PIXELS.
    """
    image = _unread(data.data if isinstance(data, EncodedImage) else data)
    try:
        if image.mode.startswith("I;16"):  # PIL clips at 255 instead of scaling
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        return image.convert("RGB")
    except Exception as error:
        raise ImageError("image", expected="pixels that can be decoded", got=_reason(error)) from None


def _unread(data: bytes | Image.Image) -> Image.Image:
    """An image with a valid header whose pixels may not be decoded yet."""
    if not isinstance(data, bytes | bytearray | memoryview | Image.Image):
        raise ImageError("image", expected="encoded bytes or a PIL image", got=type(data).__name__)
    if not isinstance(data, Image.Image) and len(data) == 0:
        raise ImageError("image", expected=f"bytes of {', '.join(FORMATS)}", got="no bytes")
    # Exception, because decoders raise nearly any type for damaged files.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = data if isinstance(data, Image.Image) else Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise ImageError("image", expected=f"bytes of {', '.join(FORMATS)}", got=_reason(error)) from None
    width, height = image.size
    # The size is from the header.
    if not 0 < width * height <= MAX_PIXELS:
        raise ImageError("image", expected=f"1 to {MAX_PIXELS} pixels", got=f"{width} x {height}")
    return image


def plan(width: int, height: int, max_slice_nums: int, *, scale: int = SCALE, patch: int = PATCH) -> SlicePlan:
    """Sizes of all slices of a width x height image.

    Args:
        max_slice_nums: maximum number of grid cells; the whole image is one slice more.
        scale: a slice has about scale * scale pixels; small images are enlarged.
    Raises: ImageError if a size or the limit is not positive.
    """
    if width < 1 or height < 1:
        raise ImageError("image size", expected="at least 1 x 1", got=f"{width} x {height}")
    if max_slice_nums < 1:
        raise ImageError("max_slice_nums", expected="at least 1", got=max_slice_nums)
    grid = slice_grid(width, height, max_slice_nums, scale=scale)
    if grid is None:
        return SlicePlan(_fit(width, height, scale, patch, enlarge=True))
    cols, rows = grid
    # The share of the image in a cell may be a fractional number of pixels.
    cell = _fit(_snap(width, cols) / cols, _snap(height, rows) / rows, scale, patch, enlarge=True)
    return SlicePlan(_fit(width, height, scale, patch, enlarge=False), grid, (cell[0] * cols, cell[1] * rows))


def slice_grid(width: int, height: int, max_slice_nums: int, *, scale: int = SCALE) -> Size | None:
    """(columns, rows) of the grid with the aspect ratio nearest to the image's, or None for no grid.

    The number of cells is the area over scale * scale, rounded up, or one fewer or one more, and at most
    `max_slice_nums`. Of equally near grids, the one with fewer cells, then fewer columns is chosen.
    """
    wanted = min(math.ceil(width * height / (scale * scale)), max_slice_nums)
    if wanted <= 1:
        return None
    shape = math.log(width / height)
    counts = (n for n in (wanted - 1, wanted, wanted + 1) if 1 < n <= max_slice_nums)
    grids = [(cols, n // cols) for n in counts for cols in range(1, n + 1) if n % cols == 0]
    return min(grids, key=lambda grid: abs(shape - math.log(grid[0] / grid[1])), default=(1, 1))


def cut(image: Image.Image | EncodedImage, plan: SlicePlan) -> list[Image.Image]:
    """The slices of an image: the whole image, then the grid's cells in row-major order.

    Raises: ImageError if the aspect ratio is so extreme that a slice exceeds MAX_PATCHES.
    """
    for wh in filter(None, (plan.source_wh, plan.cell_wh)):
        n_patches = (wh[0] // PATCH) * (wh[1] // PATCH)
        if n_patches > MAX_PATCHES:
            raise ImageError(
                "image of {} x {}".format(*image.size),
                expected=f"a shape that makes at most {MAX_PATCHES} patches",
                got=f"{n_patches} patches",
            )
    opened = open_image(image)
    slices = [opened.resize(plan.source_wh, Image.Resampling.BICUBIC)]
    if plan.grid is None or plan.refined_wh is None or plan.cell_wh is None:
        return slices
    refined = opened.resize(plan.refined_wh, Image.Resampling.BICUBIC)
    (cols, rows), (width, height) = plan.grid, plan.cell_wh
    boxes = ((x * width, y * height, (x + 1) * width, (y + 1) * height) for y in range(rows) for x in range(cols))
    return [*slices, *map(refined.crop, boxes)]


def patchify(image: Image.Image, *, table_side: int = TABLE_SIDE, patch: int = PATCH) -> ImagePatches:
    """One slice as patches.

    Args:
        image: RGB, both sides a multiple of `patch`.
        table_side: side of the encoder's position table (`VisionConfig.table_side`).
    Raises: ImageError if a side is not a multiple of `patch`.
    """
    if image.mode != "RGB" or image.width % patch or image.height % patch or 0 in image.size:
        raise ImageError(
            "slice",
            expected=f"RGB with sides in multiples of {patch}",
            got=f"{image.mode} {image.width} x {image.height}",
        )
    rows, cols = image.height // patch, image.width // patch
    pixels = np.asarray(image).reshape(rows, patch, cols, patch, 3).transpose(0, 2, 4, 1, 3)
    coords = np.stack(np.divmod(np.arange(rows * cols, dtype=np.int64), cols), axis=-1)
    return ImagePatches(
        pixels.reshape(rows * cols, -1), rows, cols, position_ids(rows, cols, table_side=table_side), coords
    )


def image_patches(
    image: Image.Image | EncodedImage, plan: SlicePlan, *, table_side: int = TABLE_SIDE
) -> list[ImagePatches]:
    """All slices of one image as patches, in the order of `cut`."""
    return [patchify(part, table_side=table_side) for part in cut(image, plan)]


def pixel_values(levels: Floats) -> Floats:
    """Float32 levels 0 to 255 mapped to [-1, 1]. The order of the operations is part of the result's exact value."""
    return (levels / 255 - 0.5) / 0.5


def pad_batch(slices: Sequence[ImagePatches], length: int = LENGTH, size: int | None = None) -> ImageBatch:
    """Slices of different sizes as one batch of `size` rows (default: one for each slice), `length` patches each.

    Raises: ShapeError if there are no slices or more than `size`, or a slice is longer than `length`.
    """
    size = len(slices) if size is None else size
    if not 0 < len(slices) <= size:
        raise ShapeError("image batch", expected=f"1 to {size} slices", got=len(slices))
    longest = max(len(part.pixels) for part in slices)
    if longest > length:
        raise ShapeError("image batch", expected=f"at most {length} patches in a slice", got=longest)
    batch = ImageBatch(
        pixels=np.zeros((size, length, slices[0].pixels.shape[1]), np.uint8),
        position_ids=np.zeros((size, length), np.int64),
        coords=np.zeros((size, length, 2), np.int64),
        mask=np.zeros((size, length), bool),
    )
    for row, part in enumerate(slices):
        n = len(part.pixels)
        batch.pixels[row, :n] = part.pixels
        batch.position_ids[row, :n] = part.position_ids
        batch.coords[row, :n] = part.coords
        batch.mask[row, :n] = True
    return batch


def _snap(side: float, multiple: int) -> int:
    """The nearest multiple (halves to even), at least `multiple` itself."""
    return max(round(side / multiple) * multiple, multiple)


def _fit(width: float, height: float, scale: int, patch: int, *, enlarge: bool) -> Size:
    """A size of about scale * scale pixels with the same aspect ratio, both sides multiples of `patch`.

    Args:
        enlarge: also scale sizes of fewer pixels.
    """
    if enlarge or width * height > scale * scale:
        shape = width / height
        height = int(scale / math.sqrt(shape))
        width = int(height * shape)  # from the truncated height, as in training
    return _snap(width, patch), _snap(height, patch)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):  # its text has the address of an object
        return "a file of another kind"
    return f"{type(error).__name__}: {error}"
