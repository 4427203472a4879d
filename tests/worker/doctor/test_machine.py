"""The facts that the doctor collects about this machine and its files."""

import json
import os
import re
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.worker.doctor.machines import NOTE, ON_GPU, check, machine
from worker import version
from worker.doctor import machine as machine_module
from worker.doctor.facts import MediaFacts, ProgramFacts, TorchGpu, UnknownFact
from worker.doctor.findings import GIB, MIB
from worker.doctor.machine import Machine
from worker.doctor.own_server import TITLES
from worker.doctor.versions import fits


def real(config: Path | None = None, **environ: str) -> Machine:
    return Machine(config, environ)


def test_collects_facts_of_this_machine(root: Path, tiny: Path) -> None:
    here = real(DUOLOGUE_MODEL_MODEL_PATH=str(tiny))
    assert here.python == sys.version_info[:3] and here.config.model.model_path == tiny
    assert {one.name for one in here.requirements} >= {"torch", "pydantic", "imageio-ffmpeg"}
    assert all(one.installed and fits(one.installed, one.bounds) for one in here.requirements), here.requirements
    assert here.ffmpeg.path and here.ffmpeg.version.startswith("ffmpeg version"), here.ffmpeg
    assert here.tokenizer_error is None and here.vocoder_files["hift.pt"] > 1000
    assert here.voice == MediaFacts("2.1 s at 16000 Hz"), here.voice
    assert 64 * MIB < here.free_memory < 64 * 1024 * GIB
    assert here.max_open_files == -1 or here.max_open_files > 0
    names = [file.name for file in tiny.glob("*.safetensors")]
    total = sum((tiny / name).stat().st_size for name in names)
    assert (here.model.n_files, here.model.n_bytes, here.model.problems) == (len(names), total, ())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC 12.2.0",
            "535.104.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build", "570.124.06"),
        ("something else", None),
        (None, None),
    ],
)
def test_reads_the_driver_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(version, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setattr(version, "DRIVER_QUERY", ("false",))
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert real().driver_version == expected


def test_counts_the_numbers_of_a_checkpoint(tiny: Path, tiny_model: Any) -> None:
    here = real(DUOLOGUE_MODEL_MODEL_PATH=str(tiny))
    expected = sum(tensor.numel() for tensor in tiny_model.state_dict().values())
    assert here.model.n_values == expected, f"expected {expected} numbers, got {here.model.n_values}"
    layers = tiny_model.llm.model.layers
    matrices = sum(tensor.numel() for tensor in layers.parameters() if tensor.ndim == 2)
    place_values = here.model.place_values
    assert place_values["llm"] + place_values["down"] == matrices and here.model.stored == ""
    assert place_values["down"] == sum(layer.mlp.down_proj.weight.numel() for layer in layers)
    assert here.model.place_values["head"] == tiny_model.llm.lm_head.weight.numel()
    assert not here.model.has_side_lane, "expected none in a checkpoint that names none"
    llm = tiny_model.config
    assert here.model.row_values == 2 * llm.num_hidden_layers * llm.num_key_value_heads * llm.head_dim


def test_asks_the_planner_how_many_sessions_fit(tmp_path: Path, root: Path) -> None:
    shutil.copy(root / "tests" / "data" / "released_config.json", tmp_path / "config.json")
    settings_file = tmp_path / "settings.json"
    settings_file.write_text('{"model": {"model_path": ".", "weights": "fp8"}}')
    here = real(settings_file)
    got = here.n_fitting("pages", 24 * GIB)
    assert got == 7, f"expected 7 sessions in pages, got {got}"
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnknownFact, match=r"worker\.plan exited with 2: .*expected a JSON file, got no such file"):
        here.n_fitting("pages", 24 * GIB)


def broken_model(tiny: Path, folder: Path, change: Callable[[Path], None]) -> tuple[str, ...]:
    """The problems of a changed copy of the embedded checkpoint."""
    shutil.copytree(tiny, folder / "model", ignore=shutil.ignore_patterns("assets"))
    change(folder / "model")
    settings_file = folder / "config.json"
    settings_file.write_text('{"model": {"model_path": "model"}}')
    return real(settings_file).model.problems


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def cut_short(folder: Path) -> None:
    os.truncate(folder / FIRST, (folder / FIRST).stat().st_size - 100)


def swap_shards(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder / FIRST)


def lose_a_key(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_short, f"{FIRST}: expected "),
        (lambda folder: (folder / SECOND).unlink(), f"{SECOND}: No such file or directory"),
        (lambda folder: (folder / SECOND).write_bytes(b"<html>"), f"{SECOND}: expected a safetensors header, got none"),
        (lambda folder: (folder / SECOND).write_bytes(struct.pack("<Q", 9) + b"{broken}}"), f"{SECOND}: "),
        (swap_shards, "tensors that the index names, such as "),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "expected JSON with weight_map"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "or model.safetensors, got neither"),
        (lose_a_key, "hidden_size"),
        (lambda folder: shutil.rmtree(folder), "expected a checkpoint folder, got no such folder"),
        (lambda folder: (shutil.rmtree(folder), folder.touch()), "expected a checkpoint folder, got a file"),
    ],
)
def test_reports_incomplete_checkpoints(tiny: Path, tmp_path: Path, change: Callable[[Path], None], said: str) -> None:
    problems = broken_model(tiny, tmp_path, change)
    assert len(problems) == 1 and said in problems[0], f"expected one problem with {said!r}, got {problems}"


