"""What the worker's files may import, and which of them stay free of torch."""

from pathlib import Path

from tests.test_architecture import imported
from tests.torch_free import assert_torch_free

TORCH_FREE = (
    *("config", "hearing", "reply", "results", "session", "settings", "talk", "window"),
    *(
        "compile_config",
        "compile_state",
        "compile_targets",
        "config_doc",
        "config_layers",
        "connection",
        "log",
        "main",
        "service_config",
        "version",
    ),
    *("message", "metrics", "protocol", "protocol_doc", "status", "system_content", "unit_message", "wire"),
    *("doctor.__main__", "doctor.checks", "doctor.checks_gpu", "doctor.machine"),
    *("report.__main__", "report.compile_report", "warmup_report"),
)
# What anybody here may know of the model: words for errors, settings, ids and counts, nothing that holds a tensor.
PLAIN = {"audio_sizes", "config", "errors", "image", "messages", "prompts", "sampling_settings", "tokens"}
# Who may know more; None: everything.
MORE: dict[str, set[str] | None] = {
    "building": None,
    "tuning": {"compiler", "graphs", "kernels_choice"},
    "tuner": {"compiler", "graphs", "omni"},
    "toggles": {"kernels_choice"},
    "sessions": {"duplex", "runner"},
    "crew": {"duplex"},
    "text_stages": {"duplex", "runner", "streams"},
    "speech_stages": {"speaker", "token2wav"},
    "unit_loop": {"duplex", "runner"},
    "voice": {"code_stream", "duplex", "token2wav"},
    "answers": {"duplex"},
    "engine": {"message_reader"},
    "offline": {"token2wav"},
    "voices": {"token2wav"},
    "voice_shelf": {"token2wav"},
    "warmup": {"graphs"},
    "compile_cache": {"kernels_choice", "token2wav"},
    "kernel_archive": {"token2wav"},
    "compile_report": {"token2wav"},
    "compile_watch": {"compiler"},
    "releasing": {"compiler"},
    "region_report": {"graphs", "state", "token2wav"},
}
ABOVE = {"server", "tests", "benchmarks", "assets"}


def worker_files(root: Path) -> list[Path]:
    files = sorted((root / "worker").rglob("*.py"))
    assert len(files) > 5
    return files


def test_package_is_empty(root: Path) -> None:
    for file in sorted((root / "worker").rglob("__init__.py")):
        assert not file.read_text().strip(), f"{file}: expected an empty file"


def test_worker_knows_nothing_above_it(root: Path) -> None:
    for file in worker_files(root):
        got = {name.partition(".")[0] for name in imported(file)} & ABOVE
        assert not got, f"{file.name}: expected none of these imports, got {sorted(got)}"


def test_who_knows_the_model(root: Path) -> None:
    too_much: dict[str, list[str]] = {}
    for file in worker_files(root):
        more = MORE.get(file.stem, set())
        names = {name.split(".")[1] for name in imported(file) if name.startswith("models.")}
        if more is not None and (got := names - PLAIN - more):
            too_much[file.name] = sorted(got)
    assert not too_much, f"expected of models only {sorted(PLAIN)} and what MORE grants, got {too_much}"


def test_torch_stays_unloaded(root: Path) -> None:
    assert_torch_free(root, [f"worker.{module}" for module in TORCH_FREE])


def test_no_cycles(root: Path) -> None:
    known = {".".join(file.relative_to(root).with_suffix("").parts): file for file in worker_files(root)}
    arrows = {name: imported(file) & known.keys() for name, file in known.items()}

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"expected no cycle, got {' -> '.join((*path, name))}"
        for target in sorted(arrows[name]):
            walk(target, (*path, name))

    for name in known:
        walk(name, ())
