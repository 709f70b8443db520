"""Makes a PARD checkpoint of a draft model without training it: the draft's weights, and a mask token.

Its drafts are poor after the first token, which must not change any token of an answer.
"""

import json
from pathlib import Path

from betoken.engine.weights.checkpoint import resolve_directory
from betoken.engine.whole_folder import whole_folder


def make_pard(draft: str, folder: Path) -> str:
    """Write the checkpoint unless the folder exists; return its name.

    Raises:
        ValueError: the draft model is a GGUF file, which cannot name a mask token.
    """
    if draft.endswith(".gguf"):
        raise ValueError(f"draft {draft}: a GGUF file names no mask token, give a PARD checkpoint (--pard)")
    if folder.exists():
        return str(folder)
    source = resolve_directory(draft, None)
    described = json.loads((source / "config.json").read_text())
    mask = {"pard_token": described.get("text_config", described)["vocab_size"] - 1, "spd_type": "pard"}
    with whole_folder(folder) as partial:
        for path in source.iterdir():
            if path.is_file() and path.name != "config.json":
                (partial / path.name).symlink_to(path.resolve())
        (partial / "config.json").write_text(json.dumps(described | mask))
    return str(folder)
