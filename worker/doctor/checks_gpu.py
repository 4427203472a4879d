"""The doctor's checks of torch, Triton, the driver and GPUs: each maps facts to a finding with its remedy.

Contains which versions and settings fit each other; does not collect facts (see `machine`).
"""

import re
from functools import cache
from typing import get_args

from models.checkpoint.precision import PRESETS, Kind, Place, Weights
from worker.doctor.facts import TorchGpu
from worker.doctor.findings import GIB, Finding, note, ok, problem, size
from worker.doctor.machine import Machine
from worker.doctor.model_memory import decode_copy_bytes, model_bytes, other_models, without_copy
from worker.doctor.versions import numbers

MATCHED_TRITON = ((2, 10), (3, 6))  # torch from this version on requires at least this Triton
MIN_FOR_TRITON = (7, 0)
MIN_FOR_BFLOAT16 = MIN_FOR_KERNELS = MIN_FOR_TF32 = MIN_FOR_FLASH = (8, 0)
MIN_FOR_FP8 = (8, 9)
SLOW: set[Kind | None] = {"fp8", "int4"}  # without the project's kernels
PROFILES: tuple[Weights, ...] = ("bf16", "int8", "int4")  # the most exact first; fp8 takes more bytes than int8
COMPILE_ROOM = GIB  # bytes of GPU memory that compiling needs beside weights and slots
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Variables that set TF32 whatever `service.compile.tf32` is: NVIDIA's libraries read the first, torch the second.
TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
# Library -> its major version, and its minor version minus x, in the release made for torch 2.x.
RELEASED_WITH_TORCH = {"torchvision": (0, 15), "torchaudio": (2, 0)}
WHEELS = "https://download.pytorch.org/whl"
NO_FLASH_ATTN = (
    "slots of different lengths share a call and have a mask, which its functions do not take; the project's own "
    "kernels read the length of each slot instead"
)

REINSTALL = "remove .venv/base and run start_all.sh, which installs versions that fit each other"
# Part of an error text -> cause, remedy.
SYMPTOMS = {
    "'KernelNamespace' object has no attribute 'mm'": ("torch and triton do not fit each other", REINSTALL),
    "operator torchvision::nms does not exist": (
        "torchvision was built for another torch; no program here uses it",
        "pip uninstall torchvision",
    ),
    "does not support checkPoolLiveAllocations": (
        "CUDA graphs do not work with the allocator cudaMallocAsync",
        "unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
    ),
}


def torch(machine: Machine) -> Finding:
    facts = machine.torch
    if facts.version is None:
        return problem("torch", *_explained(facts.errors.get("torch", "it is not installed"), REINSTALL))
    for part in ("inductor", "torchvision"):
        if error := facts.errors.get(part):
            found, remedy = _explained(error, REINSTALL)
            return problem("torch", f"{facts.version}, but {part} does not load: {found}", remedy)
    return ok("torch", f"{facts.version}, built for {f'CUDA {facts.cuda}' if facts.cuda else 'CPUs only'}")


def torch_libraries(machine: Machine) -> Finding:
    """Whether torchvision and torchaudio, if installed, are the releases made for the installed torch."""
    name, facts = "torch-libraries", machine.torch
    torch_version = numbers(facts.version or "")
    libraries = {library: version for library, version in facts.libraries.items() if library in RELEASED_WITH_TORCH}
    if not libraries:
        return ok(name, "neither torchvision nor torchaudio is installed, and neither is needed")
    installed = ", ".join(f"{library} {version}" for library, version in libraries.items())
    if len(torch_version) < 2 or torch_version[0] != 2:
        return ok(name, installed)
    found, wanted = [], []
    for library, version in libraries.items():
        major, offset = RELEASED_WITH_TORCH[library]
        expected = (major, torch_version[1] + offset)
        if numbers(version)[:2] != expected:
            release = f"{expected[0]}.{expected[1]}"
            found.append(f"{library} {version}: torch {facts.version} needs {release}")
            wanted.append(f'"{library}=={release}.*"')
    if not found:
        return ok(name, f"{installed}, as torch {facts.version} needs")
    _, plus, build = (facts.version or "").partition("+")  # cu130 or cpu: the wheels of the same build
    index = f" --index-url {WHEELS}/{build}" if plus else ""
    remedy = f"pip install {' '.join(wanted)}{index}; or uninstall: no program here needs it"
    return note(name, "\n".join(found), remedy)


