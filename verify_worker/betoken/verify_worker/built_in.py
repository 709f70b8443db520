"""Names the drafters whose weights the target's checkpoint holds, the same on all ranks of a worker."""

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.host.making import resolve_built_in
from betoken.drafters.registry import BUILT_IN, check_attached
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.sources import open_source
from betoken.verify_worker.settings import VerifyWorkerSettings


def with_built_in(settings: VerifyWorkerSettings, progress: Progress) -> VerifyWorkerSettings:
    """The settings with built-in drafters by their own names.

    Raises:
        ModelRefusedError: the checkpoint cannot be found.
        FailedPreconditionError: a drafter chooses among others that are not there.
    """
    if BUILT_IN in settings.attached_drafters:
        progress("finding the checkpoint", 0.0)
        open_source(settings.model, settings.revision, progress)  # downloads it
    names = resolve_built_in(settings)
    try:
        check_attached(names)
    except ValueError as error:
        raise FailedPreconditionError(str(error)) from None
    return settings.model_copy(update={"attached_drafters": names})
