-- Credit to generate: what a session holds of it, and the count of outstanding steps. `_turns.lua` holds the
-- count against the budget, which bounds staleness.
-- Needs: run, fetches.

-- What pacing knows of the run. `steps`: outstanding now, which is the steps in the log behind the settled
-- position, and a full fragment for each sequence with credit. `is_large`: the newest weights take more than
-- one chunk. `given`: fragments that rollout workers were given since a policy server appended one, and
-- `server_since`: when one was refused for want of room; 0: none. Behind it come the numbers of other fields.
local function read_pacing(...)
  local fields = read_numbers(STATE, 'steps_total', 'settled_steps', 'fragment_charge', 'held', 'budget',
    'version', 'lock_step', 'tag', 'pace', 'desired', 'session_timeout_ms', 'calm_ms', 'size', 'given',
    'server_since', ...)
  local total, settled, charge, held = unpack(fields, 1, 4)
  return {
    total = total, settled = settled, charge = charge, held = held, steps = total - settled + charge * held,
    budget = fields[5], version = fields[6], lock_step = fields[7], tag = fields[8], pace = fields[9],
    desired = fields[10], timeout = fields[11], calm = fields[12], is_large = fields[13] > WEIGHT_CHUNK_BYTES,
    given = fields[14], server_since = fields[15], woken = {},
  }, unpack(fields, 16)
end

-- Writes what became of it, with other fields of the state and their values.
local function keep_pacing(pacing, ...)
  redis.call('HSET', STATE, 'held', pacing.held, 'tag', pacing.tag, 'pace', pacing.pace,
    'given', pacing.given, 'server_since', pacing.server_since, ...)
end

-- A session as pacing sees it. `held`: sequences that it has credit for and has not appended. `taken`: those
-- behind them whose credit went back. `since`: when it got credit or appended last. `pace`: its median
-- milliseconds to a fragment, 0 before the first. `tag`: its place among those that wait. `noted…`: what
-- `CREDIT` and the row have of it.
local function credit_row(session)
  local key, returned, rewound, lenient = SESSION .. session, 0, 0, 0
  local fields = redis.call('HMGET', key, 'actor', 'role', 'sequence', 'begin_through', 'since', 'tag', 'taken',
    'min_version', 'round', 'pace')
  for i = 2, 10 do fields[i] = tonumber(fields[i] or 0) end
  -- Looked for in vain in nearly every run, which would take as long as all the others.
  if at_start.reopened then returned, rewound, lenient = numbers(key, 'returned', 'rewound', 'lenient_through') end
  local held = fields[4] - fields[3] - fields[7]
  return {
    key = key, session = session, actor = fields[1], role = fields[2], sequence = fields[3], through = fields[4],
    since = fields[5], tag = fields[6], taken = fields[7], version = fields[8], round = fields[9],
    pace = fields[10], returned = returned, rewound = rewound, lenient = lenient, held = held, noted = held,
    noted_version = fields[8], noted_round = fields[9],
  }
end

-- How long a session may append nothing, in milliseconds: several times its median fragment time. Its first
-- fragment may take twice as long as those of the others, and as long as a session may be silent where none was
-- appended yet. A lock-step round is worth as much waiting: it is not repeated for the member that missed it.
local function patience(pacing, credit)
  local pace = credit.pace > 0 and credit.pace or 2 * pacing.pace
  local least = (pace == 0 or pacing.lock_step == 1) and pacing.timeout or LEAST_PATIENCE_MS
  return math.max(PATIENCE * pace, least)
end

-- Writes what pacing changed of a session.
local function keep_row(pacing, credit)
  redis.call('HSET', credit.key, 'sequence', credit.sequence, 'begin_through', credit.through,
    'since', credit.since, 'tag', credit.tag, 'taken', credit.taken, 'pace', credit.pace)
  if credit.version ~= credit.noted_version or credit.round ~= credit.noted_round then
    redis.call('HSET', credit.key, 'min_version', credit.version, 'round', credit.round)
    credit.noted_version, credit.noted_round = credit.version, credit.round
  end
  if credit.held > 0 then
    redis.call('ZADD', DUE, credit.since + patience(pacing, credit), credit.session)
  elseif credit.noted ~= 0 then
    redis.call('ZREM', DUE, credit.session)
  end
  if credit.held == credit.noted then return end
  if credit.held > 0 then
    redis.call('HSET', CREDIT, credit.session, credit.held)
  else
    redis.call('HDEL', CREDIT, credit.session)
  end
  credit.noted = credit.held
end

-- Sets how many sequences a session has credit for.
local function hold(pacing, credit, count)
  local more = count - credit.held
  pacing.held, pacing.steps = pacing.held + more, pacing.steps + pacing.charge * more
  credit.held = count
end

-- One more fragment: that of the oldest sequence whose credit went back, else of a new one.
local function give(pacing, credit, now)
  if credit.taken > 0 then credit.taken = credit.taken - 1 else credit.through = credit.through + 1 end
  if credit.held == 0 then credit.since = now end
  pacing.given = pacing.given + 1
  credit.version = pacing.is_large and within_reach(credit.session) or pacing.version
  hold(pacing, credit, credit.held + 1)
end

-- Notes the time that credit was held, which is paid for with later turns. What was used while no session waited
-- counts for some turns only.
local function pay(pacing, credit, now, held)
  local some = MOST_TURNS * pacing.pace
  pacing.tag = math.min(math.max(credit.tag, pacing.tag - some), pacing.tag + some)
  credit.tag = pacing.tag + math.max(1, now - credit.since) * math.max(1, held)
end

-- Follows the median by steps of a quarter: one sample alone moves it no further.
local function median(value, sample)
  if value == 0 then return sample end
  return math.ceil(math.min(math.max(sample, value / 1.25), value * 1.25))
end

-- Takes back what a session has credit for. What it has begun with it asks again when it is appended.
local function take_back(pacing, credit, now)
  pay(pacing, credit, now, credit.held)
  credit.taken = credit.taken + credit.held
  redis.call('HINCRBY', STATE, 'taken_back', credit.held)
  hold(pacing, credit, 0)
  keep_row(pacing, credit)
end

-- The most sequences that one session ever has credit for.
local function most_credit(pacing)
  return math.max(1, math.floor(pacing.budget / pacing.charge))
end

-- Counts anew what is held: the sum of what every session holds.
local function repair_held()
  local held = 0
  for _, sequences in ipairs(redis.call('HVALS', CREDIT)) do
    held = held + sequences
  end
  redis.call('HSET', STATE, 'held', held)
end
