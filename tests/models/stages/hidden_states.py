"""The language model's hidden states during a test; the regions return only logits and chosen tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from models.omni import OmniModel


@contextmanager
def record_hidden(model: OmniModel) -> Iterator[list[Tensor]]:
    """A list that receives the hidden states of every prefill [B, T, D] and decode step [B, D] in the block."""
    llm, recorded = model.llm, []
    prefill, decode = llm.prefill, llm.decode

    def recording(call: Any) -> Any:
        def run(*arguments: Any) -> tuple[Tensor, Tensor]:
            hidden, logits = call(*arguments)
            recorded.append(hidden.clone())
            return hidden, logits

        return run

    llm.prefill, llm.decode = recording(prefill), recording(decode)
    try:
        yield recorded
    finally:
        del llm.prefill, llm.decode
