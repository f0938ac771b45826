-- Lock-step: a round has a roster, each session on it begins one fragment.
-- Needs: run, credit, turns.

-- Sessions that a round can wait for: all but those that were silent in one, until they append again.
local function members()
  local found = {}
  for _, session in ipairs(redis.call('SMEMBERS', ROLLOUTS)) do
    local credit = credit_row(session)
    if credit.taken == 0 then found[#found + 1] = credit end
  end
  return found
end

-- Opens the round that waits, once enough rollout sessions are open: all of them for round 0, else one.
-- Returns true when it did.
local function open_round()
  local pacing, round, is_open, count = read_pacing(), numbers(STATE, 'round', 'round_open', 'actor_count')
  if pacing.lock_step ~= 1 or is_open == 1 or pacing.version == 0 then return false end
  local found, now = members(), now_ms()
  if #found < (round == 0 and count or 1) then return false end
  redis.call('DEL', ROSTER)
  for _, credit in ipairs(found) do
    if credit.held == 0 then give(pacing, credit, now) end
    credit.version, credit.round, credit.since = pacing.version, round, now
    keep_row(pacing, credit)
    redis.call('SADD', ROSTER, credit.session)
  end
  redis.call('HSET', STATE, 'round_open', 1, 'round_size', #found)
  keep_pacing(pacing)
  return true
end

-- Lets round credit wait for its roster; rounds that are open or past stay as they are.
local function next_round(round)
  if round > (numbers(STATE, 'round')) then
    redis.call('HSET', STATE, 'round', round, 'round_open', 0)
  end
  return open_round()
end

-- The round that a fragment is part of which comes after its own was given up: one that is not complete yet.
local function incomplete_round()
  local round, is_open = numbers(STATE, 'round', 'round_open')
  return is_open == 1 and redis.call('SCARD', ROSTER) == 0 and round + 1 or round
end

-- Goes on without members that are silent for too long, once others have appended.
local function drop_silent()
  local pacing, size, now = read_pacing(), numbers(STATE, 'round_size'), now_ms()
  local left = redis.call('SCARD', ROSTER)
  if left == 0 or left >= size then return end
  for _, session in ipairs(silent_sessions(pacing, now)) do
    take_back(pacing, credit_row(session), now)
    redis.call('SREM', ROSTER, session)
  end
  keep_pacing(pacing)
end
