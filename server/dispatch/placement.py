"""Chooses the worker of a session: of a gateway's workers, and of a cluster's by its authority. Contains no I/O."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, Protocol, TypeVar

from models.errors import SettingsError
from server.dispatch.queue import ANY_WORKER, Model, Needs

# Share of a worker's slots: a session returns to its worker, or goes to one that has its voice, if that one is by at
# most this share fuller, or with `packs` emptier, than the worker that the policy would choose.
AFFINITY_SHARE = 0.25
MAX_VOICES = 16  # that a worker keeps in memory
MAX_SESSIONS = 256  # that are remembered of one worker
LABELS_QUERY = "labels"  # of the address of a WebSocket: labels that the session's worker must have, with commas
MAX_LABELS, MAX_LABEL = 8, 200


class PlaceableWorker(Protocol):
    """A worker, as far as its choice depends on it."""

    @property
    def labels(self) -> frozenset[str]: ...

    @property
    def affinity(self) -> "Affinity": ...

    @property
    def is_short_of_memory(self) -> bool: ...

    def n_free_of(self, model: Model) -> int: ...

    def n_slots_of(self, model: Model) -> int: ...


AnyWorker = TypeVar("AnyWorker", bound=PlaceableWorker)


class Affinity:
    """The latest sessions of a worker, and the voices that they had it prepare."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, None] = OrderedDict()
        self._voices: OrderedDict[str, None] = OrderedDict()

    def record(self, session_id: str, voice: str) -> None:
        """Record a session that gets a slot. voice: "": the default one."""
        _remember(self._sessions, session_id, MAX_SESSIONS)
        if voice:
            _remember(self._voices, voice, MAX_VOICES)

    def rank(self, session_id: str, voice: str) -> int:
        """2 for a worker that has served the session, 1 for one that has its voice, 0 for others."""
        return 2 if session_id in self._sessions else int(bool(voice) and voice in self._voices)

    def clear(self) -> None:
        """Forget everything: the process has ended."""
        self._sessions.clear()
        self._voices.clear()


def _remember(kept: "OrderedDict[str, None]", name: str, limit: int) -> None:
    kept[name] = None
    kept.move_to_end(name)
    if len(kept) > limit:
        kept.popitem(last=False)


def choose(
    workers: Sequence[AnyWorker], model: Model, session_id: str, needs: Needs = ANY_WORKER, *, packs: bool = False
) -> AnyWorker | None:
    """The worker whose slot a session gets; None if no worker with its labels has a free one.

    The order of the rules: labels and a free slot; enough memory; the policy, with affinity among workers that are
    about as full as the one that the policy chooses; the order of `workers`.

    Args:
        workers: all that the session may get.
        model: whose slot it needs.
        session_id: its id.
        needs: its labels and its voice.
        packs: choose the smallest share of free slots instead of the largest.
    """
    able = [one for one in workers if needs.labels <= one.labels and one.n_free_of(model) > 0]
    able = [one for one in able if not one.is_short_of_memory] or able
    if not able:
        return None
    # Slots are those that a worker serves in time by its own measurement, so their free share is its headroom.
    shares = [one.n_free_of(model) / one.n_slots_of(model) for one in able]
    best = min(shares) if packs else max(shares)
    near = [one for one, share in zip(able, shares, strict=True) if abs(share - best) <= AFFINITY_SHARE]
    rank, _ = max((one.affinity.rank(session_id, needs.voice), -index) for index, one in enumerate(near))
    if rank:
        return next(one for one in near if one.affinity.rank(session_id, needs.voice) == rank)
    return able[shares.index(best)]


def labels_of(health: Mapping[str, Any]) -> frozenset[str]:
    """The labels of a worker, from its /health: `model:` with its folder's name, and `precision:` of its weights."""
    model = health.get("model")
    given = model if isinstance(model, dict) else {}
    path = given.get("path")
    precision = given.get("precision_label", given.get("precision"))  # workers of earlier versions have no label
    labels = {f"model:{PurePath(path).name}"} if isinstance(path, str) and path else set()
    return frozenset(labels | ({f"precision:{precision}"} if isinstance(precision, str) else set()))


def needs_of(query: Mapping[str, str]) -> Needs:
    """What a WebSocket's address demands of the session's worker. Raises: SettingsError."""
    labels = [label for label in query.get(LABELS_QUERY, "").split(",") if label]
    if len(labels) > MAX_LABELS or any(len(label) > MAX_LABEL for label in labels):
        expected = f"at most {MAX_LABELS} labels of {MAX_LABEL} characters"
        raise SettingsError(LABELS_QUERY, expected=expected, got=f"{len(labels)}")
    return Needs(frozenset(labels)) if labels else ANY_WORKER


def voice_of(fields: Mapping[str, object]) -> str:
    """What identifies the voice that a worker's request names or brings; "": the default one."""
    for name in ("ref_audio_data", "ref_audio_path", "voice"):
        value = fields.get(name)
        if isinstance(value, str) and value:
            return blake2b(value.encode(), digest_size=16).hexdigest()
    return ""
