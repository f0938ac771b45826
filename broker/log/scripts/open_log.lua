-- Opens the log for the lease holder: for the first time, after a restart of the learner, or after a
-- restart of Redis. In the last case everything becomes the maximum of both sides, and the allocators
-- of session, version and epoch leap. Safe to repeat with the same nonce.
-- ARGV: epoch, nonce, run, holder, time to live in ms, specification, pacing (JSON), state of the learner
--       (JSON, '' for none), position to set settled back to ('' when re-opening).
-- Reply: {'OK', epoch} or {'FENCED'} or {'TRIMMED', trim floor}.
-- uses: run, sessions, credit, turns, settled, rounds, memory
redis.call('DEL', ABSENT)
local mine, position = tonumber(ARGV[1]), tonumber(ARGV[9])
local stored = numbers(STATE, 'epoch')
if redis.call('HGET', STATE, 'opened_by') == ARGV[2] then return {'OK', stored} end
local closed = is_closed()
if mine < stored then return {'FENCED'} end
local floor, newest = numbers(STATE, 'trim_floor', 'number')
if position and position < floor then return {'TRIMMED', floor} end
local state = ARGV[8] ~= '' and cjson.decode(ARGV[8]) or nil
local opened_before = redis.call('HEXISTS', STATE, 'redis_run_id') == 1
-- A Redis that was filled from a snapshot without being restarted knows less than the learner.
local behind = mine > stored or state ~= nil and state.number > newest
local rewound = (closed or behind) and (opened_before or state ~= nil)
local drawn = numbers(STATE, 'session')

local function raise(field, value)
  if value > (numbers(STATE, field)) then redis.call('HSET', STATE, field, value) end
end

-- Entries that the learner has read and Redis lost leave a hole; a marker without header ends it, so
-- that a reader who waits for the next entry finds the hole at once.
local function raise_number()
  local number, acked = numbers(STATE, 'number', 'acked')
  if state.number <= number then return end
  redis.call('HSET', STATE, 'number', state.number, 'acked', acked + state.number - number)
  raise('steps_total', state.steps_total)
  redis.call('XADD', LOG, int(state.number) .. '-0', 'h', '', 't', int((numbers(STATE, 'steps_total'))),
    'z', 0, 'r', math.max(0, state.round))
end

local function raise_log_lost()
  local lost, acked = numbers(STATE, 'log_lost', 'acked')
  if state.log_lost <= lost then return end
  redis.call('HSET', STATE, 'log_lost', state.log_lost, 'acked', acked + state.log_lost - lost)
end

local function raise_sequences()
  for session, last in pairs(state.sequences) do
    local row = SESSION .. session
    local role, sequence, through = numbers(row, 'role', 'sequence', 'begin_through')
    if role > 0 and last > sequence then
      note_lost('fragments', session, int(sequence + 1), int(last))
      redis.call('HSET', row, 'sequence', last)
      if role == 1 then
        redis.call('HSET', row, 'begin_through', math.max(through, last))
      end
    end
  end
end

