"""Allowed imports between folders, torch-free modules, and sizes of files and folders."""

import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.torch_free import assert_torch_free

PROGRAM = ("server", "worker", "models", "launcher", "clients")
# Bottom to top: a node imports from earlier lines only. Nodes of one line do not import each other. A node is a folder,
# or a file of a folder that has sub-folders.
MODELS = """
errors
atomic_file
checkpoint sampling
inputs graphs
layers
kernels qwen3_tts.codec
omni
load
random_weights
stages
token2wav.settings
token2wav.prompt token2wav.flow token2wav.hift
token2wav.backends
token2wav.load
token2wav.voice
token2wav.stream token2wav.s3gen
qwen3_tts
token2wav.__main__ quantize __main__
"""
WORKER = """
key_text
version log status describe decoding worker_report memory_limit
config protocol media transcript
voice_registry vad_network unit_phases
early
loop
engine_thread admission
assembly chat
trace
compile
speech engine report
start
conversion
slots model_changes
loaded
service doctor
http
serving
main offline plan
"""
SERVER = """
background origins doors.errors request_ids
cors
access security_headers
dispatch request_guard unknown_page
registry metrics recording tracing
admission pages
live
doors.model_names doors.voices
doors.core
doors.live
peers
doors.model_routes doors.speech doors.conversion doors.chat doors.realtime doors.gpt_live doors.dialects
doors.calls
health_watch loop_watch routes
cluster.messages cluster.peer_tls
cluster.records cluster.reports
cluster.authority
cluster.shared_dispatcher cluster.store cluster.outbox
cluster.link cluster.forward
app
serving
main
cluster.service
cluster.__main__
"""
LAYERS = {"models": MODELS, "worker": WORKER, "server": SERVER}
# What a package may import of the others: whole packages, or nodes of them.
CONTRACT = {
    "worker.protocol",
    "worker.config",
    "worker.log",
    "worker.key_text",
    "worker.version",
    "worker.status",
    "worker.voice_registry",
    "worker.describe",
    "worker.memory_limit",
    "worker.worker_report",
}
VOICE_DETECTION = {"worker.vad_network"}
WORDS = {"models.errors", "models.inputs.audio_sizes"}
ABOVE = {
    "models": set(),
    "worker": {"models"},
    "server": CONTRACT
    | WORDS
    | VOICE_DETECTION
    | {"models.atomic_file", "worker.media", "models.token2wav.load.onnx_container"},
    "clients": CONTRACT | WORDS | {"worker.media", "worker.transcript"},
    "launcher": CONTRACT | WORDS | {"models.atomic_file", "worker.doctor"},
}
# Concurrency, sockets, processes and HTTP belong to the worker and the server.
FOREIGN = {
    *("asyncio", "threading", "multiprocessing", "concurrent", "socket", "ssl", "http", "urllib", "subprocess"),
    *("fastapi", "starlette", "uvicorn", "websockets", "aiohttp", "httpx", "requests"),
}
PARTS = {"vpm", "resampler", "apm", "llm", "tts"}
TORCH_FREE = """
models.errors models.checkpoint.checksums models.checkpoint.config models.checkpoint.embedded
models.checkpoint.index models.checkpoint.precision models.checkpoint.public_layout
models.inputs.tokens models.inputs.chat_template models.inputs.pretrained
models.inputs.messages models.inputs.prompts models.inputs.image models.inputs.positions models.inputs.audio_sizes
models.sampling.settings models.qwen3_tts.codec.config
models.qwen3_tts.config models.qwen3_tts.prompt models.qwen3_tts.settings models.qwen3_tts.runaway
models.qwen3_tts.text
worker.assembly.hub worker.assembly.kv_layout worker.config.* worker.protocol.* worker.transcript.* worker.describe
worker.key_text worker.log
worker.version worker.status worker.main worker.media worker.voice_registry worker.unit_phases
worker.early.* worker.loop.early.headroom worker.loop.order.unplayed_sound worker.admission.*
worker.loop.audio_buffer worker.loop.results worker.loop.session
worker.loop.unit_decoder worker.loop.window
worker.chat.reply worker.chat.config worker.chat.vad worker.compile.state worker.compile.targets worker.http.metrics
worker.http.units.unit_message
worker.doctor.__main__ worker.doctor.checks worker.doctor.checks_gpu worker.doctor.machine
worker.report.__main__ worker.report.compile_report worker.start.warmup_report
"""
MAX_TREE_BYTES = 60 << 20
MAX_FILES = 20
MAX_LINES = 400


@cache
def imported(file: Path) -> frozenset[str]:
    """Dotted names of everything a file imports, `from a.b import c` as both a.b and a.b.c."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: expected an absolute import, got a relative one"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def modules(root: Path, package: str) -> dict[str, Path]:
    """Dotted module names of a package, without its `__init__` files."""
    files = sorted((root / package).rglob("*.py"))
    return {
        ".".join(file.relative_to(root).with_suffix("").parts): file for file in files if file.name != "__init__.py"
    }


def arrows(root: Path, package: str) -> Iterator[tuple[str, str, Path]]:
    """Every import between two modules of the package: importing module, imported module, file."""
    known = modules(root, package)
    for name, file in known.items():
        for target in sorted(imported(file) & known.keys()):
            yield name, target, file


def node_of(module: str, nodes: dict[str, int]) -> str:
    """The node that contains a module, without the package's name."""
    path = module.split(".")[1:]
    for end in range(len(path), 0, -1):
        if (node := ".".join(path[:end])) in nodes:
            return node
    raise AssertionError(f"{module}: expected it in the layers of tests/test_architecture.py, found no line")


