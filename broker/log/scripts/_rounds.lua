-- Lock-step: a round has a roster, each session on it begins one fragment.
-- Needs: run.

-- Opens the round that waits, once enough rollout sessions are open: all of them for round 0, else one.
local function open_round()
  local lock_step, round, is_open, count, version =
    numbers(STATE, 'lock_step', 'round', 'round_open', 'actor_count', 'version')
  if lock_step ~= 1 or is_open == 1 or version == 0 then return end
  local sessions = redis.call('SMEMBERS', ROLLOUTS)
  if #sessions < (round == 0 and count or 1) then return end
  redis.call('DEL', ROSTER)
  for _, session in ipairs(sessions) do
    local row = SESSION .. session
    local sequence, through = numbers(row, 'sequence', 'begin_through')
    through = math.max(through, sequence + 1)
    redis.call('HSET', row, 'begin_through', through, 'min_version', version, 'round', round)
    redis.call('HSET', CREDIT, session, through - sequence)
    redis.call('SADD', ROSTER, session)
  end
  redis.call('HSET', STATE, 'round_open', 1)
end

-- Lets round r wait for its roster; rounds that are open or past stay as they are.
local function next_round(round)
  if round > (numbers(STATE, 'round')) then
    redis.call('HSET', STATE, 'round', round, 'round_open', 0)
  end
  open_round()
end
