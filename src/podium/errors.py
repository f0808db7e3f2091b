"""Every failure that Podium names. The user can correct an `InputError` (exit code 2). The others stop a run that has
gone wrong (exit code 1), so that no error passes in silence."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class PodiumError(Exception):
    """A failure with a message that says the cause and the remedy; shown without a traceback."""

    exit_code = 1


class InputError(PodiumError, ValueError):
    """Bad settings, data or command line. Names the field or row, the value, the choices and the remedy."""

    exit_code = 2


class CodecError(PodiumError, ValueError):
    """Bytes or text from another process are not the record that was expected. Names the field."""


class ParityError(PodiumError):
    """After a weight sync the engine's logprobs differ from the trainer's: it does not hold the trained weights."""


class SplitError(PodiumError):
    """The loss of a batch is not the sum of the losses of its parts: it depends on how the step was split."""


class TokenMismatchError(PodiumError):
    """The ids about to be trained are not the ids that the engine sampled."""


class RankError(PodiumError):
    """Another rank of the same optimizer step failed."""


class TooLargeError(PodiumError):
    """A batch does not fit into memory, and this trainer cannot cut it."""


class ReferenceLostError(PodiumError):
    """The process that keeps the reference died or does not answer."""


class TrainerLostError(PodiumError):
    """The process that trains is gone; what was committed is not, and a resume goes on from there."""


class ProvisionError(PodiumError):
    """Processes or machines that a run needs are not available; the message lists all of them."""


class StalledError(PodiumError):
    """Many steps in a row changed nothing."""


class RewardContractError(PodiumError):
    """A reward returned something that its contract does not allow."""


class RewardFailedError(PodiumError):
    """Rewards raised or abstained for too large a share of the rollouts of a step."""


class WorkerError(PodiumError):
    """A worker of a pool failed, is gone or does not answer, or a pool has too few workers left."""


class EngineError(WorkerError):
    """An engine broke, or returned an answer that cannot be right: wrong counts, unknown ids, logprobs that are no
    numbers."""


class BusyError(EngineError):
    """An engine cannot take a request now and asks to come back later."""


class WeightsError(EngineError):
    """Weights on their way to an engine are damaged, of another shape, not finite or not there."""


class CheckpointError(PodiumError):
    """A checkpoint cannot be trusted: a file is missing, shorter or different from its manifest."""


class SharedPrefixError(PodiumError):
    """A prompt computed once for its group gives other logprobs than one computed for each answer."""


class NoProgressError(PodiumError):
    """Nothing moved for longer than the watchdog allows, or an earlier run of this process still holds the device."""


class CrashLoopError(PodiumError):
    """The run was resumed too often without making progress."""


class StorageError(PodiumError):
    """The disk is full, broken or read-only, or the run folder is gone."""


class RunStopped(BaseException):
    """A signal asked the run to stop while rollouts were generated; these rollouts are dropped.

    It is not an `Exception`, so that no error handler catches it.
    """
