"""The speech tokenizer (`s3tokenizer_*`): hidden rows and digits within a tolerance, tokens exactly."""

import torch

from models.layers.weights import on_meta
from models.token2wav.prompt.s3_tokenizer import S3Tokenizer, config_of
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

TOLERANCE = 5e-5


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("s3tokenizer_"):
        tensors, settings = golden.tensors(stem), golden.config(stem)
        if not report.has_inputs(stem, tensors, "in.mel", "in.lens"):
            continue
        model = _model({k.removeprefix("w."): v for k, v in tensors.items() if k.startswith("w.")}, settings)
        mel, n_frames = tensors["in.mel"], tensors["in.lens"].long()
        hidden, _ = model.encoder(mel, n_frames)
        speech_tokens, n_speech_tokens = model(mel, n_frames)
        report.equal_if(stem, "number of tokens", n_speech_tokens, tensors.get("out.code_lens"))
        for row, n in enumerate(n_speech_tokens.tolist()):
            case, frames = f"{stem} {row}", n_frames[row : row + 1]
            alone, _ = model(mel[row : row + 1, :, : int(frames)], frames)
            for name, got in (("hidden", hidden), ("fsq_pre", model.codebook.project_down(hidden))):
                if (expected := tensors.get(f"out.{name}")) is not None:
                    report.close(case, name, got[row, :n], expected[row, :n], TOLERANCE)
            if (expected := tensors.get("out.codes")) is not None:
                report.equal(case, "codes", speech_tokens[row, :n], expected[row, :n])
                report.equal(case, "tokens, alone", alone[0], expected[row, :n])


def _model(weights: dict[str, torch.Tensor], settings: dict[str, object]) -> S3Tokenizer:
    config = config_of(weights)
    if "attn_ln_eps" in settings:
        config = config.model_copy(update={"first_norm_eps": settings["attn_ln_eps"]})
    with on_meta():
        model = S3Tokenizer(config)
    model.load_state_dict(weights, assign=True)
    model.encoder.derive("cpu", torch.float32)
    return model
