-- Keeps the lease, closes expired sessions, and gives to others what is held in silence.
-- ARGV: epoch, time to live in ms, newest entry that the learner has read.
-- Reply: {'OK', closed, desired, revision, checkpoint revision, bytes, entries, head, outstanding, settled,
--         settled steps, acked, log_lost, evaluate version, rollout sessions, expired,
--         {session, actor, probe JSON, ...}} or {'FENCED'}.
-- uses: run, sessions, credit, turns
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused == 'FENCED' then return {'FENCED'} end
-- Redis was filled from a snapshot without being restarted.
if not refused and (numbers(STATE, 'number')) < tonumber(ARGV[3]) then
  redis.call('HSET', STATE, 'closed', 1)
  refused = 'CLOSED'
end
local now, expired = now_ms(), 0
if not refused then
  redis.call('HSET', STATE, 'lease_expires_ms', now + ARGV[2])
  expired = expire_sessions(now)
  repair_held()
  share_out(false)
end
local probes = {}
local answers = redis.call('HGETALL', PROBES)
for i = 1, #answers, 2 do
  probes[#probes + 1] = answers[i]
  probes[#probes + 1] = redis.call('HGET', SESSION .. answers[i], 'actor') or ''
  probes[#probes + 1] = answers[i + 1]
end
local desired, revision, checkpoint, bytes, number, settled, settled_steps, acked, lost, evaluate =
  numbers(STATE, 'desired', 'revision', 'checkpoint_revision', 'log_bytes', 'number', 'settled',
    'settled_steps', 'acked', 'log_lost', 'evaluate_version')
return {'OK', refused and 1 or 0, desired, revision, checkpoint, bytes, redis.call('XLEN', LOG), number,
  read_pacing().steps, settled, settled_steps, acked, lost, evaluate, redis.call('SCARD', ROLLOUTS), expired,
  probes}
