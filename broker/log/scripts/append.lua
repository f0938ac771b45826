-- Appends fragments in order, each at most once; their payloads are staged already.
-- KEYS: staging key per fragment.
-- ARGV: session, acked_through of the actor, then per fragment: sequence, charge, kind, size, header,
--       newest version that it was generated with.
-- Reply: {status, detail, acked_through, appended, begin_through, min_version, round,
--         outstanding, settled steps, entries, bytes, 1 when it waits for credit else 0};
--         status OK, FULL, GAP, INVALID, EXPIRED or FENCED for the first fragment not taken (GAP expects
--         acked_through + 1).
-- uses: run, sessions, credit, turns, rounds, memory
redis.call('DEL', ABSENT)
local session, actor_acked, now = ARGV[1], tonumber(ARGV[2]), now_ms()
local credit = credit_row(session)
local pacing, number, bytes, acked, lost, max_bytes, max_entries, allocated =
  read_pacing('number', 'log_bytes', 'acked', 'log_lost', 'max_log_bytes', 'max_log_entries', 'version_counter')
local total, entries, appended, rewound = pacing.total, redis.call('XLEN', LOG), 0, false
local is_late, held, stamp = credit.held == 0 and credit.taken > 0, credit.held, credit.round

-- Redis went back in time and the row with it; now its actor says how far it was, once. What it saw
-- acknowledged is acknowledged, and lost. What it began with credit of the lost seconds is honoured: this
-- message, and as much as one session can have credit for.
local function catch_up()
  redis.call('HDEL', credit.key, 'returned')
  local claimed = actor_acked - credit.sequence
  -- No session can have more in the log than fits into it: such a claim would only falsify the accounts.
  if claimed > 0 and claimed <= max_entries then
    note_lost('fragments', session, int(credit.sequence + 1), int(actor_acked))
    acked, lost, credit.sequence, rewound = acked + claimed, lost + claimed, actor_acked, true
  end
  if credit.role ~= 1 then return end
  credit.lenient = credit.sequence + #KEYS + most_credit(pacing) + 1
  redis.call('HSET', credit.key, 'lenient_through', credit.lenient)
  credit.through, credit.taken = math.max(credit.sequence, math.min(credit.through, credit.lenient)), 0
  hold(pacing, credit, credit.through - credit.sequence)
end

local function refusal_of_call()
  if is_closed() then return 'FULL', 'closed' end
  if credit.role == 0 then return refuse_session(session) end
  if credit.role == 3 then return 'INVALID', 'an evaluation session appends nothing' end
  if credit.returned == 1 then catch_up() end
  if actor_acked > credit.sequence then return 'GAP', '' end
end

-- How long a fragment takes.
local function learn(sample)
  credit.pace, pacing.pace = median(credit.pace, sample), median(pacing.pace, sample)
end

-- The credit for this fragment was taken back: it waits for its turn as one that is still to be made. In
-- lock-step it comes late for its round and is part of one that is not complete.
local function lacks_credit(given)
  if credit.role ~= 1 or credit.held > 0 or credit.taken == 0 or given > credit.through then return false end
  local may = pacing.lock_step == 1 or pacing.steps < pacing.budget
  credit.tag = math.max(credit.tag, pacing.tag)
  if may or queue_up(pacing, credit) then
    learn(now - credit.since)
    credit.since = now
  end
  if not may then return true end
  if pacing.lock_step == 1 then stamp = incomplete_round() end
  give(pacing, credit, now)
  return false
end

