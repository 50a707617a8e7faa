"""Every Redis key there is: one function each, with its type, owner and lifetime.

Owner means who writes it. "Answered" means published and acknowledged by the learner; "kept" is
`stream.KEEP_ANSWERED_S`. Keys under `arq:` belong to arq; the few that we touch are named here too, so that
nothing else spells them.
"""

from arq.constants import job_key_prefix, retry_key_prefix

QUEUE = "swerve:queue"  # zset of request ids, see transitions.py for its scores; one for all runs


def wake() -> str:
    """List of tokens, one for each request that became claimable: idle workers wait on it.

    Only a hint: a worker without one looks every now and then. Owner everybody; capped, emptied with the queue.
    """
    return "swerve:wake"


def runs() -> str:
    """Set of run ids. Owner trainer; for ever (a few bytes a run)."""
    return "swerve:runs"


def run_status(run_id: str) -> str:
    """String: RunStatus.

    Owner trainer, rewritten every second or so; expires soon after the trainer is gone, or a month after it said
    how the run ended.
    """
    return f"swerve:run:{run_id}"


def open_requests(run_id: str) -> str:
    """Zset of request ids by enqueue time. Owner trainer; a member leaves when answered or withdrawn.

    The ledger of what is owed.
    """
    return f"swerve:open:{run_id}"


def request(request_id: str) -> str:
    """String: RolloutRequest.

    Owner trainer; until answered (kept a while) or withdrawn; for ever while dead.
    """
    return f"swerve:request:{request_id}"


def image(request_id: str) -> str:
    """String: name of the request's image, for workers that fetch ahead.

    Owner trainer; a hint, so it lives `queue.HINT_S` and is not missed.
    """
    return f"swerve:image:{request_id}"


def claims(request_id: str) -> str:
    """Hash: claims `made` so far (the newest is the fence against late results), those `ended` in order, the one
    that was `last_ended`, and when it was claimed first, `first_at` (Unix milliseconds on Redis's clock).

    Owner workers; as long as the request.
    """
    return f"swerve:claims:{request_id}"


def lease(request_id: str) -> str:
    """String: Lease of the claim in force.

    Owner the claiming worker, who renews it; expires by itself when that worker dies.
    """
    return f"swerve:lease:{request_id}"


def failures(request_id: str) -> str:
    """List of AttemptFailure. Owner workers; as long as the request."""
    return f"swerve:failures:{request_id}"


def events(request_id: str) -> str:
    """List of Event, capped: what happened to the request, for `explain`. Owner everybody; as long as the request."""
    return f"swerve:events:{request_id}"


def published(request_id: str) -> str:
    """String: stream entry id of the one publication.

    Owner workers; `stream.FENCE_S` long, so that no late twin gets in.
    """
    return f"swerve:published:{request_id}"


def body(request_id: str) -> str:
    """String: Trajectory, compressed.

    Owner the publishing worker; until answered, then kept a while for `show`.
    """
    return f"swerve:body:{request_id}"


def stream(run_id: str) -> str:
    """Stream of TrajectoryHeads in order of arrival.

    Owner workers; acknowledged heads are trimmed beyond the newest thousands.
    """
    return f"swerve:stream:{run_id}"


def unacknowledged_bytes(run_id: str) -> str:
    """Hash of request id to the bytes of its unacknowledged body; under "" their sum, under "kept" the bytes of
    acknowledged bodies that are still here.

    Owner workers and trainer; for ever (small once all is answered).
    """
    return f"swerve:bytes:{run_id}"


def kept(run_id: str) -> str:
    """List of "bytes:request id" of acknowledged bodies, oldest first: what makes room for the next.

    Owner trainer; capped by bytes.
    """
    return f"swerve:kept:{run_id}"


def malformed(run_id: str) -> str:
    """List of stream entries that could not be read, with the reason. Owner trainer; capped."""
    return f"swerve:malformed:{run_id}"


def dead(run_id: str) -> str:
    """Hash of request id to DeadLetter. Owner workers; until requeued or dropped by a person."""
    return f"swerve:dead:{run_id}"


def weights(run_id: str) -> str:
    """String: the newest WeightVersion. Owner trainer; for ever."""
    return f"swerve:weights:{run_id}"


def served(run_id: str) -> str:
    """String: ServedWeights, what the engines confirmed last. Owner trainer; for ever."""
    return f"swerve:served:{run_id}"


def tokenizer(name: str) -> str:
    """String: TokenizerBundle by content hash. Owner trainer; for ever."""
    return f"swerve:tokenizer:{name}"


def worker(name: str) -> str:
    """String: WorkerStatus. Owner that worker; expires a few seconds after its last beat."""
    return f"swerve:worker:{name}"


def workers() -> str:
    """Zset of worker names by last beat.

    Owner workers; names silent for an hour are removed by whoever reads.
    """
    return "swerve:workers"


def arq_job(request_id: str) -> str:
    """arq's own: the serialised call. Owner arq."""
    return job_key_prefix + request_id


def arq_retry(request_id: str) -> str:
    """arq's own count of tries, which we do not use. Owner arq; goes with the answer."""
    return retry_key_prefix + request_id


def fleet() -> str:
    """String: a random name of this Redis's fleet: reapers leave other fleets' containers alone. For ever."""
    return "swerve:fleet"
