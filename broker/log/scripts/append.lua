-- Appends fragments in order, each at most once; their payloads are staged already.
-- KEYS: staging key per fragment.
-- ARGV: session, acked_through of the actor, then per fragment: sequence, charge, kind, size, header,
--       newest version that it was generated with.
-- Reply: {status, detail, acked_through, appended, begin_through, min_version, round,
--         outstanding, settled steps, entries, bytes}; status OK, FULL, GAP, INVALID, EXPIRED or FENCED
--         for the first fragment not taken (GAP expects acked_through + 1).
-- uses: run, sessions, credit
redis.call('DEL', ABSENT)
local session, actor_acked = ARGV[1], tonumber(ARGV[2])
local row = SESSION .. session
local role, sequence, through, round, returned, lenient =
  numbers(row, 'role', 'sequence', 'begin_through', 'round', 'returned', 'lenient_through')
local number, total, bytes, acked, lost, budget, max_bytes, max_entries, lock_step, allocated =
  numbers(STATE, 'number', 'steps_total', 'log_bytes', 'acked', 'log_lost', 'budget',
    'max_log_bytes', 'max_log_entries', 'lock_step', 'version_counter')
local entries, appended, rewound = redis.call('XLEN', LOG), 0, false
local actor = redis.call('HGET', row, 'actor') or ''
local steps = role == 2 and outstanding() or 0

-- Redis went back in time and the row with it; now its actor says how far it was, once. What it saw
-- acknowledged is acknowledged, and lost. What it began with credit of the lost seconds is honoured: this
-- message, and as much as one session can have credit for.
local function catch_up()
  redis.call('HDEL', row, 'returned')
  local claimed = actor_acked - sequence
  -- No session can have more in the log than fits into it: such a claim would only falsify the accounts.
  if claimed > 0 and claimed <= max_entries then
    note_lost('fragments', session, int(sequence + 1), int(actor_acked))
    acked, lost, sequence, rewound = acked + claimed, lost + claimed, actor_acked, true
  end
  if role ~= 1 then return end
  lenient = sequence + #KEYS + most_credit() + 1
  through = math.min(through, lenient)
  redis.call('HSET', row, 'begin_through', through, 'lenient_through', lenient)
  note_credit(session, math.max(0, through - sequence))
end

local function refusal_of_call()
  if is_closed() then return 'FULL', 'closed' end
  local status = refuse_session(session)
  if status then return status, '' end
  if role == 3 then return 'INVALID', 'an evaluation session appends nothing' end
  if returned == 1 then catch_up() end
  if actor_acked > sequence then return 'GAP', '' end
end

local function refusal_of_fragment(i, given, kind, size, version)
  if given > sequence + 1 then return 'GAP', '' end
  if role == 1 and given > math.max(through, lenient) then
    return 'INVALID', 'sequence ' .. int(given) .. ' was begun without credit'
  end
  -- The allocator leaps when a log is re-opened: no version of the lost seconds lies beyond it.
  if version > allocated then
    return 'INVALID', 'header.weights: version ' .. int(version) .. ' was never published'
  end
  if kind == 1 then
    if entries >= max_entries then return 'FULL', 'log_entries' end
    if bytes + size > max_bytes then return 'FULL', 'log_bytes' end
    if role == 2 and steps >= budget then return 'FULL', 'pacing' end
  end
  if redis.call('EXISTS', KEYS[i]) == 0 then return 'FULL', 'staging' end
end

-- RENAME first among the writes (a script does not roll back); it keeps the staging expiry: PERSIST.
local function store(i, charge, size, header)
  number, total, bytes, entries = number + 1, total + charge, bytes + size, entries + 1
  acked, steps = acked + 1, steps + charge
  redis.call('RENAME', KEYS[i], PAYLOAD .. int(number))
  redis.call('PERSIST', PAYLOAD .. int(number))
  redis.call('XADD', LOG, int(number) .. '-0', 'h', header, 't', int(total), 'z', size, 'r', round,
    'a', actor)
end

local function store_shadow(i, size, header)
  local shadow = int(redis.call('HINCRBY', STATE, 'shadow_number', 1))
  redis.call('RENAME', KEYS[i], SHADOW_PAYLOAD .. shadow)
  redis.call('PERSIST', SHADOW_PAYLOAD .. shadow)
  redis.call('XADD', SHADOW, shadow .. '-0', 'h', header, 'z', size)
  local held = redis.call('HINCRBY', STATE, 'shadow_bytes', size)
  while held > MAX_SHADOW_BYTES or redis.call('XLEN', SHADOW) > MAX_SHADOW_ENTRIES do
    local oldest = redis.call('XRANGE', SHADOW, '-', '+', 'COUNT', 1)[1][1]
    local key = SHADOW_PAYLOAD .. string.match(oldest, '%d+')
    held = redis.call('HINCRBY', STATE, 'shadow_bytes', -redis.call('STRLEN', key))
    redis.call('UNLINK', key)
    redis.call('XDEL', SHADOW, oldest)
  end
end

local status, detail = refusal_of_call()
local first_left = 1
while not status and first_left <= #KEYS do
  local i, at = first_left, 3 + (first_left - 1) * 6
  local given, charge, kind, size = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]),
    tonumber(ARGV[at + 3])
  if given <= sequence then
    redis.call('UNLINK', KEYS[i])
  else
    status, detail = refusal_of_fragment(i, given, kind, size, tonumber(ARGV[at + 5]))
    if not status then
      if kind == 1 then store(i, charge, size, ARGV[at + 4]) else store_shadow(i, size, ARGV[at + 4]) end
      sequence, appended = given, appended + 1
    end
  end
  if not status then first_left = first_left + 1 end
end
for i = first_left, #KEYS do
  redis.call('UNLINK', KEYS[i])
end

if appended > 0 or rewound then
  redis.call('HSET', STATE, 'number', number, 'steps_total', total, 'log_bytes', bytes, 'acked', acked,
    'log_lost', lost)
  through = math.max(through, role == 1 and sequence or 0)
  redis.call('HSET', row, 'sequence', sequence, 'begin_through', through)
  if role == 1 then note_credit(session, through - sequence) end
  if lock_step == 1 and appended > 0 then redis.call('SREM', ROSTER, session) end
end
steps = outstanding()
if detail ~= 'closed' and role > 0 then
  renew_session(session)
  steps = grant(session, steps)
end
local credit, version, credit_round = credit_of(session)
return {status or 'OK', detail or '', sequence, appended, credit, version, credit_round,
  steps, (numbers(STATE, 'settled_steps')), entries, bytes}
