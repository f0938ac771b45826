-- Renews a session, notes what it serves, grants credit and tells what is new.
-- ARGV: session, begun_through, applied version, probe answer (JSON, '' for none new).
-- Reply: {'OK', begin_through, min_version, round, desired, revision, traffic revision, evaluate version,
--         version, update, sha256, size, scalars} or {'NOT_READY' | 'EXPIRED' | 'FENCED', detail}.
-- uses: run, sessions, credit
redis.call('DEL', ABSENT)
local session, row = ARGV[1], SESSION .. ARGV[1]
if is_closed() then return {'NOT_READY', 'the log waits for the learner to re-open it'} end
local status = refuse_session(session)
if status then return {status, ''} end
renew_session(session)
redis.call('HSET', row, 'applied', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', PROBES, session, ARGV[4]) end

-- After a re-opening the row may lack credit that was given, and appends that were acknowledged, in the
-- lost seconds. One sequence beyond what the actor began lets its next Append say how far it was. Its word
-- is taken as far as it can be true, and holds no more of the budget than one session can have credit for.
local role, rewound = numbers(row, 'role', 'rewound')
if rewound == 1 and role == 1 then
  local sequence, through, returned, lenient =
    numbers(row, 'sequence', 'begin_through', 'returned', 'lenient_through')
  local version, lock_step, round, max_entries =
    numbers(STATE, 'version', 'lock_step', 'round', 'max_log_entries')
  if version > 0 then
    local most = returned == 1 and sequence + max_entries + most_credit() or lenient
    through = math.max(through, math.min(tonumber(ARGV[2]), most)) + 1
    redis.call('HSET', row, 'begin_through', through, 'min_version', version, 'rewound', 0)
    local credit = through - sequence
    note_credit(session, returned == 1 and math.min(credit, most_credit()) or credit)
    if lock_step == 1 then
      redis.call('HSET', row, 'round', round)
      redis.call('SADD', ROSTER, session)
    end
  end
end
grant(session, outstanding())

local through, version, round = credit_of(session)
local desired, revision, traffic, evaluate =
  numbers(STATE, 'desired', 'revision', 'traffic_revision', 'evaluate_version')
local latest = redis.call('HMGET', STATE, 'version', 'update', 'sha256', 'size', 'scalars')
return {'OK', through, version, round, desired, revision, traffic, role == 3 and evaluate or 0,
  tonumber(latest[1] or 0), tonumber(latest[2] or 0), latest[3] or '', tonumber(latest[4] or 0),
  latest[5] or ''}
