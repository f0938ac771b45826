-- Writes the desired state of the run. Safe to repeat; stopping is not taken back.
-- ARGV: action (pause, resume, stop, checkpoint), reason.
-- Reply: {'OK', revision, desired} or {'NOT_READY'}.
-- uses: run
redis.call('DEL', ABSENT)
if redis.call('HEXISTS', STATE, 'run') == 0 then return {'NOT_READY'} end
local wanted = ({resume = 1, pause = 2, stop = 3})[ARGV[1]]
local desired, revision = numbers(STATE, 'desired', 'revision')
desired = math.max(1, desired)
if ARGV[1] == 'checkpoint' then
  revision = revision + 1
  redis.call('HSET', STATE, 'checkpoint_revision', revision, 'revision', revision, 'reason', ARGV[2])
elseif wanted ~= desired and desired ~= 3 then
  revision, desired = revision + 1, wanted
  redis.call('HSET', STATE, 'revision', revision, 'desired', desired, 'reason', ARGV[2], 'calm_ms', now_ms())
end
changed()
return {'OK', revision, desired}
