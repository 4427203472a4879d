"""The conversions of a worker: a converter whose thread has failed is replaced by the next load."""

from pathlib import Path

import pytest
import torch

from models.errors import ModelError
from tests.models.token2wav.s3gen import tiny_s3gen
from tests.worker.loop.engines import make_config
from worker.conversion.conversions import Conversions
from worker.conversion.converter import ConversionSource, Converter
from worker.engine_thread import EngineThread
from worker.start.voices import ReferenceSound

WAIT_S = 60.0


def test_loads_again_after_a_failed_thread(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, conversions = make_config(s3gen_path=tiny_s3gen.write(tmp_path)), Conversions(None)
    voice = ReferenceSound.read(root / "assets" / "ref_audio" / "default.wav")
    loaded: list[str] = []
    thread = EngineThread(torch.device("cpu"))
    thread.start()
    try:
        conversions.load(config, thread, loaded.append)
        first = conversions.converter
        with monkeypatch.context() as patch:
            patch.setattr(Converter, "_step", lambda *_: 1 / 0)
            job = first.submit(ConversionSource(speech_tokens=(1, 2, 3, 4)), voice, 0, lambda part: None)
            with pytest.raises(ModelError):
                job.done.result(WAIT_S)
        body = conversions.body()
        assert body is not None and not body["running"] and not conversions.is_loaded, body
        conversions.load(config, thread, loaded.append)
        assert conversions.is_loaded and conversions.converter is not first and len(loaded) == 2
        conversions.load(config, thread, loaded.append)
        assert len(loaded) == 2, "expected a running converter to stay"
    finally:
        conversions.detach()()
        thread.close()
