"""`python -m training.scenes.pack --out scene_fonts.tar.xz`: fonts and things for a machine without them.

Unpack the archive and set `$SCENE_FONTS` to its folder `scene_fonts`. Things are finished pictures, because the font
that they are from is larger than all else. Debian's packages: fonts-dejavu fonts-liberation fonts-noto-color-emoji.
"""

import shutil
from pathlib import Path

from PIL import Image

from training.packing import pack
from training.scenes.drawing import EMOJI_SIZE, FONTS, TEXT_FONTS, draw_thing
from training.scenes.labels import THINGS


def collect(root: Path) -> None:
    """Copy text fonts and draw things to `root`."""
    for name in TEXT_FONTS:
        if (FONTS / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(FONTS / name, root / name)
    (root / "things").mkdir(parents=True)
    for name in THINGS:
        picture = draw_thing(name).resize((2 * EMOJI_SIZE, 2 * EMOJI_SIZE), Image.Resampling.BICUBIC)
        picture.save(root / "things" / f"{name}.png")


if __name__ == "__main__":
    pack(__doc__.partition("\n")[0], "scene_fonts", collect)
