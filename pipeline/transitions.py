"""Every change of a request's state, each one Lua script: it happens as a whole or not at all.

The README has a diagram of the states; each script is one of its arrows. Redis runs one script at a time, so a request is
in exactly one state wherever a process dies, and the script itself records the event that `explain` shows. All times
are those of Redis's clock, which is the same for all hosts.

A script that frees something (a renewal, a return to the queue, an acknowledgement, a withdrawal) also runs in a Redis
that is full. A script that adds something (an enqueue, a claim, a publication) is refused there as a whole, and may be
repeated.

The queue is arq's zset. Its scores have two bands. The score of a request that was never claimed is ROTATED_MS in the past (an
evaluation twice that), in the order of enqueueing. The score of a request that was claimed before is the time when it is
due again: the end of its back-off or of its lease. A claim therefore reads only what can be claimed, however many
requests are running, and a request that has waited before comes first.

A Transition is such a script for any kind of job; `of(kind)` is its text with the key names of that kind.
"""

import time
from dataclasses import dataclass
from functools import cache

from pipeline import keys
from pipeline.kinds import AnyKind

ROTATED_MS = 10 * 365 * 24 * 3600 * 1000
KEEP_EVENTS = 64  # the newest of one request
KEEP_WAKES = 1000
# Longer than any key of a request that is not outstanding lives (stream.FENCE_S).
KEEP_IDS_MS = 60 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True, eq=False)
class Transition:
    """A script without its key names. It must not assign globals, and takes all its arguments in ARGV."""

    body: str
    also_when_full: bool = False

    def of(self, kind: AnyKind) -> str:
        """The script for requests of that kind."""
        return _source(self, kind)


def due_at(score: float) -> float:
    """The time when a request with this score in the queue is due again (Unix seconds); 0 if it was never claimed."""
    return score / 1000 if score > time.time() * 1000 - ROTATED_MS // 2 else 0.0


@cache
def _source(transition: Transition, kind: AnyKind) -> str:
    flags = " flags=allow-oom" if transition.also_when_full else ""
    return f"#!lua{flags}\n{_names(kind)}{_FUNCTIONS}{transition.body}"


def _names(kind: AnyKind) -> str:
    """The prefixes of all keys that scripts use, as Lua locals."""
    return f"""
local QUEUE, WAKE = '{keys.queue(kind)}', '{keys.wake(kind)}'
local REQUEST, IMAGE = '{keys.request("", kind)}', '{keys.image("", kind)}'
local JOB, RETRY = '{keys.arq_job("")}', '{keys.arq_retry("")}'
local CLAIMS, LEASE = '{keys.claims("", kind)}', '{keys.lease("", kind)}'
local FAILURES, EVENTS = '{keys.failures("", kind)}', '{keys.events("", kind)}'
local PUBLISHED, BODY = '{keys.published("", kind)}', '{keys.body("", kind)}'
local STREAM, MALFORMED = '{keys.stream("", kind)}', '{keys.malformed("", kind)}'
local REQUESTS, OPEN, DEAD = '{keys.requests("", kind)}', '{keys.open_requests("", kind)}', '{keys.dead("", kind)}'
local BYTES, KEPT = '{keys.unacknowledged_bytes("", kind)}', '{keys.kept("", kind)}'
"""


_FUNCTIONS = f"""
local KEEP_EVENTS, KEEP_IDS_MS = {KEEP_EVENTS}, {KEEP_IDS_MS}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function note(id, what, attempt, worker, detail)
  -- pcall: events are only for people, so a key of another type under this name must not stop the script.
  redis.pcall('RPUSH', EVENTS .. id, cmsgpack.pack({{now / 1000, what, attempt, worker, detail}}))
end
local function wake()
  redis.call('LPUSH', WAKE, '1')
  redis.call('LTRIM', WAKE, 0, {KEEP_WAKES - 1})
end
local function in_force(id, attempt)
  local claims = redis.call('HMGET', CLAIMS .. id, 'made', 'last_ended')
  return claims[1] == attempt and claims[2] ~= attempt
end
local function end_claim(id, attempt)
  redis.call('HSET', CLAIMS .. id, 'last_ended', attempt)
  redis.call('HINCRBY', CLAIMS .. id, 'ended', 1)
  redis.call('DEL', LEASE .. id)
end
local function leave_queue(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('DEL', JOB .. id, RETRY .. id)
end
-- No longer count the request's body among the unacknowledged ones. Returns its bytes.
local function release_bytes(run, id)
  local num = redis.call('HGET', BYTES .. run, id)
  if not num then return 0 end
  redis.call('HDEL', BYTES .. run, id)
  redis.call('HINCRBY', BYTES .. run, '', -num)
  return tonumber(num)
end
"""