def test_reads_sounds_and_videos(root: Path, tmp_path: Path) -> None:
    (tmp_path / "noise.wav").write_bytes(b"no sound at all")
    file = tmp_path / "config.json"

    def poll(voice: Path, video: Path) -> tuple[MediaFacts | None, MediaFacts]:
        given = {"audio": {"ref_audio_path": str(voice)}, "service": {"warmup_video": str(video)}}
        file.write_text(json.dumps(given))
        return real(file).voice, real(file).warmup_video

    sound = root / "assets" / "ref_audio" / "default.wav"
    voice, video = poll(tmp_path / "noise.wav", sound)
    assert voice and "Format not recognised" in str(voice.error), voice
    assert video.error == "expected frames and sound, got Audio only", video
    voice, video = poll(tmp_path / "gone.wav", tmp_path / "noise.wav")
    assert voice == MediaFacts(error="no such file") and str(video.error).startswith("ffmpeg: "), (voice, video)


def test_reports_taken_ports(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        made = Machine(None, {"DUOLOGUE_SERVICE_GATEWAY_PORT": str(port)})
        vars(made)["torch"] = ON_GPU
        assert made.taken_ports.keys() == {port}, f"expected {port} alone to be taken, got {made.taken_ports}"
        assert not made.own_ports, "expected a server without an answer not to be ours"
    vars(made).pop("taken_ports")
    assert not made.taken_ports, "expected a free port after the server closed"


@pytest.mark.parametrize(("title", "ours"), [("Duologue gateway", True), ("Duologue worker", True), ("Other", False)])
def test_recognizes_servers_of_this_program_at_taken_ports(title: str, ours: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"info": {"title": title if self.path == "/openapi.json" else ""}}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Machine(None, {"DUOLOGUE_SERVICE_GATEWAY_PORT": str(server.server_port)})
        vars(made)["torch"] = ON_GPU
        assert made.own_ports == ({server.server_port} if ours else set())
        server.shutdown()


def test_servers_have_the_titles_that_the_doctor_expects(root: Path) -> None:
    applications = [root / "server/app.py", root / "worker/http/app.py"]
    assert [re.findall('FastAPI\\(title="([^"]*)"', file.read_text()) for file in applications] == [[t] for t in TITLES]


def test_reads_the_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel.so").write_bytes(b"12345")
    (tmp_path / "lost").symlink_to("nowhere")
    there = real(DUOLOGUE_SERVICE_CACHE_DIR=str(tmp_path)).cache_folder
    assert (there.exists, there.n_files, there.n_bytes, there.error, there.runs_code) == (True, 1, 5, None, True), there
    gone = real(DUOLOGUE_SERVICE_CACHE_DIR=str(tmp_path / "a" / "b")).cache_folder
    assert (gone.exists, gone.n_files, gone.error) == (False, 0, None) and gone.free > 0, gone
    assert not (tmp_path / "a").exists(), "expected no new folder"
    proc = real(DUOLOGUE_SERVICE_CACHE_DIR="/proc/none").cache_folder
    assert proc.error and proc.error.startswith("/proc: "), proc
    assert real(DUOLOGUE_SERVICE_DATA_DIR="/proc/none").data_folder.error == proc.error


def test_finds_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, body in (("good", "echo good 1.2; echo more"), ("bad", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert real(CXX="good -O2").cpp_compiler == ProgramFacts(str(tmp_path / "good"), "good 1.2")
    bad = real(CC="bad").c_compiler
    assert bad.error == f"{tmp_path}/bad --version does not run", bad
    assert real().cpp_compiler == ProgramFacts(None)
    assert real().n_gpus is None


def test_free_memory_is_within_the_container_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{80 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {50 * MIB}\ninactive_file {30 * MIB}\n")
    assert real().free_memory == 50 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    assert real().free_memory > 50 * MIB
    monkeypatch.setattr(machine_module, "MEMINFO", tmp_path / "none")
    blind = machine()
    del vars(blind)["free_memory"]
    check("memory", blind, NOTE, f"not checked: no {tmp_path}/none")


FAKE_TORCH = """
from types import SimpleNamespace as Bag
__version__ = "2.13.0+cu130"
version = Bag(cuda="13.0")
def zeros(n, device):
    if device == "cuda:1":
        raise RuntimeError("out of memory\\nmore")
    return Bag(add_=lambda one: Bag(cpu=lambda: None))
cuda = Bag(
    device_count=lambda: 2,
    get_arch_list=lambda: ["sm_90"],
    get_device_properties=lambda index: Bag(name=f"GPU{index}", major=9, minor=0, total_memory=1),
    mem_get_info=lambda index: (5, 9),
)
"""


def test_probe_reads_torch_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "triton.py").write_text("__version__ = '3.7.0'")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    got = real().torch
    first = TorchGpu("GPU0", (9, 0), 9, 5)
    assert got.gpus == (first, replace(first, name="GPU1", error="RuntimeError: out of memory")), got.gpus
    assert (got.version, got.cuda, got.triton, got.architectures) == ("2.13.0+cu130", "13.0", "3.7.0", ("sm_90",))
    assert got.errors["torchvision"] == "RuntimeError: operator torchvision::nms does not exist"
    assert got.errors.keys() == {"inductor", "torchvision"}, "expected no compiler in a torch of one file"
