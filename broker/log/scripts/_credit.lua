-- Credit to generate: what a session holds of it, and the outstanding steps that bound all of it. The bound on
-- staleness is here: with (S+1) batches outstanding at most, where S is `algorithm.staleness`, what is begun now
-- is trained at most S updates later.
-- Needs: run, fetches.

-- What pacing knows of the run. `steps`: outstanding now, which is the steps in the log behind the settled
-- position, and a full fragment for each sequence with credit. `is_large`: the newest weights take more than
-- one chunk. Behind it come the numbers of other fields.
local function pacing(...)
  local v = read_numbers(STATE, 'steps_total', 'settled_steps', 'fragment_charge', 'held', 'budget', 'version',
    'lock_step', 'tag', 'pace', 'desired', 'session_timeout_ms', 'calm_ms', 'size', ...)
  return {
    total = v[1], settled = v[2], charge = v[3], held = v[4], budget = v[5], version = v[6], lock_step = v[7],
    tag = v[8], pace = v[9], desired = v[10], timeout = v[11], calm = v[12], steps = v[1] - v[2] + v[3] * v[4],
    is_large = v[13] > WEIGHT_CHUNK_BYTES, woken = {},
  }, unpack(v, 14)
end

-- Writes what became of it, with other fields of the state and their values.
local function keep_pacing(p, ...)
  redis.call('HSET', STATE, 'held', p.held, 'tag', p.tag, 'pace', p.pace, ...)
end

-- A session as pacing sees it. `held`: sequences that it has credit for and has not appended. `taken`: those
-- behind them whose credit went back. `since`: when it got credit or appended last. `pace`: its median
-- milliseconds to a fragment, 0 before the first. `tag`: its place among those that wait. `noted…`: what
-- `CREDIT` and the row have of it.
local function credit_row(session)
  local key, returned, rewound, lenient = SESSION .. session, 0, 0, 0
  local v = redis.call('HMGET', key, 'actor', 'role', 'sequence', 'begin_through', 'since', 'tag', 'taken',
    'min_version', 'round', 'pace')
  for i = 2, 10 do v[i] = tonumber(v[i] or 0) end
  -- Looked for in vain in nearly every run, which would take as long as all the others.
  if at_start.reopened then returned, rewound, lenient = numbers(key, 'returned', 'rewound', 'lenient_through') end
  local held = v[4] - v[3] - v[7]
  return {
    key = key, session = session, actor = v[1], role = v[2], sequence = v[3], through = v[4], since = v[5],
    tag = v[6], taken = v[7], version = v[8], round = v[9], pace = v[10], returned = returned,
    rewound = rewound, lenient = lenient, held = held, noted = held, noted_version = v[8], noted_round = v[9],
  }
end

-- How long a session may append nothing, in milliseconds: several times its median fragment time. Its first
-- fragment may take twice as long as those of the others, and as long as a session may be silent where none was
-- appended yet. A lock-step round is worth as much waiting: it is not repeated for the member that missed it.
local function patience(p, r)
  local pace = r.pace > 0 and r.pace or 2 * p.pace
  local least = (pace == 0 or p.lock_step == 1) and p.timeout or LEAST_PATIENCE_MS
  return math.max(PATIENCE * pace, least)
end

-- Writes what pacing changed of a session.
local function keep_row(p, r)
  redis.call('HSET', r.key, 'sequence', r.sequence, 'begin_through', r.through, 'since', r.since, 'tag', r.tag,
    'taken', r.taken, 'pace', r.pace)
  if r.version ~= r.noted_version or r.round ~= r.noted_round then
    redis.call('HSET', r.key, 'min_version', r.version, 'round', r.round)
    r.noted_version, r.noted_round = r.version, r.round
  end
  if r.held > 0 then
    redis.call('ZADD', DUE, r.since + patience(p, r), r.session)
  elseif r.noted ~= 0 then
    redis.call('ZREM', DUE, r.session)
  end
  if r.held == r.noted then return end
  if r.held > 0 then redis.call('HSET', CREDIT, r.session, r.held) else redis.call('HDEL', CREDIT, r.session) end
  r.noted = r.held
end

-- Sets how many sequences a session has credit for.
local function hold(p, r, count)
  p.held, p.steps = p.held + count - r.held, p.steps + p.charge * (count - r.held)
  r.held = count
end

-- One more fragment: that of the oldest sequence whose credit went back, else of a new one.
local function give(p, r, now)
  if r.taken > 0 then r.taken = r.taken - 1 else r.through = r.through + 1 end
  if r.held == 0 then r.since = now end
  r.version = p.is_large and within_reach(r.session) or p.version
  hold(p, r, r.held + 1)
end

-- Notes the time that credit was held, which is paid for with later turns. What was used while no session waited
-- counts for some turns only.
local function pay(p, r, now, held)
  local some = MOST_TURNS * p.pace
  p.tag = math.min(math.max(r.tag, p.tag - some), p.tag + some)
  r.tag = p.tag + math.max(1, now - r.since) * math.max(1, held)
end

-- Follows the median by steps of a quarter: one sample alone moves it no further.
local function median(value, sample)
  if value == 0 then return sample end
  return math.ceil(math.min(math.max(sample, value / 1.25), value * 1.25))
end

-- Takes back what a session has credit for. What it has begun with it asks again when it is appended.
local function take_back(p, r, now)
  pay(p, r, now, r.held)
  r.taken = r.taken + r.held
  redis.call('HINCRBY', STATE, 'taken_back', r.held)
  hold(p, r, 0)
  keep_row(p, r)
end

-- The most sequences that one session ever has credit for.
local function most_credit(p)
  return math.max(1, math.floor(p.budget / p.charge))
end

-- Counts anew what is held: the sum of what every session holds.
local function repair_held()
  local held = 0
  for _, sequences in ipairs(redis.call('HVALS', CREDIT)) do
    held = held + sequences
  end
  redis.call('HSET', STATE, 'held', held)
end