ENQUEUE = Transition("""
-- ARGV: id, run, request, image or nothing, seconds to keep it, enqueued at, rank, job. Repeating it changes nothing.
local id, run = ARGV[1], ARGV[2]
if redis.call('EXISTS', PUBLISHED .. id) == 1 then return 0 end
redis.call('SET', REQUEST .. id, ARGV[3])
if ARGV[4] ~= '' then redis.call('SET', IMAGE .. id, ARGV[4], 'EX', ARGV[5]) end
redis.call('PERSIST', CLAIMS .. id)
redis.call('ZADD', OPEN .. run, ARGV[6], id)
redis.call('ZADD', REQUESTS .. run, now, id)
redis.call('ZREMRANGEBYSCORE', REQUESTS .. run, '-inf', now - KEEP_IDS_MS)
if redis.call('ZSCORE', QUEUE, id) or redis.call('HEXISTS', DEAD .. run, id) == 1 then return 0 end
redis.call('SET', JOB .. id, ARGV[8])
redis.call('ZADD', QUEUE, ARGV[7], id)
note(id, 'enqueued', 0, '', '')
wake()
return 1
""")

_CLAIM_ONE = """
local function claim(id, worker, lease_ms)
  local request = redis.call('GET', REQUEST .. id)
  if not request then leave_queue(id) return 'gone' end
  if redis.call('EXISTS', PUBLISHED .. id) == 1 then leave_queue(id) return 'answered' end
  local left_ms = redis.call('PTTL', LEASE .. id)
  if left_ms ~= -2 then
    redis.call('ZADD', QUEUE, 'XX', now + math.max(left_ms, 1), id)
    return 'held'
  end
  local attempt = redis.call('HINCRBY', CLAIMS .. id, 'made', 1)
  redis.call('HSETNX', CLAIMS .. id, 'first_at', now)
  local ended = tonumber(redis.call('HGET', CLAIMS .. id, 'ended') or 0)
  local lease = cmsgpack.pack({worker = worker, attempt = attempt, claimed_at = now / 1000})
  redis.call('SET', LEASE .. id, lease, 'PX', lease_ms)
  redis.call('ZADD', QUEUE, now + lease_ms, id)
  note(id, 'claimed', attempt, worker, '')
  redis.pcall('LTRIM', EVENTS .. id, -KEEP_EVENTS, -1)
  return {id, request, attempt, attempt - 1 - ended, now}
end
"""

CLAIM = Transition(
    _CLAIM_ONE
    + """
-- ARGV: worker, lease milliseconds, id
return claim(ARGV[3], ARGV[1], tonumber(ARGV[2]))
"""
)

TAKE = Transition(
    _CLAIM_ONE
    + f"""
-- ARGV: worker, lease milliseconds, how many
local wanted, border = tonumber(ARGV[3]), now - {ROTATED_MS // 2}
local ids = redis.call('ZRANGEBYSCORE', QUEUE, border, now, 'LIMIT', 0, wanted)
if #ids < wanted then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', QUEUE, '-inf', border, 'LIMIT', 0, wanted - #ids)) do
    ids[#ids + 1] = id
  end
end
if #ids == 0 then redis.call('DEL', WAKE) end
local found = {{}}
for _, id in ipairs(ids) do
  -- A request whose keys have the wrong type leaves the queue; otherwise it would block the others for ever.
  local well, claimed = pcall(claim, id, ARGV[1], tonumber(ARGV[2]))
  if not well then
    leave_queue(id)
    found[#found + 1] = {{id, tostring(type(claimed) == 'table' and claimed.err or claimed)}}
  elseif type(claimed) == 'table' then
    found[#found + 1] = claimed
  end
end
return found
"""
)

RENEW = Transition(
    """
-- ARGV: id, my attempt, lease, its milliseconds
local id = ARGV[1]
if redis.call('EXISTS', REQUEST .. id) == 0 or redis.call('EXISTS', PUBLISHED .. id) == 1 then return 0 end
if not in_force(id, ARGV[2]) then return 0 end
redis.call('SET', LEASE .. id, ARGV[3], 'PX', ARGV[4])
redis.call('ZADD', QUEUE, now + ARGV[4], id)
return 1
""",
    also_when_full=True,
)

