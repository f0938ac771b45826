-- Rows of open sessions. Session numbers are text here, as Redis gives and takes them.
-- Needs: run, fetches.

-- The only way a row goes. What it had credit for is outstanding no more: `share_out` gives it to others.
local function close_session(session)
  local actor = redis.call('HGET', SESSION .. session, 'actor')
  if not actor then return false end
  local sequence, returned = numbers(SESSION .. session, 'sequence', 'returned')
  -- Its actor has not reported its position since Redis went back, and will not; also before the log opens.
  if returned == 1 or is_closed() then note_lost('fragments', session, int(sequence + 1), '+') end
  if redis.call('HGET', ACTORS, actor) == session then
    redis.call('HDEL', ACTORS, actor)
  end
  end_fetch(session)
  redis.call('DEL', SESSION .. session)
  redis.call('ZREM', OPEN, session)
  redis.call('SREM', ROLLOUTS, session)
  redis.call('SREM', ROSTER, session)
  local held = redis.call('HGET', CREDIT, session)
  if held then
    redis.call('HDEL', CREDIT, session)
    redis.call('HINCRBY', STATE, 'held', -held)
  end
  redis.call('ZREM', DUE, session)
  redis.call('ZREM', WAITING, session)
  redis.call('HDEL', PROBES, session)
  return true
end

-- Closes sessions not heard for one timeout, never sooner than one timeout after the log opened.
local function expire_sessions(now)
  local timeout, opened = numbers(STATE, 'session_timeout_ms', 'opened_ms')
  if timeout == 0 or now - opened <= timeout then return 0 end
  local stale = redis.call('ZRANGEBYSCORE', OPEN, '-inf', '(' .. int(now - timeout))
  for _, session in ipairs(stale) do
    close_session(session)
  end
  return #stale
end

-- Returns why this session is refused, and the details; nil when it is not.
local function refuse_session(session)
  if redis.call('EXISTS', SESSION .. session) == 1 then return nil end
  local why = redis.call('HGET', CONVICTED, session)
  if why then return 'INVALID', 'the learner closed this session: ' .. why end
  return redis.call('ZSCORE', SUPERSEDED, session) and 'FENCED' or 'EXPIRED', ''
end

local function renew_session(session, now)
  redis.call('ZADD', OPEN, 'XX', now, session)
end
