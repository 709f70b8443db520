"""Command line of the end-to-end benchmark."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from betoken.bench.attached_weights import (
    add_weights,
    check_weights,
    embedded_weights,
    take_weights,
    weight_flag,
    weight_options,
)
from betoken.bench.command import positive, temperature
from betoken.bench.drafter_names import ATTACHABLE, ATTACHED_SUFFIX, drafter_named
from betoken.bench.matrix import DRAFTERS, DTYPES, FUSED, NO_DRAFTER, WITH_WEIGHTS
from betoken.bench.prompts import OWN_PROMPTS
from betoken.bench.sides import needs_draft_model
from betoken.client import VerificationMode
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.registry import weight_options as drafter_models


@dataclass(frozen=True, slots=True)
class EndToEndOptions:
    """Options of one run."""

    target: str
    draft: str | None
    prompts: Path
    limit: int | None
    max_new_tokens: int
    drafter: str
    drafter_settings: dict[str, str]
    models: dict[str, str]
    """Further models of hosted drafters, by the draft worker's options."""
    num_draft_tokens: int | None
    mode: VerificationMode
    temperature: float
    top_p: float
    dtype: str
    device: str
    concurrency: int
    repeats: int
    verify_threads: int | None
    draft_threads: int
    compile: str
    no_transformers: bool
    weights: dict[str, str]
    """Directories of weights, by the names of attached drafters."""

    @property
    def asked(self) -> str:
        """Name of the drafter in requests."""
        return drafter_named(self.drafter)[0]

    @property
    def attached_drafters(self) -> list[str]:
        """Drafters of the verify worker; `fused` gets `ngram` and those with weights as its sources."""
        own, is_attached = drafter_named(self.drafter)
        sources = ["ngram", *self.weights] if own == FUSED else []
        return [own, *sources] if is_attached else []

    @property
    def hosted_drafters(self) -> list[str]:
        """Drafters of the draft worker: those there always are and the one asked for; `fused` gets them as its sources.
        An attached drafter needs no draft worker."""
        if self.attached_drafters:
            return []
        return list(dict.fromkeys(("model", "ngram", *(name for name in (self.drafter,) if name != NO_DRAFTER))))

    @property
    def worker_options(self) -> list[str]:
        """The device, and room for the draft blocks asked for."""
        is_long = (self.num_draft_tokens or 0) > DraftWorkerSettings.model_fields["max_draft_tokens"].default
        return ["--device", self.device, *(["--max-draft-tokens", str(self.num_draft_tokens)] if is_long else [])]

    @property
    def verify_options(self) -> list[str]:
        """The verify worker's, which leaves half of a GPU's memory to the other processes."""
        weights = weight_options(self.attached_drafters, self.weights)
        return [*self.worker_options, "--kv-memory-fraction", "0.5", *weights]

    @property
    def draft_options(self) -> list[str]:
        """Options of the draft worker."""
        return [*self.worker_options, *weight_options(self.hosted_drafters, self.weights)]

    @property
    def is_comparable_with_transformers(self) -> bool:
        """Whether `generate()` must give the same ids: greedy float32."""
        return self.dtype == "float32" and self.temperature == 0

    @property
    def is_drafted_as_plain(self) -> bool:
        """Whether speculation must change no token."""
        return self.mode is VerificationMode.COUPLED or self.temperature == 0

    def as_json(self) -> dict[str, Any]:
        """The options; paths by their last part, so that no machine's layout enters a report."""
        names: dict[str, Any] = {"target": Path(self.target).name, "prompts": self.prompts.name}
        weights = {name: Path(directory).name for name, directory in self.weights.items()}
        models = {name: Path(model).name for name, model in self.models.items()}
        names |= {"draft": Path(self.draft).name if self.draft else None}
        return asdict(self) | names | {"models": models, "weights": weights}


def parse_options(arguments: Sequence[str] | None = None) -> EndToEndOptions:
    """Options from the command line; refuses what cannot run."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.end_to_end", description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="target model: directory or hub id")
    add("--draft", help="draft model: directory or hub id; for --drafter model, staged, fused and assisted generation")
    add("--prompts", type=Path, default=OWN_PROMPTS, help=".jsonl or .jsonl.gz with `prompt` or `turns` (default: own)")
    add("--limit", type=positive, help="only the first N prompts")
    add("--max-new-tokens", type=positive, default=128, help="tokens per answer")
    add("--drafter", choices=(NO_DRAFTER, *DRAFTERS, *ATTACHABLE), default="model", help="who guesses")
    add_weights(parser)
    add("--drafter-setting", dest="drafter_settings", type=_setting, action="append", metavar="KEY=VALUE", help="of it")
    hosted = drafter_models(lambda spec: spec.can_host)
    own_models = [option for option in hosted if option not in WITH_WEIGHTS.values()]
    for option in own_models:
        add(option.flag, default="", help=option.help)
    add("--num-draft-tokens", type=positive, help="tokens per draft block (default: the router's choice)")
    add("--mode", type=VerificationMode, choices=list(VerificationMode), default="coupled", help="of verification")
    add("--temperature", type=temperature, default=0.0, help="0 = greedy")
    add("--top-p", type=float, default=1.0, help="nucleus, for both sides")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of all models on both sides")
    add("--device", default="cpu", help="of all models on both sides, e.g. cuda:0")
    add("--concurrency", type=positive, default=1, help="above 1: also total tokens/s of N streams at once")
    add("--repeats", type=positive, default=1, help="passes over the prompts")
    add("--verify-threads", type=positive, help="threads of the verify worker (default: its own choice)")
    add("--draft-threads", type=positive, default=1, help="threads of the draft worker")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile in the workers")
    add("--no-transformers", action="store_true", help="leave out the transformers side")
    given = vars(parser.parse_args(arguments))
    is_fused = given["drafter"] == f"{FUSED}{ATTACHED_SUFFIX}"
    names = WITH_WEIGHTS if is_fused else (given["drafter"],)
    weights = embedded_weights(given["target"], names) | take_weights(given)
    models = {option.name: given.pop(option.name) for option in own_models}
    settings = dict(given.pop("drafter_settings") or ())
    options = EndToEndOptions(**given, drafter_settings=settings, models=models, weights=weights)
    if needs_draft_model(options.drafter) and not options.draft:
        parser.error(f"--drafter {options.drafter} needs --draft")
    try:
        check_weights(() if is_fused else names, weights)
    except ValueError as error:
        parser.error(f"--drafter {error}")
    if is_fused and not weights:
        parser.error(f"--drafter {options.drafter} needs {' or '.join(map(weight_flag, WITH_WEIGHTS))}")
    return options


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name, value
