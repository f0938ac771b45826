-- Renews a session, notes what it serves, grants credit and tells what is new.
-- ARGV: session, begun_through, applied version, probe answer (JSON, '' for none new),
--       1 to give back the credit for what is not begun, else 0, newest flush that a policy server answered.
-- Reply: {'OK', begin_through, min_version, round, desired, revision, traffic revision, evaluate version,
--         version, update, sha256, size, scalars, 1 when it waits for credit else 0,
--         newest flush asked for}
--        or {'NOT_READY' | 'EXPIRED' | 'FENCED', detail}.
-- uses: run, sessions, credit, turns
redis.call('DEL', ABSENT)
local session, row, begun = ARGV[1], SESSION .. ARGV[1], tonumber(ARGV[2])
if is_closed() then return {'NOT_READY', 'the log waits for the learner to re-open it'} end
local r = credit_row(session)
if r.role == 0 then return {refuse_session(session), ''} end
local now = now_ms()
renew_session(session, now)
redis.call('HSET', row, 'applied', ARGV[3], 'flushed', ARGV[6])
if ARGV[4] ~= '' then redis.call('HSET', PROBES, session, ARGV[4]) end

-- After a re-opening the row may lack credit that was given, and appends that were acknowledged, in the
-- lost seconds. One sequence beyond what the actor began lets its next Append say how far it was. Its word
-- is taken as far as it can be true, and holds no more of the budget than one session can have credit for.
local function catch_up(p)
  local round, max_entries = numbers(STATE, 'round', 'max_log_entries')
  local most = r.returned == 1 and r.sequence + max_entries + most_credit(p) or r.lenient
  r.through = math.max(r.through, math.min(begun, most)) + 1
  local credit = r.through - r.sequence
  local held = r.returned == 1 and math.min(credit, most_credit(p)) or credit
  r.version, r.taken, r.since = p.version, credit - held, now
  hold(p, r, held)
  redis.call('HSET', row, 'rewound', 0)
  if p.lock_step == 1 then
    r.round = round
    redis.call('SADD', ROSTER, session)
  end
end

-- What is not begun; what is begun is still to come. Repeating it changes nothing.
local function give_back(p)
  local unbegun = math.max(0, r.held - math.max(0, begun - r.sequence))
  if p.lock_step == 1 then return end
  r.taken = r.taken + unbegun
  hold(p, r, r.held - unbegun)
end

local waiting = 0
if r.role == 1 then
  local p = pacing()
  local through, held, taken = r.through, r.held, r.taken
  if r.rewound == 1 and p.version > 0 then catch_up(p) end
  if ARGV[5] == '1' then give_back(p) else ask(p, r, now, 2) end
  if r.through ~= through or r.held ~= held or r.taken ~= taken then
    conclude(p, r, now)
  elseif held == 0 then
    look_on(p, r, now)
  end
  waiting = waits(p, r)
end

local news = redis.call('HMGET', STATE, 'desired', 'revision', 'traffic_revision', 'evaluate_version', 'flush',
  'version', 'update', 'size', 'sha256', 'scalars')
for i = 1, 8 do news[i] = tonumber(news[i] or 0) end
local desired, revision, traffic, evaluate, flush, version, update, size, sha256, scalars = unpack(news)
return {'OK', r.through, r.version, math.max(0, r.round), desired, revision, traffic,
  r.role == 3 and evaluate or 0, version, update, sha256 or '', size, scalars or '', waiting,
  r.role == 2 and flush or 0}
