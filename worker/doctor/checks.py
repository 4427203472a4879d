"""The doctor's checks of programs, settings and files: each maps facts to a finding with its remedy.

Contains the requirements of the programs; does not collect facts (see `machine`). `checks_gpu` covers torch and GPUs.
"""

from worker.doctor.checkpoint_facts import file_bytes
from worker.doctor.facts import MediaFacts, ProgramFacts
from worker.doctor.findings import GIB, Finding, Level, note, ok, problem, size
from worker.doctor.machine import Machine
from worker.doctor.model_memory import model_bytes
from worker.doctor.versions import fits

MIN_PYTHON = (3, 11)
CACHE_ROOM = 2 * GIB  # kernels of all targets, and temporary files of the compiler
MIN_FILES, ENOUGH_FILES = 256, 1024
NOT_SERVED = "no omni model: model.omni is false"
PROCESS_ROOM = GIB // 2  # torch itself and the buffers of a unit
TOKENIZER_FILES = "tokenizer.json, or vocab.json with merges.txt"
VOCODER_FILES = ("flow.yaml", "flow.pt", "hift.pt", "campplus.onnx", "speech_tokenizer_v2_25hz.onnx")

# Variables that change torch's behaviour -> their effect.
TORCH_VARIABLES = {
    "TORCH_COMPILE_DISABLE": "nothing is compiled",
    "TORCHDYNAMO_DISABLE": "nothing is compiled",
    "TORCH_LOGS": "torch logs much more, and is slower",
    "TORCH_COMPILE_DEBUG": "torch writes every compiled graph to disk",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "every start compiles again",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "the driver allocates every tensor",
    "NVIDIA_TF32_OVERRIDE": "it overrides service.compile.tf32",
}
NO_COMPILING = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def python(machine: Machine) -> Finding:
    found = ".".join(map(str, machine.python))
    if machine.python < MIN_PYTHON:
        return problem("python", found, "install Python 3.11 or newer, remove .venv/base and run start_all.sh")
    return ok("python", found)


def dependencies(machine: Machine) -> Finding:
    missing, unfit = [], []
    for one in machine.requirements:
        if one.installed is None:
            missing.append(f"{one.name}{one.bounds} is not installed")
        elif not fits(one.installed, one.bounds):
            unfit.append(f"{one.name} {one.installed} is not {one.bounds}")
    if missing or unfit:
        remedy = "remove .venv/base/.installed-* and run start_all.sh, which installs the packages of pyproject.toml"
        return problem("dependencies", "\n".join(missing + unfit), remedy)
    return ok("dependencies", f"{len(machine.requirements)} installed, within the bounds of pyproject.toml")


def config(machine: Machine) -> Finding:
    if error := machine.config_error:
        remedy = "correct it (docs/configuration.md lists every key); until then the checks below use the defaults"
        return problem("config", error, remedy)
    if "\n" in machine.config_text:
        return note("config", machine.config_text, "keys without effect can be removed")
    return ok("config", machine.config_text)


def compiler(machine: Machine) -> Finding:
    """The compiler that torch.compile needs: C++ for kernels on the CPU, C for the code that launches GPU kernels."""
    gpu = machine.on_gpu
    program = machine.c_compiler if gpu else machine.cpp_compiler
    kind, packages = ("C", "gcc") if gpu else ("C++", "g++")
    variable = "CC" if gpu else "CXX"
    remedy = f"install {packages} (apt-get install {packages}) or set {variable}; or set service.compile to false"
    if program.path is None or program.error:
        return _needed_to_compile(machine, "compiler", program.error or f"no {kind} compiler", remedy)
    if machine.python_headers is None:
        remedy = "install Python's headers (apt-get install python3-dev), or set service.compile to false"
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
    own = machine.own_ports
    if taken := {port: why for port, why in machine.taken_ports.items() if port not in own}:
        found = "\n".join(f"{port}: {why}" for port, why in taken.items())
        remedy = (
            "stop the process that listens there (ss -ltnp), or change service.gateway_port or service.worker_base_port"
        )
        return problem("ports", found, remedy)
    if own:
        return ok("ports", f"{', '.join(map(str, sorted(own)))}: Duologue is running there")
    return ok("ports", f"{service.gateway_port} and the workers' ports from {service.worker_base_port} are free")