RETURN_TO_QUEUE = Transition(
    """
-- ARGV: id, my attempt, back-off milliseconds, failure or nothing, event, worker, detail
local id = ARGV[1]
if redis.call('EXISTS', REQUEST .. id) == 0 or redis.call('EXISTS', PUBLISHED .. id) == 1 then return 0 end
if not in_force(id, ARGV[2]) then return 0 end
if ARGV[4] ~= '' then redis.call('RPUSH', FAILURES .. id, ARGV[4]) end
end_claim(id, ARGV[2])
redis.call('ZADD', QUEUE, now + ARGV[3], id)
note(id, ARGV[5], tonumber(ARGV[2]), ARGV[6], ARGV[7])
if ARGV[3] == '0' then wake() end
return 1
""",
    also_when_full=True,
)

PUBLISH = Transition("""
-- ARGV: id, run, my attempt, body, head, fence seconds, event, worker, detail, letter or nothing, last failure
local id, run = ARGV[1], ARGV[2]
if redis.call('EXISTS', REQUEST .. id) == 0 then return 'withdrawn' end
if redis.call('HGET', CLAIMS .. id, 'made') ~= ARGV[3] then return 'fenced' end
if redis.call('EXISTS', PUBLISHED .. id) == 1 then return 'duplicate' end
if not in_force(id, ARGV[3]) then return 'fenced' end
redis.call('SET', BODY .. id, ARGV[4])
redis.call('HSET', BYTES .. run, id, #ARGV[4])
redis.call('HINCRBY', BYTES .. run, '', #ARGV[4])
local entry = redis.call('XADD', STREAM .. run, '*', 'head', ARGV[5])
redis.call('SET', PUBLISHED .. id, entry, 'EX', ARGV[6])
if ARGV[10] ~= '' then
  redis.call('HSET', DEAD .. run, id, ARGV[10])
  redis.call('RPUSH', FAILURES .. id, ARGV[11])
end
end_claim(id, ARGV[3])
leave_queue(id)
note(id, ARGV[7], tonumber(ARGV[3]), ARGV[8], ARGV[9])
return 'published'
""")

ACKNOWLEDGE = Transition(
    """
-- ARGV: run, group, entry, id, seconds to keep, bytes to keep. A dead-lettered request keeps its evidence.
local run, id = ARGV[1], ARGV[4]
redis.call('XACK', STREAM .. run, ARGV[2], ARGV[3])
if redis.call('GET', PUBLISHED .. id) ~= ARGV[3] then return 0 end
if redis.call('ZREM', OPEN .. run, id) == 1 then note(id, 'acknowledged', 0, '', '') end
local num = release_bytes(run, id)
if redis.call('HEXISTS', DEAD .. run, id) == 1 then return 0 end
for _, key in ipairs({REQUEST, IMAGE, CLAIMS, FAILURES, BODY, EVENTS}) do
  redis.call('EXPIRE', key .. id, ARGV[5])
end
if num == 0 then return 1 end
redis.call('RPUSH', KEPT .. run, num .. ':' .. id)
local kept = redis.call('HINCRBY', BYTES .. run, 'kept', num)
while kept > tonumber(ARGV[6]) do
  local oldest = redis.call('LPOP', KEPT .. run)
  if not oldest then break end
  local size, name = string.match(oldest, '^(%d+):(.*)$')
  redis.call('UNLINK', BODY .. name)
  kept = redis.call('HINCRBY', BYTES .. run, 'kept', -size)
end
return 1
""",
    also_when_full=True,
)

WITHDRAW = Transition(
    """
-- ARGV: run, fence seconds, seconds to keep, 'dead' to drop a dead-lettered request (published or not) or 'any', id.
-- CLAIMS stays for a while, because a worker that was overtaken may still try to renew or publish.
local run, id = ARGV[1], ARGV[5]
if ARGV[4] == 'dead' then
  if redis.call('HDEL', DEAD .. run, id) == 0 then return 0 end
  redis.call('DEL', BODY .. id)
elseif redis.call('EXISTS', PUBLISHED .. id) == 1 then
  return 0
end
redis.call('DEL', REQUEST .. id, IMAGE .. id, FAILURES .. id, LEASE .. id)
leave_queue(id)
redis.call('EXPIRE', CLAIMS .. id, ARGV[2])
if redis.call('ZREM', OPEN .. run, id) == 1 then note(id, 'withdrawn', 0, '', '') end
redis.call('EXPIRE', EVENTS .. id, ARGV[3])
return 1
""",
    also_when_full=True,
)

