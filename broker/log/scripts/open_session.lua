-- Draws a session number and closes the actor's previous session.
-- ARGV: actor id, role, owner (identity that opens it, '' for none).
-- Reply: {'OK', session, seed salt, begin_through, min_version, round, specification,
--         1 when it waits for credit else 0}
--        or {'NOT_READY' | 'RUN_CLOSED' | 'FULL' | 'INVALID', detail}.
-- uses: run, sessions, credit, turns, rounds
redis.call('DEL', ABSENT)
local actor, role = ARGV[1], tonumber(ARGV[2])
local specification = redis.call('GET', SPECIFICATION)
if not specification then return {'NOT_READY', 'no learner has written the run specification yet'} end
if is_closed() then return {'NOT_READY', 'the log waits for the learner to re-open it'} end
local number, desired, reopened = numbers(STATE, 'number', 'desired', 'reopened')
if desired == 3 then return {'RUN_CLOSED', 'the run is stopping'} end
if numbers(DAMAGED, actor) >= MOST_DAMAGED then
  return {'INVALID', MOST_DAMAGED .. ' sessions in a row of this actor sent experience that cannot be learned from; '
    .. 'the log of the learner says what; look for damage on its way or in its memory, then start the learner again'}
end

local previous = redis.call('HGET', ACTORS, actor)
if previous then
  -- An identity keeps its session until it ends: no other identity takes the actor's name over.
  local owner = redis.call('HGET', SESSION .. previous, 'owner') or ''
  if owner ~= '' and owner ~= ARGV[3] then
    expire_sessions(now_ms())
    if redis.call('EXISTS', SESSION .. previous) == 1 then
      return {'NOT_READY', 'the session of this actor is open and was opened by ' .. owner}
    end
    previous = nil
  end
end
if previous then
  close_session(previous)
  redis.call('ZADD', SUPERSEDED, previous, previous)
  redis.call('ZREMRANGEBYRANK', SUPERSEDED, 0, -KEPT_SUPERSEDED - 1)
end
local now = now_ms()
local expired = expire_sessions(now)
if redis.call('ZCARD', OPEN) >= MAX_SESSIONS then return {'FULL', 'sessions'} end

local session = int(redis.call('HINCRBY', STATE, 'session', 1))
redis.call('HSET', SESSION .. session, 'actor', actor, 'role', role, 'sequence', 0,
  'owner', ARGV[3] or '')
redis.call('ZADD', OPEN, now, session)
redis.call('HSET', ACTORS, actor, session)
if role == 1 then redis.call('SADD', ROLLOUTS, session) end
if open_round() then changed() elseif previous or expired > 0 then share_out(false) end
-- A newcomer waits as one that has just had its turn.
local pacing, credit = read_pacing(), credit_row(session)
if role == 1 then
  credit.tag = pacing.tag + pacing.pace
  ask(pacing, credit, now, 1)
  conclude(pacing, credit, now)
end

local salt = (previous or number > 0 or reopened > 0) and tonumber(session) or 0
return {'OK', tonumber(session), salt, credit.through, credit.version, math.max(0, credit.round),
  specification, waits(pacing, credit)}
