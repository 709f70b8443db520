"""Makes the drafter `suffix` of a worker: its memory, its file and the operator's corpus."""

from __future__ import annotations

from betoken.common.tokenizer_json import hash_tokenizer_json
from betoken.drafters.spec import DrafterContext
from betoken.drafters.suffix.corpus import read_corpus
from betoken.drafters.suffix.drafter import SuffixDrafter
from betoken.drafters.suffix.memory import SuffixMemory
from betoken.drafters.suffix.memory_file import MemoryFile
from betoken.drafters.suffix.settings import MemoryOptions, SuffixSettings
from betoken.rpc.early_end import at_end


def make_drafter(host: DrafterContext) -> SuffixDrafter:
    """The drafter of these settings; its file is written when the service ends.

    Raises:
        FailedPreconditionError: a file of the settings cannot be used.
    """
    options = MemoryOptions.parse(host.settings.suffix_memory)
    file = None
    if options.file is not None:
        text = host.tokenizer_text()
        file = MemoryFile(options.file, hash_tokenizer_json(text) if text else "")
    corpus = read_corpus(options.corpus, host.tokenizer_text)
    memory = SuffixMemory(options.max_bytes, options.shared_tenants, corpus, file)
    if file is not None:
        at_end(memory.write)
    return SuffixDrafter(memory, SuffixSettings.of_options(host.settings))