REQUEUE = Transition("""
-- ARGV: id, run, rank, job, image or nothing, seconds to keep it, enqueued at.
-- The worker that dead-lettered the request is fenced off, because the number of claims rises.
local id, run = ARGV[1], ARGV[2]
if redis.call('HEXISTS', DEAD .. run, id) == 0 then return 0 end
redis.call('HDEL', DEAD .. run, id)
local made = redis.call('HINCRBY', CLAIMS .. id, 'made', 1)
redis.call('HSET', CLAIMS .. id, 'ended', made)
release_bytes(run, id)
redis.call('DEL', PUBLISHED .. id, FAILURES .. id, BODY .. id, LEASE .. id)
for _, key in ipairs({REQUEST, CLAIMS, EVENTS}) do redis.call('PERSIST', key .. id) end
if ARGV[5] ~= '' then redis.call('SET', IMAGE .. id, ARGV[5], 'EX', ARGV[6]) end
redis.call('ZADD', OPEN .. run, ARGV[7], id)
redis.call('SET', JOB .. id, ARGV[4])
redis.call('ZADD', QUEUE, ARGV[3], id)
note(id, 'requeued', made, '', '')
wake()
return 1
""")

DEAD_LETTER_UNREADABLE = Transition(
    """
-- ARGV: id, run, letter, detail. Nothing is published: only the trainer can say what the request was (PUBLISH_UNREADABLE).
local id, run = ARGV[1], ARGV[2]
redis.call('HSET', DEAD .. run, id, ARGV[3])
leave_queue(id)
redis.call('DEL', LEASE .. id)
note(id, 'dead-lettered', 0, '', ARGV[4])
return 1
""",
    also_when_full=True,
)

PUBLISH_UNREADABLE = Transition("""
-- ARGV: id, run, head, fence seconds
local id, run = ARGV[1], ARGV[2]
if redis.call('HEXISTS', DEAD .. run, id) == 0 or redis.call('EXISTS', PUBLISHED .. id) == 1 then return 0 end
local entry = redis.call('XADD', STREAM .. run, '*', 'head', ARGV[3])
redis.call('SET', PUBLISHED .. id, entry, 'EX', ARGV[4])
note(id, 'published', 0, '', 'as failed, because no worker could read the request')
return 1
""")

RE_ENQUEUE = Transition("""
-- ARGV: id, run, rank, job. Only for an outstanding request that is not queued, claimed, published or dead-lettered.
local id, run = ARGV[1], ARGV[2]
if redis.call('EXISTS', REQUEST .. id) == 0 or redis.call('ZSCORE', QUEUE, id) then return 0 end
if redis.call('EXISTS', LEASE .. id, PUBLISHED .. id) > 0 or redis.call('HEXISTS', DEAD .. run, id) == 1 then return 0 end
redis.call('SET', JOB .. id, ARGV[4])
redis.call('ZADD', QUEUE, ARGV[3], id)
note(id, 're-enqueued', 0, '', 'Redis had lost its place in the queue')
wake()
return 1
""")

FIRST_CLAIMS = Transition(
    """
-- ARGV: ids. Returns the milliseconds since each was claimed for the first time; nothing for one that never was.
local found = {}
for place, id in ipairs(ARGV) do
  local at = redis.call('HGET', CLAIMS .. id, 'first_at')
  found[place] = at and math.max(0, now - at) or false
end
return found
""",
    also_when_full=True,
)

REWRITE_JOB = Transition("""
-- ARGV: id, job
redis.call('DEL', RETRY .. ARGV[1])
if redis.call('ZSCORE', QUEUE, ARGV[1]) then redis.call('SET', JOB .. ARGV[1], ARGV[2]) end
return 1
""")

WAITING_IMAGES = Transition(
    f"""
-- ARGV: how many requests
local found = {{}}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', QUEUE, '-inf', now - {ROTATED_MS // 2}, 'LIMIT', 0, ARGV[1])) do
  local image = redis.call('GET', IMAGE .. id)
  if image then found[#found + 1] = image end
end
return found
""",
    also_when_full=True,
)

SET_ASIDE = Transition(
    """
-- ARGV: run, group, entry, reason, how many to keep
redis.call('LPUSH', MALFORMED .. ARGV[1], ARGV[3] .. ': ' .. ARGV[4])
redis.call('LTRIM', MALFORMED .. ARGV[1], 0, ARGV[5] - 1)
return redis.call('XACK', STREAM .. ARGV[1], ARGV[2], ARGV[3])
""",
    also_when_full=True,
)
