"""Keeps the programs of a cluster running: one authority, the gateways, and groups of workers within limits.

Contains no Ray: `Placement` starts programs on nodes. A program whose node dies is started on another one. A worker is
removed only after it was drained and has no session.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx

from launcher.cluster.groups import ClusterReport, Group, loads_of
from launcher.cluster.members import ClusterPlan, Member, NodeLostError, Placement
from launcher.cluster.program_host import ProgramSpec
from launcher.restart_policy import RestartBackoff, RestartPolicy

LOG = logging.getLogger(__name__)
AUTHORITY_MARK = "{authority}"  # in a gateway's command
PROBE_S = 2.0  # for one request to the authority


class Controller:
    """The programs of one cluster.

    Args:
        plan: what should run.
        placement: starts programs.
        clock: monotonic s.
        http: client for the authority.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        placement: Placement,
        clock: Callable[[], float] = time.monotonic,
        http: httpx.Client | None = None,
    ):
        self.plan, self._placement, self._clock = plan, placement, clock
        self._http = http or httpx.Client(trust_env=False, timeout=PROBE_S)
        self._http.headers.update(plan.secret_headers)
        self.authority = self._member(plan.authority)
        self.gateways: list[Member] = []
        self.groups = [Group(one) for one in plan.groups]
        self._unseen: list[Member] = []  # adopted ones without an address so far
        self._is_stopping = False

    @property
    def workers(self) -> list[Member]:
        """The workers of all groups."""
        return [worker for group in self.groups for worker in group.members]

    def _member(self, spec: ProgramSpec) -> Member:
        return Member(spec, RestartBackoff(RestartPolicy()))

    def adopt(self, names: list[str]) -> None:
        """Add the workers that an earlier controller has started. names: of all actors."""
        self._unseen = [worker for group in self.groups for worker in group.adopt(names)]

    # --- one round -----------------------------------------------------------------------------

    def poll(self) -> None:
        """Check all programs once: start, stop, register and scale."""
        self._keep(self.authority)
        if self._is_stopping:
            self._end_programs()
            return
        if not self.authority.address:
            return
        while len(self.gateways) < len(self.plan.gateways):
            self.gateways.append(self._member(self.plan.gateways[len(self.gateways)]))
        for gateway in self.gateways:
            self._keep(gateway)
        for group in self.groups:
            for worker in list(group.members):
                self._keep(worker)
                if worker.is_stopping and worker.placed is None:
                    group.members.remove(worker)
        report = self._report()
        if report is None:  # the authority starts again
            for group in self.groups:
                _make(group, group.plan.scaling.min_workers)
            return
        self._register(report.workers)
        self._scale(report)

    def _keep(self, member: Member) -> None:
        """Start a program that does not run, and record the end of one that did."""
        now = self._clock()
        if member.placed is None:
            if not member.is_stopping and now >= member.start_at:
                member.placed = self._placement.place(self._located(member.spec))
            return
        try:
            status = member.placed.status()
        except NodeLostError as error:
            self._on_end(member, str(error))
            return
        if status is None:
            return
        if status.ended:
            self._on_end(member, status.ended)
        elif not member.address:
            member.address, member.node = status.address, status.node
            member.backoff.mark_ready(now)
            LOG.info("%s runs at %s", member.spec.name, member.address)

    def _located(self, spec: ProgramSpec) -> ProgramSpec:
        """The program with the address that the authority has now."""
        address = self.authority.address
        return replace(spec, command=tuple(address if part == AUTHORITY_MARK else part for part in spec.command))

    def _on_end(self, member: Member, reason: str) -> None:
        assert member.placed is not None, "expected a program that was placed"
        member.placed.remove()
        member.placed, member.reason = None, reason
        if member in self.workers and member.address:
            self._change("DELETE", member.address)
        member.address = member.node = ""
        member.is_stopping = member.is_stopping or member.is_draining
        if not member.is_stopping:
            member.backoff.mark_exited(None, self._clock())
            wait_s = member.backoff.next_wait_s()
            member.start_at = self._clock() + wait_s
            LOG.warning("%s: %s; starting it again in %g s", member.spec.name, reason, wait_s)

    # --- workers -------------------------------------------------------------------------------

    def _report(self) -> ClusterReport | None:
        """The authority's state of the workers and the queue; None if it does not answer."""
        try:
            response = self._http.get(f"http://{self.authority.address}/workers")
            response.raise_for_status()
            return ClusterReport.read(response.json())
        except (httpx.HTTPError, ValueError, KeyError):
            return None

    def _change(self, method: str, address: str) -> bool:
        """Register, drain or remove a worker at the authority. Returns: whether it was done."""
        try:
            response = self._http.request(method, f"http://{self.authority.address}/workers/{address}")
        except httpx.HTTPError:
            return False
        return response.is_success

    def _register(self, known: dict[str, dict[str, Any]]) -> None:
        ours = {worker.address: worker for worker in self.workers if worker.address}
        self._unseen = [one for one in self._unseen if one in self.workers and not one.address and not one.reason]
        for address in () if self._unseen else known.keys() - ours.keys():
            self._change("DELETE", address)
        for address, worker in ours.items():
            if address not in known:
                self._change("PUT", address)
                continue
            worker.is_draining = worker.is_draining or known[address]["is_draining"]  # since an earlier controller
            if worker.is_draining and not known[address]["is_draining"]:
                self._change("POST", address)
            elif worker.is_draining and not worker.is_stopping and _is_empty(known[address]):
                assert worker.placed is not None, "expected a worker that runs"
                worker.is_stopping = True
                worker.placed.terminate()
                LOG.info("%s has no session and is stopped", worker.spec.name)

    def _scale(self, report: ClusterReport) -> None:
        now = self._clock()
        numbers = [
            group.scaler.desired(load, now)
            for group, load in zip(self.groups, loads_of(self.groups, report), strict=True)
        ]
        if numbers != [group.requested for group in self.groups]:
            self._request(numbers)
        for group, n in zip(self.groups, numbers, strict=True):
            _make(group, n)
            if n < len(group.active):
                leases = {one.spec.name: report.workers.get(one.address, {}).get("leases", 0) for one in group.active}
                self.drain(min(leases, key=lambda name: leases[name]))

    def _request(self, numbers: Sequence[int]) -> None:
        """Ask for nodes for these numbers of workers of the groups."""
        for group, n in zip(self.groups, numbers, strict=True):
            group.requested = n
        self._placement.request([(group.plan.worker, group.requested) for group in self.groups])

    def drain(self, name: str) -> bool:
        """Drain a worker, or all workers of a node, and remove each once it has no session.

        name: of a worker or of a node. Returns: whether there is one.
        """
        found = [worker for worker in self.workers if name in (worker.spec.name, worker.node)]
        for worker in found:
            worker.is_draining = True
            if not worker.address:  # it has not started yet
                worker.is_stopping = True
                if worker.placed is not None:
                    worker.placed.remove()
                    worker.placed = None
        return bool(found)

    # --- the end -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all programs: gateways first, which let their sessions end, then workers, then the authority."""
        self._is_stopping = True
        self._request([0] * len(self.groups))  # else Ray's autoscaler keeps the nodes after the end
        self._end(self.gateways)

    def _end(self, members: list[Member]) -> None:
        for member in members:
            if not member.is_stopping:
                member.is_stopping = True
                if member.placed is not None:
                    member.placed.terminate()

    def _end_programs(self) -> None:
        for members in (self.gateways, self.workers):
            for member in members:
                self._keep(member)
        if all(one.placed is None for one in self.gateways):
            self._end(self.workers)
            if all(one.placed is None for one in self.workers):
                self._end([self.authority])

    @property
    def is_stopped(self) -> bool:
        """Whether all programs have ended after `stop`."""
        return self._is_stopping and all(one.placed is None for one in (self.authority, *self.gateways, *self.workers))

    def describe(self) -> dict[str, Any]:
        """The state of all programs, for operators."""
        report = (self._report() if self.authority.address else None) or ClusterReport()
        return {
            "authority": _describe(self.authority),
            "gateways": [_describe(one) for one in self.gateways],
            "workers": [
                {**_describe(one), "group": group.plan.worker.name, **report.workers.get(one.address, {})}
                for group in self.groups
                for one in group.members
            ],
        }


def _describe(member: Member) -> dict[str, Any]:
    state = "waiting" if member.placed is None else "running" if member.address else "starting"
    return {
        "name": member.spec.name,
        "program": "stopping" if member.is_stopping else state,
        "address": member.address,
        "node": member.node,
        "last_end": member.reason,
    }


def _make(group: Group, n: int) -> None:
    """Make workers until there are `n` that do not drain."""
    while len(group.active) < n:
        group.add()


def _is_empty(known: dict[str, Any]) -> bool:
    """Whether a draining worker is known to have no session, neither of the cluster's gateways nor of other clients."""
    return bool(known["is_draining"]) and not (known["leases"] or known["others"] or known["is_unsure"])
