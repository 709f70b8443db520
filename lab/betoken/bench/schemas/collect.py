"""The cases of the JSON Schema Test Suite that grammars keep, as lines of `suite.jsonl`.

    python -m betoken.bench.schemas.collect jsonschema-4.26.0/json/tests > lab/betoken/bench/schemas/suite.jsonl

The suite is in the source distribution of `jsonschema`. A case is taken if something is valid by it, llguidance keeps
its schema, and `jsonschema` judges all its examples as the suite does: only then can it judge answers.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import Constraint

DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
"""Folders of the suite that are read; a schema that an earlier one has is left out."""
NUM_CASES = 190


def collect(suite: Path, grammars: Grammars) -> Iterator[dict[str, Any]]:
    """The first `NUM_CASES` of them."""
    seen: set[str] = set()
    for draft in DRAFTS:
        for path in sorted((suite / draft).rglob("*.json")):
            for case in json.loads(path.read_text()):
                key = json.dumps(_without_dialect(case["schema"]), sort_keys=True)
                if len(seen) < NUM_CASES and key not in seen and _is_fit(case, grammars):
                    seen.add(key)
                    name = f"{path.relative_to(suite)}: {case['description']}"
                    yield {"name": name, "schema": case["schema"]}


def _without_dialect(schema: Any) -> Any:
    return {key: value for key, value in schema.items() if key != "$schema"} if isinstance(schema, dict) else schema


def _is_fit(case: Any, grammars: Grammars) -> bool:
    schema, examples = case["schema"], case["tests"]
    if not (isinstance(schema, dict) and any(example["valid"] for example in examples)):
        return False
    try:
        grammars.compile(Constraint(json_schema=json.dumps(schema)))
        validator = jsonschema.validators.validator_for(schema)(schema)
        return all(validator.is_valid(example["data"]) == example["valid"] for example in examples)
    except Exception:  # llguidance refuses, or jsonschema knows no such reference or regular expression
        return False


def main() -> None:
    """Print the lines."""
    grammars = Grammars((Path(__file__).parents[4] / "models" / "target" / "tokenizer.json").read_text())
    for case in collect(Path(sys.argv[1]), grammars):
        print(json.dumps(case, ensure_ascii=False))


if __name__ == "__main__":
    main()
