-- Makes a checkpoint count, and with it the answers to the commands that it contains. The second call changes
-- nothing.
-- ARGV: epoch, commit (JSON), position, trim, then number and answer (JSON) of each command.
-- Reply: {'OK', trim floor} or {'FENCED' | 'CLOSED'}.
-- uses: run, commands
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
if redis.call('LINDEX', COMMITS, -1) ~= ARGV[2] then
  redis.call('RPUSH', COMMITS, ARGV[2])
  redis.call('LTRIM', COMMITS, -KEPT_COMMITS, -1)
end
for i = 5, #ARGV, 2 do answer(ARGV[i], ARGV[i + 1]) end
local floor = math.max((numbers(STATE, 'trim_floor')), math.min(tonumber(ARGV[3]), tonumber(ARGV[4])))
redis.call('HSET', STATE, 'trim_floor', floor)
return {'OK', floor}
