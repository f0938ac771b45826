-- Removes entries up to the trim floor, at most so many per call (a script blocks every other call).
-- ARGV: epoch, most entries. Reply: {'OK', entries left to forget} or {'FENCED' | 'CLOSED'}.
-- uses: run, settled, memory
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local floor, trimmed, bytes = numbers(STATE, 'trim_floor', 'trimmed', 'log_bytes')
local through = math.min(floor, trimmed + ARGV[2])
if through > trimmed then
  local steps = steps_at(through)
  for _, entry in ipairs(redis.call('XRANGE', LOG, int(trimmed + 1) .. '-0', int(through) .. '-0')) do
    bytes = bytes - held_bytes(entry)
  end
  for number = trimmed + 1, through do
    redis.call('UNLINK', PAYLOAD .. int(number))
  end
  redis.call('XTRIM', LOG, 'MINID', int(through + 1) .. '-0')
  redis.call('HSET', STATE, 'trimmed', through, 'trim_steps', steps, 'log_bytes', bytes)
end
return {'OK', floor - through}
