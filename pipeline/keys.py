"""Every Redis key, as one function each, with its type, its owner and its lifetime.

The owner is the process that writes the key. "Answered" means published and acknowledged; "kept" is
`stream.KEEP_ANSWERED_S`. A key with a `kind` exists once for each kind of job (`kinds.py`). Keys that begin with `arq:`
belong to arq; the two that we touch are named here as well, so that no other file spells a key.
"""

from arq.constants import job_key_prefix, retry_key_prefix

from pipeline.kinds import ROLLOUT, AnyKind

# Keys of the queue and its requests


def queue(kind: AnyKind = ROLLOUT) -> str:
    """Zset of request ids, one for all runs; transitions.py explains the scores. Owner everybody."""
    return f"{kind.prefix}:queue"


def wake(kind: AnyKind = ROLLOUT) -> str:
    """List of tokens, one for each request that became claimable; idle workers block on it.

    Only a hint: a worker that gets no token looks at the queue every now and then. Owner everybody; capped, and
    deleted when the queue is empty.
    """
    return f"{kind.prefix}:wake"


def request(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """String: the request, whole.

    Owner trainer; until answered (then kept a while) or withdrawn; without expiry while dead.
    """
    return f"{kind.prefix}:request:{request_id}"


def image(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """String: name of the image that the request needs, for workers that fetch images ahead.

    Owner trainer; only a hint, so it expires after `request_store.HINT_S`.
    """
    return f"{kind.prefix}:image:{request_id}"


def claims(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """Hash: `made`, the number of claims so far, which is also the newest attempt and the fence against late results;
    `ended`, how many of them published or returned the request; `last_ended`, the newest attempt that did; `first_at`,
    when the request was claimed first (Unix milliseconds on Redis's clock).

    Owner workers; as long as the request.
    """
    return f"{kind.prefix}:claims:{request_id}"


def lease(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """String: Lease of the claim in force.

    Owner the claiming worker, who renews it; expires by itself when that worker dies.
    """
    return f"{kind.prefix}:lease:{request_id}"


def watched(request_id: str) -> str:
    """Empty string, which exists while somebody watches the episode. Owner the pages; expires after `watching.WATCHED_S`."""
    return f"swerve:watched:{request_id}"


def watched_turns(request_id: str) -> str:
    """String: WatchedTurns. Owner the claiming worker; expires after `watching.SHOWN_S`."""
    return f"swerve:watched-turns:{request_id}"


def failures(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """List of AttemptFailure. Owner workers; as long as the request."""
    return f"{kind.prefix}:failures:{request_id}"


def events(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """List of Event, capped: what happened to the request, for `explain`. Owner everybody; as long as the request."""
    return f"{kind.prefix}:events:{request_id}"


def published(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """String: stream entry id of the one publication.

    Owner workers; for `stream.FENCE_S`, so that no late duplicate is accepted.
    """
    return f"{kind.prefix}:published:{request_id}"


def body(request_id: str, kind: AnyKind = ROLLOUT) -> str:
    """String: the result, compressed.

    Owner the publishing worker; until answered, then kept a while for `show`.
    """
    return f"{kind.prefix}:body:{request_id}"


def arq_job(request_id: str) -> str:
    """arq's own: the serialised call. Owner arq."""
    return job_key_prefix + request_id


def arq_retry(request_id: str) -> str:
    """arq's own count of tries, which we do not use. Owner arq; deleted when the request leaves the queue."""
    return retry_key_prefix + request_id


# Keys of a run


def runs() -> str:
    """Set of run ids. Owner trainer; until the run is forgotten (a few bytes a run)."""
    return "swerve:runs"


def run_status(run_id: str) -> str:
    """String: RunStatus.

    Owner trainer, rewritten every second or so; expires a month after the last time, so its TTL shows its age.
    """
    return f"swerve:run:{run_id}"


def open_requests(run_id: str, kind: AnyKind = ROLLOUT) -> str:
    """Zset of outstanding requests, by enqueue time: enqueued, and neither answered nor withdrawn. Owner trainer."""
    return f"{kind.prefix}:open:{run_id}"


def requests(run_id: str, kind: AnyKind = ROLLOUT) -> str:
    """Zset of every request that may still have keys, by enqueue time: what `forget` deletes.

    Owner trainer; entries older than any key of a request are removed with each enqueue.
    """
    return f"{kind.prefix}:requests:{run_id}"


def stream(run_id: str, kind: AnyKind = ROLLOUT) -> str:
    """Stream of heads in order of arrival.

    Owner workers; acknowledged heads are trimmed beyond the newest thousands.
    """
    return f"{kind.prefix}:stream:{run_id}"


def unacknowledged_bytes(run_id: str, kind: AnyKind = ROLLOUT) -> str:
    """Hash of request id to the bytes of its unacknowledged body; under "" their sum, under "kept" the bytes of
    acknowledged bodies that are still there.

    Owner workers and trainer; until the run is forgotten (small once everything is answered).
    """
    return f"{kind.prefix}:bytes:{run_id}"


def kept(run_id: str, kind: AnyKind = ROLLOUT) -> str:
    """List of "bytes:request id" of acknowledged bodies, oldest first: the first to be deleted for a new one.

    Owner trainer; capped by bytes.
    """
    return f"{kind.prefix}:kept:{run_id}"


def malformed(run_id: str, kind: AnyKind = ROLLOUT) -> str:
    """List of stream entries that could not be decoded, with the reason. Owner trainer; capped."""
    return f"{kind.prefix}:malformed:{run_id}"


def dead(run_id: str, kind: AnyKind = ROLLOUT) -> str:
    """Hash of request id to DeadLetter. Owner workers; until a person requeues or drops it."""
    return f"{kind.prefix}:dead:{run_id}"


def weights(run_id: str) -> str:
    """String: the newest WeightVersion. Owner trainer; until the run is forgotten."""
    return f"swerve:weights:{run_id}"


def served(run_id: str) -> str:
    """String: ServedWeights, what the engines confirmed last. Owner trainer; until the run is forgotten."""
    return f"swerve:served:{run_id}"


# Keys of everybody


def tokenizer(name: str) -> str:
    """String: TokenizerBundle by content hash. Owner trainer; without expiry."""
    return f"swerve:tokenizer:{name}"


def worker(name: str) -> str:
    """String: WorkerStatus. Owner that worker; expires a few seconds after its last heartbeat."""
    return f"swerve:worker:{name}"


def workers() -> str:
    """Zset of worker names by last heartbeat.

    Owner workers; a reader removes the names that have been silent for an hour.
    """
    return "swerve:workers"


def policy_lease() -> str:
    """Hash: which process publishes weights to the engines of this Redis's fleet (`weights.PolicyHolder`).

    Owner that process, which renews it; expires by itself soon after the process is gone.
    """
    return "swerve:policy"


def fleet() -> str:
    """String: a random name for all that shares this Redis; a reaper leaves the containers of other fleets alone. Without expiry."""
    return "swerve:fleet"
