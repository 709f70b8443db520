"""The blocking client: streams one answer and prints its speculation statistics.

Start `betoken up`, then `python examples/client.py [ADDRESS] [PROMPT]`.
"""

import sys

from betoken.client import Client, UnavailableError


def main(address: str = "127.0.0.1:50051", prompt: str = "def fibonacci(n):") -> None:
    """Print the answer as it comes."""
    with Client(address) as client:
        answer = client.generate(prompt, max_new_tokens=64, temperature=0.8, seed=1)
        for piece in answer:
            print(piece.text, end="", flush=True)
        done = answer.result()
    stats = done.speculation
    print(f"\n{done.usage.output_tokens} tokens, {stats.num_verify_forwards} target forwards, {done.finish_reason}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UnavailableError as error:
        sys.exit(f"no router answers: {error}")
