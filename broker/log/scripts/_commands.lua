-- Commands of operators: a hash for each of the newest, found by the id that its caller has drawn.
-- Needs: run.

-- Returns number, request id, action, argument, through ('' undecided) and answer ('' pending) of a command.
local function command_of(number)
  local fields = redis.call('HMGET', COMMAND .. int(number), 'id', 'action', 'argument', 'through', 'answer')
  if not fields[1] then return nil end
  return {number, fields[1], fields[2], fields[3], fields[4] or '', fields[5] or ''}
end

-- Notes an answer, JSON; a command that Redis has lost with its newest seconds stays lost.
local function answer(number, text)
  if redis.call('EXISTS', COMMAND .. number) == 1 then redis.call('HSET', COMMAND .. number, 'answer', text) end
end
