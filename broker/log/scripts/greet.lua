-- Closes the log when Redis was restarted since it was opened. The first command of every connection of
-- brokers and learners: a connection ends with the process that it leads to, so no script runs after a
-- restart before one of them has said so.
-- Reply: 1 when the log is closed, else 0.
-- uses: run
local opened_by = redis.call('HGET', STATE, 'redis_run_id')
if opened_by and opened_by ~= redis_run_id() and not is_closed() then
  redis.call('DEL', ABSENT)
  redis.call('HSET', STATE, 'closed', 1)
end
return is_closed() and 1 or 0
