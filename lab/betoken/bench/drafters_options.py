"""Command line of the drafter table."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
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
from betoken.bench.matrix import DTYPES, FUSED, NO_DRAFTER
from betoken.bench.sides import DEFAULT_SIDES, HOSTED, Side, Variant, hosted_drafters, parse_side
from betoken.cli.local_services import LocalServicesConfig
from betoken.rpc.worker_settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class DraftersOptions:
    """Options of one measurement."""

    target: str
    draft: str
    prompts: list[Path]
    category: str
    limit: int | None
    max_new_tokens: int
    drafters: list[Side]
    num_draft_tokens: int | None
    repeats: int
    samples: int
    """Answers per prompt with different seeds; each is a pass over all prompts."""
    temperature: float
    dtype: str
    device: str
    verify_threads: int | None
    draft_threads: int
    compile: str
    no_transformers: bool
    out: Path
    minutes: float | None
    report: bool
    weights: dict[str, str]
    """Directories of weights, by the names of attached drafters."""

    @property
    def is_comparable_with_transformers(self) -> bool:
        """Whether `generate()` must give the same ids: greedy float32."""
        return self.dtype == "float32" and self.temperature == 0

    @property
    def variants(self) -> list[Variant]:
        """The services needed: a draft worker without options first, then each that a side asks for."""
        return list(dict.fromkeys([HOSTED, *(side.variant for side in self.drafters)]))

    def hosted(self, variant: Variant) -> list[str]:
        """Drafters that the worker of these services runs, each once."""
        return hosted_drafters([side for side in self.drafters if side.variant == variant])

    def services(self, variant: Variant) -> LocalServicesConfig:
        """Services whose one draft worker hosts, or whose verify worker attaches, every side with these options.

        An option of the value `target` or `draft` is given that model.
        """
        models = {"target": self.target, "draft": self.draft}
        is_attached, worker_options = variant
        own = [part for name, value in worker_options for part in (name, models.get(value, value))]
        own = [*weight_options(self.hosted(variant), self.weights), *own]
        longest = max(self.num_draft_tokens or 0, *(side.num_draft_tokens or 0 for side in self.drafters))
        is_long = longest > WorkerSettings.model_fields["max_draft_tokens"].default
        shared = ["--device", self.device, *(["--max-draft-tokens", str(longest)] if is_long else [])]
        return LocalServicesConfig(
            target=self.target,
            draft=self.draft,
            drafters=[] if is_attached else self.hosted(variant),
            attached_drafters=self.hosted(variant) if is_attached else (),
            dtype=self.dtype,
            verify_threads=self.verify_threads,
            draft_threads=self.draft_threads,
            compile=self.compile,
            prefix_caching=False,  # the same prompts are asked again and again
            # Half a GPU for the other processes.
            verify_options=[*shared, "--kv-memory-fraction", "0.5", *(own if is_attached else ())],
            draft_options=[*shared, *(() if is_attached else own)],  # a side may name its own device
            router_options=["--no-drafts-must-pay"],  # what each drafter brings, not what is made of it
        )

    def decisive(self) -> dict[str, Any]:
        """The options that speeds depend on, as JSON holds them: what runs into one folder must agree on."""
        return {
            "category": self.category,
            "max_new_tokens": self.max_new_tokens,
            "drafters": [side.name for side in self.drafters],
            "num_draft_tokens": self.num_draft_tokens,
            **({"samples": self.samples} if self.samples > 1 else {}),
            "temperature": self.temperature,
            "dtype": self.dtype,
            "device": self.device,
            "verify_threads": self.verify_threads,
            "draft_threads": self.draft_threads,
            "compile": self.compile,
            "transformers": not self.no_transformers,
        } | ({"weights": {name: Path(place).name for name, place in self.weights.items()}} if self.weights else {})


def parse_options(arguments: Sequence[str] | None = None) -> DraftersOptions:
    """Options from the command line; refuses what cannot run."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.drafters", description=__doc__)
    add = parser.add_argument
    add("--target", default="", help="target model: directory or hub id")
    add("--draft", default="", help="draft model: directory or hub id")
    add("--prompts", type=Path, action="append", help=".jsonl or .jsonl.gz with `prompt` or `turns`; may be repeated")
    add("--category", default="code", help="of prompts whose file names none")
    add("--limit", type=positive, help="only the first N prompts of each category of each file")
    add("--max-new-tokens", type=positive, default=128, help="tokens per answer; EOS is ignored")
    add(
        "--drafters",
        type=_sides,
        default=_sides(",".join(DEFAULT_SIDES)),
        help="drafter[@attached][/setting=value...][/--option=value...], separated by commas; options are the worker's"
        " that runs it: the draft worker, or the verify worker it is attached to",
    )
    add_weights(parser)
    add("--num-draft-tokens", type=positive, help="tokens per draft block (default: the router's choice)")
    add("--repeats", type=positive, default=1, help="passes over the prompts")
    add("--samples", type=positive, default=1, help="answers per prompt with different seeds, each in its own pass")
    add("--temperature", type=temperature, default=0.0, help="0 = greedy")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of all models on all sides")
    add("--device", default="cpu", help="of all models on all sides, e.g. cuda:0")
    add("--verify-threads", type=positive, help="threads of the verify worker (default: its own choice)")
    add("--draft-threads", type=positive, default=1, help="threads of the draft worker")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile in the workers")
    add("--no-transformers", action="store_true", help="leave out the transformers sides")
    add("--out", type=Path, default=Path("runs/drafters"), help="folder of the results; resumed when it exists")
    add("--minutes", type=float, help="stop after the prompt under way by then; to be resumed")
    add("--report", action="store_true", help="measure nothing, print what is in --out")
    given = vars(parser.parse_args(arguments))
    weights = embedded_weights(given["target"], (side.drafter for side in given["drafters"])) | take_weights(given)
    options = DraftersOptions(**given, weights=weights)
    if not options.report:
        _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: DraftersOptions) -> None:
    for name in ("target", "draft", "prompts"):
        if not getattr(options, name):
            parser.error(f"--{name} must be given, unless --report is")
    try:
        without_own = (side for side in options.drafters if weight_flag(side.drafter) not in dict(side.worker_options))
        check_weights((side.drafter for side in without_own), options.weights)
    except ValueError as error:
        parser.error(f"--drafters {error}")
    names = [path.name for path in options.prompts]
    if len(set(names)) < len(names):
        parser.error(f"--prompts {' '.join(names)}: results are kept by file name, which must differ")
    for hosted in map(options.hosted, options.variants):
        if FUSED in hosted and len(hosted) < 3:
            why = "chooses among the others with the same options, of which two are needed"
            parser.error(f"--drafters {','.join(hosted)}: `{FUSED}` {why}")


def _sides(text: str) -> list[Side]:
    try:
        sides = [parse_side(part) for part in text.split(",") if part]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not sides or len({side.name for side in sides}) < len(sides):
        raise argparse.ArgumentTypeError(f"{text!r} must name at least one drafter, each once")
    if any(side.drafter == NO_DRAFTER for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r}: {NO_DRAFTER} is what they are compared with and always there")
    return sides
