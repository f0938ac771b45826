-- The run at one moment; writes nothing.
-- Reply: {closed, outstanding, entries, learner JSON, state as field, value, ..., then
--         {session, actor, role, sequence, begin_through, applied, idle ms} per open session}.
-- uses: run, credit
local sessions, now = {}, (run_ms())
local open = redis.call('ZRANGE', OPEN, 0, -1, 'WITHSCORES')
for i = 1, #open, 2 do
  local row = SESSION .. open[i]
  local role, sequence, through, applied = numbers(row, 'role', 'sequence', 'begin_through', 'applied')
  sessions[#sessions + 1] = {tonumber(open[i]), redis.call('HGET', row, 'actor') or '', role, sequence,
    through, applied, math.max(0, now - open[i + 1])}
end
return {is_closed() and 1 or 0, read_pacing().steps, redis.call('XLEN', LOG), redis.call('GET', LEARNER) or '',
  redis.call('HGETALL', STATE), sessions}
