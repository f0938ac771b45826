-- Closes the log when Redis was restarted since it was opened. The first command of every connection of
-- brokers and learners: a connection ends with the process that it leads to, so no script runs after a
-- restart before one of them has said so.
-- Reply: 1 when the log is closed, else 0.
-- uses: run
local closed = is_closed()
if not closed and at_start.redis_run_id ~= redis_run_id() then
  redis.call('DEL', ABSENT)
  redis.call('HSET', STATE, 'closed', 1)
  closed = true
end
return closed and 1 or 0
