"""Keeps the gateway and the workers running until a stop signal, then stops them in order.

Watches exit statuses and HTTP probes. The launch plan defines the processes, the restart policy the time limits.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from launcher.addresses import own_addresses
from launcher.devices import Device
from launcher.managed_process import ChildProcess, Program, describe_exit
from launcher.memory_watch import MemoryWatch
from launcher.plan import LOW_PRIORITY, LaunchPlan
from launcher.progress import LiveLine, StatusDisplay, n_slots, ready_text, starting_line, totals_text
from launcher.restart_policy import HealthTimeout, RestartBackoff, RestartPolicy, Verdict
from launcher.worker_states import WorkerStates
from worker.worker_report import WorkerState

READY = ("IDLE", "BUSY")
# Some terminals and wrappers send two signals for one Ctrl-C. Signals this close together count as one.
SAME_SIGNAL_S = 0.5
POLL_S = 0.05  # interval at which the end of processes is polled
FAILED_GRACE_S = 5.0  # time that a failed worker has to exit after SIGTERM


@dataclass
class ManagedProcess:
    """A program under supervision and the state of its current process.

    is_ready: it serves requests. is_open: the gateway accepts sessions. is_given_up: it is not started again.
    started_at: monotonic s. body: JSON body of /health when the worker became ready.
    """

    program: Program
    child: ChildProcess
    backoff: RestartBackoff
    is_ready: bool = False
    is_open: bool = False
    is_given_up: bool = False
    started_at: float = 0.0
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def is_settled(self) -> bool:
        """Whether the ready line need not wait for this process any longer."""
        return self.is_ready or self.is_given_up or self.backoff.n_failed > 0


@dataclass(frozen=True)
class ProbeResult:
    """Response to one HTTP probe. status: 0 if there was no response."""

    status: int = 0
    body: dict[str, Any] = field(default_factory=dict)


class Supervisor:
    """Runs all processes of a plan.

    Call `run` on the main thread: the parent-death signal is tied to the thread that starts a process. failure: why
    `run` ended without a stop signal; empty otherwise.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        display: StatusDisplay,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.failure = ""
        self._plan, self._display, self._clock = plan, display, clock
        self._policy = policy or RestartPolicy()
        self._gateway = self._managed(plan.gateway)
        self._workers = [self._managed(program) for program in plan.workers]
        self._states = WorkerStates(plan.folder, [program.stem for program in plan.workers])
        self._stop, self._kill_now = asyncio.Event(), asyncio.Event()
        self._stop_signal_at: float | None = None
        self._is_announced = False

    def _managed(self, program: Program) -> ManagedProcess:
        child = ChildProcess(program, self._plan.folder, self._plan.root)
        return ManagedProcess(program, child, RestartBackoff(self._policy))

    @property
    def _all(self) -> list[ManagedProcess]:
        return [self._gateway, *self._workers]

    async def run(self) -> int:
        """Run all processes until they have ended. Returns: 0 after a stop signal, 1 after a failure."""
        self._install_signal_handlers()
        for process in self._all:
            process.child.clear_log()
        limits = httpx.Limits(max_keepalive_connections=0)  # a kept connection would outlive the process it leads to
        client = httpx.AsyncClient(verify=False, trust_env=False, timeout=self._policy.probe_timeout_s, limits=limits)  # noqa: S501 - own gateway
        try:
            async with client:
                tasks = [
                    asyncio.create_task(self._supervise(process, client), name=process.name) for process in self._all
                ]
                for task in tasks:
                    task.add_done_callback(self._on_task_done)
                await self._stop.wait()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all()
        finally:
            self._kill_all()
            self._states.remove()
        return 1 if self.failure else 0

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            # A closing terminal sends several SIGHUPs, so a second one does not kill the processes at once.
            loop.add_signal_handler(signal.SIGHUP, self._stop.set)

    def _on_stop_signal(self) -> None:
        """Stop; a second signal, sent later, kills all processes at once."""
        now = self._clock()
        if self._stop_signal_at is not None and now - self._stop_signal_at > SAME_SIGNAL_S:
            self._kill_now.set()
        if self._stop_signal_at is None:
            self._stop_signal_at = now
        self._stop.set()

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"internal error of the launcher at {task.get_name()}: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._stop.set()

    # --- one process ---------------------------------------------------------------------------

    async def _supervise(self, process: ManagedProcess, client: httpx.AsyncClient) -> None:
        """Start a process, watch it and start it again, until it is given up."""
        event = ""
        while True:
            process.started_at = self._clock()
            self._record(process, "starting", reason=event)
            try:
                process.child.start(*self._start_flags(process))
                reason = await self._watch(process, client)
            except OSError as error:
                reason = f"could not be started: {error}"
            process.is_ready = process.is_open = False
            self._display.remove(process.name)
            status = process.child.poll()
            event = reason
            if not reason:
                message = process.child.last_message()
                event = f"ended with {describe_exit(status or 0)}{f': {message}' if message else ''}"
            verdict = process.backoff.mark_exited(None if reason else status, self._clock())
            if verdict is Verdict.GIVE_UP or (verdict is Verdict.FAILING and not self._others_serve(process)):
                self._on_given_up(process, event)
                return
            wait = process.backoff.next_wait_s()
            self._display.print_line(f"{process.name} {event}; starting it again in {wait:g} s")
            self._record(process, "waiting", reason=event, wait_s=wait)
            self._announce_ready()
            await asyncio.sleep(wait)

    def _start_flags(self, process: ManagedProcess) -> tuple[str, ...]:
        """A worker that starts beside one that serves leaves it the CPU."""
        serves = process is not self._gateway and any(worker.is_ready for worker in self._workers)
        return (LOW_PRIORITY,) if serves else ()

    def _others_serve(self, process: ManagedProcess) -> bool:
        """Whether another worker is ready, or may still become ready."""
        others = [worker for worker in self._workers if worker is not process]
        return process is not self._gateway and not all(one.is_given_up or one.backoff.is_failing for one in others)

    def _record(self, process: ManagedProcess, state: WorkerState, *, reason: str = "", wait_s: float = 0.0) -> None:
        self._states.record(process.program.stem, state, process.backoff, reason=reason, wait_s=wait_s)

    async def _watch(self, process: ManagedProcess, client: httpx.AsyncClient) -> str:
        """Probe a process until it has ended. Returns: why it was stopped, empty if it ended by itself."""
        health_timeout, memory = HealthTimeout(self._policy), MemoryWatch(self._plan.max_worker_bytes)
        is_gateway = process is self._gateway
        while process.child.is_running:
            path = "/readyz" if is_gateway else "/livez" if process.is_ready else "/health"
            result = await self._probe(client, process.program.url + path)
            if result.status and not process.is_ready and not process.child.listens_on(process.program.port):
                result = ProbeResult()  # the response of another program on this port
            if is_gateway:
                self._on_gateway_probe(process, result)
            elif not process.is_ready:
                self._on_starting_probe(process, result)
            elif result.status == 503:
                await self._end([process], FAILED_GRACE_S)
                return f"broke down: {result.body.get('error') or 'no error in its response'}"
            if health_timeout.record_probe(bool(result.status), self._clock(), is_ready=process.is_ready):
                await self._end([process], 0)
                seconds = self._policy.hang_timeout_s if process.is_ready else self._policy.start_timeout_s
                return f"has not answered for {seconds:g} s and was killed"
            if process.is_ready and not is_gateway and (leak := memory.record(process.child.memory_bytes)):
                await self._end([process], self._plan.drain_s + self._policy.grace_s)
                return leak
            await asyncio.to_thread(process.child.rotate_log)
            is_serving = process.is_ready and (process.is_open or not is_gateway)
            await asyncio.sleep(self._policy.ready_poll_s if is_serving else self._policy.starting_poll_s)
        return ""

    async def _probe(self, client: httpx.AsyncClient, url: str) -> ProbeResult:
        try:
            response = await client.get(url)
        except (httpx.HTTPError, OSError):
            return ProbeResult()
        body: Any = None
        with suppress(ValueError):
            body = response.json()
        return ProbeResult(response.status_code, body if isinstance(body, dict) else {})

    def _on_gateway_probe(self, process: ManagedProcess, result: ProbeResult) -> None:
        process.is_open = result.status == 200
        if not result.status:
            return
        if not process.is_ready:
            process.is_ready = True
            again, loading = process.backoff.was_ready, not any(worker.is_ready for worker in self._workers)
            process.backoff.mark_ready(self._clock())
            state = " again" if again else ", while the model loads" if loading else ""
            self._display.print_line(f"gateway  answers at {self._plan.url()}{state}")
        self._announce_ready()

    def _on_starting_probe(self, process: ManagedProcess, result: ProbeResult) -> None:
        seconds = self._clock() - process.started_at
        body = result.body if result.status == 200 else None
        if body is None or body.get("state") not in READY:
            self._display.update(process.name, starting_line(self._label(process), body, seconds))
            return
        process.is_ready, process.body = True, body
        process.backoff.mark_ready(self._clock())
        self._record(process, "ready")
        self._display.remove(process.name)
        self._display.print_line(ready_text(self._label(process), body, seconds))
        device = self._device_of(process)
        if device.visible is not None and (body.get("device") or {}).get("type") == "cpu":
            self._display.print_line(
                f"warning: {process.name} runs on the CPU, not on {device.label}: python -m worker.doctor"
            )
        self._announce_ready()

    def _label(self, process: ManagedProcess) -> str:
        return f"{process.name} ({self._device_of(process).label})"

    def _device_of(self, worker: ManagedProcess) -> Device:
        return self._plan.devices[self._workers.index(worker)]

    def _on_given_up(self, process: ManagedProcess, event: str) -> None:
        process.is_given_up = True
        self._record(process, "given up", reason=event)
        text = f"{process.name} {event}; given up (log: {process.child.log})"
        self._display.print_line(text)
        if process is self._gateway or not self._others_serve(process):
            self._fail(text)
        self._announce_ready()

    def _announce_ready(self) -> None:
        """Print the URLs once, when sessions are accepted and every worker is ready or has failed to start."""
        ready = [worker for worker in self._workers if worker.is_ready]
        is_settled = all(worker.is_settled for worker in self._workers)
        if self._is_announced or not self._gateway.is_open or not ready or not is_settled:
            return
        self._is_announced = True
        totals = totals_text(len(ready), len(self._workers), sum(n_slots(worker.body) for worker in ready))
        for line in announcement(self._plan, totals, own_addresses(self._plan.host)):
            self._display.print_line(line)

    # --- the end -------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """Stop the gateway first, which ends all sessions, so that it sends none to a worker that is stopping."""
        timeout_s = self._plan.drain_s + self._policy.grace_s
        # SIGTERM would let workers keep sessions for the next gateway.
        await self._end([self._gateway], timeout_s, number=signal.SIGINT, is_shown=True)
        await self._end(self._workers, timeout_s, is_shown=True)
        self._display.print_line("stopped")

    async def _end(
        self,
        processes: Sequence[ManagedProcess],
        timeout_s: float,
        *,
        number: signal.Signals = signal.SIGTERM,
        is_shown: bool = False,
    ) -> None:
        """Terminate processes and wait until they have ended.

        Args:
            processes: those to end; some may have ended already.
            timeout_s: time after which they are killed, or earlier after a second stop signal. 0 kills at once.
            number: the signal.
            is_shown: show the processes that are still running.
        """
        for process in processes:
            if timeout_s > 0:
                process.child.terminate(number)
        begin = self._clock()
        while running := [process for process in processes if process.child.is_running]:
            seconds = self._clock() - begin
            if seconds >= timeout_s or self._kill_now.is_set():
                break
            if is_shown:
                names = ", ".join(process.name for process in running)
                limit = f"sessions have up to {self._plan.drain_s:g} s, Ctrl-C again ends all"
                self._display.update("stopping", LiveLine(names, f"waiting {seconds:.0f} s for {names}: {limit}"))
            await asyncio.sleep(POLL_S)
        self._display.remove("stopping")
        for process in running:
            if is_shown:
                reason = "at once" if self._kill_now.is_set() else f"it did not end within {timeout_s:g} s"
                self._display.print_line(f"{process.name} killed: {reason}")
            process.child.kill()
        while any(process.child.is_running for process in processes):
            await asyncio.sleep(POLL_S)

    def _kill_all(self) -> None:
        """Kill every process that is still running, also after an unexpected exception."""
        for process in self._all:
            process.child.kill()
        while any(process.child.is_running for process in self._all):
            time.sleep(POLL_S)


def announcement(plan: LaunchPlan, totals: str, addresses: Sequence[str]) -> list[str]:
    """The lines with the URLs. addresses: of this machine, as seen from other machines."""
    lines = [f"ready: {plan.url()}  ({totals}; Ctrl-C stops)"]
    if not plan.is_remote:
        return lines
    if plan.start_key is None:
        lines += [f"       {plan.url(address)}" for address in addresses]
    else:
        urls = [plan.url(), *(plan.url(address) for address in addresses)]
        lines += ["open the pages with one of these links; each contains the key of this run:"]
        lines += [f"       {url}/#{plan.start_key}" for url in urls]
    if not plan.has_keys:
        lines.append("warning: anyone who can reach this port can talk to the model; there are no keys (docs/keys.md)")
    if plan.scheme == "http":
        remedy = "start with --https (docs/operations.md)"
        lines.append(f"warning: browsers allow camera and microphone only on https and localhost; {remedy}")
    return lines
