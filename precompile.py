"""Compiles for one GPU ahead of time: load, compile and warm up as a worker does, then exit.

    CUDA_VISIBLE_DEVICES=0 PYTHONPATH=. .venv/base/bin/python precompile.py

The compiled code stays in the cache folder, and workers start from it in seconds. The program reads the settings and
sets the environment variables of compilers and drivers before it imports torch. It compiles whatever
`service.compile.enabled` is, unless `--no-compile` is given. Exit status: 0; 1 if a stage, a target or the project's
kernels failed; 2 for invalid settings or arguments; 130 if interrupted.
"""

import argparse
import atexit
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import ModelError, SettingsError
from worker import log
from worker.compile.state import TargetState
from worker.config.service import INDUCTOR_VARIABLE, Config, load_config
from worker.config.session import EngineConfig
from worker.report.compile_report import CompileReport, write_report

if TYPE_CHECKING:
    from worker.start.starting import Started

FAILED, USAGE, INTERRUPTED = 1, 2, 130
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
FLAGS = {
    "model_path": "model.model_path",
    "pt_path": "model.pt_path",
    "ref_audio_path": "audio.ref_audio_path",
    "mode": "service.compile.mode",
    "max_warmup_chunks": "service.max_warmup_chunks",
    "warmup_video": "service.warmup_video",
    "attn_implementation": "model.attn_implementation",
    "device": "model.device",
    "max_sessions": "duplex.max_sessions",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="precompile.py", description="Compile for one GPU ahead of time, so that workers start quickly."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; default: config.json at the root")
    parser.add_argument("--model-path", metavar="DIR", help="checkpoint folder, or a model id of the Hugging Face hub")
    parser.add_argument("--pt-path", metavar="FILE", help="weights that replace those of the checkpoint")
    parser.add_argument("--ref-audio-path", metavar="FILE", help="the voice of the warm-up")
    parser.add_argument("--gpu-id", type=int, default=0, metavar="N", help="index among the visible GPUs; default: 0")
    parser.add_argument("--mode", choices=["default", "reduce-overhead", "max-autotune"], help="mode of torch.compile")
    parser.add_argument("--max-warmup-chunks", type=int, metavar="N", help="maximum seconds of the video; default: 10")
    parser.add_argument("--warmup-video", metavar="FILE", help="input of the warm-up")
    parser.add_argument(
        "--attn-implementation", choices=["auto", "flash_attention_2", "sdpa", "eager"], help="attention kernels"
    )
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--max-sessions", type=int, metavar="N", help="slots; default: as many as fit into memory")
    parser.add_argument("--no-compile", action="store_true", help="load and warm up only, to check files and model")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the compile report as JSON")
    parser.add_argument("--measure", action="store_true", help="measure regions too: eager, compiled, captured")
    parser.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        log.set_up(log.level_of(args.log_level, os.environ))
        config, notes = settings(args, os.environ)
        if args.report is not None:
            _check_folder(args.report)
        if config.model.device in ("auto", "cuda"):
            os.environ[GPU_VARIABLE] = gpu(args.gpu_id, os.environ.get(GPU_VARIABLE))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    os.environ[INDUCTOR_VARIABLE] = str(config.service.cache_dir)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    try:
        return _run(config, args.report, measures=args.measure)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def settings(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """A worker's settings, with compiling on unless `--no-compile` is given. Raises: ConfigError, SettingError."""
    flags: dict[str, object] = {key: getattr(args, name) for name, key in FLAGS.items()}
    flags["service.compile.enabled"] = not args.no_compile
    return load_config(args.config, flags=flags, environ=environ)


def gpu(number: int, visible: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves one GPU visible.

    Args:
        number: index among the visible GPUs.
        visible: the variable's present value; None: unset.

    Raises: SettingsError for an index out of range.
    """
    names = None if visible is None else [name for name in visible.split(",") if name.strip()]
    if number < 0 or (names and number >= len(names)):
        expected = f"0 to {len(names) - 1}, of {GPU_VARIABLE}={visible}" if names else "0 or more"
        raise SettingsError("--gpu-id", expected=expected, got=number)
    if names is None:
        return str(number)
    return names[number] if names else ""


def _check_folder(path: Path) -> None:
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise SettingsError(f"--report {path}", expected="a file in an existing folder", got="none")


def _run(config: Config, path: Path | None, *, measures: bool) -> int:
    from worker.assembly.backend_flags import limit_threads
    from worker.assembly.parts import device_type
    from worker.start.starting import start_engine
    from worker.status import Status

    engine = config.engine()
    limit_threads(device_type(engine.device))
    started = start_engine(
        engine,
        video=config.service.warmup_video,
        ref_audio=config.audio.ref_audio_path,
        max_units=config.service.max_warmup_chunks,
        cache_dir=config.service.cache_dir,
        status=Status(),
        targets={},
    )
    try:
        report = _measured(started, engine) if measures else started.report
        print("\n".join(summary(started)))
        print(report.table())
        for line in error_lines(started):
            print(line, file=sys.stderr)
        if path is not None:
            write_report(report, path)
            print(f"report: {path}")
    except OSError as error:
        print(f"error: {path}: {error.strerror}", file=sys.stderr)
        return FAILED
    finally:
        started.engine.close()
    return 0 if started.compile_result.is_whole else FAILED


def _measured(started: "Started", config: EngineConfig) -> CompileReport:
    """The start's report, followed by a row for each region. Raises: ReportError."""
    from worker.report.region_report import region_report

    # On the engine's thread, because another thread would compile again.
    parts = started.engine.parts
    measuring = started.engine.submit(region_report, parts, config, started.compile_result)
    return started.report.followed_by(measuring.result())


def failed_targets(started: "Started") -> list[TargetState]:
    """Targets that do not run as configured."""
    return [one for one in started.targets.values() if one.has_failed]


def error_lines(started: "Started") -> list[str]:
    """Lines for stderr: notes, and each failed target."""
    notes = [f"note: {note}" for note in started.compile_result.notes]
    return [*notes, *(f"error: {one.name} fell back: {one.error}" for one in failed_targets(started))]


def summary(started: "Started") -> list[str]:
    """Lines for stdout: stages, cache, targets."""
    stages = ", ".join(f"{stage.replace('_', ' ')} {seconds:.1f} s" for stage, seconds in started.seconds.items())
    rows: list[tuple[str, ...]] = [("target", "state", "seconds", "graphs", "captured", "hits", "misses")]
    for one in started.targets.values():
        counts = (one.n_graphs, one.n_captured, one.hits, one.misses)
        rows.append((one.name, one.phase.value, f"{one.seconds:.1f}", *map(str, counts)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = [f"{one.name}: {one.error}" for one in started.targets.values() if one.error]
    return [stages, str(started.cache or "compile cache: not used"), *table, *failed]


def _end(statuses: list[int]) -> None:
    """End the process with the last status; does nothing without one."""
    if statuses:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(statuses[-1])


if __name__ == "__main__":
    # Triton's extension lists objects that outlive the interpreter on stderr, as leaks. The first registered function
    # runs last: it ends the process before the interpreter is torn down.
    statuses: list[int] = []
    atexit.register(_end, statuses)
    statuses.append(main())
    if statuses[-1] == INTERRUPTED:
        _end(statuses)  # a running compiler cannot be stopped, and crashes in the exit functions
    sys.exit(statuses[-1])
