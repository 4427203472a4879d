"""The speaker encoder (`campplus_*`): its front end, each sound alone, and all sounds in one bucket."""

import torch
from torch.nn.functional import pad

from models.layers.weights import on_meta
from models.token2wav.prompt.campplus import CampPlus, config_of, fold_batch_norms
from tests.parity.golden import GoldenDir
from tests.parity.report import Report

TOLERANCE = 2e-5
HEAD_STEP = 8  # the files contain every 8th channel of the front end


def run(golden: GoldenDir, report: Report) -> None:
    for stem in golden.stems("campplus_"):
        tensors = golden.tensors(stem)
        sounds = sorted(name.removeprefix("in.fbank") for name in tensors if name.startswith("in.fbank"))
        if not sounds:
            report.fail(stem, "input", "missing: in.fbank0")
            continue
        weights = fold_batch_norms({k.removeprefix("w."): v for k, v in tensors.items() if k.startswith("w.")})
        with on_meta():
            model = CampPlus(config_of(weights))
        model.load_state_dict(weights, assign=True)

        fbanks = [tensors[f"in.fbank{sound}"] for sound in sounds]
        n_frames = torch.tensor([fbank.shape[1] for fbank in fbanks])
        bucket = int(n_frames.max()) + 13
        batch = torch.cat([pad(fbank, (0, 0, 0, bucket - fbank.shape[1]), value=1e3) for fbank in fbanks])
        together = model(batch, n_frames)
        for row, (sound, fbank) in enumerate(zip(sounds, fbanks, strict=True)):
            case = f"{stem} {sound}"
            head = model.head(fbank, torch.ones(1, 1, fbank.shape[1], dtype=torch.bool))[:, ::HEAD_STEP]
            report.close_if(case, "front end", head, tensors.get(f"out.head{sound}"), TOLERANCE)
            expected = tensors.get(f"out.emb{sound}")
            report.close_if(case, "vector", model(fbank), expected, TOLERANCE)
            report.close_if(case, "vector, in a bucket", together[row : row + 1], expected, TOLERANCE)
