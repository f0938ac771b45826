-- Fetches of weights that take more than one chunk. The bytes of a version that a session fetches stay until it
-- has asked for the last chunk or is closed. At most MOST_FETCHED versions are fetched at once.
-- Needs: run.

-- Versions that are being fetched, oldest first.
local function fetched_versions()
  local versions = {}
  for i, text in ipairs(redis.call('HKEYS', FETCHES)) do versions[i] = tonumber(text) end
  table.sort(versions)
  return versions
end

-- The version that a session fetches; 0: none. The second result is true where that fetch was given up.
local function fetching(session)
  local version = numbers(SESSION .. session, 'fetches')
  if version == 0 or redis.call('HEXISTS', FETCHES, int(version)) == 1 then return version, false end
  return 0, true
end

local function end_fetch(session)
  local version = fetching(session)
  redis.call('HDEL', SESSION .. session, 'fetches')
  if version > 0 and redis.call('HINCRBY', FETCHES, int(version), -1) < 1 then
    redis.call('HDEL', FETCHES, int(version))
  end
end

-- The version that a session can have soonest: what it fetches, else the newest, or, where that would be one
-- version too many, the newest of those that are being fetched.
local function within_reach(session)
  local newest, size = numbers(STATE, 'version', 'size')
  if size <= WEIGHT_CHUNK_BYTES then return newest end
  local mine = fetching(session)
  if mine > 0 then return mine end
  local fetched = fetched_versions()
  return #fetched < MOST_FETCHED and newest or fetched[#fetched]
end
