"""Token ids of real text: the text files of the installed packages, documentation and programs alike.

Two tokenisations, because they repeat themselves to different degrees: words, spaces and signs one by one ("text"), and
a byte-level BPE of 32k tokens trained on the same text ("bpe"), which packs what is frequent into longer tokens.
"""

import hashlib
import re
import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

VOCAB_SIZE = 65_536
_TEXT_BYTES = 8 << 20
_PATTERNS = ("METADATA", "*.md", "*.rst", "*.txt", "*.py")
_BPE_SIZE = 32_000


def text_ids(tokenisation: Literal["text", "bpe"]) -> Tensor:
    """int64 [some millions] of ids below `VOCAB_SIZE`; 0 ends a file. Made once, kept in the temporary folder."""
    cached = Path(tempfile.gettempdir()) / f"skyrl-qwen38-{tokenisation}-ids-{_TEXT_BYTES}.pt"
    if not cached.exists():
        ids = _words(_texts()) if tokenisation == "text" else _bpe(_texts())
        temporary = cached.with_suffix(".tmp")
        torch.save(torch.tensor(ids), temporary)
        temporary.replace(cached)
    return torch.load(cached, weights_only=True)


def _words(texts: list[str]) -> list[int]:
    vocabulary: dict[str, int] = {}
    ids: list[int] = []
    for text in texts:
        # The last id stands for every word that comes too late for the vocabulary.
        words = re.findall(r"\w+|\s+|[^\w\s]", text)
        ids += [min(vocabulary.setdefault(word, len(vocabulary) + 1), VOCAB_SIZE - 1) for word in words]
        ids.append(0)
    return ids


def _bpe(texts: list[str]) -> list[int]:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=_BPE_SIZE, special_tokens=["<eos>"], show_progress=False)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [*encoding.ids, 0]
    return ids


def _texts() -> list[str]:
    """Files of the packages that torch is installed beside, each text once, in an order that mixes packages."""
    texts: dict[str, None] = {}
    size = 0
    packages = Path(torch.__file__).parents[1]
    paths = {path.relative_to(packages).as_posix(): path for pattern in _PATTERNS for path in packages.rglob(pattern)}
    for name in sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = paths[name].read_text(encoding="utf-8", errors="ignore") if paths[name].is_file() else ""
        if 1000 < len(text) < 200_000 and text not in texts and size + len(text) <= _TEXT_BYTES:
            texts[text] = None
            size += len(text)
    return list(texts)
