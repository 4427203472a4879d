"""The process that forks programs. It imports their modules once, and has a single thread when it forks.

A request is a message over a socket: module, arguments, environment, working folder and ignored signals as JSON, with a
descriptor for the output and one for the exit status. The answer is the child's pid with a descriptor of the child. The
process ends when the other end of the socket is closed; its children go on.
"""

import json
import os
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

MAX_REQUEST = 1 << 20
# No process can ignore the first two, and Python ignores the others in every process.
SAME_EVERYWHERE = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}


def import_all(modules: list[str]) -> None:
    """Import modules with all that they import. Raises: SystemExit if one starts a thread: no child would have it."""
    for name in modules:
        import_module(name)
    if (n := len(os.listdir("/proc/self/task"))) > 1:
        raise SystemExit(f"expected modules that start no thread, got {n} threads after importing {', '.join(modules)}")


def main(fd: int, modules: list[str]) -> None:
    """Serve requests, and run the program of the request in a child."""
    import_all(modules)
    request = _serve(socket.socket(fileno=fd))
    if request is None:
        os._exit(0)  # there is nothing to clear
    sys.modules.pop(request["module"], None)
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """The request, in a child that has its environment; None in the server when it ends."""
    running: dict[int, tuple[int, int]] = {}  # pid and descriptor for the exit status, by descriptor of the child
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)
    connection.send(b"ready")
    while True:
        for key, _ in selector.select():
            if key.fileobj is not connection:
                selector.unregister(key.fd)
                _report_end(key.fd, *running.pop(key.fd))
                continue
            data, given, _, _ = socket.recv_fds(connection, MAX_REQUEST, 2)
            if not data:
                return None
            output, status = given
            if not (pid := os.fork()):
                selector.close()
                connection.close()
                request: dict[str, Any] = json.loads(data)
                _become(request, output)
                return request
            child = os.pidfd_open(pid)
            running[child] = pid, status
            selector.register(child, selectors.EVENT_READ)
            socket.send_fds(connection, [str(pid).encode()], [child])
            os.close(output)


def _report_end(child: int, pid: int, status: int) -> None:
    _, how = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # the test process does not wait for it
        os.write(status, str(os.waitstatus_to_exitcode(how)).encode())
    os.close(status)
    os.close(child)


def _become(request: dict[str, Any], output: int) -> None:
    """Set everything that a new process would have."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    _handle_signals(set(request["ignored"]))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.path[0] = request["folder"]
    sys.argv = [request["module"], *request["arguments"]]


def _handle_signals(ignored: set[int]) -> None:
    """Ignore what the test process ignores now; this process may have been started while that ignored other signals."""
    for number in signal.valid_signals() - SAME_EVERYWHERE:
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
