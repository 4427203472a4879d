"""`python -m worker.report`: fetches the report of a worker, makes that of a module or checkpoint; one-line errors."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch._dynamo

from worker.report.__main__ import main
from worker.report.compile_report import CompileReport, Header, Live, Row

HEADER = Header(what="a model", date="2030-01-01T00:00:00+00:00", device="cpu", python="3.12", torch="2.13")
GOOD = CompileReport(header=HEADER, rows=[Row(name="llm.model", compile_s=1.5)], live=Live())
PLAIN = "tests.worker.report.compilable"


@contextlib.contextmanager
def served(body: bytes, status: int = 200) -> Iterator[str]:
    """A server with this answer at `/compile_report` only. Yields: its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/compile_report" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refused() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_prints_a_workers_report_unchanged(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with served(GOOD.to_json().encode()) as url:
        assert main(["--url", url + "/", "--json", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out == GOOD.table() + "\n"
    assert CompileReport.from_json((tmp_path / "report.json").read_bytes()) == GOOD


def test_reports_a_worker_that_compiled_while_serving(capsys: pytest.CaptureFixture[str]):
    report = GOOD.with_live(Live(compiles=2, recompiles=1, last=["recompiled forward (a.py:1): size 3"]))
    with served(report.to_json().encode()) as url:
        assert main(["--url", url]) == 1
    out = capsys.readouterr().out
    assert "1 recompiles since warm-up" in out and "recompiled forward (a.py:1): size 3" in out


@pytest.mark.parametrize(
    ("body", "status", "got"),
    [(b"", 503, "got 503"), (b"<html>", 200, "expected a compile report"), (b"{}", 200, "header")],
)
def test_refuses_answers_that_are_not_reports(body: bytes, status: int, got: str, capsys: pytest.CaptureFixture[str]):
    with served(body, status) as url:
        assert main(["--url", url]) == 2
    err = capsys.readouterr().err
    assert got in err and err.count("\n") == 1, f"expected one line with {got!r}, got {err!r}"


@pytest.mark.parametrize("url", [refused(), "nonsense", "http://127.0.0.1:1x"], ids=["refused", "no URL", "no port"])
def test_unreachable_worker_is_one_line(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--url", url]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {url}/compile_report: expected a worker") and err.count("\n") == 1, f"got {err!r}"


def test_reports_a_module(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    torch._dynamo.reset()
    path = tmp_path / "report.json"
    flags = ["--backend", "aot_eager", "--runs", "3", "--device", "cpu", "--json", str(path)]
    assert main(["--module", f"{PLAIN}:build_plain", "--dynamic", *flags]) == 0
    report = CompileReport.from_json(path.read_bytes())
    assert capsys.readouterr().out == report.table() + "\n"
    assert report.header.settings == {"mode": "default", "dynamic": True, "backend": "aot_eager", "runs": 3}
    assert [row.eager.n for row in report.rows] == [3, 3]


@pytest.mark.parametrize(("build", "problem"), [("build_breaking", "graph breaks"), ("build_failing", "linalg.inv")])
def test_problems_exit_with_1(build: str, problem: str, capsys: pytest.CaptureFixture[str]):
    torch._dynamo.reset()
    assert main(["--module", f"{PLAIN}:{build}", "--backend", "eager", "--runs", "2"]) == 1
    out = capsys.readouterr().out
    assert problem in out and "printed by the module" not in out, "expected a report without what the module prints"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no colon", "expected pkg.mod:build, a function in a module that can be imported, got 'no colon'"),
        ("no.such.module:build", "got ModuleNotFoundError: No module named 'no'"),
        (f"{PLAIN}:build_missing", f"got no function build_missing in {PLAIN}"),
        (f"{PLAIN}:build_nothing", "build_nothing(): expected (module, inputs), got Plain"),
        (f"{PLAIN}:build_badly", "build_badly(): expected (module, inputs), got RuntimeError: no weights"),
    ],
)
def test_refuses_what_is_not_a_module(name: str, expected: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--module", name]) == 2
    err = capsys.readouterr().err
    assert expected in err and err.count("\n") == 1, f"expected one line with {expected!r}, got {err!r}"


def test_refuses_a_missing_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--model-path", str(tmp_path / "nowhere"), "--device", "cpu"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_refuses_an_unwritable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").write_text("")
    with served(GOOD.to_json().encode()) as url:
        assert main(["--url", url, "--json", str(tmp_path / "file" / "report.json")]) == 2
    assert "expected a writable file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["--module", "a:b", "--model-path", "c"], ["--runs", "0"], ["--mode", "fast"], ["--dynamic", "--static"]]
)
def test_refuses_conflicting_flags(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and "error: argument" in capsys.readouterr().err
