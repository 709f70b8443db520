"""Draft models with other tokenizers than the embedded target's, made of the embedded draft model."""

import json
import random
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, ByteLevelBPETokenizer

MODELS = Path(__file__).parents[3] / "models"
TARGET_JSON = (MODELS / "target" / "tokenizer.json").read_text()
NUM_KEPT = {"tokens": 3700, "text": 1900}
"""Ids that a draft model keeps: with the first number most of a text's tokens are common, with the second few."""
_EMBEDDING = "model.embed_tokens.weight"


def cut_tokenizer(tokenizer_json, num_ids, seed=0):
    """The tokenizer with its first ids alone, in another order, and the new id of each."""
    data = json.loads(tokenizer_json)
    order = list(range(num_ids))
    random.Random(seed).shuffle(order)
    model = data["model"]
    model["vocab"] = {token: order[index] for token, index in model["vocab"].items() if index < num_ids}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [[left, right] for left, right in pairs if left + right in model["vocab"]]
    for token in data["added_tokens"]:
        token["id"] = order[token["id"]]
    return json.dumps(data), order


def trained_json(text, num_ids, *special):
    """A tokenizer trained on the text."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=num_ids, special_tokens=list(special), show_progress=False)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer._tokenizer.to_str()


def save_translated_pair(folder, kind):
    """Write the embedded target, and a draft model whose drafts are translated by `tokens` or as `text`."""
    shutil.copytree(MODELS / "target", folder / "target")
    shutil.copytree(MODELS / "draft", folder / "draft")
    text, order = cut_tokenizer(TARGET_JSON, NUM_KEPT[kind])
    (folder / "draft" / "tokenizer.json").write_text(text)
    weights = load_file(MODELS / "draft" / "model.safetensors")
    rows = weights[_EMBEDDING][: len(order)]
    weights[_EMBEDDING] = rows[[order.index(place) for place in range(len(order))]].contiguous()
    save_file(weights, folder / "draft" / "model.safetensors", {"format": "pt"})
    config = folder / "draft" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": len(order)}))
