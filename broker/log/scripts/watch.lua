-- Renews a session, notes what it serves, grants credit and tells what is new.
-- ARGV: session, begun_through, applied version, probe answer (JSON, '' for none new),
--       1 to give back the credit for what is not begun, else 0, newest flush that a policy server answered.
-- Reply: {'OK', begin_through, min_version, round, desired, revision, traffic revision, evaluate version,
--         version, update, sha256, size, scalars, 1 when it waits for credit else 0,
--         newest flush asked for}
--        or {'NOT_READY' | 'EXPIRED' | 'FENCED' | 'INVALID', detail}.
-- uses: run, sessions, credit, turns
redis.call('DEL', ABSENT)
local session, row, begun = ARGV[1], SESSION .. ARGV[1], tonumber(ARGV[2])
if is_closed() then return {'NOT_READY', 'the log waits for the learner to re-open it'} end
local credit = credit_row(session)
if credit.role == 0 then return {refuse_session(session)} end
local now = now_ms()
renew_session(session, now)
redis.call('HSET', row, 'applied', ARGV[3], 'flushed', ARGV[6])
if ARGV[4] ~= '' then redis.call('HSET', PROBES, session, ARGV[4]) end

-- After a re-opening the row may lack credit that was given, and appends that were acknowledged, in the
-- lost seconds. One sequence beyond what the actor began lets its next Append say how far it was. Its word
-- is taken as far as it can be true, and holds no more of the budget than one session can have credit for.
local function catch_up(pacing)
  local round, max_entries = numbers(STATE, 'round', 'max_log_entries')
  local most = credit.returned == 1 and credit.sequence + max_entries + most_credit(pacing) or credit.lenient
  credit.through = math.max(credit.through, math.min(begun, most)) + 1
  local given = credit.through - credit.sequence
  local held = credit.returned == 1 and math.min(given, most_credit(pacing)) or given
  credit.version, credit.taken, credit.since = pacing.version, given - held, now
  hold(pacing, credit, held)
  redis.call('HSET', row, 'rewound', 0)
  if pacing.lock_step == 1 then
    credit.round = round
    redis.call('SADD', ROSTER, session)
  end
end

-- What is not begun; what is begun is still to come. Repeating it changes nothing.
local function give_back(pacing)
  local unbegun = math.max(0, credit.held - math.max(0, begun - credit.sequence))
  if pacing.lock_step == 1 then return end
  credit.taken = credit.taken + unbegun
  hold(pacing, credit, credit.held - unbegun)
end

local waiting = 0
if credit.role == 1 then
  local pacing = read_pacing()
  local through, held, taken = credit.through, credit.held, credit.taken
  if credit.rewound == 1 and pacing.version > 0 then catch_up(pacing) end
  if ARGV[5] == '1' then give_back(pacing) else ask(pacing, credit, now, 2) end
  if credit.through ~= through or credit.held ~= held or credit.taken ~= taken then
    conclude(pacing, credit, now)
  elseif held == 0 then
    look_on(pacing, credit, now)
  end
  waiting = waits(pacing, credit)
end

local news = redis.call('HMGET', STATE, 'desired', 'revision', 'traffic_revision', 'evaluate_version', 'flush',
  'version', 'update', 'size', 'sha256', 'scalars')
for i = 1, 8 do news[i] = tonumber(news[i] or 0) end
local desired, revision, traffic, evaluate, flush, version, update, size, sha256, scalars = unpack(news)
return {'OK', credit.through, credit.version, math.max(0, credit.round), desired, revision, traffic,
  credit.role == 3 and evaluate or 0, version, update, sha256 or '', size, scalars or '', waiting,
  credit.role == 2 and flush or 0}
