"""Workers of an omni model and workers of a speech model in one cluster with Ray, each on nodes of its own.

Needs the extra `cluster`: `python -m pytest -m cluster tests/e2e/ray_clusters/test_groups.py`.
"""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from assets.build_tiny_speech import build
from benchmarks.serve.ray_cluster import WORKER, LocalCluster
from tests.launcher.processes import free_ports
from tests.server.live_gateway import connect_to

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
OMNI = ("--group", "omni", f"resource={WORKER}", "max-sessions=2", "set=model.speech_path=null")
SPEECH = ("--group", "speech", "resource=speech", "max=2", "set=model.omni=false", "set=model.speech_sessions=2")


def test_two_kinds_of_workers_serve_their_models(tmp_path: Path) -> None:
    speech, (port,) = build(tmp_path / "tiny-speech"), free_ports(1)
    with LocalCluster(1, 0, port) as cluster:
        settings = json.loads(cluster.config.read_text())
        settings["model"] = {"speech_path": str(speech)}
        cluster.config.write_text(json.dumps(settings))
        node = cluster.cluster.add_node(num_cpus=1, num_gpus=0, resources={"speech": 1})
        shared = ("--config", str(cluster.config), "--gpus-per-worker", "0", "--no-compile")
        cluster.command("up", *shared, *OMNI, *SPEECH)
        workers = {one["group"]: one for one in cluster.state()["workers"]}
        assert set(workers) == {"omni", "speech"}, f"expected one worker of each group, got {workers}"
        assert workers["speech"]["node"] == node.node_id != workers["omni"]["node"]
        assert workers["speech"]["models"]["speech"]["slots"] == 2 and "omni" not in workers["speech"]["models"]
        assert workers["omni"]["models"]["omni"]["slots"] == 2 and "speech" not in workers["omni"]["models"]

        async def converse() -> None:
            client = await (await connect_to(port, "omni_me")).prepared()
            await client.unit()
            await client.close()

        asyncio.run(converse())
        text = {"model": speech.name, "input": "Hello.", "voice": "serena", "response_format": "pcm"}
        url = f"http://127.0.0.1:{port}/v1/audio/speech"
        answer = httpx.post(url, json=text, timeout=120.0, trust_env=False)
        assert answer.status_code == 200 and answer.content, f"expected sound, got {answer.status_code}: {answer.text}"
        cluster.command("down")
