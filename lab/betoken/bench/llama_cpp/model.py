"""A GGUF file in llama.cpp, through the C functions of llama-cpp-python: steps of given ids.

Its Python classes are left out, since they copy unused logits.
"""

import ctypes
import importlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

MAX_TOKENS = 2048
"""Tokens of a context, and of a batch."""
FORMATS = ("q4_0", "q4_1", "q8_0", "bf16")


def load_library() -> Any:
    """The binding, silenced and ready.

    Raises:
        ValueError: it is not installed.
    """
    try:
        library: Any = importlib.import_module("llama_cpp")
    except ImportError as error:
        raise ValueError("the package llama-cpp-python is not installed") from error
    callback = library.llama_log_callback(lambda *_: None)
    library.llama_log_set(callback, ctypes.c_void_p())
    library.kept_callback = callback  # which the library calls as long as the process lives
    library.llama_backend_init()
    return library


def write_as(library: Any, source: Path, name: str, folder: Path) -> Path:
    """Path of the file's weights in another of `FORMATS`, written by llama.cpp.

    Raises:
        ValueError: llama.cpp cannot write it.
    """
    path = folder / f"{source.stem}-{name}.gguf"
    options = library.llama_model_quantize_default_params()
    options.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
    options.allow_requantize = True
    if library.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(options)):
        raise ValueError(f"{source}: llama.cpp cannot write it as {name}")
    return path


@contextmanager
def open_models(
    library: Any, target: Path, formats: Sequence[str], num_threads: int
) -> Iterator[dict[str, "LlamaModel"]]:
    """The file and its weights in other formats, by name; what is written for it goes at the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as models:
        files = {target.stem: target} | {name: write_as(library, target, name, Path(folder)) for name in formats}
        yield {name: models.enter_context(LlamaModel(library, path, num_threads)) for name, path in files.items()}


class LlamaModel:
    """One sequence of one model; a context manager."""

    def __init__(self, library: Any, file: Path, num_threads: int) -> None:
        """
        Raises:
            ValueError: llama.cpp cannot read the file.
        """
        self._library = library
        self._model = library.llama_model_load_from_file(bytes(file), library.llama_model_default_params())
        if not self._model:
            raise ValueError(f"{file}: llama.cpp cannot load it")
        self._vocabulary = library.llama_model_get_vocab(self._model)
        self.vocab_size: int = library.llama_vocab_n_tokens(self._vocabulary)
        options = library.llama_context_default_params()
        options.n_ctx = options.n_batch = MAX_TOKENS
        options.n_threads = options.n_threads_batch = num_threads
        self._context = library.llama_init_from_model(self._model, options)
        self._memory = library.llama_get_memory(self._context)
        self._batch = library.llama_batch_init(MAX_TOKENS, 0, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def forward(self, ids: Sequence[int], position: int, num_logits: int) -> None:
        """Run rows from a position on, which forgets what was there; the last `num_logits` get logits."""
        self._library.llama_memory_seq_rm(self._memory, 0, position, -1)
        batch = self._batch
        batch.n_tokens = len(ids)
        for row, token in enumerate(ids):
            batch.token[row], batch.pos[row] = token, position + row
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            batch.logits[row] = row >= len(ids) - num_logits
        if status := self._library.llama_decode(self._context, batch):
            raise ValueError(f"{len(ids)} rows at {position}: llama.cpp answers {status}")

    def wait(self) -> None:
        """Wait for the end of the last forward."""
        self._library.llama_get_logits_ith(self._context, -1)
