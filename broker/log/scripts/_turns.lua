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
-- After every script: where a session waits, nothing of the budget is left.

-- A session as the script has it already (`mine`), else as it is noted.
local function row_of(session, mine)
  return mine and mine.session == session and mine or credit_row(session)
end

-- Gives the next fragments to those that wait, in turn.
local function serve(p, now, mine)
  if p.version == 0 then return end
  while p.steps < p.budget do
    local first = redis.call('ZPOPMIN', WAITING)
    if not first[1] then return end
    local r = row_of(first[1], mine)
    p.tag = tonumber(first[2])
    give(p, r, now)
    keep_row(p, r)
    p.woken[#p.woken + 1] = first[1]
  end
end

-- Sessions that hold credit and are silent for too long. Not while the run stands still, nor in the first timeout
-- after: everybody was silent then.
local function silent_sessions(p, now)
  if p.desired ~= 1 or now - p.calm <= p.timeout then return {} end
  return redis.call('ZRANGEBYSCORE', DUE, '-inf', int(now), 'LIMIT', 0, MOST_RECLAIMED)
end

-- Gives what is free to those that wait, and takes back for them what is held in silence. `mine`: see `row_of`.
local function relieve(p, now, mine)
  if p.lock_step == 1 then return end
  serve(p, now, mine)
  if p.steps < p.budget or redis.call('ZCARD', WAITING) == 0 then return end
  for _, session in ipairs(silent_sessions(p, now)) do
    take_back(p, row_of(session, mine), now)
  end
  serve(p, now, mine)
end

-- Takes a place among those that wait, by the credit that it has used. True when it had none yet.
local function queue_up(p, r)
  return redis.call('ZADD', WAITING, 'NX', r.tag, r.session) == 1
end

-- Helpings while no session waits: as deep as the session has shown to work, no deeper than its share.
local function help(p, r, now, ahead)
  if p.steps >= p.budget then return end
  -- What is appended may take less of the budget than was held for it: that is for those that wait.
  if redis.call('ZCARD', WAITING) > 0 then return end
  local share = math.floor(p.budget / (p.charge * redis.call('SCARD', ROLLOUTS)))
  local most = math.max(1, math.min(share, r.sequence + ahead))
  while p.steps < p.budget and r.held < most do
    give(p, r, now)
  end
end

-- Asks for a session, for `ahead` fragments more than it has appended at the most. What it has begun with
-- credit that was taken back asks for itself, when it is appended.
local function ask(p, r, now, ahead)
  if r.role ~= 1 or p.lock_step == 1 or (r.held == 0 and r.taken > 0) then return end
  if p.version > 0 then help(p, r, now, ahead) end
  if r.held == 0 then queue_up(p, r) end
end

-- Wakes those that were given credit.
local function wake(p)
  if p.woken[1] then redis.call('PUBLISH', CHANGED, table.concat(p.woken, ' ')) end
end

-- Writes what became of a session, gives what is left to those that wait, and wakes them. Further arguments: see
-- `keep_pacing`.
local function conclude(p, r, now, ...)
  keep_row(p, r)
  relieve(p, now, r)
  keep_pacing(p, ...)
  wake(p)
end

-- The same where nothing became of the session but time.
local function look_on(p, r, now)
  local held, tag = p.held, p.tag
  relieve(p, now, r)
  if p.held ~= held or p.tag ~= tag then keep_pacing(p) end
  wake(p)
end

-- 1 for a session that waits for its turn, else 0.
local function waits(p, r)
  return r.role == 1 and p.lock_step == 0 and r.held == 0 and 1 or 0
end

-- Gives what became free to those that wait and wakes them. `news`: wakes also all that do not wait.
local function share_out(news)
  local p = pacing()
  relieve(p, now_ms())
  keep_pacing(p)
  local names = table.concat(p.woken, ' ')
  if news or names ~= '' then
    redis.call('PUBLISH', CHANGED, (news and '+ ' or '') .. names)
  end
end
