"""The deterministic pictures that the golden data was made with."""

import numpy as np
from PIL import Image


def picture(width: int, height: int, k: int) -> Image.Image:
    """RGB test picture number `k`: ramps in red and green, a checkerboard with a diagonal in blue."""
    x, y = np.arange(width)[None, :], np.arange(height)[:, None]
    red = (x * (3 + k) + 5 * y) % 256
    green = (x * y // 7 + 11 * k) % 256
    blue = (x // 16 + y // 16 + k) % 2 * 200 + (x + y) % 50
    return Image.fromarray(np.stack([red, green, blue], axis=-1).astype(np.uint8))
