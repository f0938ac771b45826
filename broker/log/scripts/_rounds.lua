-- Lock-step: a round has a roster, each session on it begins one fragment.
-- Needs: run, credit, turns.

-- Sessions that a round can wait for: all but those that were silent in one, until they append again.
local function members()
  local found = {}
  for _, session in ipairs(redis.call('SMEMBERS', ROLLOUTS)) do
    local r = credit_row(session)
    if r.taken == 0 then found[#found + 1] = r end
  end
  return found
end

-- Opens the round that waits, once enough rollout sessions are open: all of them for round 0, else one.
-- Returns true when it did.
local function open_round()
  local p, round, is_open, count = pacing(), numbers(STATE, 'round', 'round_open', 'actor_count')
  if p.lock_step ~= 1 or is_open == 1 or p.version == 0 then return false end
  local found, now = members(), now_ms()
  if #found < (round == 0 and count or 1) then return false end
  redis.call('DEL', ROSTER)
  for _, r in ipairs(found) do
    if r.held == 0 then give(p, r, now) end
    r.version, r.round, r.since = p.version, round, now
    keep_row(p, r)
    redis.call('SADD', ROSTER, r.session)
  end
  redis.call('HSET', STATE, 'round_open', 1, 'round_size', #found)
  keep_pacing(p)
  return true
end

-- Lets round r wait for its roster; rounds that are open or past stay as they are.
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
  local p, size, now = pacing(), numbers(STATE, 'round_size'), now_ms()
  local left = redis.call('SCARD', ROSTER)
  if left == 0 or left >= size then return end
  for _, session in ipairs(silent_sessions(p, now)) do
    take_back(p, credit_row(session), now)
    redis.call('SREM', ROSTER, session)
  end
  keep_pacing(p)
end
