"""The engine's own errors. The workers map them to gRPC statuses."""


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class ModelRefusedError(EngineError):
    """The model cannot be served exactly; the message says why."""


class CompiledModelRefusedError(ModelRefusedError):
    """The model cannot be served as it was compiled; uncompiled it may be."""


class RankLostError(EngineError):
    """A rank of a model that several processes share has ended or lost step: the worker cannot go on."""


class OutOfPagesError(EngineError):
    """The KV pool has too few free pages for the request.

    Attributes hold the number of pages needed and the number that were free.
    """

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} KV pages are needed, {num_free} are free")
        self.num_needed = num_needed
        self.num_free = num_free


class IntegrityError(EngineError):
    """The page accounting is inconsistent: an internal error."""