def cache(machine: Machine) -> Finding:
    folder = machine.cache_folder
    remedy = "set service.cache_dir to a writable folder, or set service.compile to false"
    if folder.error:
        return _needed_to_compile(machine, "cache", f"not writable: {folder.error}", remedy)
    if not folder.runs_code:
        remedy = "set service.cache_dir to a folder on a disk that is not mounted noexec"
        return _needed_to_compile(machine, "cache", f"{folder.path}: kernels cannot be loaded from there", remedy)
    if folder.free < CACHE_ROOM:
        found = f"{folder.path}: {size(folder.free)} free, compiling may need {size(CACHE_ROOM)}"
        return _needed_to_compile(machine, "cache", found, "free disk space, or set service.cache_dir to another disk")
    room = f"{folder.path}: {size(folder.free)} free"
    if not machine.compiles:
        return ok("cache", room)
    if not folder.n_files:
        remedy = "run precompile.py once on each kind of machine; later starts load its kernels"
        return note("cache", f"{room}, empty: the first start compiles everything", remedy)
    return ok("cache", f"{room}, {folder.n_files} files of {size(folder.n_bytes)}")


def data(machine: Machine) -> Finding:
    """The folder of recordings, voices and presets."""
    folder = machine.data_folder
    if folder.error:
        remedy = "set service.data_dir to a writable folder: voices cannot be uploaded, and nothing can be recorded"
        level = problem if machine.config.recording.enabled else note
        return level("data", f"not writable: {folder.error}", remedy)
    return ok("data", f"{folder.path}: {size(folder.free)} free")


def model(machine: Machine) -> Finding:
    settings = machine.config.model
    if not settings.omni:
        return ok("model", NOT_SERVED)
    facts = machine.model
    problems = list(facts.problems)
    if settings.pt_path is not None and not settings.pt_path.is_file():
        problems.append(f"{settings.pt_path}: expected a file of weights (model.pt_path), got no such file")
    if problems:
        remedy = (
            "complete the folder, or set model.model_path to a complete one or to a model id of the Hugging Face hub"
        )
        return problem("model", "\n".join(problems), facts.remedy or remedy)
    n_files = "1 file" if facts.n_files == 1 else f"{facts.n_files} files"
    lane = "a side lane" if facts.has_side_lane else "no side lane: live sessions call no functions"
    text = f"{settings.model_path}: {n_files} of {size(facts.n_bytes)}, {facts.n_values:,} numbers; {lane}"
    return ok("model", text)


def checksums(machine: Machine) -> Finding:
    if not machine.config.model.omni:
        return ok("checksums", NOT_SERVED)
    n_files, error = machine.checked_files
    if error:
        return problem("checksums", error, "copy the folder again, or write it anew with python -m models.quantize")
    if not n_files:
        return ok("checksums", "the index has none; python -m models.quantize writes them")
    return ok("checksums", f"{n_files} files equal their checksums")


def tokenizer(machine: Machine) -> Finding:
    if not machine.config.model.omni:
        return ok("tokenizer", NOT_SERVED)
    if error := machine.tokenizer_error:
        return problem("tokenizer", error, f"put {TOKENIZER_FILES} of the checkpoint into its folder")
    return ok("tokenizer", "complete, with every special token")


def conversion(machine: Machine) -> Finding:
    """Whether S3Gen's checkpoint, if one is configured, is a file."""
    path = machine.config.model.s3gen_path
    if path is None:
        return ok("conversion", "no voice conversion: model.s3gen_path is null")
    if (n_bytes := file_bytes(path)) is None:
        remedy = "set model.s3gen_path to s3gen.safetensors or s3gen_meanflow.safetensors, or to null"
        return problem("conversion", f"{path}: no such file", remedy)
    return ok("conversion", f"{path}: {size(n_bytes)}")


