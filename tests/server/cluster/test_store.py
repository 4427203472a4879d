"""The file of an authority."""

from pathlib import Path

from server.cluster.messages import CountedUse
from server.cluster.store import AuthorityStore


def test_a_disk_that_takes_nothing_does_not_end_the_cluster(tmp_path: Path) -> None:
    store = AuthorityStore(tmp_path / "state")
    assert store.store_gateways(["g0"]), "expected the name to be stored"
    store._db.execute("PRAGMA query_only = ON")  # every change fails, as on a full disk
    assert not store.store_gateways(["g0", "g1"]), "expected to hear of the failure"
    store.store_workers([("w:1", False)])
    store.store_usage(1, "g0", {"key": CountedUse(requests=1)})
    store._db.execute("PRAGMA query_only = OFF")
    assert (store.gateways, store.workers, store.usage(1)) == (["g0"], [], {})
    assert store.store_gateways(["g1"]) and store.gateways == ["g1"], f"expected g1, got {store.gateways}"
    store.close()
