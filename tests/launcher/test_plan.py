"""Command lines, ports and addresses of the launch plan."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.devices import CPU, Device
from launcher.options import parser, settings
from launcher.plan import LaunchPlan, RunSecrets, make_plan
from launcher.supervise import announcement
from models.errors import ModelError, SettingsError
from server.main import parser as server_parser
from worker.config.service import ROOT
from worker.main import parser as worker_parser

GPUS = [Device("2", is_listed=True), Device("GPU-aaaa"), Device("5", is_listed=True)]


def plan_of(*flags: str, devices: list[Device] | None = None, environ: dict[str, str] | None = None) -> LaunchPlan:
    args, environ = parser().parse_args(flags), environ or {}
    return make_plan(settings(args, environ)[0], args, devices or [CPU], environ, 8)


def worker_flags(plan: LaunchPlan, index: int = 0):
    command = plan.workers[index].command
    assert command[1:3] == ("-m", "worker.main"), command
    return worker_parser().parse_args(command[3:])


def gateway_flags(plan: LaunchPlan):
    assert plan.gateway.command[1:3] == ("-m", "server.main"), plan.gateway.command
    return server_parser().parse_args(plan.gateway.command[3:])


def test_one_worker_for_each_gpu() -> None:
    plan = plan_of(devices=GPUS, environ={"DUOLOGUE_SERVICE_WORKER_BASE_PORT": "9100"})
    parsed = [worker_flags(plan, i) for i in range(3)]
    assert [(one.worker_index, one.gpu_id, one.port) for one in parsed] == [(0, 2, 9100), (1, 1, 9101), (2, 5, 9102)]
    assert [one.environ["CUDA_VISIBLE_DEVICES"] for one in plan.workers] == ["2", "GPU-aaaa", "5"]
    assert ["CUDA_DEVICE_ORDER" in one.environ for one in plan.workers] == [True, False, True]
    assert gateway_flags(plan).workers == "127.0.0.1:9100,127.0.0.1:9101,127.0.0.1:9102"
    assert [one.url for one in plan.workers] == [f"http://127.0.0.1:{port}" for port in (9100, 9101, 9102)]


def test_number_of_workers() -> None:
    assert len(plan_of("--num-workers", "2", devices=GPUS).workers) == 2
    assert len(plan_of("--num-workers", "9", devices=GPUS).workers) == 3
    assert len(plan_of().workers) == 1
    on_cpu = plan_of("--num-workers", "4")
    assert [one.environ["OMP_NUM_THREADS"] for one in on_cpu.workers] == ["2"] * 4
    assert "OMP_NUM_THREADS" not in plan_of("--num-workers", "4", environ={"OMP_NUM_THREADS": "3"}).workers[0].environ
    with pytest.raises(SystemExit):
        plan_of("--num-workers", "0")


def test_passes_flags_on_to_programs(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"service": {"drain_timeout_s": 7}}')
    flags = ("--config", str(file), "--model-path", "assets/tiny", "--max-sessions", "3", "--no-compile")
    plan = plan_of(*flags, "--lang", "zh", "--log-level", "DEBUG", "--port", "9001", "--log-dir", str(tmp_path))
    worker, gateway = worker_flags(plan), gateway_flags(plan)
    assert (worker.config, gateway.config) == (file, file)
    assert (worker.model_path, worker.max_sessions, worker.compile) == (str(ROOT / "assets/tiny"), 3, False)
    assert (gateway.lang, gateway.port, plan.drain_s, plan.folder) == ("zh", 9001, 7, tmp_path)
    assert all(one.environ["DUOLOGUE_LOG_LEVEL"] == "DEBUG" for one in (plan.gateway, *plan.workers))


def test_passes_no_flag_that_was_not_given() -> None:
    worker = worker_flags(plan_of())
    assert (worker.config, worker.model_path, worker.max_sessions, worker.compile, worker.device) == (None,) * 5
    assert worker_flags(plan_of("--compile")).compile is True


def test_worker_base_port_moves_all_workers() -> None:
    plan = plan_of("--num-workers", "2", "--worker-base-port", "23000", environ={"CUDA_VISIBLE_DEVICES": ""})
    assert [one.url.rpartition(":")[2] for one in plan.workers] == ["23000", "23001"]
    assert [worker_flags(plan, index).port for index in range(2)] == [23_000, 23_001]


def test_worker_sees_only_its_gpu() -> None:
    plan = plan_of(devices=GPUS[:1], environ={"DUOLOGUE_MODEL_DEVICE": "cuda:1"})
    assert worker_flags(plan).device == "cuda"


@pytest.mark.parametrize(
    ("flags", "host", "url", "probed"),
    [
        ((), "127.0.0.1", "http://localhost:8006", "http://127.0.0.1:8006"),
        (("--remote",), "0.0.0.0", "http://localhost:8006", "http://127.0.0.1:8006"),
        (("--remote", "--host", "::"), "::", "http://localhost:8006", "http://[::1]:8006"),
        (("--remote", "--host", "10.1.2.3"), "10.1.2.3", "http://10.1.2.3:8006", "http://10.1.2.3:8006"),
        (("--host", "::1"), "::1", "http://localhost:8006", "http://[::1]:8006"),
        (("--host", "localhost"), "localhost", "http://localhost:8006", "http://localhost:8006"),
    ],
)
def test_addresses(flags: tuple[str, ...], host: str, url: str, probed: str) -> None:
    plan = plan_of("--port", "8006", *flags)
    parsed = gateway_flags(plan)
    assert (plan.host, parsed.host, plan.url(), plan.gateway.url) == (host, host, url, probed)
    assert parsed.remote == plan.is_remote == ("--remote" in flags)
    assert parsed.http and not parsed.https


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--host", "10.1.2.3"), "--host: expected a loopback address, or --remote as well"),
        (("--host", "example.org"), "--host: expected an IP address"),
        (("--https",), "--https: expected service.ssl_certfile"),
        (("--port", "22401"), "service.gateway_port: expected none of the workers' ports .22400 to 22403."),
        (("--port", "0"), "service.gateway_port"),
        (("--max-sessions", "0"), "duplex.max_sessions"),
    ],
)
def test_refuses_invalid_settings(flags: tuple[str, ...], expected: str) -> None:
    environ = {"DUOLOGUE_SERVICE_WORKER_BASE_PORT": "22400", "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(ModelError, match=expected):
        plan_of("--num-workers", "4", *flags, environ=environ)


@given(base=st.integers(1, 65_535), n=st.integers(1, 64), gateway=st.integers(1, 65_535))
def test_ports_are_valid_and_distinct(base: int, n: int, gateway: int) -> None:
    environ = {"DUOLOGUE_SERVICE_WORKER_BASE_PORT": str(base), "DUOLOGUE_SERVICE_GATEWAY_PORT": str(gateway)}
    try:
        plan = plan_of("--num-workers", str(n), environ=environ)
    except SettingsError:
        assert base + n - 1 > 65_535 or base <= gateway < base + n
        return
    ports = [int(one.url.rpartition(":")[2]) for one in (plan.gateway, *plan.workers)]
    assert len(set(ports)) == n + 1 and max(ports) <= 65_535, ports


@pytest.mark.parametrize(("flags", "scheme"), [((), "https"), (("--https",), "https"), (("--http",), "http")])
def test_uses_https_if_certificate_is_configured(flags: tuple[str, ...], scheme: str) -> None:
    environ = {"DUOLOGUE_SERVICE_SSL_CERTFILE": "/a.pem", "DUOLOGUE_SERVICE_SSL_KEYFILE": "/b.pem"}
    plan = plan_of(*flags, environ=environ)
    assert plan.scheme == scheme and plan.gateway.url.startswith(f"{scheme}://")
    assert (gateway_flags(plan).https, gateway_flags(plan).http) == (scheme == "https", scheme == "http")


def test_announcement_lists_addresses_and_warnings_if_remote() -> None:
    assert announcement(plan_of("--port", "8006"), "1 worker, 4 slots", []) == [
        "ready: http://localhost:8006  (1 worker, 4 slots; Ctrl-C stops)"
    ]
    _, address, *warnings = announcement(plan_of("--port", "8006", "--remote"), "1 worker, 4 slots", ["10.0.0.7"])
    assert address.strip() == "http://10.0.0.7:8006"
    assert len(warnings) == 2 and "no keys" in warnings[0] and "camera and microphone" in warnings[1]


def test_remote_run_without_keys_makes_one(tmp_path: Path) -> None:
    """Its links open the pages; gateway and workers share a secret; no command line contains either."""
    empty = {"DUOLOGUE_SERVICE_DATA_DIR": str(tmp_path)}

    def run_of(*flags: str, environ: dict[str, str] | None = None) -> tuple[LaunchPlan, list[str]]:
        args, environ = parser().parse_args(flags), {**empty, **(environ or {})}
        config = settings(args, environ)[0]
        plan = make_plan(config, args, [CPU], environ, 8, RunSecrets.make(config, args))
        return plan, announcement(plan, "1 worker, 4 slots", ["10.0.0.7"])

    plan, lines = run_of("--remote", "--port", "8006")
    key = plan.start_key
    assert key is not None and plan.gateway.environ["DUOLOGUE_START_KEY"] == key
    assert f"http://localhost:8006/#{key}" in lines[2] and f"http://10.0.0.7:8006/#{key}" in lines[3], lines
    assert not any("no keys" in line for line in lines)
    worker = plan.workers[0]
    secret = plan.gateway.environ["DUOLOGUE_WORKER_SECRET"]
    assert worker.environ["DUOLOGUE_WORKER_SECRET"] == secret and "DUOLOGUE_START_KEY" not in worker.environ
    assert not {key, secret} & {*plan.gateway.command, *worker.command}

    plan, lines = run_of("--remote", "--insecure")
    assert plan.start_key is None and gateway_flags(plan).insecure and any("no keys" in line for line in lines)
    assert run_of()[0].start_key is None, "expected no key for this machine alone"
    entry = json.dumps([{"name": "x", "hash": f"sha256:{'0' * 64}"}])
    plan, lines = run_of("--remote", environ={"DUOLOGUE_SERVICE_API_KEYS": entry})
    assert plan.start_key is None and not any("no keys" in line for line in lines)
    (tmp_path / "api_keys.json").write_text('{"keys": []}')
    assert run_of("--remote")[0].start_key is None, "expected the file of keys to count"