def speech(machine: Machine) -> Finding:
    """Whether the speech model's checkpoint, if one is configured, is complete."""
    path, facts = machine.config.model.speech_path, machine.speech
    if facts is None:
        return ok("speech", "no speech model: model.speech_path is null")
    if facts.problems:
        remedy = "set model.speech_path to a complete Qwen3-TTS folder or to its model id, or to null"
        return problem("speech", "\n".join(facts.problems), facts.remedy or remedy)
    return ok("speech", f"{path}: {size(facts.n_bytes)}, {facts.n_values:,} numbers")


def vocoder(machine: Machine) -> Finding:
    if not machine.config.model.omni:
        return ok("vocoder", NOT_SERVED)
    folder, files = machine.vocoder_folder, machine.vocoder_files
    if not files:
        remedy = "set model.token2wav_path to the vocoder's folder, unless text output is enough"
        level = Level.NOTE if machine.config.model.token2wav_path is None else Level.PROBLEM
        return Finding("vocoder", level, f"{folder}: no files; replies have no speech", remedy)
    if missing := [name for name in VOCODER_FILES if not files.get(name)]:
        return problem("vocoder", f"{folder}: missing or empty: {', '.join(missing)}", "download the folder again")
    return ok("vocoder", f"{folder}: {size(sum(files.values()))}")


def warmup(machine: Machine) -> Finding:
    path, facts = machine.config.service.warmup_video, machine.warmup_video
    remedy = "set service.warmup_video to a video with sound; assets/build_warmup.py makes the default one"
    return _media("warmup", str(path), facts, remedy)


def voice(machine: Machine) -> Finding:
    path, facts = machine.config.audio.ref_audio_path, machine.voice
    if facts is None:
        remedy = "set audio.ref_audio_path, unless every client sends a voice"
        return note("voice", "none: sessions without a voice of their own are silent", remedy)
    return _media("voice", str(path), facts, "set audio.ref_audio_path to a sound file of 0.5 to 30 s")


def memory(machine: Machine) -> Finding:
    needed = PROCESS_ROOM if machine.on_gpu else PROCESS_ROOM + model_bytes(machine)
    found = f"{size(machine.free_memory)} free, at least {size(needed)} needed"
    if machine.free_memory < needed:
        remedy = "stop other programs, raise the container's limit, or take a smaller model"
        return problem("memory", found, remedy)
    return ok("memory", found)


def files(machine: Machine) -> Finding:
    limit = machine.max_open_files
    found = "no limit" if limit < 0 else f"at most {limit} open files"
    if 0 <= limit < ENOUGH_FILES:
        level = Level.PROBLEM if limit < MIN_FILES else Level.NOTE
        return Finding("files", level, found, f"ulimit -n {ENOUGH_FILES} before the start, or more for many sessions")
    return ok("files", found)


def environment(machine: Machine) -> Finding:
    given = {name: value for name in TORCH_VARIABLES if (value := machine.environ.get(name, "")) not in ("", "0")}
    if machine.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        given["NVIDIA_TF32_OVERRIDE"] = "0"
    if not given:
        return ok("environment", "no variable that changes torch's behaviour")
    found = "\n".join(f"{name}={value}: {TORCH_VARIABLES[name]}" for name, value in given.items())
    prevents = machine.compiles and any(name in given for name in NO_COMPILING)
    return Finding("environment", Level.PROBLEM if prevents else Level.NOTE, found, f"unset {' '.join(given)}")


# --- shared by several checks ---------------------------------------------------------------------


def _media(name: str, path: str, facts: MediaFacts, remedy: str) -> Finding:
    if facts.error:
        return problem(name, f"{path}: {facts.error}", remedy)
    return ok(name, f"{path}: {facts.text}")


def _runs(program: ProgramFacts) -> bool:
    return program.path is not None and program.error is None


def _needed_to_compile(machine: Machine, name: str, found: str, remedy: str) -> Finding:
    """A problem if workers compile, a note otherwise."""
    level = Level.PROBLEM if machine.compiles else Level.NOTE
    return Finding(name, level, found, remedy)