local function refusal_of_fragment(i, given, charge, kind, taken, version)
  if given > credit.sequence + 1 then return 'GAP', '' end
  -- Credit is counted in fragments: one of many times the steps would be as much of a batch as it likes.
  if charge > pacing.charge then
    return 'INVALID', 'header: ' .. int(charge) .. ' steps (T·N), a fragment of this run has '
      .. int(pacing.charge) .. ' at most; send T ≤ actor.unroll_length and N ≤ environment.count'
  end
  if credit.role == 1 and given > math.max(credit.through, credit.lenient) then
    return 'INVALID', 'sequence ' .. int(given) .. ' was begun without credit'
  end
  -- The allocator leaps when a log is re-opened: no version of the lost seconds lies beyond it.
  if version > allocated then
    return 'INVALID', 'header.weights: version ' .. int(version) .. ' was never published'
  end
  if kind == 1 then
    if entries >= max_entries then return 'FULL', 'log_entries' end
    if bytes + taken > max_bytes then return 'FULL', 'log_bytes' end
    if credit.role == 2 and pacing.steps >= pacing.budget then
      pacing.server_since = now
      return 'FULL', 'pacing'
    end
  end
  -- Staged payloads expire, those in the log do not; one that is not taken is dropped below.
  if redis.call('PERSIST', KEYS[i]) == 0 then return 'FULL', 'staging' end
  if lacks_credit(given) then return 'FULL', 'pacing' end
end

-- The charge of what is in the log takes the place of what was held for it.
local function note_appended(given, charge)
  total, pacing.steps = total + charge, pacing.steps + charge
  credit.sequence, appended = given, appended + 1
  if credit.role == 1 then
    credit.through = math.max(credit.through, given)
    hold(pacing, credit, math.max(0, credit.held - 1))
  elseif charge > 0 then
    pacing.given, pacing.server_since = 0, 0
  end
end

-- RENAME first among the writes: a script does not roll back.
local function store(i, size, header, charge)
  number, bytes, entries, acked = number + 1, bytes + entry_bytes(size, #header), entries + 1, acked + 1
  local name = int(number)
  redis.call('RENAME', KEYS[i], PAYLOAD .. name)
  redis.call('XADD', LOG, name .. '-0', 'h', header, 't', int(total + charge), 'z', size, 'r', stamp,
    'a', credit.actor or '')
end

local function store_shadow(i, size, header)
  local shadow = int(redis.call('HINCRBY', STATE, 'shadow_number', 1))
  redis.call('RENAME', KEYS[i], SHADOW_PAYLOAD .. shadow)
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
  if given <= credit.sequence then
    redis.call('UNLINK', KEYS[i])
  else
    local taken = entry_bytes(size, #ARGV[at + 4])
    status, detail = refusal_of_fragment(i, given, charge, kind, taken, tonumber(ARGV[at + 5]))
    if not status then
      if kind == 1 then store(i, size, ARGV[at + 4], charge) else store_shadow(i, size, ARGV[at + 4]) end
      note_appended(given, kind == 1 and charge or 0)
    end
  end
  if not status then first_left = first_left + 1 end
end
for i = first_left, #KEYS do
  redis.call('UNLINK', KEYS[i])
end

-- Time with credit is paid for with later turns.
local function note_time()
  if not is_late then
    pay(pacing, credit, now, held)
    learn(math.ceil((now - credit.since) / appended))
  end
  credit.since = now
end

local counters = {}
if appended > 0 or rewound then
  counters = {'number', number, 'steps_total', total, 'log_bytes', bytes, 'acked', acked, 'log_lost', lost}
end
if detail ~= 'closed' and credit.role > 0 then
  renew_session(session, now)
  if credit.role == 1 then
    if appended > 0 then note_time() elseif status == 'FULL' and not is_late then credit.since = now end
    ask(pacing, credit, now, 2)
    conclude(pacing, credit, now, unpack(counters))
  else
    if #counters > 0 then redis.call('HSET', credit.key, 'sequence', credit.sequence) end
    relieve(pacing, now)
    keep_pacing(pacing, unpack(counters))
    wake(pacing)
  end
  if pacing.lock_step == 1 and appended > 0 then
    redis.call('SREM', ROSTER, session)
    if open_round() then changed() end
  end
end
return {status or 'OK', detail or '', credit.sequence, appended, credit.through, credit.version,
  math.max(0, credit.round), pacing.steps, pacing.settled, entries, bytes, waits(pacing, credit)}
