"""A checkpoint's tokenizer as `transformers` loads it. Torch-free until the first load.

Used for what `tokenizers` does not read by itself: vocabularies kept as `vocab.json` and `merges.txt`, and chat
templates. A tokenizer in `tokenizer.json` is read by `tokenizers` directly.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_pretrained(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a checkpoint folder; no code of the checkpoint is run, and no network is used.

    Raises: errors of `transformers`, which has no common base class for them.
    """
    # Not at the top: measured on two CPU cores, this import takes 2.5 s and loads torch. Reading tokenizer.json with
    # `tokenizers` takes 2 ms; encoding is 1.7 times and decoding one token 2.5 times as fast as through transformers.
    from transformers import AutoTokenizer

    # Every checkpoint of this family has Qwen's byte-level BPE. Naming the type keeps AutoTokenizer from looking for
    # it in config.json, whose `model_type` and `auto_map` refer to Python files in the checkpoint.
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, tokenizer_type="qwen2", local_files_only=True
    )
    return tokenizer
