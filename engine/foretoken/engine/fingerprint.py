"""Identity of a checkpoint on disk: what two workers compare before one may stand in for the other."""

import hashlib
import json
from pathlib import Path

from foretoken.engine.errors import ModelRefusedError

EDGE_BYTES = 64 * 1024
_HEADER_LENGTH_BYTES = 8


def hash_weights(directory: Path) -> str:
    """SHA-256 hex of config.json and of every safetensors file's name, size, header, first and last 64 KiB.

    Raises:
        FileNotFoundError: no config.json or no safetensors file.
    """
    digest = hashlib.sha256()
    config = json.loads((directory / "config.json").read_text())
    config.pop("transformers_version", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no *.safetensors file")
    for path in files:
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header_length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            digest.update(file.read(min(header_length, size)))
            file.seek(0)
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


def hash_tokenizer(directory: Path) -> str:
    """`hash_tokenizer_json` of the directory's tokenizer.json; empty when there is none.

    Raises:
        ModelRefusedError: the file is not a tokenizer.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        return hash_tokenizer_json(path.read_text(encoding="utf-8"))
    except Exception as error:  # whatever its contents are taken for
        raise ModelRefusedError(f"{path} is not a tokenizer: {type(error).__name__}: {error}") from error


def hash_tokenizer_json(text: str) -> str:
    """SHA-256 hex of the canonical vocabulary, merges and added tokens of a tokenizer.json's text.

    The router computes the same from the same file: keep the two definitions identical.
    """
    data = json.loads(text)
    model = data["model"]
    vocab = model.get("vocab", {})
    canonical = {
        # BPE, WordPiece, WordLevel: token -> id, sorted by id then token; Unigram: [token, score] by position
        "vocab": sorted(([t, i] for t, i in vocab.items()), key=lambda entry: (entry[1], entry[0]))
        if isinstance(vocab, dict)
        else [entry[0] for entry in vocab],
        # older files write "a b", newer ones ["a", "b"]
        "merges": [m.split(" ") if isinstance(m, str) else list(m) for m in model.get("merges") or []],
        "added_tokens": sorted([t["id"], t["content"]] for t in data.get("added_tokens") or []),
    }
    encoded = json.dumps(canonical, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(encoded.encode()).hexdigest()