def triton(machine: Machine) -> Finding:
    facts = machine.torch
    if error := facts.errors.get("triton"):
        return problem("triton", *_explained(error, REINSTALL))
    if facts.triton is None:
        if facts.cuda is None:
            return ok("triton", "not installed; a CPU build of torch does not need it")
        return problem("triton", "not installed; compiling for a GPU needs it", REINSTALL)
    from_torch, minimum = MATCHED_TRITON
    too_old = numbers(facts.version or "") >= from_torch and numbers(facts.triton) < minimum
    required = facts.triton_required
    if too_old or (required and numbers(facts.triton)[:2] != numbers(required)[:2]):
        expected = required or f"{'.'.join(map(str, minimum))} or newer"
        remedy = f'pip install "triton=={required}"' if required else REINSTALL
        return problem("triton", f"{facts.triton}; torch {facts.version} needs {expected}", remedy)
    return ok("triton", facts.triton)


def driver(machine: Machine) -> Finding:
    facts, device = machine.torch, machine.config.model.device
    if facts.driver_cuda is None:
        if device.startswith("cuda"):
            remedy = "install NVIDIA's driver (in a container: start it with --gpus all), or set model.device to cpu"
            return problem("driver", f"none, and model.device is {device}", remedy)
        return ok("driver", "none: workers run on the CPU")
    newest = f"CUDA {'.'.join(map(str, facts.driver_cuda))}"
    supports = f"{machine.driver_version or 'version unknown'}, up to {newest}"
    if facts.cuda is None:
        found = f"{supports}, and torch is built for CPUs only"
        remedy = "install a torch for CUDA: remove .venv/base, run start_all.sh without an index of CPU builds"
        return problem("driver", found, remedy) if device.startswith("cuda") else note("driver", found, remedy)
    # Within one major version newer toolkits run on older drivers.
    if facts.driver_cuda[0] < numbers(facts.cuda)[0]:
        remedy = f"update NVIDIA's driver, or install a torch that is built for {newest} or older"
        return problem("driver", f"{supports}, and torch is built for CUDA {facts.cuda}", remedy)
    return ok("driver", f"{supports}, torch is built for CUDA {facts.cuda}")


def gpus(machine: Machine) -> Finding:
    facts, visible = machine.torch, machine.environ.get("CUDA_VISIBLE_DEVICES")
    if wrong := _wrong_devices(visible, machine.n_gpus):
        remedy = "name GPUs that nvidia-smi -L lists, each once, such as CUDA_VISIBLE_DEVICES=0,1; or unset it"
        return problem("gpus", f"CUDA_VISIBLE_DEVICES={visible}: {wrong}", remedy)
    if error := facts.errors.get("cuda"):
        found, remedy = _explained(error, "see the finding `driver`; nvidia-smi shows the driver's state")
        needed = machine.config.model.device.startswith("cuda") or machine.n_gpus
        return problem("gpus", found, remedy) if needed else ok("gpus", "none")
    if broken := [f"{index} {gpu.name}: {gpu.error}" for index, gpu in enumerate(facts.gpus) if gpu.error]:
        remedy = "check which processes use it (nvidia-smi), or leave it out with CUDA_VISIBLE_DEVICES"
        return problem("gpus", "\n".join(broken), remedy)
    requested = re.fullmatch(r"cuda(?::(\d+))?", machine.config.model.device)
    if requested and int(requested[1] or 0) >= len(facts.gpus):
        found = f"{len(facts.gpus)} visible, and model.device is {requested[0]}"
        return problem("gpus", found, "change model.device or CUDA_VISIBLE_DEVICES")
    if not facts.gpus:
        hidden = f", {machine.n_gpus} hidden" if machine.n_gpus else ""
        return ok("gpus", f"none visible{hidden}: workers run on the CPU")
    return ok("gpus", "\n".join(f"{index} {gpu.name}, {size(gpu.total)}" for index, gpu in enumerate(facts.gpus)))


def capability(machine: Machine) -> Finding:
    facts, config = machine.torch, machine.config
    if not (used := _used(machine)):
        return ok("capability", "no GPU is used")
    for gpu in used.values():
        version = ".".join(map(str, gpu.capability))
        if not _runs_on(gpu, facts.architectures):
            found = f"{gpu.name} has {version}, and torch is built for {' '.join(facts.architectures)}"
            return problem("capability", found, "install a torch that is built for this GPU, or leave it out")
        if machine.compiles and gpu.capability < MIN_FOR_TRITON:
            found = f"{gpu.name} has {version}, and triton needs {'.'.join(map(str, MIN_FOR_TRITON))} or higher"
            return problem("capability", found, "set service.compile to false, or leave this GPU out")
        if config.model.dtype != "float32" and gpu.capability < MIN_FOR_BFLOAT16:
            found = f"{gpu.name} has {version}, and bfloat16 is slow below {'.'.join(map(str, MIN_FOR_BFLOAT16))}"
            return note("capability", found, "set model.dtype to float32 if it fits")
    return ok("capability", ", ".join(sorted({".".join(map(str, gpu.capability)) for gpu in used.values()})))


