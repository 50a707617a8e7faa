"""Every change of a request's state, each one Lua script: it happens whole or not at all.

The README draws the states; a script is an arrow of that drawing. Redis runs one at a time, so a request is in
exactly one state whoever dies where, and an event of its life is written in the same breath. Times are those of
Redis, the one clock that all hosts share.

What lets go of something (a breath, a hand-back, an acknowledgement, a withdrawal) also works in a Redis that is
full; what adds to it (an enqueue, a claim, a publication) is refused there as a whole, and may be tried again.

The queue is arq's zset. Its scores have two bands: never claimed requests lie ROTATED_MS in the past (evaluations
twice that), in the order of their enqueueing; those claimed once lie at the time when they are due again, be it
the end of a back-off or of a lease. So a claim reads only what can be claimed, however much is running, and what
has waited before goes first.
"""

import time

from pipeline import keys

ROTATED_MS = 10 * 365 * 24 * 3600 * 1000
KEEP_EVENTS = 64  # of one request, the newest
KEEP_WAKES = 1000

_PRELUDE = f"""
local QUEUE, WAKE = '{keys.QUEUE}', '{keys.wake()}'
local REQUEST, IMAGE, JOB, RETRY = '{keys.request("")}', '{keys.image("")}', '{keys.arq_job("")}', '{keys.arq_retry("")}'
local CLAIMS, LEASE, FAILURES, EVENTS = '{keys.claims("")}', '{keys.lease("")}', '{keys.failures("")}', '{keys.events("")}'
local PUBLISHED, BODY = '{keys.published("")}', '{keys.body("")}'
local STREAM, MALFORMED = '{keys.stream("")}', '{keys.malformed("")}'
local OPEN, DEAD, BYTES, KEPT = '{keys.open_requests("")}', '{keys.dead("")}', '{keys.unacknowledged_bytes("")}', '{keys.kept("")}'
local KEEP_EVENTS = {KEEP_EVENTS}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function note(id, what, attempt, worker, detail)
  -- For people: a key that somebody else made there breaks nothing.
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
local function owe_no_bytes(run, id)
  local num = redis.call('HGET', BYTES .. run, id)
  if not num then return 0 end
  redis.call('HDEL', BYTES .. run, id)
  redis.call('HINCRBY', BYTES .. run, '', -num)
  return tonumber(num)
end
"""


def due_at(score: float) -> float:
    """When the bearer of a score in the queue is due again (Unix s); 0 if it was never claimed."""
    return score / 1000 if score > time.time() * 1000 - ROTATED_MS // 2 else 0.0


def _script(body: str, *, also_when_full: bool = False) -> str:
    return f"#!lua{' flags=allow-oom' if also_when_full else ''}\n{_PRELUDE}{body}"


