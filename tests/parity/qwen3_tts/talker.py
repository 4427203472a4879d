"""Talker and code predictor of Qwen3-TTS: teacher-forced states and logits, greedy residual codes."""

import torch

from models.layers.kv_cache import KVCache
from models.qwen3_tts.code_predictor import PASS_ROWS
from models.qwen3_tts.config import CodePredictorConfig, TalkerConfig
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.model import Qwen3TTS
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

HEAD = "talker.codec_head.weight"
TABLE = "talker.model.codec_embedding.weight"
VALUES = 2e-5


def model_name(stem: str) -> str:
    """Folder of the checkpoint that a file was made with: `talker_a...` is of `tiny_a`."""
    return f"tiny_{stem.split('_')[1]}"


def run_talkers(golden: GoldenDir, report: Report) -> None:
    """Prompts of several lengths together, then steps; the files have them padded on the left."""
    for stem in golden.stems("talker_"):
        tensors = golden.tensors(stem)
        if not report.has_inputs(stem, tensors, "embeds", "mask", "step_embeds"):
            continue
        model, mask = load_qwen3_tts(golden.model(model_name(stem))), tensors["mask"].bool()
        columns = golden.kept_rows(HEAD, model_name(stem))
        n_slots, n_rows = mask.shape
        n_new = mask.sum(1)
        cache = _cache(model.config.talker_config, n_slots, n_rows + tensors["step_embeds"].shape[1])
        slots = torch.arange(n_slots)
        rows = torch.zeros_like(tensors["embeds"])
        for slot in range(n_slots):
            rows[slot, : n_new[slot]] = tensors["embeds"][slot, mask[slot]]
        hidden = model.talker(rows, cache, slots, n_new, cache.max_len, model.backend)
        logits = model.talker.logits(hidden, model.backend)[..., columns]
        for slot in range(n_slots):
            own = slice(0, int(n_new[slot]))
            for name, got in (("hidden", hidden), ("logits", logits)):
                expected = tensors.get(f"prefill_{name}")
                if expected is not None:
                    report.close(f"{stem} {slot}", f"prompt {name}", got[slot, own], expected[slot, mask[slot]], VALUES)
        steps = [
            model.talker(row[:, None], cache, slots, torch.ones_like(slots), cache.max_len, model.backend)
            for row in tensors["step_embeds"].unbind(1)
        ]
        stepped = torch.cat(steps, dim=1)
        report.close_if(stem, "step hidden", stepped, tensors.get("step_hidden"), VALUES)
        logits = model.talker.logits(stepped, model.backend)[..., columns]
        report.close_if(stem, "step logits", logits, tensors.get("step_logits"), VALUES)
        _compare_cache(stem, tensors, cache, mask, report)


def run_predictors(golden: GoldenDir, report: Report) -> None:
    """Greedy codes one pass at a time, and their logits in one pass."""
    for stem in golden.stems("predictor_"):
        tensors = golden.tensors(stem)
        if not report.has_inputs(stem, tensors, "past_hidden", "code0"):
            continue
        model = load_qwen3_tts(golden.model(model_name(stem)))
        predictor, hidden, first = model.talker.code_predictor, tensors["past_hidden"][:, 0], tensors["code0"][:, 0]
        cache, slots = _cache(predictor.config, len(hidden), PASS_ROWS), torch.arange(len(hidden))
        first_rows = model.talker.code_rows[first]
        logits: list[torch.Tensor] = []

        def greedy(
            scores: torch.Tensor, group: int, table: torch.Tensor | None, logits: list[torch.Tensor] = logits
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            logits.append(scores)
            drawn = scores.argmax(-1)
            return drawn, None if table is None else table[drawn][:, None]

        rows = torch.stack((hidden, first_rows), dim=1)
        codes = predictor(rows, cache, slots, torch.ones_like(slots), greedy, model.backend)
        report.equal_if(stem, "codes", codes, tensors.get("codes"))
        report.close_if(stem, "logits", torch.stack(logits, dim=1), tensors.get("logits"), VALUES)
        parallel = predictor.parallel_logits(hidden, first_rows, codes, cache, slots, model.backend)
        report.close_if(stem, "parallel logits", parallel, tensors.get("parallel_logits"), VALUES)
        frame = model.talker.frame_rows(torch.cat((first[:, None], codes), dim=1))
        report.close_if(stem, "frame row", frame, tensors.get("frame_embed"), VALUES)


def _cache(config: TalkerConfig | CodePredictorConfig, n_slots: int, max_len: int) -> KVCache:
    return KVCache(
        n_layers=config.num_hidden_layers,
        n_slots=n_slots,
        max_len=max_len,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )


def _compare_cache(
    stem: str, tensors: dict[str, torch.Tensor], cache: KVCache, mask: torch.Tensor, report: Report
) -> None:
    """Keys and values of each slot against the columns that the file does not mask."""
    for kind, caches in (("k", cache.k), ("v", cache.v)):
        for layer, got in enumerate(caches):
            if (expected := tensors.get(f"cache.{kind}.{layer}")) is None:
                continue
            n_steps = expected.shape[2] - mask.shape[1]
            for slot, own in enumerate(torch.nn.functional.pad(mask, (0, n_steps), value=True)):
                rows = expected[slot][:, own]
                report.close(f"{stem} {slot}", f"{kind} of layer {layer}", got[slot, :, : rows.shape[1]], rows, VALUES)


def override(model: Qwen3TTS, tensors: dict[str, torch.Tensor], rows: dict[str, int]) -> None:
    """Replace rows of weights as `override.NAME` of a case says."""
    for name, row in rows.items():
        model.get_parameter(name).data[row] = tensors[f"override.{name}"]