def compiles(machine: Machine) -> Finding:
    """Whether a worker compiles; eager execution on a GPU does not keep up with one unit a second."""
    enabled = machine.config.compile.enabled
    setting = f"service.compile is {enabled if enabled == 'auto' else str(enabled).lower()}"
    if machine.compiles:
        return ok("compile", f"on: {setting}")
    if _used(machine):
        found = f"off: {setting}, and the model runs eagerly on a GPU; a spoken unit takes about 2 s instead of 0.1 s"
        return note("compile", found, 'set service.compile to "auto" or true, or start with --compile')
    return ok("compile", f"off: {setting}, and no GPU is used")


def tf32(machine: Machine) -> Finding:
    """Whether float32 products use TF32 where that helps, and only there.

    A bfloat16 model has few float32 products, and TF32 speeds them up. A float32 model loses 13 mantissa bits by it.
    """
    used, setting = _used(machine), machine.config.compile.tf32
    able = [gpu for gpu in used.values() if gpu.capability >= MIN_FOR_TF32]
    if not able:
        return ok("tf32", "no GPU with TF32 is used")
    forced = {name: value for name in TF32_VARIABLES if (value := machine.environ.get(name)) in ("0", "1")}
    if opposed := {name: value for name, value in forced.items() if (value == "1") is not setting}:
        assignments = " ".join(f"{name}={value}" for name, value in opposed.items())
        effect = "turns it off" if setting else "turns it on, at the cost of accuracy"
        found = f"service.compile.tf32 is {str(setting).lower()}, but {assignments} {effect}"
        return note("tf32", found, f"unset {' '.join(opposed)}, and choose with service.compile.tf32")
    if not machine.compiles and "tf32" not in machine.config.compile.model_fields_set:
        return ok("tf32", "PyTorch's default, since service.compile.tf32 is not given; see the finding `compile`")
    is_float32 = machine.config.model.dtype == "float32"
    if setting and is_float32:
        found = "on, and model.dtype is float32: every product has 10 mantissa bits instead of 23"
        return note("tf32", found, "set service.compile.tf32 to false for full accuracy, or model.dtype to bfloat16")
    if not setting and not is_float32:
        found = f"off: float32 products of {able[0].name} run without tensor cores"
        return note("tf32", found, "set service.compile.tf32 to true")
    return ok("tf32", "on" if setting else "off: model.dtype is float32, products have full accuracy")


def kernels(machine: Machine) -> Finding:
    """Whether the project's own kernels will run the model's layers, and if not, for what reason."""
    compiling, used = machine.config.compile, _used(machine)
    if not used:
        return ok("kernels", "no GPU is used")
    if not machine.compiles:
        return ok("kernels", "off, as service.compile is")
    settings = (
        ("kernels", compiling.kernels, "auto"),
        ("mode", compiling.mode, "default"),
        ("attention", compiling.attention, "auto"),
    )
    changed = [f"service.compile.{name} is {value}" for name, value, default in settings if value != default]
    if compiling.cuda_graphs == "off":  # "on" is as good as the default
        changed.append("service.compile.cuda_graphs is off")
    if changed:
        remedy = "set these keys to their defaults, unless you compare backends"
        return note("kernels", f"not used: {', '.join(changed)}; layers are compiled", remedy)
    if machine.torch.triton is None:
        return note("kernels", "not used: triton is not installed; see the finding `triton`", REINSTALL)
    if old := sorted({gpu.name for gpu in used.values() if gpu.capability < MIN_FOR_KERNELS}):
        found = f"may not run on {', '.join(old)}: written for capability 8.0 or higher"
        return note("kernels", found, "set service.compile.kernels to off")
    return ok("kernels", "the project's own run the model's layers")