@pytest.mark.parametrize("package", LAYERS)
def test_folders_import_downwards_only(root: Path, package: str) -> None:
    floors = LAYERS[package].split("\n")
    nodes = {node: floor for floor, line in enumerate(floors) for node in line.split()}
    for importer, target, file in arrows(root, package):
        upper, lower = node_of(importer, nodes), node_of(target, nodes)
        allowed = upper == lower or nodes[lower] < nodes[upper]
        assert allowed, f"{file}: expected {upper} to import only from the layers below it, got {lower} ({target})"


@pytest.mark.parametrize("package", LAYERS)
def test_layers_name_existing_folders(root: Path, package: str) -> None:
    for node in LAYERS[package].split():
        path = root / package / node.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), f"{package}.{node}: expected a folder or a file"


@pytest.mark.parametrize("package", PROGRAM)
def test_modules_have_no_import_cycles(root: Path, package: str) -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for importer, target, _ in arrows(root, package):
        graph[importer].add(target)
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"expected no cycle, got {' -> '.join((*path, name))}"
        if name not in done:
            for target in sorted(graph[name]):
                walk(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        walk(name, ())


@pytest.mark.parametrize("package", PROGRAM)
def test_packages_import_only_granted_modules(root: Path, package: str) -> None:
    others = {*PROGRAM, "tests", "benchmarks", "assets", "training"} - {package}
    for file in modules(root, package).values():
        for name in sorted(imported(file)):
            if name.partition(".")[0] not in others or any(one.startswith(f"{name}.") for one in ABOVE[package]):
                continue
            granted = any(name == one or name.startswith(f"{one}.") for one in ABOVE[package])
            assert granted, f"{file}: expected imports of {sorted(ABOVE[package])} only, got {name}"


def test_models_use_no_sockets_threads_or_processes(root: Path) -> None:
    for file in modules(root, "models").values():
        got = {name.partition(".")[0] for name in imported(file)} & FOREIGN
        assert not got, f"{file}: expected none of these imports, got {sorted(got)}"


def test_models_read_no_environment(root: Path) -> None:
    for file in modules(root, "models").values():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
                pytest.fail(f"{file}:{node.lineno}: expected no use of the environment, got .{node.attr}")
        assert not imported(file) & {"os.environ", "os.getenv"}, file


def test_parts_of_the_model_do_not_import_each_other(root: Path) -> None:
    parts = {f"models.layers.{part}" for part in PARTS}
    for part in sorted(PARTS):
        got = imported(root / "models" / "layers" / f"{part}.py") & parts
        assert not got, f"{part}: expected no other part, got {sorted(got)}"


def test_torch_stays_unloaded(root: Path) -> None:
    names: list[str] = []
    for name in TORCH_FREE.split():
        prefix = name.removesuffix("*")
        known = modules(root, name.partition(".")[0])
        found = [one for one in known if one.startswith(prefix)] if name.endswith("*") else [name]
        assert found, f"{name}: expected modules, found none"
        names += found
    names += [name for package in ("server", "clients", "launcher") for name in modules(root, package)]
    assert_torch_free(root, names)


def test_package_files_are_empty(root: Path) -> None:
    for package in (*PROGRAM, "benchmarks", "tests"):
        found = sorted((root / package).rglob("__init__.py"))
        assert found, f"{package}: expected __init__.py files, found none"
        for file in found:
            assert not file.read_text().strip(), f"{file}: expected an empty file"


def test_class_names_have_one_meaning(root: Path) -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for package in (*PROGRAM, "benchmarks"):
        for name, file in modules(root, package).items():
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    where[node.name].append(name)
    twice = {name: found for name, found in where.items() if len(found) > 1}
    assert not twice, f"expected one public class of each name, got {twice}"


def test_the_tracked_tree_stays_small(root: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True).stdout.split("\0")
    sizes = {name: (root / name).lstat().st_size for name in tracked if name and (root / name).is_file()}
    if not sizes:
        pytest.skip("not a git checkout")
    largest = sorted(sizes, key=sizes.__getitem__)[-5:]
    total = sum(sizes.values())
    assert total <= MAX_TREE_BYTES, f"expected at most {MAX_TREE_BYTES} bytes, got {total}; the largest are {largest}"


def test_folders_and_files_stay_small(root: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.js"], cwd=root, capture_output=True, text=True
    ).stdout.split()
    files = [Path(name) for name in tracked if (root / name).is_file()]
    if not files:
        pytest.skip("not a git checkout")
    crowded = {
        str(folder): n
        for folder, n in Counter(file.parent for file in files if file.name != "__init__.py").items()
        if n > MAX_FILES
    }
    assert not crowded, f"expected at most {MAX_FILES} files a folder, got {crowded}"
    long = {
        str(file): n
        for file in files
        if file.parts[0] in PROGRAM and (n := len((root / file).read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"expected at most {MAX_LINES} lines, got {long}"