-- Checkpoint ids rise. A learner that resumes may know a commit that is older than those kept here.
local function raise_commits()
  local ids, texts = {}, {}
  local function add(commit)
    local id = cjson.decode(commit).checkpoint_id
    if not texts[id] then ids[#ids + 1] = id end
    texts[id] = commit
  end
  for _, commit in ipairs(state.commits) do add(commit) end
  for _, commit in ipairs(redis.call('LRANGE', COMMITS, 0, -1)) do add(commit) end
  table.sort(ids)
  redis.call('DEL', COMMITS)
  for i = math.max(1, #ids - KEPT_COMMITS + 1), #ids do redis.call('RPUSH', COMMITS, texts[ids[i]]) end
end

-- Counts what the entries take, once for a run of an earlier layout.
local function recount_bytes()
  local bytes, from = 0, '-'
  repeat
    local entries = redis.call('XRANGE', LOG, from, '+', 'COUNT', 512)
    for _, entry in ipairs(entries) do
      bytes, from = bytes + held_bytes(entry), '(' .. entry[1]
    end
  until #entries == 0
  redis.call('HSET', STATE, 'log_bytes', bytes)
end

if (numbers(STATE, 'layout')) < LAYOUT then recount_bytes() end
if rewound and state then
  raise_number()
  raise_log_lost()
  raise_sequences()
  raise_commits()
  for _, field in ipairs({'session', 'trim_floor', 'reports', 'revision', 'settled', 'command'}) do
    raise(field, state[field])
  end
  raise('version_counter', state.version)
  if not opened_before then raise('trimmed', state.trim_floor) end
  if state.round > (numbers(STATE, 'round')) then
    redis.call('HSET', STATE, 'round', state.round, 'round_open', 0)
    redis.call('DEL', ROSTER)
  end
end

local epoch = mine
if rewound then
  local far = leap()
  epoch = mine + far
  local leapt = redis.call('HINCRBY', STATE, 'session', int(far))
  note_lost('sessions', int(drawn + 1), int(leapt))
  redis.call('HINCRBY', STATE, 'version_counter', int(far))
  redis.call('HINCRBY', STATE, 'reopened', 1)
  redis.call('HINCRBY', STATE, 'revision', 1)
end
local now = now_ms()
for _, session in ipairs(redis.call('ZRANGE', OPEN, 0, -1)) do
  redis.call('ZADD', OPEN, now, session)
  if rewound then redis.call('HSET', SESSION .. session, 'rewound', 1, 'returned', 1) end
end

redis.call('SET', SPECIFICATION, ARGV[6])
for field, value in pairs(cjson.decode(ARGV[7])) do
  redis.call('HSET', STATE, field, value)
end
-- Credit of lost seconds that was honoured before may be more than a session is ever given: until its actor
-- has said how far it is it counts no further.
if rewound then
  redis.call('DEL', CREDIT, DUE, WAITING)
  local pacing = read_pacing()
  for _, session in ipairs(redis.call('SMEMBERS', ROLLOUTS)) do
    local credit = credit_row(session)
    local given = credit.through - credit.sequence
    credit.held, credit.noted = math.min(given, most_credit(pacing)), 0
    credit.taken, credit.since = given - credit.held, now
    keep_row(pacing, credit)
  end
end
repair_held()
-- A stop outlives a learner that crashed before it had followed it.
local desired, stop_done = numbers(STATE, 'desired', 'stop_done')
if desired == 0 or (desired == 3 and position and stop_done == 1) then
  redis.call('HSET', STATE, 'desired', 1)
  redis.call('HINCRBY', STATE, 'revision', 1)
end
if position then redis.call('HDEL', STATE, 'stop_done') end
redis.call('HSETNX', STATE, 'round', 0)
-- With a value as long as this Redis keeps the hash as a table. In a list, which it is otherwise, each field is
-- sought from the first one on.
redis.call('HSETNX', STATE, 'kept_as', 'a table, because this value is longer than those of a hash that is a list')
if rewound then redis.call('HSET', STATE, 'incarnation', ARGV[2]) end
redis.call('HSETNX', STATE, 'incarnation', ARGV[2])
redis.call('HSET', STATE, 'layout', LAYOUT, 'run', ARGV[3], 'holder', ARGV[4], 'epoch', epoch,
  'lease_expires_ms', now + ARGV[5], 'opened_ms', now, 'calm_ms', now, 'opened_by', ARGV[2],
  'redis_run_id', redis_run_id(), 'closed', 0)
if position then
  -- No learner waits any more for the evaluations that the one before had asked for.
  redis.call('HSET', STATE, 'evaluate_version', 0)
  redis.call('DEL', PINS)
end
set_settled(position or (numbers(STATE, 'settled')))
open_round()
share_out(false)
changed()
return {'OK', epoch}
