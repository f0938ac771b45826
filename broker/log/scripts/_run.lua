-- Numbers, time and state of the run. Integers stay below 2^53, where Lua's doubles are exact.

-- The fields of the state that nearly every script needs, as they are when it begins; the clock as it is noted.
local at_start
local function read_start()
  local v = redis.call('HMGET', STATE, 'run', 'layout', 'incarnation', 'redis_run_id', 'closed', 'clock_ms',
    'wall_ms', 'reopened')
  at_start = {run = v[1], layout = v[2], incarnation = v[3], redis_run_id = v[4], closed = v[5],
    clock_ms = v[6], wall_ms = v[7], reopened = v[8]}
end

-- Decimal text of an integer: `..` alone would write 1e+15.
local function int(n)
  return string.format('%.0f', n)
end

-- The clock of Redis's host, which may step: an operator sets it, or a time service does.
local function wall_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The run's own time in milliseconds, and the host's: leases, deadlines and rates are measured in the first. It
-- goes on as the host's clock does, but from one script to the next by MOST_STEP_MS at most and never back. A
-- learner renews its lease more often than that.
local function run_ms()
  local known, then_ms, wall = at_start.clock_ms, at_start.wall_ms, wall_ms()
  if not known then return wall, wall, 0 end
  return known + math.max(0, math.min(wall - then_ms, MOST_STEP_MS)), wall, tonumber(then_ms)
end

-- The run's time, noted as it passes. For scripts that write; others ask `run_ms`.
local function now_ms()
  local now, wall, then_ms = run_ms()
  if math.abs(wall - then_ms) >= CLOCK_NOTE_MS then
    redis.call('HSET', STATE, 'clock_ms', now, 'wall_ms', wall)
    at_start.clock_ms, at_start.wall_ms = now, wall
  end
  return now
end

-- Returns the distance by which allocators leap past the numbers drawn in the seconds that a Redis has lost.
-- It may lose the leap as well, and the learner with it: the next leap begins at the same number and must not
-- meet the first one, so it depends on the time. 64 in a millisecond are more than can be drawn in it.
local function leap()
  return JUMP + (wall_ms() % 2 ^ 20) * 64
end

-- Numeric fields of a hash in a list, 0 where absent.
local function read_numbers(key, ...)
  local values = redis.call('HMGET', key, ...)
  for i = 1, #values do
    values[i] = tonumber(values[i] or 0)
  end
  return values
end

-- The same, one by one.
local function numbers(key, ...)
  return unpack(read_numbers(key, ...))
end

-- The process of Redis that runs this. INFO is slow: only scripts that are rarely run ask.
local function redis_run_id()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
end

-- True until the lease holder opens the log, and again from a restart of Redis until it re-opens it. Every
-- connection notes a restart before anything else (`greet`), and none survives one.
local function is_closed()
  return not at_start.redis_run_id or at_start.closed == '1'
end

-- Returns why a learner with this epoch may not write; nil when it may. A Redis that went back in time holds
-- an older epoch than the true lease holder's: that is CLOSED, not FENCED.
local function fence(epoch)
  local stored = numbers(STATE, 'epoch')
  local mine = tonumber(epoch)
  if mine < stored then return 'FENCED' end
  if mine > stored or is_closed() then return 'CLOSED' end
end

-- Records for audits what a Redis that went back in time has lost, unless the lineage or the log has it:
-- "fragments SESSION FIRST LAST" (LAST '+': all that follow) or "sessions FIRST LAST".
local function note_lost(kind, ...)
  redis.call('RPUSH', LOST, table.concat({kind, ...}, ' '))
  redis.call('LTRIM', LOST, -KEPT_LOST, -1)
end

-- Wakes every call that is held.
local function changed()
  redis.call('PUBLISH', CHANGED, '')
end