ENQUEUE = _script("""
-- ARGV: id, run, request, image, seconds to keep it, enqueued at, rank, job. Asking again changes nothing.
local id, run = ARGV[1], ARGV[2]
if redis.call('EXISTS', PUBLISHED .. id) == 1 then return 0 end
redis.call('SET', REQUEST .. id, ARGV[3])
redis.call('SET', IMAGE .. id, ARGV[4], 'EX', ARGV[5])
redis.call('PERSIST', CLAIMS .. id)
redis.call('ZADD', OPEN .. run, ARGV[6], id)
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

CLAIM = _script(
    _CLAIM_ONE
    + """
-- ARGV: worker, lease milliseconds, id
return claim(ARGV[3], ARGV[1], tonumber(ARGV[2]))
"""
)

TAKE = _script(
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
  -- One whose keys are not what they should be leaves the queue, lest it hold up the others for ever.
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

RENEW = _script(
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

RETURN_TO_QUEUE = _script(
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

PUBLISH = _script("""
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

ACKNOWLEDGE = _script(
    """
-- ARGV: run, group, entry, id, seconds to keep, bytes to keep. A dead request keeps its evidence.
local run, id = ARGV[1], ARGV[4]
redis.call('XACK', STREAM .. run, ARGV[2], ARGV[3])
if redis.call('GET', PUBLISHED .. id) ~= ARGV[3] then return 0 end
if redis.call('ZREM', OPEN .. run, id) == 1 then note(id, 'acknowledged', 0, '', '') end
local num = owe_no_bytes(run, id)
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

WITHDRAW = _script(
    """
-- ARGV: run, fence seconds, seconds to keep, 'dead' if it must be that, answered or not, or 'any', id.
-- An overtaken worker may still breathe, hence the fence.
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

REQUEUE = _script("""
-- ARGV: id, run, rank, job, image, seconds to keep it, enqueued at. A worker that dead-lettered it is fenced off.
local id, run = ARGV[1], ARGV[2]
if redis.call('HEXISTS', DEAD .. run, id) == 0 then return 0 end
redis.call('HDEL', DEAD .. run, id)
local made = redis.call('HINCRBY', CLAIMS .. id, 'made', 1)
redis.call('HSET', CLAIMS .. id, 'ended', made)
owe_no_bytes(run, id)
redis.call('DEL', PUBLISHED .. id, FAILURES .. id, BODY .. id, LEASE .. id)
for _, key in ipairs({REQUEST, CLAIMS, EVENTS}) do redis.call('PERSIST', key .. id) end
redis.call('SET', IMAGE .. id, ARGV[5], 'EX', ARGV[6])
redis.call('ZADD', OPEN .. run, ARGV[7], id)
redis.call('SET', JOB .. id, ARGV[4])
redis.call('ZADD', QUEUE, ARGV[3], id)
note(id, 'requeued', made, '', '')
wake()
return 1
""")

DEAD_LETTER_UNREADABLE = _script(
    """
-- ARGV: id, run, letter, detail. Whoever asked can say what for, and has it answered.
local id, run = ARGV[1], ARGV[2]
redis.call('HSET', DEAD .. run, id, ARGV[3])
leave_queue(id)
redis.call('DEL', LEASE .. id)
note(id, 'dead-lettered', 0, '', ARGV[4])
return 1
""",
    also_when_full=True,
)

PUBLISH_UNREADABLE = _script("""
-- ARGV: id, run, head, fence seconds
local id, run = ARGV[1], ARGV[2]
if redis.call('HEXISTS', DEAD .. run, id) == 0 or redis.call('EXISTS', PUBLISHED .. id) == 1 then return 0 end
local entry = redis.call('XADD', STREAM .. run, '*', 'head', ARGV[3])
redis.call('SET', PUBLISHED .. id, entry, 'EX', ARGV[4])
note(id, 'answered as failed', 0, '', '')
return 1
""")

MEND = _script("""
-- ARGV: id, run, rank, job: owed, but in no queue, with no worker, not answered and not dead
local id, run = ARGV[1], ARGV[2]
if redis.call('EXISTS', REQUEST .. id) == 0 or redis.call('ZSCORE', QUEUE, id) then return 0 end
if redis.call('EXISTS', LEASE .. id, PUBLISHED .. id) > 0 or redis.call('HEXISTS', DEAD .. run, id) == 1 then return 0 end
redis.call('SET', JOB .. id, ARGV[4])
redis.call('ZADD', QUEUE, ARGV[3], id)
note(id, 'found lost, queued again', 0, '', '')
wake()
return 1
""")

FIRST_CLAIMS = _script(
    """
-- ARGV: ids. Milliseconds since each was claimed for the first time; nothing for one that never was.
local found = {}
for place, id in ipairs(ARGV) do
  local at = redis.call('HGET', CLAIMS .. id, 'first_at')
  found[place] = at and math.max(0, now - at) or false
end
return found
""",
    also_when_full=True,
)

REWRITE_JOB = _script("""
-- ARGV: id, job
redis.call('DEL', RETRY .. ARGV[1])
if redis.call('ZSCORE', QUEUE, ARGV[1]) then redis.call('SET', JOB .. ARGV[1], ARGV[2]) end
return 1
""")

WAITING_IMAGES = _script(
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

SET_ASIDE = _script(
    """
-- ARGV: run, group, entry, reason, how many to keep
redis.call('LPUSH', MALFORMED .. ARGV[1], ARGV[3] .. ': ' .. ARGV[4])
redis.call('LTRIM', MALFORMED .. ARGV[1], 0, ARGV[5] - 1)
return redis.call('XACK', STREAM .. ARGV[1], ARGV[2], ARGV[3])
""",
    also_when_full=True,
)