def kv_layout(machine: Machine) -> Finding:
    """The layout that a worker with these settings has on each GPU."""
    config = machine.config
    if not config.model.omni:
        return ok("kv-layout", "the omni model is not served")
    from worker.assembly.kv_layout import with_kv_layout  # here, because it imports packages that may be missing

    used, setting, engine = _used(machine), config.model.kv_layout, config.engine()
    by_kernels = bool(used) and machine.compiles and config.compile.allows_kernels and machine.torch.triton is not None

    @cache  # GPUs of one kind are equal
    def layout(total: int) -> str:
        found = with_kv_layout(
            engine, by_kernels=by_kernels, n_fitting=lambda given: machine.n_fitting(given.kv_layout, total)
        )
        return found.kv_layout

    lines = [f"{index}: {gpu.name}, {layout(gpu.total)}" for index, gpu in used.items()] or [layout(0)]
    return ok("kv-layout", "\n".join([*lines[:-1], f"{lines[-1]} (model.kv_layout is {setting})"]))


def decode_copy(machine: Machine) -> Finding:
    """Whether a copy for decoding that the settings ask for can be made."""
    model = machine.config.model
    if not (model.omni and model.decode_copy is True):
        return ok("decode-copy", "not asked for: model.decode_copy is not true, or the omni model is not served")
    if why := without_copy(machine):
        return note("decode-copy", f"model.decode_copy has no effect: {why}", 'set model.decode_copy to "auto"')
    return ok("decode-copy", "of the language model's weights of bfloat16 numbers")


def attention(machine: Machine) -> Finding:
    """Whether flash attention, if it is asked for, can run."""
    chosen, used = machine.config.compile.attention, _used(machine)
    if not used:
        return ok("attention", "no GPU is used")
    package = machine.torch.libraries.get("flash-attn")
    unused = f"; the package flash-attn {package} is not used: {NO_FLASH_ATTN}" if package else ""
    if chosen != "flash":
        return ok("attention", f"{chosen}{unused}")
    if machine.config.model.dtype == "float32":
        found = f"flash attention computes in 16 bits, and model.dtype is float32: plain products run instead{unused}"
        return note("attention", found, "set service.compile.attention to auto, or model.dtype to bfloat16")
    if old := [gpu.name for gpu in used.values() if gpu.capability < MIN_FOR_FLASH]:
        found = f"PyTorch's flash kernels need capability 8.0, and {old[0]} is older: plain products run{unused}"
        return note("attention", found, "set service.compile.attention to auto")
    return ok("attention", f"PyTorch's flash kernels, and plain products for calls with a mask{unused}")


def allocator(machine: Machine) -> Finding:
    set_to = {name: value for name in ALLOCATOR_VARIABLES if (value := machine.environ.get(name))}
    found = " ".join(f"{name}={value}" for name, value in set_to.items())
    compiling = machine.config.compile
    graphs = machine.compiles and (compiling.cuda_graphs != "off" or compiling.mode != "default")
    if machine.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") and graphs and machine.on_gpu:
        found = "PYTORCH_NO_CUDA_MEMORY_CACHING is set, and CUDA graphs need memory that stays allocated"
        return problem("allocator", found, "unset PYTORCH_NO_CUDA_MEMORY_CACHING")
    if not any(re.search(r"backend\s*:\s*cudaMallocAsync", value) for value in set_to.values()):
        return ok("allocator", found or "torch's own, with default settings")
    remedy = f"unset {' '.join(set_to)}; or set service.compile.cuda_graphs to off and its mode to default"
    if graphs and machine.on_gpu:
        found += "\nCUDA graphs cannot use it: `cudaMallocAsync does not support checkPoolLiveAllocations`"
        return problem("allocator", found, remedy)
    return note("allocator", f"{found}\nCUDA graphs could not use it", remedy)


def weights(machine: Machine) -> Finding:
    """The precision of the linear layers, whether it fits the device and the folder, and the profile of each GPU."""
    model, precision = machine.config.model, machine.config.model.precision
    found, by_place = str(precision), {place: precision.at(place) for place in get_args(Place)}
    kinds, own = {*by_place.values()}, {kind for place, kind in by_place.items() if place != "flow"}
    if slow := sorted(kind for kind in kinds if kind is not None and kind in SLOW):
        key = "model.weights" if own & SLOW else "model.part_weights.flow"
        if not machine.on_gpu:
            found += f": {' and '.join(slow)} are dequantised at each product on a CPU"
            return note("weights", found, f"set {key} to int8 or bf16")
        if not machine.compiles or machine.config.compile.kernels == "off":
            found += ": without the project's kernels each product dequantises them"
            return note("weights", found, "set service.compile to auto and service.compile.kernels to auto")
    stored = "int4" if machine.model.stored in ("awq", "gptq") else machine.model.stored
    if stored in SLOW and stored not in own:
        found += f": the folder stores {machine.model.stored}, and no part of the model uses {stored}"
        return note("weights", found, f"set model.weights to {stored}, which takes the stored values as they are")
    old = [gpu.name for gpu in _used(machine).values() if "fp8" in kinds and gpu.capability < MIN_FOR_FP8]
    if old:
        found += f"; {old[0]} multiplies fp8 as bfloat16"
    lines = [found if model.weights == found else f"{found} (model.weights is {model.weights})"]
    for index, gpu in _used(machine).items():
        major, minor = gpu.capability
        lines.append(f"{index}: {gpu.name} (sm_{major}{minor}), profile {_profile(machine, gpu) or 'none that fits'}")
    return ok("weights", "\n".join(lines))


