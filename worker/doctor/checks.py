"""The doctor's checks of programs, settings and files: facts in, a finding with its remedy out.

Knows what the programs need; does not know where facts come from. `checks_gpu` has those about torch and GPUs.
"""

from worker.doctor.facts import MediaFacts, ProgramFacts
from worker.doctor.findings import GIB, Finding, Level, note, ok, problem, size
from worker.doctor.machine import Machine
from worker.doctor.versions import fits

OLDEST_PYTHON = (3, 11)
CACHE_ROOM = 2 * GIB  # kernels of all targets, and what compiling writes meanwhile
FEW_FILES, ENOUGH_FILES = 256, 1024
PROCESS_ROOM = GIB // 2  # torch itself and what a unit needs
TOKENIZER_FILES = "tokenizer.json, or vocab.json with merges.txt"
VOCODER_FILES = ("flow.yaml", "flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v2_25hz.onnx")

# Variables that change what torch does, and how.
ODD_VARIABLES = {
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
    "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCH_LOGS": "torch tells much more, and is slower for it",
    "TORCH_COMPILE_DEBUG": "every compiled graph is written to disk",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "every start compiles anew",
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver",
    "NVIDIA_TF32_OVERRIDE": "it overrides service.compile.tf32",
}
NO_COMPILING = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def python(machine: Machine) -> Finding:
    found = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        return problem("python", found, "install Python 3.11 or newer, remove .venv/base and run start_all.sh")
    return ok("python", found)


def dependencies(machine: Machine) -> Finding:
    missing, outside = [], []
    for one in machine.requirements:
        if one.installed is None:
            missing.append(f"{one.name}{one.bounds} is not installed")
        elif not fits(one.installed, one.bounds):
            outside.append(f"{one.name} {one.installed} is not {one.bounds}")
    if missing or outside:
        remedy = "remove .venv/base/.installed-* and run start_all.sh, which installs what pyproject.toml names"
        return problem("dependencies", "\n".join(missing + outside), remedy)
    return ok("dependencies", f"{len(machine.requirements)} installed, within the bounds of pyproject.toml")


def config(machine: Machine) -> Finding:
    if error := machine.config_error:
        remedy = "correct it (docs/configuration.md lists every key); until then the checks below look at the defaults"
        return problem("config", error, remedy)
    if "\n" in machine.config_text:
        return note("config", machine.config_text, "keys without effect can be removed")
    return ok("config", machine.config_text)


def compiler(machine: Machine) -> Finding:
    """What torch.compile builds with: C++ for kernels on the CPU, C for what starts kernels on a GPU."""
    gpu = machine.on_gpu
    program = machine.c_compiler if gpu else machine.cpp_compiler
    kind, packages = ("C", "gcc") if gpu else ("C++", "g++")
    remedy = (
        f"install {packages} (apt-get install {packages}) or set {'CC' if gpu else 'CXX'}; or turn service.compile off"
    )
    if program.path is None or program.error:
        return _needed_to_compile(machine, "compiler", program.error or f"no {kind} compiler", remedy)
    if machine.python_headers is None:
        remedy = "install Python's headers (apt-get install python3-dev), or turn service.compile off"
        return _needed_to_compile(machine, "compiler", "no Python.h, which compiled kernels include", remedy)
    return ok("compiler", program.version)


def ffmpeg(machine: Machine) -> Finding:
    found = machine.ffmpeg
    if not _runs(found):
        remedy = "install it (apt-get install ffmpeg) or imageio-ffmpeg (pip); warm-up and media files need it"
        return problem("ffmpeg", found.error or "none", remedy)
    return ok("ffmpeg", f"{found.version.partition(' Copyright')[0]} at {found.path}")


def ports(machine: Machine) -> Finding:
    service = machine.config.service
    if taken := machine.taken_ports:
        found = "\n".join(f"{port}: {why}" for port, why in taken.items())
        remedy = (
            "stop what listens there (ss -ltnp shows it), or change service.gateway_port or service.worker_base_port"
        )
        return problem("ports", found, remedy)
    return ok("ports", f"{service.gateway_port} and workers from {service.worker_base_port} on are free")


def cache(machine: Machine) -> Finding:
    folder = machine.cache_folder
    remedy = "set service.cache_dir to a folder that can be written to, or turn service.compile off"
    if folder.error:
        return _needed_to_compile(machine, "cache", f"cannot be written to: {folder.error}", remedy)
    if not folder.runs_code:
        remedy = "set service.cache_dir to a folder on a disk that is not mounted noexec"
        return _needed_to_compile(machine, "cache", f"{folder.path}: compiled kernels cannot be loaded there", remedy)
    if folder.free < CACHE_ROOM:
        found = f"{folder.path}: {size(folder.free)} free, compiling may need {size(CACHE_ROOM)}"
        return _needed_to_compile(machine, "cache", found, "free some room, or set service.cache_dir to another disk")
    room = f"{folder.path}: {size(folder.free)} free"
    if not machine.compiles:
        return ok("cache", room)
    if not folder.n_files:
        remedy = "run precompile.py once on each kind of machine; later starts find what it compiled"
        return note("cache", f"{room}, nothing compiled yet: the first start has to", remedy)
    return ok("cache", f"{room}, {folder.n_files} files of {size(folder.n_bytes)}")


