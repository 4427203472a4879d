"""The voice conversion of a worker, if it has one: when it is loaded, and the voices that it speaks in."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.errors import SettingsError
from worker.admission.lease_count import LeaseCount
from worker.assembly.backend_flags import resolve_compile
from worker.assembly.parts import pick_device, pick_dtype
from worker.config.session import EngineConfig
from worker.conversion.converter import Converter
from worker.conversion.unit_gate import UnitGate
from worker.engine_thread import EngineThread
from worker.start.voices import ReferenceSound
from worker.voice_registry import voice_file

LOG = logging.getLogger(__name__)
N_SLOTS = 16  # requests; their pieces share batches


class Conversions:
    """The converter of the loaded settings.

    slots: of requests that are served at the same time. error: why the latest S3Gen was not loaded.

    Args:
        default: file of the voice of requests without one; None: they are refused.
        folders: of voices that come with the server, and of registered ones.
    """

    def __init__(self, default: Path | None, *folders: Path):
        self._default, self._folders = default, folders
        self.error: str | None = None
        self._converter: Converter | None = None
        self._path: Path | None = None
        self._gate: UnitGate | None = None
        self.slots = LeaseCount("voice conversion", N_SLOTS)

    def load(
        self, engine: EngineConfig, thread: EngineThread, progress: Callable[[str], None], *, may_fail: bool = False
    ) -> None:
        """Load, compile and capture what `engine.s3gen_path` names, unless one is loaded or the settings name none.

        Call it before the slots of the omni model are sized: they take the memory that is left.

        Args:
            thread: of live units, which come first.
            may_fail: log an error, as other models are served on. `error` has it in any case.
        Raises: as `Converter`, unless it may fail.
        """
        if (path := engine.s3gen_path) is None or self.is_loaded:
            return
        self.detach()()  # one whose thread has failed
        progress(f"voice conversion: {path.name}")
        device = pick_device(engine.device)
        dtype, compiling = pick_dtype(engine.dtype, device), resolve_compile(engine, device.type).compile
        gate = UnitGate(thread)
        try:
            modes = engine.s3gen_modes
            converter = Converter(path, device=device, dtype=dtype, compile=compiling, modes=modes, gate=gate)
        except Exception as error:
            self.error = str(error)
            gate.close()
            if not may_fail:
                raise
            LOG.exception("the voice conversion cannot start; the others are served on")
            return
        self._path, self._gate, self._converter, self.error = path, gate, converter, None

    def detach(self) -> Callable[[], None]:
        """Give no more slots of what is loaded. Returns: what frees its networks, graphs and compiled code."""
        converter, self._converter, gate, self._gate = self._converter, None, self._gate, None

        def close() -> None:
            if converter is not None:
                converter.close()
            if gate is not None:
                gate.close()

        return close

    @property
    def is_loaded(self) -> bool:
        """Whether a converter runs; one whose thread has failed does not."""
        return self._converter is not None and self._converter.is_running

    @property
    def converter(self) -> Converter:
        """Raises: SettingsError without one."""
        if self._converter is None:
            raise SettingsError("voice conversion", expected="a worker with model.s3gen_path", got="one without")
        return self._converter

    def body(self) -> dict[str, Any] | None:
        """State and counters for /health; None without a converter."""
        converter, path = self._converter, self._path
        if converter is None:
            return None
        counts = {"jobs": converter.n_jobs, "batches": converter.batches, "pieces": converter.pieces}
        is_running = converter.is_running
        slots = self.slots.body() if is_running else {"total": 0, "free": 0}
        return {"path": str(path), "running": is_running, "slots": slots, **counts}

    def voice(self, named: str | None, samples: np.ndarray | None, rate: int) -> ReferenceSound:
        """The sound whose voice speaks: of a name, of samples [n] at `rate` Hz, or the default one. Reads files.

        Raises: SettingsError for an unknown name, or without a default; AudioError.
        """
        if samples is not None:
            return ReferenceSound(torch.from_numpy(samples)[None].clamp(-1, 1), rate)
        if named is not None:
            return ReferenceSound.read(voice_file(named, *self._folders))
        if self._default is None:
            raise SettingsError("voice", expected="a worker with a default voice", got="one without")
        return ReferenceSound.read(self._default)