def _profile(machine: Machine, gpu: TorchGpu) -> Weights | None:
    """The most exact `model.weights` whose weights and one session fit into a GPU's free memory."""
    free = gpu.free - (COMPILE_ROOM if machine.compiles else 0)
    return next((weights for weights in PROFILES if model_bytes(machine, PRESETS[weights]) <= free), None)


def gpu_memory(machine: Machine) -> Finding:
    if not (used := _used(machine)):
        return ok("gpu-memory", "no GPU is used")
    room = COMPILE_ROOM if machine.compiles else 0
    needed = model_bytes(machine) + decode_copy_bytes(machine) + room
    lines = [f"{index}: {size(gpu.free)} free" for index, gpu in used.items()]
    found = "\n".join([*lines, f"at least {size(needed)} needed for weights and one session{_others(machine)}"])
    if any(gpu.free < needed for gpu in used.values()):
        remedy = "stop other processes on it (nvidia-smi lists them), lower duplex.context_rows, or take another GPU"
        profiles = [_profile(machine, gpu) for gpu in used.values()]
        if machine.config.model.speech_path is not None:
            remedy = f"lower model.speech_sessions, {remedy}"
        if smallest := max((PROFILES.index(one) for one in profiles if one), default=0):
            remedy = f"set model.weights to {PROFILES[smallest]}, {remedy}"
        return problem("gpu-memory", found, remedy)
    return ok("gpu-memory", found)


def _others(machine: Machine) -> str:
    """What other models than the omni model need, in words; "" without them."""
    needs = other_models(machine.config.engine(), machine.speech, on_gpu=machine.on_gpu)
    words = [f"{size(n_bytes)} for {name}" for name, n_bytes in needs.items()]
    return f"; of it {', '.join(words)}" if words else ""


def _used(machine: Machine) -> dict[int, TorchGpu]:
    """Index -> GPU, of those that workers may run on."""
    visible = dict(enumerate(machine.torch.gpus))
    if not machine.on_gpu:
        return {}
    _, colon, index = machine.config.model.device.partition(":")
    return {i: gpu for i, gpu in visible.items() if not colon or i == int(index)}


def _explained(error: str, default_remedy: str) -> tuple[str, str]:
    """The error text with its cause, if that is known, and the remedy."""
    for symptom, (cause, remedy) in SYMPTOMS.items():
        if symptom in error:
            return f"{error}\n{cause}", remedy
    return error, default_remedy


def _wrong_devices(visible: str | None, n_gpus: int | None) -> str | None:
    """What is wrong with CUDA_VISIBLE_DEVICES; CUDA silently ignores the list from its first unknown entry on."""
    entries = [one.strip() for one in (visible or "").split(",")]
    if visible is None or entries in ([""], ["-1"], ["NoDevFiles"]):
        return None
    for entry in entries:
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry):
            return f"expected numbers or names that begin with GPU- or MIG-, got {entry!r}"
        if n_gpus is not None and entry.isdigit() and int(entry) >= n_gpus:
            return f"expected numbers below {n_gpus}, got {entry}"
    if len(set(entries)) < len(entries):
        return "expected each GPU once, got one of them twice"
    return None


def _runs_on(gpu: TorchGpu, architectures: tuple[str, ...]) -> bool:
    """Whether the GPU runs kernels built for one of these.

    It runs binaries (sm) of its own major version that are not newer, and PTX (compute) that is not newer.
    """
    for one in architectures:
        found = re.match(r"(sm|compute)_(\d+)(\d)", one)
        if not found:
            continue
        version = int(found[2]), int(found[3])
        same_kind = found[1] == "compute" or version[0] == gpu.capability[0]
        if same_kind and version <= gpu.capability:
            return True
    return not architectures
