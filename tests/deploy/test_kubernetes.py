"""The manifests name real flags, settings, ports and metrics, and leave pods the time that a drain takes.

`scripts/check_manifests.sh` compares them with the schemas of Kubernetes.
"""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.make_keys import secret
from launcher.options import parser as launcher_parser
from server.cluster.__main__ import PORT as AUTHORITY_PORT
from server.cluster.__main__ import parser as authority_parser
from server.main import parser as gateway_parser
from server.main import worker_addresses
from tests.deploy.test_monitoring import MONITORING, assert_exported, scraped
from worker.config.service import Config, ServiceSection, load_config
from worker.key_text import WORKER_SECRET_VARIABLE
from worker.main import parser as worker_parser

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
PARSERS = {
    "launcher": launcher_parser,
    "server.main": gateway_parser,
    "worker.main": worker_parser,
    "server.cluster": authority_parser,
}
SETTINGS = "duologue-settings"
AFTER_DRAIN_S = 10  # for closes and the end of the process
__all__ = ["scraped"]


@cache
def manifests() -> list[dict[str, Any]]:
    files = sorted(FOLDER.rglob("*.yaml"))
    return [manifest for file in files for manifest in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in manifests() if one["kind"] == kind}


def pods() -> dict[str, dict[str, Any]]:
    found = named("Deployment") | named("StatefulSet")
    return {name: one["spec"]["template"]["spec"] for name, one in found.items()}


@pytest.mark.parametrize("name", pods())
def test_pods_run_real_commands_within_their_grace_period(name: str) -> None:
    pod = pods()[name]
    [container] = pod["containers"]
    module, *flags = container["args"]
    args = PARSERS[module]().parse_args(flags)
    service = ServiceSection()
    ports = {"worker.main": service.worker_base_port, "server.cluster": AUTHORITY_PORT}
    port = ports.get(module, service.gateway_port)
    assert [one["containerPort"] for one in container["ports"]] == [port] and args.port in (port, None)
    values = {one["name"]: one.get("value") for one in container["env"]}
    n_drains = {"launcher": 2, "server.cluster": 0}.get(module, 1)
    drain_s = n_drains * float(values.get("DUOLOGUE_SERVICE_DRAIN_TIMEOUT_S", 0))
    stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    expected = drain_s + float(stop[1]) + AFTER_DRAIN_S
    grace_s = pod["terminationGracePeriodSeconds"]
    assert grace_s >= expected, f"{name}: expected {expected} s of grace or more, got {grace_s}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in ("/livez", "/readyz"), f"{name}: {probe}"


@pytest.mark.parametrize("name", pods())
def test_pods_run_without_root_and_write_to_volumes_only(name: str) -> None:
    pod = pods()[name]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    written = {"worker.main": {"/data", "/cache"}, "server.cluster": {"/state"}}
    expected = {"/tmp", *written.get(container["args"][0], {"/data", "/logs"})}
    assert expected <= mounted, f"{name}: expected {expected}, got {mounted}"


def test_settings_and_secrets_are_those_that_the_programs_read() -> None:
    made = secret("duologue")[0]["stringData"]
    for name, pod in pods().items():
        [container] = pod["containers"]
        environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        for one in container["env"]:
            if "valueFrom" in one:
                source = one["valueFrom"]["secretKeyRef"]
                assert source["name"] == "duologue" and source["key"] in made, f"{name}: got {source}"
                environ[one["name"]] = made[source["key"]]
        environ.pop(WORKER_SECRET_VARIABLE, None)
        for one in named_settings():
            load_config(None, flags={}, environ=environ | one)
    [gateway] = [one for one in named("ServiceMonitor").values() if "authorization" in one["spec"]["endpoints"][0]]
    assert gateway["spec"]["endpoints"][0]["authorization"]["credentials"]["key"] in made


def named_settings() -> list[dict[str, str]]:
    """The variables of each generated ConfigMap."""
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in FOLDER.rglob("kustomization.yaml")]
    maps = [one for file in files for one in file.get("configMapGenerator", ()) if one["name"] == SETTINGS]
    assert len(maps) == 3, f"expected settings of a node, a fleet and of CPUs, got {len(maps)}"
    return [dict(literal.split("=", 1) for literal in one["literals"]) for one in maps]


def test_gateway_lists_every_worker_that_may_run(scraped: dict) -> None:
    [scaled] = named("ScaledObject").values()
    spec = scaled["spec"]
    workers = named("StatefulSet")[spec["scaleTargetRef"]["name"]]
    name, service = workers["metadata"]["name"], workers["spec"]["serviceName"]
    _, *flags = pods()["duologue-gateway"]["containers"][0]["args"]
    got = [str(address) for address in worker_addresses(gateway_parser().parse_args(flags), Config())]
    port = named("Service")[service]["spec"]["ports"][0]["port"]
    expected = [f"{name}-{index}.{service}:{port}" for index in range(spec["maxReplicaCount"])]
    assert got == expected, f"expected {expected}, got {got}"
    [listed] = [flag for flag in pods()["duologue-authority"]["containers"][0]["args"] if flag.startswith("--workers")]
    assert listed == f"--workers={','.join(expected)}", f"authority: expected {expected}, got {listed}"
    for trigger in spec["triggers"]:
        assert_exported(trigger["metadata"]["query"], scraped)


def test_rules_are_those_of_compose() -> None:
    [rules] = named("PrometheusRule").values()
    assert rules["spec"] == yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize(
    ("folder", "image"),
    [("node", "duologue-cuda"), ("overlays/cpu", "duologue"), ("overlays/cluster", "duologue-cuda")],
)
def test_kustomize_renders_the_manifests(folder: str, image: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": os.environ["PATH"]}).stdout
    rendered = list(yaml.safe_load_all(text))
    [workers] = [one["spec"] for one in rendered if one["kind"] == "StatefulSet"]
    [container] = workers["template"]["spec"]["containers"]
    assert container["image"].removesuffix(":latest") == image
    assert ("replicas" in workers) == (folder != "overlays/cluster"), "expected KEDA alone to set replicas"
    [settings] = [one["metadata"]["name"] for one in rendered if one["kind"] == "ConfigMap"]
    if folder == "overlays/cluster":
        gateway = next(
            one for one in rendered if one["metadata"]["name"] == "duologue-gateway" and "replicas" in one["spec"]
        )
        [given] = gateway["spec"]["template"]["spec"]["containers"]
        args = gateway_parser().parse_args(given["args"][1:])
        assert args.authority == f"duologue-authority:{AUTHORITY_PORT}" and args.workers is None, f"got {given['args']}"
    assert container["envFrom"] == [{"configMapRef": {"name": settings}}], f"got {container['envFrom']}"
