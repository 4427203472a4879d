"""`python -m worker.plan`: how many sessions of which kind fit in memory and are served in time.

Memory is computed from the settings and the checkpoint's configuration, for any size of a GPU. Time is measured with
`--measure`, by the engine that a worker would start here. Exit status: 0 if the sessions fit; 1 if none fits, or fewer
than the settings name; 2 for invalid settings or arguments.
"""

import argparse
import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path

from models.errors import ModelError, SettingsError
from worker.config.service import INDUCTOR_VARIABLE, Config, load_config

DO_NOT_FIT, USAGE = 1, 2
SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:GB|GiB|G)?", re.IGNORECASE)
FLAGS = {
    "model_path": "model.model_path",
    "max_sessions": "duplex.max_sessions",
    "context_rows": "duplex.context_rows",
    "dtype": "model.dtype",
    "weights": "model.weights",
    "kv_layout": "model.kv_layout",
    "device": "model.device",
    "compile": "service.compile.enabled",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker.plan", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--gpu", metavar="24GB", help="memory of a GPU as on its label, in units of 2**30 bytes")
    parser.add_argument("--measure", action="store_true", help="start the engine here, and measure units of each kind")
    parser.add_argument(
        "--json", action="store_true", help="print the memory as JSON, sizes in bytes, and nothing else"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; default: config.json at the root")
    parser.add_argument("--model-path", metavar="DIR", help="checkpoint folder; for the memory, config.json is enough")
    parser.add_argument("--max-sessions", type=int, metavar="N", help="slots; default: as many as fit into memory")
    parser.add_argument("--context-rows", type=int, metavar="N", help="context length of a slot in tokens")
    parser.add_argument("--dtype", help="auto, float32, bfloat16")
    parser.add_argument("--weights", help="bf16, fp8, int8, int4")
    parser.add_argument("--kv-layout", help="auto, slots, pages")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the model, or not")
    return parser


def gpu_bytes(text: str) -> int:
    """The bytes of a size such as `24GB`. Raises: SettingsError."""
    matched = SIZE.fullmatch(text.strip())
    if matched is None or not float(matched[1]):
        raise SettingsError("--gpu", expected="a size such as 24GB", got=repr(text))
    return int(float(matched[1]) * 2**30)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        flags = {key: getattr(args, name) for name, key in FLAGS.items()}
        config, _ = load_config(args.config, flags=flags, environ=os.environ)
        os.environ[INDUCTOR_VARIABLE] = str(config.service.cache_dir)
        lines, fits = _lines(config, args)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    print("\n".join(lines))
    return 0 if fits else DO_NOT_FIT


def _lines(config: Config, args: argparse.Namespace) -> tuple[list[str], bool]:
    """The answer, and whether the sessions fit. Raises: ModelError."""
    if args.json and args.measure:
        raise SettingsError("--json", expected="no --measure beside it: JSON holds the memory alone", got="both")
    if args.measure and not config.model.omni:
        raise SettingsError("--measure", expected="an omni model (model.omni), whose units are measured", got="none")
    import torch

    from worker.assembly.kv_layout import layout_of, with_kv_layout
    from worker.assembly.parts import device_type, pick_device
    from worker.plan.memory import graphs_line, layout_line, memory_lines, plan_memory

    total = None if args.gpu is None else gpu_bytes(args.gpu)
    kind = device_type(config.model.device)
    if total is None and kind == "cuda":
        total = torch.cuda.get_device_properties(pick_device(config.model.device)).total_memory
    if total is None and (args.json or not args.measure):
        raise SettingsError("worker.plan", expected="--gpu SIZE or --measure without a GPU", got="neither")
    engine, fits = config.engine(), True
    if total is None:
        lines = [layout_line(engine, layout_of(with_kv_layout(engine, by_kernels=False, n_fitting=lambda _: 0)))]
    else:
        plan = plan_memory(
            engine, total, by_kernels=config.compile.enabled is not False and config.compile.allows_kernels
        )
        if args.json:
            return [json.dumps(asdict(plan))], plan.fits
        fits = plan.fits
        lines = [layout_line(engine, plan.kv_layout)] if engine.omni else []
        lines += [*memory_lines(plan), graphs_line(config.service.cache_dir)]
    unmeasured = ["time: not measured; --measure does it on the machine"] if engine.omni else []
    return lines + (_measured(config) if args.measure else unmeasured), fits


def _measured(config: Config) -> list[str]:
    from worker.assembly.backend_flags import limit_threads
    from worker.assembly.parts import device_type
    from worker.loop.prompt.system_prompt import SystemPrompt
    from worker.plan.measure import measure, time_lines
    from worker.serving import worker_settings
    from worker.start.starting import start_engine
    from worker.start.voices import ReferenceSound
    from worker.start.warmup import SYSTEM, extract
    from worker.status import Status

    settings = worker_settings(config)
    limit_threads(device_type(settings.engine.device))
    started = start_engine(
        settings.engine,
        video=settings.video,
        ref_audio=settings.ref_audio,
        max_units=settings.max_warmup_units,
        cache_dir=settings.cache_dir,
        status=Status(),
        targets={},
    )
    try:
        voice = audio_16k = None
        if settings.ref_audio is not None and started.voices is not None:
            reference = ReferenceSound.read(settings.ref_audio)
            audio_16k, voice = reference.audio_16k(), started.voices.of(reference)
        prompt = SystemPrompt.of(SYSTEM, audio_16k, voice)
        return time_lines(measure(started.engine, extract(settings.video, settings.max_warmup_units), prompt))
    finally:
        started.engine.close()


if __name__ == "__main__":
    sys.exit(main())
