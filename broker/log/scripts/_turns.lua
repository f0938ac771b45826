-- Whose turn it is to get credit, and from whom it comes back.
-- Needs: run, credit.
--
-- Credit goes one fragment at a time to the session whose turn it is (`WAITING`); second helpings only while
-- no session waits. A turn is start-time fair queueing (Goyal, Vin and Cheng 1996): every session has a tag,
-- the milliseconds of credit that it has used, and the lowest tag is next. So a slow session holds as much of
-- the budget as a fast one. While a session waits, credit comes back from one that appends nothing for several
-- times its own fragment time (`DUE`). Its numbers stay, for they are absolute and may be begun already, but
-- what is begun with them needs credit again when it is appended. So outstanding never passes the budget by
-- more than a fragment.
--
-- Policy servers have no credit: they append what clients did while there is room. One that finds none has a turn
-- too, after one of each rollout worker: room for its fragment is kept until it asks again.
--
-- After every script: where a session waits, nothing of the budget is left, but what is kept for a server.

-- A session as the script has it already (`mine`), else as it is noted.
local function row_of(session, mine)
  return mine and mine.session == session and mine or credit_row(session)
end

-- True while there is room in the budget for one more fragment of a rollout worker. The bound on staleness is
-- here: with (S+1) batches outstanding at most, where S is `algorithm.staleness`, what is begun now is trained at
-- most S updates later.
local function has_room(pacing, now)
  if pacing.steps >= pacing.budget then return false end
  local is_kept = pacing.server_since > 0 and now - pacing.server_since < SERVER_WAIT_MS
    and pacing.given >= redis.call('SCARD', ROLLOUTS)
  return not is_kept or pacing.steps + pacing.charge < pacing.budget
end

-- Gives the next fragments to those that wait, in turn.
local function serve(pacing, now, mine)
  if pacing.version == 0 then return end
  while has_room(pacing, now) do
    local first = redis.call('ZPOPMIN', WAITING)
    if not first[1] then return end
    local credit = row_of(first[1], mine)
    pacing.tag = tonumber(first[2])
    give(pacing, credit, now)
    keep_row(pacing, credit)
    pacing.woken[#pacing.woken + 1] = first[1]
  end
end

-- Sessions that hold credit and are silent for too long. Not while the run stands still, nor in the first timeout
-- after: everybody was silent then.
local function silent_sessions(pacing, now)
  if pacing.desired ~= 1 or now - pacing.calm <= pacing.timeout then return {} end
  return redis.call('ZRANGEBYSCORE', DUE, '-inf', int(now), 'LIMIT', 0, MOST_RECLAIMED)
end

-- Gives what is free to those that wait, and takes back for them what is held in silence. `mine`: see `row_of`.
local function relieve(pacing, now, mine)
  if pacing.lock_step == 1 then return end
  serve(pacing, now, mine)
  if has_room(pacing, now) or redis.call('ZCARD', WAITING) == 0 then return end
  for _, session in ipairs(silent_sessions(pacing, now)) do
    take_back(pacing, row_of(session, mine), now)
  end
  serve(pacing, now, mine)
end

-- Takes a place among those that wait, by the credit that it has used. True when it had none yet.
local function queue_up(pacing, credit)
  return redis.call('ZADD', WAITING, 'NX', credit.tag, credit.session) == 1
end

-- Helpings while no session waits: as deep as the session has shown to work, no deeper than its share.
local function help(pacing, credit, now, ahead)
  if not has_room(pacing, now) then return end
  -- What is appended may take less of the budget than was held for it: that is for those that wait.
  if redis.call('ZCARD', WAITING) > 0 then return end
  local share = math.floor(pacing.budget / (pacing.charge * redis.call('SCARD', ROLLOUTS)))
  local most = math.max(1, math.min(share, credit.sequence + ahead))
  while credit.held < most and has_room(pacing, now) do
    give(pacing, credit, now)
  end
end

-- Asks for a session, for `ahead` fragments more than it has appended at the most. What it has begun with
-- credit that was taken back asks for itself, when it is appended.
local function ask(pacing, credit, now, ahead)
  if credit.role ~= 1 or pacing.lock_step == 1 or (credit.held == 0 and credit.taken > 0) then return end
  if pacing.version > 0 then help(pacing, credit, now, ahead) end
  if credit.held == 0 then queue_up(pacing, credit) end
end

-- Wakes those that were given credit.
local function wake(pacing)
  if pacing.woken[1] then redis.call('PUBLISH', CHANGED, table.concat(pacing.woken, ' ')) end
end

-- Writes what became of a session, gives what is left to those that wait, and wakes them. Further arguments: see
-- `keep_pacing`.
local function conclude(pacing, credit, now, ...)
  keep_row(pacing, credit)
  relieve(pacing, now, credit)
  keep_pacing(pacing, ...)
  wake(pacing)
end

-- The same where nothing became of the session but time.
local function look_on(pacing, credit, now)
  local held, tag = pacing.held, pacing.tag
  relieve(pacing, now, credit)
  if pacing.held ~= held or pacing.tag ~= tag then keep_pacing(pacing) end
  wake(pacing)
end

-- 1 for a session that waits for its turn, else 0.
local function waits(pacing, credit)
  return credit.role == 1 and pacing.lock_step == 0 and credit.held == 0 and 1 or 0
end

-- Gives what became free to those that wait and wakes them. `news`: wakes also all that do not wait.
local function share_out(news)
  local pacing = read_pacing()
  relieve(pacing, now_ms())
  keep_pacing(pacing)
  local names = table.concat(pacing.woken, ' ')
  if news or names ~= '' then
    redis.call('PUBLISH', CHANGED, (news and '+ ' or '') .. names)
  end
end
