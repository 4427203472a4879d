"""What the launcher's files may import, and that it stays free of torch."""

from pathlib import Path

from tests.test_architecture import imported

CONTRACT = {"log", "service_config"}
DOCTOR = {"worker.doctor.checks", "worker.doctor.facts", "worker.doctor.findings", "worker.doctor.machine"}


def test_what_it_knows_of_others(root: Path) -> None:
    files = sorted((root / "launcher").glob("*.py"))
    assert len(files) > 10
    for file in files:
        names = imported(file)
        top = {name.partition(".")[0] for name in names}
        assert not top & {"torch", "server", "tests", "benchmarks", "assets", "clients"}, f"{file.name}: got {top}"
        models = {name.split(".")[1] for name in names if name.startswith("models.")}
        assert models <= {"errors"}, f"{file.name}: expected of models errors alone, got {models}"
        worker = {name for name in names if name.startswith("worker.")}
        other = {one for one in worker if one.split(".")[1] not in CONTRACT and not one.startswith(tuple(DOCTOR))}
        assert other <= {"worker.doctor"}, f"{file.name}: expected the contract and the doctor's checks, got {other}"
