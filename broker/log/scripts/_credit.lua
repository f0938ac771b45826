-- Pacing: credit to generate, the outstanding steps that bound it, the settled position that frees it.
-- Needs: run, fetches.

-- Steps in the log behind the settled position, plus a full fragment for each sequence with credit.
local function outstanding()
  local total, settled, charge = numbers(STATE, 'steps_total', 'settled_steps', 'fragment_charge')
  local begun = 0
  for _, sequences in ipairs(redis.call('HVALS', CREDIT)) do
    begun = begun + sequences
  end
  return total - settled + charge * begun
end

-- Notes how many sequences a rollout session has credit for beyond what it appended.
local function note_credit(session, count)
  if count > 0 then
    redis.call('HSET', CREDIT, session, count)
  else
    redis.call('HDEL', CREDIT, session)
  end
end

-- The most sequences that one session ever has credit for.
local function most_credit()
  local budget, charge = numbers(STATE, 'budget', 'fragment_charge')
  return math.max(1, math.floor(budget / charge))
end

-- Raises begin_through of a rollout session by one while budget and its fair share allow.
-- `steps`: outstanding now. Returns what is outstanding then.
local function grant(session, steps)
  local row = SESSION .. session
  local role, sequence, through = numbers(row, 'role', 'sequence', 'begin_through')
  local budget, charge, version, lock_step =
    numbers(STATE, 'budget', 'fragment_charge', 'version', 'lock_step')
  if role ~= 1 or lock_step == 1 or version == 0 then return steps end
  local share = math.max(1, math.floor(budget / (charge * redis.call('SCARD', ROLLOUTS))))
  local granted = through
  while steps < budget and granted - sequence < share do
    granted, steps = granted + 1, steps + charge
  end
  if granted > through then
    redis.call('HSET', row, 'begin_through', granted, 'min_version', within_reach(session))
    note_credit(session, granted - sequence)
  end
  return steps
end

-- Credit as replies carry it.
local function credit_of(session)
  local through, version, round = numbers(SESSION .. session, 'begin_through', 'min_version', 'round')
  return through, version, math.max(0, round)
end

-- Running total of steps at a position: that of the newest entry at or before it.
local function steps_at(position)
  local number, total, trimmed = numbers(STATE, 'number', 'steps_total', 'trim_steps')
  if position >= number then return total end
  local entry = redis.call('XREVRANGE', LOG, int(position) .. '-0', '-', 'COUNT', 1)[1]
  if not entry then return trimmed end
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 't' then return tonumber(entry[2][i + 1]) end
  end
end

-- Sets the settled position; never beyond the newest entry.
local function set_settled(position)
  local settled = math.min(position, (numbers(STATE, 'number')))
  redis.call('HSET', STATE, 'settled', settled, 'settled_steps', steps_at(settled))
end
