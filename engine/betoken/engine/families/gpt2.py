"""GPT-2: GGUF files."""

from betoken.engine.families.family import Architecture, Family, Given


def _finish(given: Given) -> None:
    given["n_positions"], given["n_inner"] = given.get("n_ctx"), given.pop("feed_forward_length", None)


GPT2 = Family(model_types=("gpt2",), gguf={"gpt2": Architecture("gpt2", "gpt2", finish=_finish)})
