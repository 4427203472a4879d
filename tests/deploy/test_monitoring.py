"""Dashboard and alert rules name only metrics, labels and values that a gateway's /metrics contains."""

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.app import build_app
from tests.server.routes.asgi_gateway import IDLE, asgi_client, gateway_of

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
NAME = re.compile(r"\bduologue_\w+")
SELECTED = re.compile(r"\b(duologue_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
GROUPED = re.compile(r"\bby \(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job", "namespace", "pod"}  # labels that a scrape adds
Labels = dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def scraped() -> Labels:
    """Sample name -> label -> values, of a gateway that has counted every kind of event once."""
    gateway = gateway_of(1)
    metrics, worker = gateway.metrics, gateway.dispatcher.workers.all[0]
    compiled = {"counts": {"graphs": 1}, "after_warm_up": {"recompiles": 0}}
    gateway.dispatcher.workers.record_health(worker, {**IDLE, "compile": compiled, "memory": {"allocated": 1}})
    metrics.record_result(
        {
            "is_listen": False,
            "wall_clock_ms": 1,
            "lag_ms": 1,
            "headroom_ms": -1,
            "stages": {"see": 1, "first_sound": 1},
        },
        "omni_duplex",
    )
    metrics.record_relay("up", 0.1)
    metrics.record_error("bad_json")
    metrics.record_session_start("omni_duplex", 0.1)
    metrics.record_session_end("omni_duplex", 0.1)
    metrics.record_connection_end("stopped")
    metrics.record_resumption("resumed")
    metrics.record_move("moved", 0.1)
    metrics.record_worker_lost(worker.name)

    async def text() -> str:
        async with asgi_client(build_app(gateway)) as client:
            return (await client.request("GET", "/metrics")).text

    found: Labels = defaultdict(lambda: defaultdict(set))
    for family in text_string_to_metric_families(asyncio.run(text())):
        for sample in family.samples:
            labels = found[sample.name]
            for label, value in sample.labels.items():
                labels[label].add(value)
    return found


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "grafana" / "duologue.json").read_text(encoding="utf-8"))


def expressions() -> dict[str, str]:
    """Title -> expression, of panels, variables and alerts."""
    board = dashboard()
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel["targets"]
    }
    for variable in board["templating"]["list"]:
        if isinstance(variable["query"], dict):
            found[f"variable {variable['name']}"] = variable["query"]["query"]
    alerts = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
    for group in alerts["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


@pytest.mark.parametrize("title", expressions())
def test_expressions_name_what_the_gateway_exports(title: str, scraped: Labels) -> None:
    assert_exported(expressions()[title], scraped)


def assert_exported(expression: str, scraped: Labels) -> None:
    names = NAME.findall(expression)
    assert names, f"expected a metric of this server, got {expression}"
    unknown = sorted(set(names) - scraped.keys())
    assert not unknown, f"expected names of /metrics, got {unknown}"
    known = {label for name in names for label in scraped[name]} | OF_PROMETHEUS
    for name, matchers in SELECTED.findall(expression):
        for label, operator, value in MATCHER.findall(matchers):
            assert label in scraped[name].keys() | OF_PROMETHEUS, f"{name}: expected a label of it, got {label}"
            wanted = set(value.split("|")) if operator in ("=~", "!~") else {value}
            if label not in OF_PROMETHEUS:
                absent = wanted - scraped[name][label]
                assert not absent, f"{name}: expected values of {label}, got {sorted(absent)}"
    for group in GROUPED.findall(expression):
        labels = {label.strip() for label in group.split(",")}
        assert labels <= known, f"expected labels of {names}, got {sorted(labels - known)}"


@pytest.mark.parametrize(
    "expression",
    [
        "duologue_gateway_late_units",
        'duologue_gateway_slots{kind="all"}',
        "sum by (gpu) (duologue_gateway_queue_length)",
    ],
)
def test_other_names_are_found(expression: str, scraped: Labels) -> None:
    with pytest.raises(AssertionError, match="expected"):
        assert_exported(expression, scraped)


def test_panels_cover_what_operators_watch() -> None:
    titles = " ".join(panel["title"].lower() for panel in dashboard()["panels"])
    missing = [word for word in ("units on time", "first sound", "headroom", "queue", "gpu") if word not in titles]
    assert not missing, f"expected panels of {missing}, got {titles}"
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids), f"expected each id once, got {ids}"
