-- Has policy servers hand over what they have cut for a flush, and decides what it takes, once.
-- ARGV: epoch, number of the command, 1 to decide though servers have not answered.
-- Reply: {'OK', servers that have not answered, newest entry it takes ('' not decided)} or
--        {'FENCED' | 'CLOSED'}.
-- uses: run
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local number, row = tonumber(ARGV[2]), COMMAND .. ARGV[2]
if number > (numbers(STATE, 'flush')) then
  redis.call('HSET', STATE, 'flush', number)
  redis.call('HINCRBY', STATE, 'revision', 1)
  changed()
end
local waiting = 0
for _, session in ipairs(redis.call('ZRANGE', OPEN, 0, -1)) do
  local role, flushed = numbers(SESSION .. session, 'role', 'flushed')
  if role == 2 and flushed < number then waiting = waiting + 1 end
end
if (waiting == 0 or ARGV[3] == '1') and redis.call('EXISTS', row) == 1 then
  redis.call('HSETNX', row, 'through', int((numbers(STATE, 'number'))))
end
return {'OK', waiting, redis.call('HGET', row, 'through') or ''}
