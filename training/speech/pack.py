"""`python -m training.speech.pack --out speech_tools.tar.xz`: the speech engines, to be used on a machine without them.

The archive holds the programs with every shared library, the loader included, and the data of the used voices. It runs
from any folder: unpack it and set `$SPEECH_TOOLS` to its folder `speech_tools`. Festival reads its data at
`/usr/share/festival` only; where that is missing its start script makes a link there, which needs root. Linux on x86-64
only.

Debian's packages: flite festival festvox-us-slt-hts festvox-kdlpc16k espeak-ng.
"""

import re
import shutil
import subprocess
from pathlib import Path

from training.packing import pack

LOADER = "ld-linux-x86-64.so.2"
FESTIVAL_DATA = Path("/usr/share/festival")
FESTIVAL_VOICES = {"us": "cmu_us_slt_arctic_hts", "english": "ked_diphone"}  # by folder
FESTIVAL_DICTIONARY = ("cmudict-0.4.out", "cmulex.scm", "cmudict_extensions.scm", "cmu_lts_rules.scm")
ESPEAK_DATA = Path("/usr/lib/x86_64-linux-gnu/espeak-ng-data")
ESPEAK_FILES = ("phondata", "phonindex", "phontab", "intonations", "en_dict", "voices/!v", "lang/gmw")

FESTIVAL_LINK = f'[ -e {FESTIVAL_DATA} ] || ln -s "$here/share/festival" {FESTIVAL_DATA} 2>/dev/null || true\n'

OPTIONS = {
    "flite": '"$@"',
    "festival": '"$@"',
    "espeak-ng": '--path="$here/share" "$@"',
}


def collect(root: Path) -> None:
    """Copy programs, libraries and data to `root`."""
    for name in ("bin", "lib", "share"):
        (root / name).mkdir(parents=True)
    for name, options in OPTIONS.items():
        program = Path(shutil.which(name) or name)
        shutil.copy(program, root / "bin" / name)
        for library in libraries(program):
            shutil.copy(library, root / "lib" / library.name)
        wrapper = root / name
        loader = f'"$here/lib/{LOADER}" --inhibit-cache --library-path "$here/lib" "$here/bin/{name}"'
        link = FESTIVAL_LINK if name == "festival" else ""
        wrapper.write_text(f'#!/bin/sh\nhere="${{0%/*}}"\n{link}exec {loader} {options}\n')
        wrapper.chmod(0o755)
    shutil.copy(f"/lib64/{LOADER}", root / "lib" / LOADER)
    _copy_festival(root / "share" / "festival")
    for file in ESPEAK_FILES:
        source, target = ESPEAK_DATA / file, root / "share" / "espeak-ng-data" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def libraries(program: Path) -> list[Path]:
    """Every shared library that a program loads."""
    told = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    return [Path(path) for path in re.findall(r"=> (/\S+)", told)]


def _copy_festival(target: Path) -> None:
    def left_out(folder: str, names: list[str]) -> set[str]:
        place = Path(folder)
        if place.name == "voices":
            return {name for name in names if name not in FESTIVAL_VOICES}
        if place.parent.name == "voices":
            return {name for name in names if name != FESTIVAL_VOICES[place.name]}
        if place.name == "dicts":
            return {name for name in names if name != "cmu" and not name.startswith("wsj")}
        if place.name == "cmu":
            return {name for name in names if name not in FESTIVAL_DICTIONARY}
        return {"multisyn", "examples"} & set(names)

    shutil.copytree(FESTIVAL_DATA, target, ignore=left_out, symlinks=False)


if __name__ == "__main__":
    pack(__doc__.partition("\n")[0], "speech_tools", collect)
