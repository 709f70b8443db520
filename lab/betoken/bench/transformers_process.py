"""The baseline of every comparison: `transformers` `generate()` in a separate process.

Reads one JSON object per line from stdin and answers each with one on stdout: `generate` (plain, assisted by a
draft model, or prompt lookup), `gap` (distance of the two best logits at one position). Started by `baseline.py`.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

from betoken.common.gguf import find_gguf, read_header, read_tokenizer

METHODS = ("plain", "assisted", "prompt_lookup")
PROMPT_LOOKUP_TOKENS = 10


@dataclass(slots=True)
class Models:
    """The loaded pair; `draft` is None when no assistant was given."""

    target: Any
    draft: Any
    tokenizer: Any

    @classmethod
    def load(cls, target: str, draft: str | None, dtype: str, device: str) -> "Models":
        """Load both models on one device in one dtype."""

        def load(name: str) -> Any:
            from_pretrained: Any = AutoModelForCausalLM.from_pretrained
            return from_pretrained(**_source(name), dtype=getattr(torch, dtype)).eval().to(device)

        return cls(
            target=load(target),
            draft=load(draft) if draft else None,
            tokenizer=_tokenizer(target),
        )

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one `generate` request: output ids (prompt excluded), prompt ids, seconds inside `generate()`."""
        torch.set_num_threads(request["num_threads"])
        torch.manual_seed(request.get("seed", 0))
        inputs = self.tokenizer(request["prompt"], return_tensors="pt").to(self.target.device)
        arguments = {**_sampling(request), **self._method(request), **self._end(request)}
        start = time.perf_counter()
        output = self.target.generate(**inputs, max_new_tokens=request["max_new_tokens"], **arguments)
        ids: list[int] = output[0].tolist()  # which waits for a GPU
        seconds = time.perf_counter() - start
        num_prompt = inputs.input_ids.shape[1]
        return {"prompt_ids": ids[:num_prompt], "ids": ids[num_prompt:], "seconds": seconds}

    def gap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Top-2 logit gap of greedy decoding at output token `position` (0-based)."""
        inputs = self.tokenizer(request["prompt"], return_tensors="pt").to(self.target.device)
        output = self.target.generate(
            **inputs,
            max_new_tokens=request["position"] + 1,
            do_sample=False,
            **self._end(request),
            return_dict_in_generate=True,
            output_logits=True,
        )
        best, second = output.logits[-1][0].float().topk(2).values
        return {"gap": float(best - second)}

    def _method(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["method"]:
            case "plain":
                return {}
            case "assisted":
                return {"assistant_model": self.draft}
            case "prompt_lookup":
                return {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
            case other:
                raise ValueError(f"method is {other!r}, not one of {METHODS}")

    def _end(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ids that end an answer: the model's EOS and, as in our router, the EOS of a tokenizer with a chat template.
        Where EOS is ignored, an id that the model lacks."""
        eos = self.target.generation_config.eos_token_id
        ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
        pad_id = ids[0] if ids else 0
        if request.get("ignore_eos"):
            ids = [self.target.config.vocab_size]
        elif self.tokenizer.chat_template and self.tokenizer.eos_token_id not in (None, *ids):
            ids = [*ids, self.tokenizer.eos_token_id]
        return {"pad_token_id": pad_id} | ({"eos_token_id": ids} if ids else {})


def _source(name: str) -> dict[str, Any]:
    """Place from which `from_pretrained` loads a model; a GGUF file is dequantised there first."""
    file = find_gguf(Path(name))
    if file is None:
        return {"pretrained_model_name_or_path": name}
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    return source | {"quantization_config": GgufConfig(dequantize=True)}


def _tokenizer(name: str) -> Any:
    """A GGUF file's is ours: transformers forgets how some of them cut a text."""
    file = find_gguf(Path(name))
    if file is None:
        return AutoTokenizer.from_pretrained(name)
    ours = read_tokenizer(read_header(file))
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=Tokenizer.from_str(ours.text), **ours.config)
    fast.chat_template = ours.chat_template
    return fast


def _sampling(request: dict[str, Any]) -> dict[str, Any]:
    temperature = request["temperature"]
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": request["top_p"], "top_k": 0}


def serve(models: Models, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until the input ends."""
    operations = {"generate": models.generate, "gap": models.gap}
    for line in requests:
        request = json.loads(line)
        try:
            reply = operations[request["op"]](request)
        except Exception as error:  # the parent raises it; this process goes on
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def main() -> None:
    """Load the models named by the first line, then serve; stdout is kept for replies alone."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    models = Models.load(first["target"], first.get("draft"), first["dtype"], first["device"])
    print(json.dumps({"vocab_size": models.target.config.vocab_size}), file=replies, flush=True)
    with torch.inference_mode():
        serve(models, sys.stdin, replies)


if __name__ == "__main__":
    main()
