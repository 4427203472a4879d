"""What goes into the images: packages, files of the checkout, and ports."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.requirements import NAME, OF_MODELS, requirements
from worker.config.service import ServiceSection

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


def names(lines: list[str]) -> set[str]:
    return {NAME.match(line)[0].lower() for line in lines}


def test_gateway_image_has_every_dependency_but_those_of_models() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    whole = names(requirements(project, ["webrtc"]))
    assert {"torch", "aiortc", "fastapi"} <= whole
    of_gateway, bare = (
        names(requirements(project, ["webrtc"], gateway=True)),
        names(requirements(project, [], bare=True)),
    )
    assert of_gateway | bare == whole - OF_MODELS, f"expected all but {OF_MODELS}, got {sorted(of_gateway | bare)}"
    assert not of_gateway & bare


def test_build_context_has_the_packages_of_the_program() -> None:
    """`.dockerignore` lists what is copied; a package that is absent there is absent in the image."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = {line[1:] for line in lines if line.startswith("!")}
    missing = {"server", "worker", "models", "launcher", "clients", "assets", "config.json", "pyproject.toml"} - copied
    assert not missing, f"expected them in .dockerignore, got none of {sorted(missing)}"
    absent = [name for name in copied if not (ROOT / name).exists()]
    assert not absent, f".dockerignore: expected paths that exist, got {absent}"
    assert "*" in lines, "expected everything else to be left out"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_run_without_root_and_report_their_health(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    stages = re.split(r"^FROM ", text, flags=re.M)[1:]
    served = [stage for stage in stages if "ENTRYPOINT" in stage]
    assert served, f"{name}: expected a stage with an entry point"
    for stage in served:
        head = stage.splitlines()[0]
        port = ServiceSection().gateway_port
        for wanted in ("USER 10001:10001", "HEALTHCHECK", f"EXPOSE {port}", f"http://127.0.0.1:{port}/"):
            assert wanted in stage, f"{name}, {head}: expected {wanted}"
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.M):
        assert source == "." or (ROOT / source).exists(), f"{name}: expected a file of the checkout, got {source}"


def test_compose_files_name_real_modules_files_and_ports() -> None:
    folder = ROOT / "deploy"
    compose = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
    service, ports = ServiceSection(), compose["services"]
    [workers] = [one for one in ports["gateway"]["command"] if one.startswith("worker:")]
    assert (
        workers == f"worker:{service.worker_base_port}" and str(service.worker_base_port) in ports["worker"]["command"]
    )
    targets = [
        target
        for job in yaml.safe_load((folder / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
        for config in job["static_configs"]
        for target in config["targets"]
    ]
    assert targets == [f"gateway:{service.gateway_port}", workers], f"got {targets}"
    for name, one in ports.items():
        for mount in one.get("volumes", ()):
            source = mount.split(":")[0]
            exists = (folder / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert exists, f"{name}: expected a file or a volume, got {source}"
        assert one["cap_drop"] == ["ALL"] and one["read_only"], f"{name}: expected a hardened service"
        grace = int(one.get("stop_grace_period", "45s").rstrip("s"))
        assert grace > service.drain_timeout_s, f"{name}: expected more than a drain, got {grace} s"
