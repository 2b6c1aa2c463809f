"""Token ids of real text: the text files of the installed packages, documentation and programs alike."""

import hashlib
import tempfile
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

VOCAB_SIZE = 32_000
_TEXT_BYTES = 16 << 20
_PATTERNS = ("METADATA", "*.md", "*.rst", "*.txt", "*.py")


def text_ids() -> Tensor:
    """int64 [some millions] of ids below `VOCAB_SIZE`, from a byte-level BPE trained on the same text; made once."""
    cached = Path(tempfile.gettempdir()) / f"skyrl-qwen38-text-ids-{VOCAB_SIZE}-{_TEXT_BYTES}.pt"
    if not cached.exists():
        texts = list(_texts())
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(texts, vocab_size=VOCAB_SIZE, special_tokens=["<eos>"], show_progress=False)
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(texts):
            ids += [*encoding.ids, 0]
        temporary = cached.with_suffix(".tmp")
        torch.save(torch.tensor(ids), temporary)
        temporary.replace(cached)
    return torch.load(cached, weights_only=True)


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
