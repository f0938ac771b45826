-- Closes a session that sent experience which cannot be learned from, and counts it for its actor.
-- ARGV: epoch, session, actor ('' is not counted), why. Reply: {'OK'} or {'FENCED' | 'CLOSED'}.
-- uses: run, sessions, credit, turns
redis.call('DEL', ABSENT)
local refused = fence(ARGV[1])
if refused then return {refused} end
local session, actor = ARGV[2], ARGV[3]
for _, key in ipairs({CONVICTED, DAMAGED}) do
  if redis.call('HLEN', key) >= MAX_SESSIONS then redis.call('DEL', key) end
end
if redis.call('HSETNX', CONVICTED, session, ARGV[4]) == 1 and actor ~= '' then
  if numbers(SESSION .. session, 'sequence') >= FORGIVEN_AFTER then redis.call('HDEL', DAMAGED, actor) end
  redis.call('HINCRBY', DAMAGED, actor, 1)
end
if close_session(session) then
  share_out(false)
  changed()
end
return {'OK'}
