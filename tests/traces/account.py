"""Records a replayed session under the field names of the recording.

Reads the session, its slot and the log of its unit. Does not contain the expected values and changes nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.inputs.audio_sizes import HOP
from models.inputs.mel_stream import window_start
from models.inputs.tokens import Tokenizer
from models.stages.unit_steps import UnitSteps
from tests.parity.checksum import checksum
from tests.traces.watch import UnitLog
from worker.loop.session import Session
from worker.loop.unit_decoder import UnitDecoder


@dataclass
class SessionRecord:
    """The recorded fields of one replayed session.

    prepare, units, final: as `expected.json` has them; a unit has `counts` besides. tensors: as `tensors.safetensors`.
    keeps_rows: units whose context rows are kept as tensors. from_snapshot: the prompt was copied, not fed.
    """

    unit_steps: UnitSteps
    session: Session
    tokenizer: Tokenizer
    keeps_rows: frozenset[int] = frozenset()
    prepare: dict[str, Any] = field(default_factory=dict)
    units: list[dict[str, Any]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    from_snapshot: bool = False
    _res_ids: list[int] = field(default_factory=list)
    _total_ids: list[int] = field(default_factory=list)
    _schema: str = ""
    _n_events: int = 0
    _n_remembered: int = 0

    def take_prepare(self, log: UnitLog, prefix: str, suffix: str) -> None:
        encode, window, in_context = self.tokenizer.encode, self.session.window, self._in_context
        self.prepare = {
            "prompt_prefix_ids": encode(prefix),
            "prompt_suffix_ids": encode(suffix),
            "ops": log.feeds.get("prompt", []),
            "kv_len": self.n_rows,
            "preserve": window.preserve,
            "prefix_len": window.prefix if in_context else 0,
            "kv": self._checksums(),
            "t2w_buffer": self._waiting_tokens(),
            "marker_ids": encode(self.session.config.window.marker) if in_context else [],
            "suffix_ids": list(window.suffix) if in_context else [],
        }
        self.from_snapshot = not log.feeds and self.n_rows > 0

    def take_unit(self, log: UnitLog, job: Any) -> None:
        """Record a closed unit. job: its `worker.loop.duplex_job.DuplexJob`."""
        decoder = job.decoder
        if decoder is not None:
            special = self.tokenizer.special
            self._res_ids += decoder.res_ids
            self._total_ids += [*decoder.all_ids, special.unit_end]
            self._schema += self._unit_schema(log, job)
        self._take_tensors(f"u{len(self.units)}.", log)
        self.units.append(
            {
                "prefill": self._prefill(log, job),
                "generate": self._generate(log, decoder),
                "finalize": None if decoder is None else self._finalize(log),
                "counts": self._counts(),
            }
        )
        self._n_events, self._n_remembered = self.session.window.events, self._count("remembered")

    def take_final(self) -> None:
        self.final = {
            "res_ids": self._res_ids,
            "total_ids": self._total_ids,
            "schema": self._schema,
            "kv_len": self.n_rows,
            "kv": self._checksums(),
        }

    # --- a unit's phases -----------------------------------------------------------------------

    def _prefill(self, log: UnitLog, job: Any) -> dict[str, Any]:
        fields = {
            "success": job.decoder is not None,
            "kv_len": log.n_generated if log.n_prefilled is None else log.n_prefilled,
            "ops": log.feeds.get("prefill", []),
            "audio_buffer_left": self.session.audio_buffer.n_waiting,
            "audio_chunk_idx": self.session.audio_buffer.n_units,
            "audio_encoder_kv_len": self._count("audio_rows"),
        }
        if job.decoder is not None:
            modes = {(False, True): "AUDIO", (True, False): "VISION", (True, True): "OMNI"}
            fields["mode"] = modes[bool(job.layout.image_starts), bool(job.layout.audio_starts)]
        if log.mel is not None:
            n_samples = self.unit_steps.state.mel.n_samples[self.session.slot]
            start = window_start(n_samples)
            fields |= {
                "mel_frames": log.mel.shape[1],
                "mel_chk": checksum(log.mel),
                "mel_window_samples": int(n_samples - start),
                "mel_base_frame": int(start) // HOP,
            }
        return fields

    def _generate(self, log: UnitLog, decoder: UnitDecoder | None) -> dict[str, Any]:
        result, speech = log.event, self.unit_steps.state.speech
        n_spoken = 0 if speech is None else int(speech.cache.positions[self.session.slot])
        sound = torch.zeros(0) if result.pcm is None else torch.from_numpy(result.pcm)
        return {
            "is_listen": result.is_listen,
            "text": result.text,
            "end_of_turn": result.end_of_turn,
            "current_time": result.index,
            "n_tokens": result.n_tokens,
            "n_tts_tokens": result.n_speech_tokens,
            "all_ids": list(result.tokens),
            "text_ids": [] if decoder is None else list(decoder.spoken),
            "terminator_id": None if decoder is None else decoder.terminator,
            "needs_finalize": decoder is not None,
            "history_added": self._history_added(),
            "kv_len": log.n_generated,
            "turn_ended": not self.session.turn_open,
            "generate_count": self.session.n_decided,
            "ops": log.feeds.get("token", []),
            "steps": [{"logits": one.logits, "token": one.token, "history_len": one.remembered} for one in log.choices],
            "tts": [
                {
                    "condition_len": len(call.rows),
                    "condition_chk": checksum(call.rows),
                    "pos": call.start,
                    "min": call.least,
                    "max": call.most,
                    "codes": call.speech_tokens,
                    "kv_len": call.n_after,
                }
                for call in log.speech
            ],
            "tts_pos_after": n_spoken,
            "tts_kv_alive": self._count("speech_rows") > 0,
            "t2w_calls": log.windows,
            "t2w_buffer": self._waiting_tokens(),
            "audio_samples": len(sound),
            "audio_chk": checksum(sound),
        }

    def _finalize(self, log: UnitLog) -> dict[str, Any]:
        window, n_rows = self.session.window, self.n_rows
        lengths = [unit.length for unit in window.units]
        return {
            "kv_len": n_rows,
            "ops": log.feeds.get("finalize", []),
            "evicted": window.events > self._n_events,
            "window": {
                "unit_ids": [unit.id for unit in window.units],
                "unit_lengths": lengths,
                "preserve": window.preserve,
                "prefix_len": window.prefix if self._in_context else 0,
                "previous_len": len(window.previous_ids),
                "previous_ids": list(window.previous_ids),
                "previous_text": window.previous_text,
                "position_offset": window.position_offset,
                "events": window.events,
                "dropped_tokens": window.dropped_tokens,
                "dropped_units": window.dropped_units,
            },
            "kv": self._checksums(),
            "consistent": window.preserve + sum(lengths) == n_rows,
        }

    def _unit_schema(self, log: UnitLog, job: Any) -> str:
        """The unit as text, with placeholders for media and visible special tokens."""
        special, decode = self.tokenizer.special, self.tokenizer.decode
        media = dict(zip(job.layout.image_starts, log.images, strict=True)) | dict(
            zip(job.layout.audio_starts, log.audio, strict=True)
        )
        ids, place, text = job.layout.ids, 0, ""
        while place < len(ids):
            rows = media.get(place)
            kind = "img" if place in job.layout.image_starts else "audio"
            text += decode([ids[place]], skip_special=False) if rows is None else f"[{kind}_embed_{len(rows)}]"
            place += 1 if rows is None else len(rows)
        return text + decode([*job.decoder.all_ids, special.unit_end], skip_special=False)

    def _take_tensors(self, prefix: str, log: UnitLog) -> None:
        if log.pending_logits is not None:
            self.tensors[f"{prefix}pending_logits"] = log.pending_logits
        for rows in log.audio:
            self.tensors[f"{prefix}audio_embeds"] = rows
        for number, rows in enumerate(log.images):
            self.tensors[f"{prefix}vision_embeds.{number}"] = rows
        for call in log.speech:
            self.tensors[f"{prefix}tts_condition"] = call.rows
        if len(self.units) in self.keeps_rows:
            for part, layers in self._rows().items():
                for layer, rows in enumerate(layers):
                    self.tensors[f"{prefix}after_evict.{part}.{layer}"] = rows.clone()

    # --- the slot ------------------------------------------------------------------------------

    @property
    def n_rows(self) -> int:
        """Context rows as counted on the device."""
        return self._count("context_len")

    @property
    def _in_context(self) -> bool:
        return self.session.config.window.mode == "context"

    def _device_counts(self) -> dict[str, int]:
        state, slot = self.unit_steps.state, self.session.slot
        tensors = {
            "context_len": state.llm.lengths,
            "remembered": state.text.count,
            "audio_rows": None if state.apm is None else state.apm.lengths,
            "n_samples": None if state.mel is None else state.mel.n_samples,
            "n_frames": None if state.mel is None else state.mel.n_emitted,
            "speech_rows": None if state.speech is None else state.speech.cache.lengths,
        }
        return {name: 0 if tensor is None else int(tensor[slot]) for name, tensor in tensors.items()}

    def _count(self, name: str) -> int:
        return self._device_counts()[name]

    def _counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counters of the host and of the device, which must be equal."""
        host = self.unit_steps.counters(self.session.slot)._asdict()
        device = self._device_counts()
        return {name: host[name] for name in device}, device

    def _history_added(self) -> list[int]:
        """Tokens added to the sampler's history by this unit."""
        ring = self.unit_steps.state.text.history[self.session.slot]
        return [int(ring[place % len(ring)]) for place in range(self._n_remembered, self._count("remembered"))]

    def _waiting_tokens(self) -> list[int]:
        windows = self.session.speech.windows
        return [] if windows is None else list(windows.waiting)

    def _rows(self) -> dict[str, list[Tensor]]:
        """Keys and values of the context, [kv_heads, rows, head_dim] for each layer."""
        cache, slot = self.unit_steps.state.llm, self.session.slot
        return {
            part: [layer[slot, :, : self.n_rows] for layer in layers]
            for part, layers in (("key", cache.k), ("value", cache.v))
        }

    def _checksums(self) -> dict[str, list[list[float]]]:
        return {part[0]: [checksum(rows) for rows in layers] for part, layers in self._rows().items()}