def model(machine: Machine) -> Finding:
    facts, settings = machine.model, machine.config.model
    problems = list(facts.problems)
    if settings.pt_path is not None and not settings.pt_path.is_file():
        problems.append(f"{settings.pt_path}: expected a file of weights (model.pt_path), got no such file")
    if problems:
        remedy = (
            "complete the folder, or set model.model_path to a complete one or to a model id of the Hugging Face hub"
        )
        return problem("model", "\n".join(problems), remedy)
    n_files = "1 file" if facts.n_files == 1 else f"{facts.n_files} files"
    return ok("model", f"{settings.model_path}: {n_files} of {size(facts.n_bytes)}, {facts.n_values:,} numbers")


def tokenizer(machine: Machine) -> Finding:
    if error := machine.tokenizer_error:
        return problem("tokenizer", error, f"put {TOKENIZER_FILES} of the checkpoint into its folder")
    return ok("tokenizer", "whole, with every special token")


def vocoder(machine: Machine) -> Finding:
    folder, files = machine.vocoder_folder, machine.vocoder_files
    if not files:
        remedy = "set model.token2wav_path to the vocoder's folder, unless text is all that is wanted"
        level = Level.NOTE if machine.config.model.token2wav_path is None else Level.PROBLEM
        return Finding("vocoder", level, f"{folder}: no files, nothing will be spoken", remedy)
    if lost := [name for name in VOCODER_FILES if not files.get(name)]:
        return problem("vocoder", f"{folder}: missing or empty: {', '.join(lost)}", "download the folder again")
    return ok("vocoder", f"{folder}: {size(sum(files.values()))}")


def warmup(machine: Machine) -> Finding:
    path, facts = machine.config.service.warmup_video, machine.warmup_video
    remedy = "set service.warmup_video to a video with sound; assets/build_warmup.py makes the default one"
    return _media("warmup", str(path), facts, remedy)


def voice(machine: Machine) -> Finding:
    path, facts = machine.config.audio.ref_audio_path, machine.voice
    if facts is None:
        remedy = "set audio.ref_audio_path, unless every client brings a voice"
        return note("voice", "none: sessions that bring no voice are silent", remedy)
    return _media("voice", str(path), facts, "set audio.ref_audio_path to a sound file of 0.5 to 30 s")


def memory(machine: Machine) -> Finding:
    needed = PROCESS_ROOM if machine.on_gpu else PROCESS_ROOM + machine.least_model_bytes
    found = f"{size(machine.free_memory)} free, at least {size(needed)} needed"
    if machine.free_memory < needed:
        remedy = "stop other programs, allow the container more, or take a smaller model"
        return problem("memory", found, remedy)
    return ok("memory", found)


def files(machine: Machine) -> Finding:
    most = machine.most_open_files
    found = "no limit" if most < 0 else f"{most} open files at most"
    if 0 <= most < ENOUGH_FILES:
        level = Level.PROBLEM if most < FEW_FILES else Level.NOTE
        return Finding("files", level, found, f"ulimit -n {ENOUGH_FILES} before the start, or more for many sessions")
    return ok("files", found)


def environment(machine: Machine) -> Finding:
    odd = {name: value for name in ODD_VARIABLES if (value := machine.environ.get(name, "")) not in ("", "0")}
    if machine.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        odd["NVIDIA_TF32_OVERRIDE"] = "0"
    if not odd:
        return ok("environment", "no variable that changes what torch does")
    found = "\n".join(f"{name}={value}: {ODD_VARIABLES[name]}" for name, value in odd.items())
    stops = machine.compiles and any(name in odd for name in NO_COMPILING)
    return Finding("environment", Level.PROBLEM if stops else Level.NOTE, found, f"unset {' '.join(odd)}")


# --- words of several checks ----------------------------------------------------------------------


def _media(name: str, path: str, facts: MediaFacts, remedy: str) -> Finding:
    if facts.error:
        return problem(name, f"{path}: {facts.error}", remedy)
    return ok(name, f"{path}: {facts.text}")


def _runs(program: ProgramFacts) -> bool:
    return program.path is not None and program.error is None


def _needed_to_compile(machine: Machine, name: str, found: str, remedy: str) -> Finding:
    """A problem if something is to be compiled, worth knowing if not."""
    level = Level.PROBLEM if machine.compiles else Level.NOTE
    return Finding(name, level, found, remedy)
