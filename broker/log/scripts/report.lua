-- Keeps finished episodes for the learner, idempotent by the session's report sequence.
-- ARGV: session, sequence, encoded report, 1 for one of an evaluation else 0.
-- Reply: {status, last report taken, detail}; status OK, GAP, INVALID, EXPIRED, FENCED or FULL.
-- uses: run, sessions
redis.call('DEL', ABSENT)
local session, sequence, row = ARGV[1], tonumber(ARGV[2]), SESSION .. ARGV[1]
if is_closed() then return {'FULL', 0, 'closed'} end
local status, detail = refuse_session(session)
if status then return {status, 0, detail} end
renew_session(session, now_ms())
local taken, role = numbers(row, 'reports', 'role')
-- A result decides which version is the best one and when a run is solved.
if ARGV[4] == '1' and role ~= 3 then
  return {'INVALID', taken, 'evaluation=true: the session is no evaluation session; open one as EVALUATION'}
end
local reopened, number, bytes = numbers(STATE, 'reopened', 'reports', 'report_bytes')
if sequence <= taken then return {'OK', taken, ''} end
if sequence > taken + 1 and reopened == 0 then return {'GAP', taken, ''} end

number, bytes = number + 1, bytes + #ARGV[3]
redis.call('XADD', REPORTS, int(number) .. '-0', 'a', redis.call('HGET', row, 'actor'), 'b', ARGV[3])
while bytes > MAX_REPORT_BYTES or redis.call('XLEN', REPORTS) > MAX_REPORT_ENTRIES do
  local oldest = redis.call('XRANGE', REPORTS, '-', '+', 'COUNT', 1)[1]
  bytes = bytes - #oldest[2][4]
  redis.call('XDEL', REPORTS, oldest[1])
end
redis.call('HSET', row, 'reports', sequence)
redis.call('HSET', STATE, 'reports', number, 'report_bytes', bytes)
return {'OK', sequence, ''}
