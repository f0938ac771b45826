-- Notes a command for the learner, once for each request id.
-- ARGV: request id, action (checkpoint, flush, restore), argument, reason.
-- Reply: {'OK', command as in _commands.lua, new (0 or 1)} or {'NOT_READY'} or {'OTHER', action, argument} for an id that
--        names another command, or {'BUSY', commands that wait}.
-- uses: run, commands
redis.call('DEL', ABSENT)
if redis.call('HEXISTS', STATE, 'run') == 0 then return {'NOT_READY'} end
local known = redis.call('HGET', COMMAND_IDS, ARGV[1])
if known then
  local found = command_of(tonumber(known))
  if found[3] ~= ARGV[2] or found[4] ~= ARGV[3] then return {'OTHER', found[3], found[4]} end
  return {'OK', found, 0}
end
local newest, waiting = numbers(STATE, 'command'), 0
for number = math.max(1, newest - KEPT_COMMANDS + 1), newest do
  local row = COMMAND .. int(number)
  if redis.call('EXISTS', row) == 1 and redis.call('HEXISTS', row, 'answer') == 0 then waiting = waiting + 1 end
end
if waiting >= MAX_PENDING_COMMANDS then return {'BUSY', waiting} end
local number = redis.call('HINCRBY', STATE, 'command', 1)
redis.call('HSET', COMMAND .. int(number), 'id', ARGV[1], 'action', ARGV[2], 'argument', ARGV[3],
  'reason', ARGV[4])
redis.call('HSET', COMMAND_IDS, ARGV[1], int(number))
local oldest = COMMAND .. int(number - KEPT_COMMANDS)
local id = redis.call('HGET', oldest, 'id')
if id then
  redis.call('HDEL', COMMAND_IDS, id)
  redis.call('DEL', oldest)
end
redis.call('HINCRBY', STATE, 'revision', 1)
changed()
return {'OK', command_of(number), 1}
