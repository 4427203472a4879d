"""The doctor's checks of torch, triton, the driver and GPUs: facts in, a finding with its remedy out.

Knows which versions and settings go together; does not know where facts come from.
"""

import re

from worker.doctor.facts import TorchGpu
from worker.doctor.findings import GIB, Finding, note, ok, problem, size
from worker.doctor.machine import Machine
from worker.doctor.versions import numbers

MATCHED_TRITON = ((2, 10), (3, 6))  # from this torch on, at least this triton
MIN_FOR_TRITON = (7, 0)
MIN_FOR_BFLOAT16 = MIN_FOR_KERNELS = (8, 0)
COMPILE_ROOM = GIB  # bytes of GPU memory that compiling takes on top
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

REINSTALL = "remove .venv/base and run start_all.sh, which installs versions that belong together"
# What an error says -> what is behind it, and what to do.
SYMPTOMS = {
    "'KernelNamespace' object has no attribute 'mm'": ("torch and triton do not belong together", REINSTALL),
    "operator torchvision::nms does not exist": (
        "torchvision was built for another torch, and nothing here needs it",
        "pip uninstall torchvision",
    ),
    "does not support checkPoolLiveAllocations": (
        "CUDA graphs cannot use the allocator cudaMallocAsync",
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


def triton(machine: Machine) -> Finding:
    facts = machine.torch
    if error := facts.errors.get("triton"):
        return problem("triton", *_explained(error, REINSTALL))
    if facts.triton is None:
        if facts.cuda is None:
            return ok("triton", "none, and a torch for CPUs needs none")
        return problem("triton", "none, and nothing can be compiled for a GPU without", REINSTALL)
    from_torch, least = MATCHED_TRITON
    too_old = numbers(facts.version or "") >= from_torch and numbers(facts.triton) < least
    wanted = facts.triton_wanted
    if too_old or (wanted and numbers(facts.triton)[:2] != numbers(wanted)[:2]):
        expected = wanted or f"{'.'.join(map(str, least))} or newer"
        remedy = f'pip install "triton=={wanted}"' if wanted else REINSTALL
        return problem("triton", f"{facts.triton}, and torch {facts.version} goes with {expected}", remedy)
    return ok("triton", facts.triton)


def driver(machine: Machine) -> Finding:
    facts, device = machine.torch, machine.config.model.device
    if facts.driver is None:
        if device.startswith("cuda"):
            remedy = "install NVIDIA's driver (in a container: start it with --gpus all), or set model.device to cpu"
            return problem("driver", f"none, and model.device is {device}", remedy)
        return ok("driver", "none: workers run on the CPU")
    goes_to = f"CUDA {'.'.join(map(str, facts.driver))}"
    up_to = f"{machine.driver_version or 'version unknown'}, up to {goes_to}"
    if facts.cuda is None:
        found = f"{up_to}, and torch is built for CPUs only"
        remedy = "install a torch for CUDA: remove .venv/base, run start_all.sh without an index of CPU builds"
        return problem("driver", found, remedy) if device.startswith("cuda") else note("driver", found, remedy)
    # Within one major version newer toolkits run on older drivers.
    if facts.driver[0] < numbers(facts.cuda)[0]:
        remedy = f"update NVIDIA's driver, or install a torch that is built for {goes_to} or older"
        return problem("driver", f"{up_to}, and torch is built for CUDA {facts.cuda}", remedy)
    return ok("driver", f"{up_to}, torch is built for CUDA {facts.cuda}")


def gpus(machine: Machine) -> Finding:
    facts, visible = machine.torch, machine.environ.get("CUDA_VISIBLE_DEVICES")
    if wrong := _wrong_devices(visible, machine.n_gpus):
        remedy = "name GPUs that nvidia-smi -L lists, each once, such as CUDA_VISIBLE_DEVICES=0,1; or unset it"
        return problem("gpus", f"CUDA_VISIBLE_DEVICES={visible}: {wrong}", remedy)
    if error := facts.errors.get("cuda"):
        found, remedy = _explained(error, "see the finding about the driver; nvidia-smi tells more")
        needed = machine.config.model.device.startswith("cuda") or machine.n_gpus
        return problem("gpus", found, remedy) if needed else ok("gpus", "none")
    if broken := [f"{index} {gpu.name}: {gpu.error}" for index, gpu in enumerate(facts.gpus) if gpu.error]:
        remedy = "see what else runs there (nvidia-smi), or leave it out with CUDA_VISIBLE_DEVICES"
        return problem("gpus", "\n".join(broken), remedy)
    asked = re.fullmatch(r"cuda(?::(\d+))?", machine.config.model.device)
    if asked and int(asked[1] or 0) >= len(facts.gpus):
        found = f"{len(facts.gpus)} visible, and model.device is {asked[0]}"
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
            found = f"{gpu.name} has {version}, and triton compiles from {'.'.join(map(str, MIN_FOR_TRITON))} on"
            return problem("capability", found, "turn service.compile off, or leave this GPU out")
        if config.model.dtype != "float32" and gpu.capability < MIN_FOR_BFLOAT16:
            found = f"{gpu.name} has {version}, and bfloat16 is fast from {'.'.join(map(str, MIN_FOR_BFLOAT16))} on"
            return note("capability", found, "set model.dtype to float32 if it fits")
    return ok("capability", ", ".join(sorted({".".join(map(str, gpu.capability)) for gpu in used.values()})))


def kernels(machine: Machine) -> Finding:
    """Whether the project's own kernels will run the model's layers, and if not, what keeps them from it."""
    compiling, used = machine.config.compile, _used(machine)
    if not used:
        return ok("kernels", "no GPU is used")
    if not machine.compiles:
        return ok("kernels", "off, as service.compile is")
    switches = (
        ("kernels", compiling.kernels, "auto"),
        ("mode", compiling.mode, "default"),
        ("attention", compiling.attention, "auto"),
    )
    if odd := [f"service.compile.{name} is {value}" for name, value, wanted in switches if value != wanted]:
        remedy = "take these settings back to their defaults, unless they are there to be compared"
        return note("kernels", f"not used: {', '.join(odd)}; layers are compiled", remedy)
    if machine.torch.triton is None:
        return note("kernels", "not used: there is no triton; see the finding about it", REINSTALL)
    if old := sorted({gpu.name for gpu in used.values() if gpu.capability < MIN_FOR_KERNELS}):
        return note("kernels", f"may not run on {', '.join(old)}: made for 8.0 and up", "service.compile.kernels: off")
    return ok("kernels", "the project's own run the model's layers")


def allocator(machine: Machine) -> Finding:
    set_to = {name: value for name in ALLOCATOR_VARIABLES if (value := machine.environ.get(name))}
    found = " ".join(f"{name}={value}" for name, value in set_to.items())
    compiling = machine.config.compile
    graphs = machine.compiles and (compiling.cuda_graphs != "off" or compiling.mode != "default")
    if machine.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") and graphs and machine.on_gpu:
        found = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: CUDA graphs have no memory that stays theirs"
        return problem("allocator", found, "unset PYTORCH_NO_CUDA_MEMORY_CACHING")
    if not any(re.search(r"backend\s*:\s*cudaMallocAsync", value) for value in set_to.values()):
        return ok("allocator", found or "torch's own, as it is")
    remedy = f"unset {' '.join(set_to)}; or set service.compile.cuda_graphs to off and its mode to default"
    if graphs and machine.on_gpu:
        found += "\nCUDA graphs cannot use it: `cudaMallocAsync does not support checkPoolLiveAllocations`"
        return problem("allocator", found, remedy)
    return note("allocator", f"{found}\nCUDA graphs could not use it", remedy)


def gpu_memory(machine: Machine) -> Finding:
    if not (used := _used(machine)):
        return ok("gpu-memory", "no GPU is used")
    room = COMPILE_ROOM if machine.compiles else 0
    needed = machine.least_model_bytes + room
    lines = [f"{index}: {size(gpu.free)} free" for index, gpu in used.items()]
    found = "\n".join([*lines, f"at least {size(needed)} needed for weights and one session"])
    if any(gpu.free < needed for gpu in used.values()):
        remedy = "stop what else runs there (nvidia-smi), lower duplex.context_rows, or take another GPU"
        return problem("gpu-memory", found, remedy)
    return ok("gpu-memory", found)


def _used(machine: Machine) -> dict[int, TorchGpu]:
    """Index -> GPU, of those that workers may run on."""
    visible = dict(enumerate(machine.torch.gpus))
    if not machine.on_gpu:
        return {}
    _, colon, index = machine.config.model.device.partition(":")
    return {i: gpu for i, gpu in visible.items() if not colon or i == int(index)}


def _explained(error: str, otherwise: str) -> tuple[str, str]:
    """An error with what is behind it, and what to do."""
    for symptom, (cause, remedy) in SYMPTOMS.items():
        if symptom in error:
            return f"{error}\n{cause}", remedy
    return error, otherwise


def _wrong_devices(visible: str | None, n_gpus: int | None) -> str | None:
    """What is wrong with CUDA_VISIBLE_DEVICES; CUDA silently stops reading at the first entry it does not know."""
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
    """Whether kernels for one of these run there: same major version and no newer, or text that the driver compiles."""
    for one in architectures:
        found = re.match(r"(sm|compute)_(\d+)(\d)", one)
        if not found:
            continue
        version = int(found[2]), int(found[3])
        same_kind = found[1] == "compute" or version[0] == gpu.capability[0]
        if same_kind and version <= gpu.capability:
            return True
    return not architectures
