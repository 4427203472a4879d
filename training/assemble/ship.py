"""`python -m training.assemble.ship --weights RUN`: trained weights as the embedded checkpoint, measured.

Exports what `training.run_mind` left in RUN, assembles the checkpoint, evaluates it through the served system, records
an exchange, writes the bounds of the gate, and lets programs without a model run the talker. With `--dry-run` all
files are written below `--work` and the tree stays as it is. Prints the seconds of each step and the bytes.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from models.errors import ModelError
from models.quantize import TOKEN2WAV, folder_bytes
from training.assemble import talker as assemble
from training.evaluate import __main__ as evaluate
from training.evaluate import exchange
from training.mind import export

ROOT = Path(__file__).parents[2]
TALKER = Path("assets/talker")
BOUNDS = Path("training/evaluate/bounds.json")
# Texts that name the embedded checkpoint, before and after.
SWITCHES = {
    Path("models/checkpoint/embedded.py"): ("DEFAULT = TINY ", f'DEFAULT = Path("{TALKER}") '),
    Path("docs/configuration.md"): (
        '| `model.model_path` | `"assets/tiny"` |',
        f'| `model.model_path` | `"{TALKER}"` |',
    ),
}


@dataclass(frozen=True)
class Places:
    """Files and folders of the steps; those of a dry run are below the work folder."""

    work: Path
    talker: Path
    docs: Path
    bounds: Path

    @classmethod
    def of(cls, root: Path, work: Path, is_dry: bool) -> "Places":
        base = work if is_dry else root
        return cls(work, base / TALKER, base / "docs", base / BOUNDS)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.assemble.ship", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--weights", type=Path, required=True, help="folder of mind_weights.pt and speech_weights.pt")
    parser.add_argument("--vocoder-weights", type=Path, default=ROOT / TALKER / TOKEN2WAV)
    parser.add_argument("--work", type=Path, default=Path("tmp/ship"), help="folder of voices, logs and the result")
    parser.add_argument("--quick", action="store_true", help="evaluate a small part of the material")
    parser.add_argument("--no-ear", action="store_true", help="evaluate without word errors, which need pocketsphinx")
    parser.add_argument("--dry-run", action="store_true", help="change nothing in the tree; speech may be untrained")
    args = parser.parse_args(argv)
    try:
        size = [*(["--quick"] if args.quick else []), *(["--no-ear"] if args.no_ear else [])]
        ship(args.weights, args.vocoder_weights, Places.of(ROOT, args.work, args.dry_run), size, args.dry_run)
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def ship(weights: Path, vocoder: Path, places: Places, size: Sequence[str], is_dry: bool) -> None:
    """All steps in order; the default is changed last. size: of the evaluation. Raises: ModelError if one fails."""
    if not is_dry and not (weights / "speech_weights.pt").exists():
        raise ModelError(str(weights), expected="mind_weights.pt and speech_weights.pt", got="no speech_weights.pt")
    mind, work, talker = places.work / "mind", str(places.work / "evaluate"), str(places.talker)
    trained = ["--mind", str(mind), "--speech", str(mind), "--weights", str(vocoder)]
    result, bounds = str(places.work / "result.json"), str(places.bounds)
    _step("export", lambda: export.main(["--weights", str(weights), "--out", str(mind)]))
    _step("assemble", lambda: assemble.main(["--out", talker, *trained]))
    print(f"{talker}: {folder_bytes(places.talker):,} bytes, largest file {_largest(places.talker):,}")
    _step("evaluate", lambda: evaluate.main(["--model", talker, "--work", work, "--json", result, *size]))
    _step("exchange", lambda: exchange.main(["--model", talker, "--work", work, "--out", str(places.docs)]))
    # Twice: the first run also synthesizes its sentences, which would count into its time.
    gate = ["--model", talker, "--work", work, "--gate"]
    _step("bounds", lambda: evaluate.main([*gate, "--write-bounds", bounds]))
    _step("gate", lambda: evaluate.main([*gate, "--bounds", bounds]))
    if not is_dry:
        make_default(ROOT)


def make_default(root: Path) -> None:
    """Let programs without a model run the talker. Raises: ModelError if a file names another one."""
    changed = {}
    for file, (before, after) in SWITCHES.items():
        text = (root / file).read_text(encoding="utf-8")
        if after in text:
            continue
        if text.count(before) != 1:
            raise ModelError(str(file), expected=f"once {before.strip()}", got=f"{text.count(before)} times")
        changed[root / file] = text.replace(before, after)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")


def _step(name: str, run: Callable[[], int | None]) -> None:
    """Run a step and print its time. Raises: ModelError for a nonzero status."""
    begun = time.monotonic()
    status = run()
    print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    if status:
        raise ModelError(name, expected="status 0", got=status)


def _largest(folder: Path) -> int:
    return max(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the served system ends too
    sys.exit(main())
